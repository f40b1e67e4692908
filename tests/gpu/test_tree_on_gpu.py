"""Rows that share prompts on a real GPU: varlen_attn in bfloat16, SDPA with masks in float32."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from rollstream.learner.algorithms.base import BatchView
from rollstream.learner.model import tree_attention
from rollstream.learner.model.loading import inner
from rollstream.learner.model.policy import PolicyModel
from rollstream.learner.model.tree_attention import longest_row, use_flash_attention
from rollstream.schemas.settings import LoraSettings, ModelSettings
from tests.rigs.grouped_batches import backward, distance

pytestmark = pytest.mark.gpu


def policy(folder: Path, device: str, dtype: Any, **changes: Any) -> PolicyModel:
    return PolicyModel(ModelSettings(path=str(folder), device=device, dtype=dtype, **changes), seed=0)


@pytest.mark.parametrize("lora", [None, LoraSettings(rank=8)], ids=["full", "lora"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_model_can_share_prompts_of_any_length(gpu: str, folder: Path, dtype: Any, lora: Any) -> None:
    model = policy(folder, gpu, dtype, lora=lora)
    decoder = inner(model.module).get_decoder()
    found = longest_row(decoder, model.device, model.compute_dtype)
    assert found[0] == math.inf, found[1]
    assert model.shares_prefixes(100_000)


def test_bfloat16_is_computed_by_the_variable_length_kernel_and_float32_with_masks(
    cuda: str, folder: Path, batch: BatchView, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, calls = tree_attention.varlen.varlen_attn, list[int]()

    def counted(*args: Any, **options: Any) -> Any:
        calls.append(1)
        return plain(*args, **options)

    models = [policy(folder, cuda, dtype) for dtype in ("bfloat16", "float32")]
    monkeypatch.setattr(tree_attention.varlen, "varlen_attn", counted)
    for model, wanted in zip(models, (2, 2), strict=True):  # layers; and none more in float32
        backward(model, batch, shares=True)
        assert len(calls) == wanted


def test_in_float32_a_tree_has_the_log_probabilities_and_gradients_of_padded_rows(
    gpu: str, folder: Path, batch: BatchView
) -> None:
    model = policy(folder, gpu, "float32")
    tree, padded = (backward(model, batch, shares=shares) for shares in (True, False))
    assert distance(tree, padded) < 1e-4
    assert max(float((one - other).abs().max()) for one, other in zip(tree[:1], padded[:1], strict=True)) < 1e-4


def test_in_bfloat16_a_tree_is_as_exact_as_padded_rows(gpu: str, folder: Path, batch: BatchView) -> None:
    exact = backward(policy(folder, gpu, "float32"), batch, shares=False)
    model = policy(folder, gpu, "bfloat16")
    tree, padded = (backward(model, batch, shares=shares) for shares in (True, False))
    errors = [(distance(one[:1], exact[:1]), distance(one[1:], exact[1:])) for one in (tree, padded)]
    assert errors[0][0] <= 1.5 * errors[1][0] < 1.5e-2, errors
    assert errors[0][1] <= 1.5 * errors[1][1] < 0.15, errors


@pytest.mark.parametrize(("version", "package"), [("FA3", "flash_attn_interface"), ("FA4", "flash_attn.cute")])
def test_other_flash_attention_is_as_exact_and_gives_equal_bits(
    cuda: str, folder: Path, batch: BatchView, version: Any, package: str
) -> None:
    pytest.importorskip(package)
    exact = backward(policy(folder, cuda, "float32"), batch, shares=False)
    usual = backward(policy(folder, cuda, "bfloat16"), batch, shares=True)
    use_flash_attention(version)
    try:
        model = policy(folder, cuda, "bfloat16", flash_attention=version)
        assert model.shares_prefixes(1000)
        found, again = (backward(model, batch, shares=True) for _ in range(2))
    finally:
        use_flash_attention("FA2")
    assert all(one.equal(other) for one, other in zip(found, again, strict=True))
    assert distance(found[:1], exact[:1]) <= 1.5 * distance(usual[:1], exact[:1])
    assert distance(found[1:], exact[1:]) <= 1.5 * distance(usual[1:], exact[1:])


@pytest.mark.parametrize("lora", [None, LoraSettings(rank=8)], ids=["full", "lora"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("shares", [True, False], ids=["tree", "padded"])
def test_equal_rows_give_equal_bits_under_deterministic_algorithms(
    gpu: str, folder: Path, batch: BatchView, dtype: Any, shares: bool, lora: Any
) -> None:
    assert torch.are_deterministic_algorithms_enabled()
    model = policy(folder, gpu, dtype, lora=lora)
    found, again, other = (
        backward(model, batch, shares=shares) for model in (model, model, policy(folder, gpu, dtype, lora=lora))
    )
    for one, same, new in zip(found, again, other, strict=True):
        assert one.equal(same)
        assert one.equal(new)
