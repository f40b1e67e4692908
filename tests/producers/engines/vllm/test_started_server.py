"""What a vLLM server that is started gets of its parent."""

from typing import Any

from rollstream.producers.engines.vllm.child import environment


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
