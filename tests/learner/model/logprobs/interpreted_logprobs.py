"""Tests of the fused kernels on the CPU, by Triton's interpreter: `test_fused_logprobs.py` runs this file with it on.

The interpreter is chosen when triton is imported, so these tests need a process of their own. It rounds numbers to
bfloat16 toward zero, where a GPU rounds them to the nearest.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, Qwen2Config

from rollstream.learner.model import fused_logprobs, logprobs, policy
from rollstream.learner.model.collate import MicroBatch
from rollstream.learner.model.fused_logprobs import Tiling
from rollstream.learner.model.logprobs import Head, KeptSets, fuses, selected_logprobs, why_not_fused
from rollstream.learner.model.policy import PolicyModel
from rollstream.schemas.settings import ModelSettings
from tests.rigs.selected_terms import OF_ENTROPY, TEMPERATURE, computed, error, given

SHAPES = [(37, 21, 101), (32, 48, 96), (1, 5, 3), (19, 16, 17)]
"""Tokens, width and vocabulary: no multiples of tiles, multiples of them, less than one tile, just above one."""


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several tiles, runs and bands, and several parts of the vocabulary in the backward pass."""
    small = Tiling(tokens=16, columns=16, dims=16, run=2, band=2)
    monkeypatch.setattr(fused_logprobs, "tiling", lambda dtype: small)
    monkeypatch.setattr(fused_logprobs, "GRAD_CHUNK", 37 * 40)


def by_numpy(operands: list[Tensor], targets: Tensor) -> list[np.ndarray[Any, Any]]:
    """The same in float64, by the formulas of the gradient."""
    hidden, weight, *bias = (one.double().numpy() for one in operands)
    rows, factors = np.arange(len(targets)), np.arange(1.0, len(targets) + 1)[:, None]
    logits = (hidden @ weight.T + (bias[0] if bias else 0)) / TEMPERATURE
    log_softmax = logits - logits.max(axis=1, keepdims=True)
    log_softmax -= np.log(np.exp(log_softmax).sum(axis=1, keepdims=True))
    shares = np.exp(log_softmax)
    entropies = -(shares * log_softmax).sum(axis=1)
    grad = -factors * shares - OF_ENTROPY * factors * shares * (log_softmax + entropies[:, None])
    grad[rows, targets.numpy()] += factors[:, 0]
    grad /= TEMPERATURE
    of_bias = [grad.sum(axis=0)] if bias else []
    return [log_softmax[rows, targets.numpy()], entropies, grad @ weight, grad.T @ hidden, *of_bias]


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_values_and_gradients_are_those_of_numpy_and_of_chunks(shape: Any, dtype: torch.dtype, bias: bool) -> None:
    operands, targets = given(shape, dtype, bias=bias)
    found, chunks = (computed(operands, targets, fused=fused) for fused in (True, False))
    exact = [torch.from_numpy(one) for one in by_numpy(operands, targets)]
    low = dtype == torch.bfloat16
    for number, (one, other, wanted) in enumerate(zip(found, chunks, exact, strict=True)):
        is_gradient = number > 1
        assert one.dtype == other.dtype
        assert error(one, wanted) <= (2e-2 if low and is_gradient else 5e-6)
        assert error(one, other) <= (5e-2 if low else 5e-6), "chunks round logits to the type of products"


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("of_entropy", [False, True])
def test_gradients_are_of_what_was_asked_for(of_entropy: bool) -> None:
    (hidden, weight), targets = given(SHAPES[0], torch.float32, bias=False)
    grads = []
    for fused in (True, False):
        own = hidden.clone().requires_grad_()
        one, entropy = selected_logprobs(
            own, Head(weight), targets, 1.0, entropy_needs_grad=of_entropy, fused=fused
        )  # the head is frozen
        assert entropy is not None
        assert entropy.requires_grad == of_entropy
        (entropy if of_entropy else one).sum().backward()
        assert own.grad is not None
        grads.append(own.grad)
    assert error(*grads) <= 5e-6
    assert selected_logprobs(hidden, Head(weight), targets, 1.0, entropy=False, fused=True)[1] is None


@pytest.mark.usefixtures("small_tiles")
def test_equal_input_gives_equal_bits() -> None:
    operands, targets = given(SHAPES[0], torch.bfloat16, bias=True)
    first, second = (computed(operands, targets, fused=True) for _ in range(2))
    assert all(one.equal(other) for one, other in zip(first, second, strict=True))


@pytest.mark.usefixtures("small_tiles")
def test_no_tensor_is_as_large_as_all_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            found = func(*args, **(kwargs or {}))
            sizes.extend([found.nbytes] if isinstance(found, Tensor) else [])
            return found

    num_tokens, width, vocabulary = 32, 8, 192
    monkeypatch.setattr(fused_logprobs, "GRAD_CHUNK", 32 * 32)
    operands, targets = given((num_tokens, width, vocabulary), torch.float32, bias=False)
    with Watch():
        computed(operands, targets, fused=True)
    runs = 3 * -(-vocabulary // 32) * num_tokens
    assert max(sizes) <= 4 * max(32 * 32, vocabulary * width, runs) < 4 * num_tokens * vocabulary


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")
def test_large_logits_stay_exact_and_what_is_not_finite_stays_in_its_row() -> None:
    (hidden, weight), targets = given(SHAPES[0], torch.float32, bias=False)
    found, exact = computed([hidden * 300, weight], targets, fused=True), by_numpy([hidden * 300, weight], targets)
    assert all(one.isfinite().all() for one in found)
    assert error(found[0], torch.from_numpy(exact[0])) <= 1e-6
    assert np.abs(found[1].numpy() - exact[1]).max() <= 1e-3
    hidden[4, 2] = torch.nan
    one, entropy = selected_logprobs(hidden, Head(weight), targets, 1.0, fused=True)
    assert entropy is not None
    assert one.isnan().nonzero().tolist() == entropy.isnan().nonzero().tolist() == [[4]]


def test_sampling_from_kept_sets_is_computed_in_chunks() -> None:
    (hidden, weight), targets = given(SHAPES[0], torch.float32, bias=False)
    kept = KeptSets(targets, torch.ones_like(targets))
    values = [selected_logprobs(hidden, Head(weight), targets, 1.0, kept, fused=fused)[0] for fused in (True, False)]
    assert values[0].equal(values[1])
    assert values[0].abs().max() == 0
    assert len(selected_logprobs(hidden[:0], Head(weight), targets[:0], 1.0, fused=True)[0]) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_check_passes_with_the_tiles_of_a_gpu(dtype: torch.dtype) -> None:
    assert why_not_fused(torch.device("cpu"), dtype) == ""
    assert not fuses(torch.device("cpu"), dtype), "a CPU only interprets"


def test_kernels_that_fail_or_are_wrong_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    plain: Any = fused_logprobs._backward
    cpu = torch.device("cpu")

    def wrong(*given: Any) -> Any:
        of_hidden, of_weight, of_bias = plain(*given)
        return of_hidden, 1.01 * of_weight, of_bias

    def failing(*given: Any) -> Any:
        raise KeyError("no kernel image")

    for broken, words in ((wrong, "off by"), (failing, "KeyError: 'no kernel image'")):
        monkeypatch.setattr(fused_logprobs, "_backward", broken)
        assert words in why_not_fused(cpu, torch.float32)
    monkeypatch.setattr(logprobs, "find_spec", lambda name: None)
    assert why_not_fused(cpu, torch.float32) == "triton is not installed"


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_model_trains_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: Any, tied: bool) -> None:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=40, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, tie_word_embeddings=tied,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    model = PolicyModel(ModelSettings(path=str(tmp_path), device="cpu", dtype=dtype), seed=0)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 40, (3, 9), generator=generator)
    batch = MicroBatch(ids, torch.arange(9).expand(3, 9) > 2, torch.zeros(3, 9), torch.zeros(3, 9))
    asked: list[torch.dtype] = []
    monkeypatch.setattr(policy, "fuses", lambda device, asked_dtype: asked.append(asked_dtype) or True)
    results = []
    for model.may_fuse in (True, False):
        model.module.zero_grad()
        one, entropy = model.completion_terms(batch, temperature=0.7, entropy_needs_grad=True)
        (one.sum() + entropy.sum()).backward()
        grads = [parameter.grad for _, parameter in model.trainable() if parameter.grad is not None]
        results.append([one.detach(), entropy.detach(), *grads])
    assert asked == [getattr(torch, dtype)]
    for one, other in zip(*results, strict=True):
        assert error(one, other) <= (5e-2 if dtype == "bfloat16" else 1e-5)
