"""The fused kernels of log-probabilities on a real GPU, against float64. On a CPU only TRITON_INTERPRET=1 runs them."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from rollstream.learner.algorithms.base import BatchView
from rollstream.learner.model import fused_logprobs
from rollstream.learner.model.logprobs import Head, fuses, selected_logprobs, why_not_fused
from rollstream.learner.model.policy import PolicyModel
from rollstream.schemas.settings import ModelSettings
from tests.rigs.grouped_batches import backward, distance
from tests.rigs.selected_terms import TEMPERATURE, Shape, by_autograd, computed, error, given

pytestmark = pytest.mark.gpu
SHAPES: list[tuple[Shape, bool]] = [
    ((1, 5, 3), False),
    ((37, 21, 101), True),
    ((127, 64, 128), True),
    ((130, 896, 3001), False),
    ((300, 200, 20011), True),
]
"""Shapes, and whether there is a bias: below a tile, not and just divided by tiles. Each kind is compiled for seconds.
"""
QWEN: Shape = (5000, 896, 151936)
TYPES = [torch.bfloat16, torch.float32]


@pytest.fixture
def kernels(gpu: str) -> str:
    """A device that the kernels run on."""
    if gpu == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("on a CPU only Triton's interpreter runs the kernels")
    return gpu


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_the_kernels_pass_the_learners_own_check(kernels: str, dtype: torch.dtype) -> None:
    device = torch.device(kernels)
    assert why_not_fused(device, dtype) == ""
    assert fuses(device, dtype) == (device.type == "cuda")


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(("shape", "bias"), SHAPES, ids=str)
def test_values_and_gradients_are_those_of_float64(kernels: str, shape: Shape, dtype: torch.dtype, bias: bool) -> None:
    if kernels == "cpu" and shape[2] > 101:
        pytest.skip("the interpreter takes minutes")
    operands, targets = given(shape, dtype, bias=bias, device=kernels)
    found, exact = computed(operands, targets, fused=True), by_autograd(operands, targets)
    for number, (one, wanted) in enumerate(zip(found, exact, strict=True)):
        limit = 2e-5 if number < 2 else 2e-2 if dtype == torch.bfloat16 else 1e-4
        assert error(one, wanted) <= limit, f"result {number}"


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_thousands_of_tokens_over_a_large_vocabulary_are_exact_and_equal_bit_by_bit(
    cuda: str, dtype: torch.dtype
) -> None:
    operands, targets = given(QWEN, dtype, bias=False, device=cuda)
    operands[1] /= 8  # else every softmax is one token
    found, again = (computed(operands, targets, fused=True) for _ in range(2))
    assert all(one.equal(other) for one, other in zip(found, again, strict=True))
    del again
    exact = computed([one.double() for one in operands], targets, fused=False)
    limits = [2e-5, 2e-5, *[2e-2 if dtype == torch.bfloat16 else 1e-4] * 2]
    errors = [error(one, wanted) for one, wanted in zip(found, exact, strict=True)]
    assert all(one <= limit for one, limit in zip(errors, limits, strict=True)), errors


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_no_memory_is_taken_for_the_logits_of_all_tokens(cuda: str, dtype: torch.dtype) -> None:
    (hidden, weight), targets = given(QWEN, dtype, bias=False, device=cuda)
    own = [one.requires_grad_() for one in (hidden, weight)]
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    logprobs, _ = selected_logprobs(own[0], Head(own[1]), targets, TEMPERATURE, fused=True)
    kept = torch.cuda.memory_allocated() - before
    logprobs.sum().backward()
    peak = torch.cuda.max_memory_allocated() - before
    logits, gradients = hidden.itemsize * QWEN[0] * QWEN[2], hidden.nbytes + weight.nbytes
    assert kept < 2**24, "what the backward pass needs beside its operands"
    assert peak < gradients + logits / 4


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_model_computes_by_the_kernels_what_it_computes_in_chunks(
    cuda: str, folder: Path, batch: BatchView, monkeypatch: pytest.MonkeyPatch, dtype: Any
) -> None:
    calls: list[int] = []
    plain = fused_logprobs._forward

    def counted(*args: Any, **options: Any) -> Any:
        calls.append(1)
        return plain(*args, **options)

    settings = ModelSettings(path=str(folder), device=cuda, dtype=dtype)
    model = PolicyModel(settings, seed=0)
    assert fuses(torch.device(cuda), getattr(torch, dtype)), "found by trying, once in a process"
    monkeypatch.setattr(fused_logprobs, "_forward", counted)
    found = backward(model, batch, shares=True)
    assert calls == [1]
    chunks = PolicyModel(settings.model_copy(update={"fused_kernels": False}), seed=0)
    wanted = backward(chunks, batch, shares=True)
    assert calls == [1]
    assert distance(found, wanted) < (2e-2 if dtype == "bfloat16" else 1e-5)
