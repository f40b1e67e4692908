"""Gradient checkpointing changes memory and nothing else, also for prefix trees, adapters and models in evaluation.

Attention implementations. Versions of Flash attention need a GPU: here, torch's registry of them is real.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.nn.attention import current_flash_attention_impl
from transformers import AutoModelForCausalLM, Qwen2Config

from rollstream.learner.algorithms.builtin.grpo import Grpo
from rollstream.learner.model import collate
from rollstream.learner.model.policy import PolicyModel, Reference
from rollstream.learner.model.tree_attention import use_flash_attention
from rollstream.schemas.algorithms import GrpoSettings
from rollstream.schemas.errors import ModelError
from rollstream.schemas.settings import LoraSettings, ModelSettings
from tests.rigs.runs.step_rows import rows

LORA = LoraSettings(rank=2, alpha=4, dropout=0.1, target_modules=("q_proj", "v_proj"))


def backward(path: Path, *, shares: bool, **changes: Any) -> tuple[dict[str, torch.Tensor], int]:
    """Gradients by name, and how many numbers the forward pass kept for the backward one."""
    model = PolicyModel(ModelSettings(path=str(path), device="cpu", **changes), seed=0)
    model.use_dropout(False)
    trained, units = collate.prepared_rows(rows(), Grpo().prepare(rows(), GrpoSettings()))
    batch = collate.pad(trained, units, shares=shares)
    kept: list[int] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        logprobs, _ = model.completion_terms(batch, temperature=1.0, entropy_needs_grad=False)
    if model.settings.lora:
        Reference(model, model.weights_bytes(), "base").logprobs(batch, temperature=1.0)
    logprobs.sum().backward()
    return {name: one.grad for name, one in model.trainable() if one.grad is not None}, sum(kept)


@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
@pytest.mark.parametrize("shares", [False, True], ids=["padded", "tree"])
def test_gradients_are_equal_and_less_is_kept(tiny_model: Path, shares: bool, lora: LoraSettings | None) -> None:
    plain, num_plain = backward(tiny_model, shares=shares, lora=lora)
    found, num_found = backward(tiny_model, shares=shares, lora=lora, gradient_checkpointing=True)
    assert plain.keys() == found.keys()
    assert plain
    for name, gradient in plain.items():
        assert torch.equal(gradient, found[name]), name
    assert num_found < num_plain / 2


def test_dropout_that_no_module_shows_is_refused(tmp_path: Path) -> None:
    shape: dict[str, Any] = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    config = Qwen2Config(**shape, num_attention_heads=2, num_key_value_heads=1, attention_dropout=0.1)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    settings = ModelSettings(path=str(tmp_path), device="cpu", gradient_checkpointing=True)
    with pytest.raises(ModelError, match=r"does not go with its attention_dropout of 0.1; set attention_dropout to 0"):
        PolicyModel(settings, seed=0)


def test_an_attention_implementation_that_is_not_installed_is_named(tiny_model: Path) -> None:
    settings = ModelSettings(path=str(tiny_model), device="cpu", attn_implementation="flash_attention_2")
    with pytest.raises(ModelError, match=r"cannot be loaded.*(?i:flash)"):
        PolicyModel(settings, seed=0)


def test_eager_attention_and_a_head_in_float32_match_sdpa(tiny_model: Path) -> None:
    plain, _ = backward(tiny_model, shares=False)
    other, _ = backward(tiny_model, shares=False, attn_implementation="eager", fp32_head=True)
    for name, gradient in plain.items():
        assert torch.allclose(gradient, other[name], atol=1e-5), name
    settings = ModelSettings(path=str(tiny_model), device="cpu", dtype="bfloat16")
    batch = collate.pad(*collate.prepared_rows(rows(), Grpo().prepare(rows(), GrpoSettings())))
    wanted = PolicyModel(settings.model_copy(update={"dtype": "float32"}), seed=0)
    errors: list[float] = []
    for fp32_head in (False, True):
        model = PolicyModel(settings.model_copy(update={"fp32_head": fp32_head}), seed=0)
        terms = [one.completion_terms(batch, temperature=1.0, entropy_needs_grad=False)[0] for one in (model, wanted)]
        errors.append((terms[0] - terms[1]).abs().mean().item())
    assert errors[1] < errors[0]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process that takes itself to have a GPU, and computes by what torch includes again afterwards."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    yield
    use_flash_attention("FA2")


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> torch.library.Library:
    """The package of FA3, with operators that cannot be called."""
    module = ModuleType("flash_attn_interface")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    library = torch.library.Library("flash_attn_3", "FRAGMENT")
    for name in ("fwd", "bwd"):
        library.define(f"{name}(Tensor query) -> Tensor")
    return library


def test_each_job_computes_by_its_own_version(gpu: None, package: torch.library.Library) -> None:
    found: list[str | None] = []
    for version in ("FA2", "FA3", "FA3", "FA2"):
        use_flash_attention(version)
        found.append(current_flash_attention_impl())
    assert found == [None, "FA3", "FA3", None]


def test_a_version_that_is_not_installed_is_named_with_its_package(gpu: None) -> None:
    with pytest.raises(ModelError, match=r"model\.flash_attention is FA4, and .*flash_attn.*; install flash-attn-4"):
        use_flash_attention("FA4")
    assert current_flash_attention_impl() is None


def test_a_cpu_has_no_version() -> None:
    use_flash_attention("FA4")
    assert current_flash_attention_impl() is None
