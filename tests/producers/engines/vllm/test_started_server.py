"""The environment and the arguments of a vLLM server that an engine starts."""

import sys
from typing import Any

import pytest

from rollstream.producers.engines.vllm.child import check_settings, environment
from rollstream.schemas.errors import ConfigError
from rollstream.schemas.services import VllmSettings


def test_a_server_gets_no_secrets_of_this_process() -> None:
    given: dict[str, Any] = dict.fromkeys(
        [
            *("PATH", "HOME", "LANG", "LC_CTYPE", "LD_LIBRARY_PATH", "LD_PRELOAD", "https_proxy", "SSL_CERT_FILE"),
            *("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "NCCL_DEBUG", "VLLM_CPU_KVCACHE_SPACE", "HF_TOKEN"),
            *("HF_HOME", "TORCH_HOME", "TORCHINDUCTOR_CACHE_DIR", "PYTORCH_CUDA_ALLOC_CONF", "OMP_NUM_THREADS"),
        ],
        "kept",
    )
    secrets = dict.fromkeys(
        [
            *(
                "KAFKA_PASSWORD",
                "ROLLSTREAM_ENDPOINT_TOKEN",
                "WANDB_API_KEY",
                "MLFLOW_TRACKING_PASSWORD",
                "OPENAI_API_KEY",
            ),
            *("AWS_SECRET_ACCESS_KEY", "VLLM_API_KEY", "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "MYPATH"),
        ],
        "hidden",
    )
    found = environment({**given, **secrets}, is_lora=True)
    own = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1"}
    assert found == given | own
    assert environment({}, is_lora=False).keys() == own.keys() - {"VLLM_ALLOW_RUNTIME_LORA_UPDATING"}


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--data-parallel-size=2", "not for a server that is started here"),
        ("--data_parallel_size=2", "not for a server that is started here"),
        ("--data-parallel-si", "not for a server that is started here"),
        ("-dp2", "not for a server that is started here"),
        ("-dpl", "not for a server that is started here"),
        ("--api_server_count=2", "not for a server that is started here"),
        ("-asc", "not for a server that is started here"),
        ("--ho=0.0.0.0", "not for a server that is started here"),
        ("--api_key=x", "not for a server that is started here"),
        ("--config=server.yaml", "not for a server that is started here"),
        ("--served_model_name=other", "not for a server that is started here"),
        ("--max-loras=1", "from engine.max_loras; leave it out"),
        ("--max_lora_rank", "from engine.max_lora_rank; leave it out"),
        ("--dty=half", "from engine.dtype; leave it out"),
        ("--logprobs_mode=raw_logprobs", "from what the learner needs; leave it out"),
    ],
)
def test_an_argument_that_the_engine_gives_itself_is_refused_however_it_is_written(argument: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_settings(VllmSettings(executable=sys.executable, arguments=("--enforce-eager", argument)))


@pytest.mark.parametrize(
    "arguments",
    [
        ("--max-model-len", "512", "--max-num-seqs=64"),
        ("--config-format=hf", "--model-impl=vllm", "--quantization", "bitsandbytes"),
        ("-tp", "2", "--hf-overrides.rope_theta=1"),
    ],
)
def test_other_arguments_are_passed_on(arguments: tuple[str, ...]) -> None:
    check_settings(VllmSettings(executable=sys.executable, arguments=arguments))
