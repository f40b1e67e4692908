"""Settings that change memory, speed or the optimizer, on a real GPU: what they may not change, and what they save."""

import gc
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._inductor import config as inductor

from rollstream.learner.algorithms.base import BatchView
from rollstream.learner.algorithms.builtin.grpo import Grpo
from rollstream.learner.model.optimizer import make_optimizer
from rollstream.learner.model.policy import PolicyModel, Reference
from rollstream.learner.model.step import train_batch
from rollstream.schemas.algorithms import GrpoSettings
from rollstream.schemas.settings import JobSettings, LoraSettings, ModelSettings, OptimizerSettings
from tests.rigs.grouped_batches import (
    OPTIMIZER,
    Scale,
    backward,
    distance,
    grouped,
    make_model,
    micro_batch,
    step,
)

pytestmark = pytest.mark.gpu
LORA = LoraSettings(rank=8)
needs_bitsandbytes = pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")


def model_of(folder: Path, device: str, **changes: Any) -> ModelSettings:
    return ModelSettings(path=str(folder), device=device, **changes)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
@pytest.mark.parametrize("shares", [True, False], ids=["tree", "padded"])
def test_gradient_checkpointing_changes_no_gradient(
    gpu: str, folder: Path, batch: BatchView, dtype: Any, lora: Any, shares: bool
) -> None:
    settings = model_of(folder, gpu, dtype=dtype, lora=lora)
    plain, found = (
        backward(PolicyModel(settings.model_copy(update={"gradient_checkpointing": on}), seed=0), batch, shares=shares)
        for on in (False, True)
    )
    assert all(one.equal(other) for one, other in zip(plain, found, strict=True))


def test_gradient_checkpointing_takes_less_memory(cuda: str, tmp_path: Path, scale: Scale, batch: BatchView) -> None:
    deep = make_model(tmp_path / "deep", scale, num_layers=6)
    peaks: list[int] = []
    for on in (False, True):
        model = PolicyModel(model_of(deep, cuda, gradient_checkpointing=on), seed=0)
        gc.collect()
        before = torch.cuda.memory_allocated()
        given = micro_batch(batch, shares=True).to(model.device)
        logprobs, _ = model.completion_terms(given, temperature=1.0, entropy_needs_grad=False)
        peaks.append(torch.cuda.memory_allocated() - before)
        del logprobs, given, model
    assert peaks[1] < 0.6 * peaks[0], peaks


@pytest.mark.parametrize(
    ("changes", "limit"),
    [
        ({"attn_implementation": "eager"}, 1e-4),
        ({"fp32_head": True}, 1e-6),
        ({"fused_kernels": False}, 1e-4),
        ({"deterministic": False}, 1e-4),
    ],
    ids=lambda one: next(iter(one)) if isinstance(one, dict) else "",
)
def test_in_float32_an_option_that_computes_otherwise_gives_the_same_step(
    gpu: str, folder: Path, batch: BatchView, changes: dict[str, Any], limit: float
) -> None:
    plain, found = (step(model_of(folder, gpu, dtype="float32", **one), batch) for one in ({}, changes))
    assert distance(found.gradients, plain.gradients) <= limit
    assert distance(found.weights, plain.weights) <= limit


def test_a_head_in_float32_is_more_exact_than_one_in_bfloat16(gpu: str, folder: Path, batch: BatchView) -> None:
    wanted, plain, found = (
        backward(PolicyModel(model_of(folder, gpu, **one), seed=0), batch, shares=True)[:1]
        for one in ({"dtype": "float32"}, {"dtype": "bfloat16"}, {"dtype": "bfloat16", "fp32_head": True})
    )
    assert distance(found, wanted) <= distance(plain, wanted) * 1.01


def test_a_reference_in_bfloat16_takes_half_of_the_memory(gpu: str, folder: Path, batch: BatchView) -> None:
    given: list[torch.Tensor] = []
    taken: list[int] = []
    for dtype in ("auto", "bfloat16"):
        policy = PolicyModel(model_of(folder, gpu, dtype="bfloat16", reference_dtype=dtype), seed=0)
        gc.collect()
        before = torch.cuda.memory_allocated()
        reference = Reference(policy, policy.weights_bytes(), "base")
        taken.append(torch.cuda.memory_allocated() - before)
        given.append(reference.logprobs(micro_batch(batch, shares=True).to(policy.device), temperature=1.0))
        del policy, reference
    assert gpu == "cpu" or taken[1] <= 0.6 * taken[0], taken
    assert distance(given[1:], given[:1]) < 1e-2


@pytest.mark.parametrize("changes", [{}, {"use_rslora": True}, {"use_dora": True}], ids=["lora", "rslora", "dora"])
def test_adapters_begin_and_train_as_on_the_cpu(
    gpu: str, folder: Path, few: BatchView, changes: dict[str, Any]
) -> None:
    lora = LoraSettings(rank=4, **changes)
    first, *others = (
        step(model_of(folder, device, dtype="float32", lora=lora), few, times=times)
        for device, times in (("cpu", 0), (gpu, 0), ("cpu", 1), (gpu, 1))
    )
    assert all(one.equal(other) for one, other in zip(first.weights, others[0].weights, strict=True)) or (
        lora.use_dora and distance(others[0].weights, first.weights) < 1e-6
    )
    assert distance(others[2].weights, others[1].weights) < 1e-4
    assert distance(others[2].weights, first.weights) > 1e-4


@needs_bitsandbytes
def test_adapters_over_a_base_in_4_bits_train_to_equal_bits_near_those_over_16_bits(
    gpu: str, folder: Path, batch: BatchView
) -> None:
    settings = model_of(folder, gpu, dtype="bfloat16", lora=LORA, quantization="nf4")
    one, other = (step(settings, batch, times=2) for _ in range(2))
    assert one.model.weights_bytes() == other.model.weights_bytes()
    assert all(value.isfinite().all() for value in one.weights)
    whole = step(settings.model_copy(update={"quantization": None}), batch, times=2)
    assert one.results[0].metrics["loss/total"] == pytest.approx(whole.results[0].metrics["loss/total"], abs=0.05)
    base = [value for name, value in one.model.module.named_parameters() if "q_proj.base_layer.weight" in name]
    assert {value.dtype for value in base} == {torch.uint8}


@pytest.mark.parametrize("kind", ["muon", pytest.param("adamw_8bit", marks=needs_bitsandbytes)])
def test_another_optimizer_moves_the_weights_as_on_the_cpu_and_to_equal_bits(
    gpu: str, folder: Path, few: BatchView, kind: Any
) -> None:
    optimizer = OPTIMIZER.model_copy(update={"kind": kind})
    one, other = (step(model_of(folder, gpu, dtype="float32"), few, times=2, optimizer=optimizer) for _ in range(2))
    assert one.model.weights_bytes() == other.model.weights_bytes()
    start, wanted = (
        step(model_of(folder, "cpu", dtype="float32"), few, times=times, optimizer=optimizer) for times in (0, 2)
    )
    moved, wanted_move = (
        [after - before for after, before in zip(each.weights, start.weights, strict=True)] for each in (one, wanted)
    )
    assert distance(moved, wanted_move) < 0.1


@pytest.mark.parametrize("kind", ["adamw", pytest.param("adamw_8bit", marks=needs_bitsandbytes)])
def test_an_offloaded_optimizer_takes_the_same_steps_and_leaves_its_memory(
    gpu: str, folder: Path, batch: BatchView, kind: Any
) -> None:
    held: list[int] = []
    taken = []
    for offload in (None, "cpu"):
        optimizer = OPTIMIZER.model_copy(update={"kind": kind, "offload": offload})
        taken.append(step(model_of(folder, gpu), batch, times=2, optimizer=optimizer))
        state = taken[-1].optimizer.state
        tensors = [value for one in state.values() for value in one.values() if isinstance(value, torch.Tensor)]
        held.append(sum(value.nbytes for value in tensors if value.is_cuda))
    assert taken[0].model.weights_bytes() == taken[1].model.weights_bytes()
    assert held[1] == 0
    assert (held[0] > 0) == (gpu != "cpu")


def test_memory_of_an_offloaded_optimizer_is_free_between_its_steps(cuda: str, folder: Path, batch: BatchView) -> None:
    found: list[int] = []
    for offload in (None, "cpu"):
        gc.collect()
        before = torch.cuda.memory_allocated()
        taken = step(model_of(folder, cuda), batch, optimizer=OPTIMIZER.model_copy(update={"offload": offload}))
        found.append(torch.cuda.memory_allocated() - before)
        size = sum(one.nbytes for _, one in taken.model.trainable())
        del taken
    assert found[0] - found[1] > 1.8 * size, (found, size)


@pytest.fixture
def in_this_process() -> Iterator[None]:
    """Compile without further processes, and nothing of what other tests compiled."""
    torch.compiler.reset()
    with inductor.patch(compile_threads=1):
        yield
    torch.compiler.reset()


@pytest.mark.timeout(300)
@pytest.mark.usefixtures("in_this_process")
def test_compiled_layers_give_the_numbers_of_layers_that_are_not(cuda: str, tmp_path: Path, scale: Scale) -> None:
    folder, batch = make_model(tmp_path / "model", scale, num_layers=1), grouped(scale)
    settings = model_of(folder, cuda, dtype="bfloat16")
    exact = backward(PolicyModel(settings.model_copy(update={"dtype": "float32"}), seed=0), batch, shares=True)
    plain = backward(PolicyModel(settings, seed=0), batch, shares=True)
    model = PolicyModel(settings.model_copy(update={"compile": True}), seed=0)
    found, again = (backward(model, batch, shares=True) for _ in range(2))
    assert all(one.equal(other) for one, other in zip(found, again, strict=True))
    assert distance(found, exact) <= 1.5 * distance(plain, exact)


def test_a_reference_stays_while_the_policy_is_trained(gpu: str, folder: Path, batch: BatchView) -> None:
    for lora in (None, LORA):
        chosen = GrpoSettings(kl_coefficient=0.1)
        # Since revision 6 the reference is computed before the step: only here does it share the GPU with the backward.
        job = JobSettings(kind="rl", model=model_of(folder, gpu, lora=lora), algorithm=chosen, revision=5)
        policy = PolicyModel(job.model, seed=0)
        policy.use_dropout(False)
        reference = Reference(policy, policy.weights_bytes(), "base")
        given = micro_batch(batch, shares=True).to(policy.device)
        before = reference.logprobs(given, temperature=1.0)
        optimizer = make_optimizer(policy.trainable(), OptimizerSettings(learning_rate=1e-2))
        result = train_batch(policy, optimizer, batch, Grpo(), job, index=0, seed=1, reference=reference)
        assert result.num_optimizer_steps == 1
        assert reference.logprobs(given, temperature=1.0).equal(before)
        now, _ = policy.completion_terms(given, temperature=1.0, entropy_needs_grad=False)
        assert not now.equal(before)
