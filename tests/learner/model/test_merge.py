"""A version as a whole model, over the architectures that users train: equal to base and adapter together."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GemmaConfig,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

from rollstream.learner.model.export import export_merged, export_model
from rollstream.learner.model.policy import PolicyModel
from rollstream.learner.tiny_model import make_tiny_model
from rollstream.schemas.errors import ModelError
from rollstream.schemas.events import WeightsPublished
from rollstream.schemas.settings import ArtifactRef, LoraSettings, ModelSettings
from tests.rigs.services.vllm_server import serving, tiny_base

LORA = LoraSettings(rank=2, alpha=8, target_modules=("q_proj", "v_proj", "down_proj"))
IDS = torch.arange(3, 20)[None]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "model", seed=0)


def base_model(folder: Path, tiny: Path, config: Any, *, tied: bool, dtype: torch.dtype) -> Path:
    """A model of an architecture with random weights, and the tiny model's tokenizer."""
    torch.manual_seed(0)
    shape = AutoModelForCausalLM.from_pretrained(tiny).config
    small = config(
        vocab_size=shape.vocab_size,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
    )
    AutoModelForCausalLM.from_config(small).to(dtype).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny).save_pretrained(folder)
    return folder


def trained(base: Path, lora: LoraSettings | None) -> PolicyModel:
    policy = PolicyModel(ModelSettings(path=str(base), lora=lora, device="cpu"), seed=0)
    policy.use_dropout(False)
    generator = torch.Generator().manual_seed(1)
    for _, parameter in policy.trainable():
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    return policy


def published(policy: PolicyModel, weights: Path, **changes: Any) -> WeightsPublished:
    weights.write_bytes(policy.weights_bytes())
    fields: dict[str, Any] = {
        "run_id": "run-1",
        "time_ms": 1,
        "model_group": "run-1/policy",
        "job_id": "run-1/rl",
        "batch_id": None,
        "version": 3,
        "parent": None,
        "term": 1,
        "weights_sha256": "0" * 64,
        "weights_format": policy.weights_format,
        "lora": policy.adapter_config(),
        "base_model": policy.settings.path,
        "artifact": ArtifactRef(uri="none", sha256="0" * 64, size_bytes=0),
    }
    return WeightsPublished(**(fields | changes))


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(
    "lora",
    [LORA, LORA.model_copy(update={"use_dora": True, "use_rslora": True}), None],
    ids=["lora", "dora", "full"],
)
@pytest.mark.parametrize("config", [Qwen2Config, Qwen3Config, LlamaConfig, GemmaConfig, MistralConfig])
@torch.no_grad()
def test_the_logits_of_a_merged_version_match_the_policys(
    tmp_path: Path, tiny: Path, config: Any, lora: LoraSettings | None, tied: bool
) -> None:
    base = base_model(tmp_path / "base", tiny, config, tied=tied, dtype=torch.float32)
    policy = trained(base, lora)
    export_merged(published(policy, tmp_path / "weights"), tmp_path / "weights", tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    assert type(merged) is type(AutoModelForCausalLM.from_pretrained(base)), "no adapter is left"
    expected = policy.module.eval()(input_ids=IDS).logits
    assert torch.allclose(merged(input_ids=IDS).logits, expected, rtol=1e-4, atol=1e-4)
    untrained = AutoModelForCausalLM.from_pretrained(base).eval()(input_ids=IDS).logits
    assert not torch.allclose(untrained, expected, atol=1e-2)
    assert merged.config.tie_word_embeddings == tied
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "merged")
    assert tokenizer.chat_template
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "merged", "weights"]


@pytest.mark.filterwarnings("ignore:Model (has|with) `tie_word_embeddings=True`")
@pytest.mark.parametrize("use_dora", [False, True], ids=["lora", "dora"])
@pytest.mark.parametrize("targets", [("q_proj", "lm_head"), ("embed_tokens",), ("lm_head", "embed_tokens")])
@pytest.mark.parametrize("config", [Qwen2Config, GemmaConfig])
@torch.no_grad()
def test_an_adapter_on_one_of_tied_head_and_embeddings_is_not_added_to_the_other(
    tmp_path: Path, tiny: Path, config: Any, targets: tuple[str, ...], use_dora: bool
) -> None:
    base = base_model(tmp_path / "base", tiny, config, tied=True, dtype=torch.float32)
    policy = trained(base, LORA.model_copy(update={"target_modules": targets, "use_dora": use_dora}))
    export_merged(published(policy, tmp_path / "weights"), tmp_path / "weights", tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    assert not merged.config.tie_word_embeddings
    expected = policy.module.eval()(input_ids=IDS).logits
    assert torch.allclose(merged(input_ids=IDS).logits, expected, rtol=1e-4, atol=1e-4)


def test_the_weights_of_an_adapter_are_taken_without_a_look_at_the_base_model_s_folder_or_the_hub(
    tmp_path: Path, tiny: Path
) -> None:
    base = tmp_path / "base"
    shutil.copytree(tiny, base)
    policy = trained(base, LORA)
    expected = policy.weights_bytes()
    base.rename(tmp_path / "gone")
    assert policy.weights_bytes() == expected


@pytest.mark.vllm
@pytest.mark.timeout(600)
@torch.no_grad()
def test_the_logprobs_of_a_merged_version_on_real_vllm_match_the_policys(tmp_path: Path) -> None:
    policy = trained(tiny_base(tmp_path / "base"), LORA)
    merged = tmp_path / "merged"
    export_merged(published(policy, tmp_path / "weights"), tmp_path / "weights", merged)
    with serving(tmp_path, is_lora=False, base=merged) as server:
        asked = {"model": str(merged), "prompt": IDS[0].tolist(), "max_tokens": 1, "prompt_logprobs": 0}
        answer = server.ask("/v1/completions", asked)
    given = zip(answer["choices"][0]["prompt_logprobs"][1:], IDS[0][1:].tolist(), strict=True)
    found = [of_token[str(token)]["logprob"] for of_token, token in given]
    logprobs = policy.module.eval()(input_ids=IDS).logits[0, :-1].log_softmax(-1)
    expected = logprobs.gather(1, IDS[0][1:, None])[:, 0].tolist()
    assert found == pytest.approx(expected, abs=1e-3)


def test_the_sum_is_stored_in_the_type_of_the_base_model(tmp_path: Path, tiny: Path) -> None:
    base = base_model(tmp_path / "base", tiny, LlamaConfig, tied=False, dtype=torch.bfloat16)
    policy = trained(base, LORA)
    export_merged(published(policy, tmp_path / "weights"), tmp_path / "weights", tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert {value.dtype for value in merged.state_dict().values()} == {torch.bfloat16}


def test_a_base_model_below_the_home_folder_is_found_by_every_export(
    tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tiny.parent))
    for lora in (LORA, None):
        policy = trained(Path(f"~/{tiny.name}"), lora)
        version = published(policy, tmp_path / "weights")
        for export in (export_model, export_merged):
            folder = tmp_path / f"{export.__name__}-{policy.weights_format}"
            export(version, tmp_path / "weights", folder)
            assert AutoTokenizer.from_pretrained(folder).eos_token is not None
    adapter = json.loads((tmp_path / "export_model-lora" / "adapter_config.json").read_text())
    assert adapter["base_model_name_or_path"] == str(tiny)
    for name in ("export_model-full", "export_merged-full", "export_merged-lora"):
        assert AutoModelForCausalLM.from_pretrained(tmp_path / name).config.vocab_size


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rank_pattern": {"a": 2}}, "rank_pattern of its adapter is {'a': 2}, which cannot be merged here"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save of its adapter is"),
        ({"r": "many"}, "its adapter's configuration cannot be read"),
        ({"r": 4}, "weights do not fit"),
        ({"target_modules": ["q_proj"]}, "weights do not fit model"),
        ({"target_modules": ["no_proj"]}, "cannot have the adapter of model.lora"),
    ],
)
def test_a_failed_merge_leaves_no_folder(tmp_path: Path, tiny: Path, changes: dict[str, Any], message: str) -> None:
    policy = trained(tiny, LORA)
    lora = {**(policy.adapter_config() or {}), **changes}
    with pytest.raises(ModelError, match=message):
        export_merged(published(policy, tmp_path / "weights", lora=lora), tmp_path / "weights", tmp_path / "merged")
    missing = published(policy, tmp_path / "weights", base_model=str(tmp_path / "gone"))
    with pytest.raises(ModelError, match=r"model folder .*gone does not exist"):
        export_merged(missing, tmp_path / "weights", tmp_path / "merged")
    other = published(policy, tmp_path / "weights", base_sha256="0" * 64)
    with pytest.raises(ModelError, match="are an adapter of other weights than those of model"):
        export_merged(other, tmp_path / "weights", tmp_path / "merged")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["weights"]
