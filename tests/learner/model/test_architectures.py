"""The architectures that users train: each takes a step, continues from its checkpoint bit by bit, and is exported."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GemmaConfig,
    GPT2Config,
    Llama4TextConfig,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

from rollstream.learner.algorithms.base import BatchView, Member, Row
from rollstream.learner.algorithms.builtin.grpo import Grpo
from rollstream.learner.model.export import export_model
from rollstream.learner.model.optimizer import load_state_tensors, make_optimizer, state_tensors
from rollstream.learner.model.policy import PolicyModel, make_deterministic
from rollstream.learner.model.step import StepResult, train_batch
from rollstream.schemas.events import WeightsPublished
from rollstream.schemas.revisions import NEWEST_REVISION
from rollstream.schemas.settings import ArtifactRef, JobSettings, LoraSettings, ModelSettings, OptimizerSettings

SHAPE: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
GPT2: dict[str, Any] = {"vocab_size": 40, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64}
LLAMA4: dict[str, Any] = {"intermediate_size_mlp": 24, "num_local_experts": 2, "pad_token_id": 0}
NO_DROPOUT: dict[str, Any] = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
MODELS: dict[str, Callable[[bool], Any]] = {
    "qwen2": lambda tied: Qwen2Config(**SHAPE, tie_word_embeddings=tied),
    "qwen3": lambda tied: Qwen3Config(**SHAPE, tie_word_embeddings=tied),
    "llama": lambda tied: LlamaConfig(**SHAPE, tie_word_embeddings=tied),
    "gemma": lambda tied: GemmaConfig(**SHAPE, tie_word_embeddings=tied),
    "gemma2": lambda tied: Gemma2Config(**SHAPE, tie_word_embeddings=tied),
    "mistral": lambda tied: MistralConfig(**SHAPE, tie_word_embeddings=tied),
    "gpt2": lambda tied: GPT2Config(**GPT2, **NO_DROPOUT, tie_word_embeddings=tied),
    "llama4": lambda tied: Llama4TextConfig(**SHAPE, **LLAMA4, tie_word_embeddings=tied),
}
APART = ("gemma2", "llama4")
"""Models whose rows share no prefixes: one caps its logits, of the other transformers has no decoder."""


def batch() -> BatchView:
    """A group of four over one prompt."""
    rng = np.random.default_rng(3)
    prompt = rng.integers(0, 40, 5)
    rows: list[Row] = []
    for index in range(4):
        ids = np.concatenate([prompt, rng.integers(0, 40, 3 + index)]).astype(np.int32)
        mask = np.arange(len(ids)) >= len(prompt)
        rows.append(Row(ids, mask, np.where(mask, -3.6, 0).astype(np.float32), index))
    return BatchView(rows, [Member("g", "agent", reward=float(index % 2)) for index in range(4)])


def step(model: PolicyModel, optimizer: torch.optim.Optimizer, index: int) -> StepResult:
    job = JobSettings(kind="rl", model=model.settings, revision=NEWEST_REVISION)
    return train_batch(model, optimizer, batch(), Grpo(), job, index=index, seed=index)


def policy(folder: Path) -> PolicyModel:
    made = PolicyModel(ModelSettings(path=str(folder), device="cpu"), seed=0)
    made.use_dropout(False)
    return made


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("name", MODELS)
def test_it_trains_goes_on_and_is_exported(name: str, tied: bool, tmp_path: Path) -> None:
    make_deterministic(1)
    torch.manual_seed(0)
    base = tmp_path / "base"
    AutoModelForCausalLM.from_config(MODELS[name](tied)).save_pretrained(base)
    model, settings = policy(base), OptimizerSettings(learning_rate=1e-2)
    optimizer = make_optimizer(model.trainable(), settings)
    before = model.weights_bytes()
    result = step(model, optimizer, 0)
    assert result.num_optimizer_steps == 1
    assert (result.metrics["tokens/packing_ratio"] < 1) == (name not in APART)
    weights = {key: value.clone() for key, value in model.weights().items()}
    state = {key: value.clone() for key, value in state_tensors(optimizer, model.trainable()).items()}
    assert model.weights_bytes() != before
    step(model, optimizer, 1)

    again = policy(base)
    other = make_optimizer(again.trainable(), settings)
    again.load_weights(weights)
    load_state_tensors(other, again.trainable(), state)
    step(again, other, 1)
    assert again.weights_bytes() == model.weights_bytes()

    path = tmp_path / "weights.safetensors"
    path.write_bytes(model.weights_bytes())
    published = WeightsPublished.model_construct(
        weights_format="full",
        base_model=str(base),
        lora=None,
        artifact=ArtifactRef(uri=str(path), sha256="0" * 64, size_bytes=1),
    )
    loaded = AutoModelForCausalLM.from_pretrained(export_model(published, path, tmp_path / "out"))
    ids = torch.arange(12)[None]
    with torch.no_grad():
        model.module.eval()
        assert torch.allclose(loaded.eval()(ids).logits, model.module(ids).logits, atol=1e-5)
    head: Any = loaded.get_output_embeddings()
    embeddings: Any = loaded.get_input_embeddings()
    assert torch.equal(head.weight, embeddings.weight) == tied


LINEAR = {
    "qwen2": {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"},
    "gpt2": {"c_attn", "c_proj", "c_fc"},
}


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("name", LINEAR)
@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False")
def test_an_adapter_of_all_linear_layers_has_them_by_name_and_leaves_the_head(
    name: str, tied: bool, tmp_path: Path
) -> None:
    make_deterministic(1)
    AutoModelForCausalLM.from_config(MODELS[name](tied)).save_pretrained(tmp_path)
    lora = LoraSettings(rank=2, target_modules="all-linear")
    model = PolicyModel(ModelSettings(path=str(tmp_path), device="cpu", lora=lora), seed=0)
    adapted = {key.split(".lora_")[0].rpartition(".")[2] for key in model.weights()}
    assert adapted == LINEAR[name]
    optimizer = make_optimizer(model.trainable(), OptimizerSettings(learning_rate=1e-2))
    assert step(model, optimizer, 0).num_optimizer_steps == 1
    config = model.adapter_config()
    assert config is not None
    assert config["target_modules"] == sorted(LINEAR[name])
