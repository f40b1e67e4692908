"""A step of every algorithm on a real GPU: the CPU's numbers, two waits, equal bits; and one without a finite loss."""

import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load as load_tensors

from rollstream.learner.algorithms import table
from rollstream.learner.algorithms.base import BatchView
from rollstream.learner.algorithms.builtin.grpo import Grpo
from rollstream.learner.algorithms.tokens import Losses, TokenBatch
from rollstream.learner.tiny_model import make_tiny_model
from rollstream.schemas.policy_gradient import OffPolicySettings, PolicyGradientSettings
from rollstream.schemas.revisions import NEWEST_REVISION
from rollstream.schemas.settings import LoraSettings, ModelSettings
from tests.contracts.algorithms import OTHERS, Case, case_of
from tests.rigs.grouped_batches import distance, step

pytestmark = pytest.mark.gpu
NAMES = [*table.names(), *OTHERS]
SETUPS = [None, LoraSettings(rank=8)]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of one layer with heads of 16 numbers."""
    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "model", hidden_size=64, num_layers=1)


def corrected(case: Case, **changes: Any) -> dict[str, Any]:
    """Settings with an off-policy correction and mask where the algorithm has them, and a micro-batch for each row."""
    if isinstance(case.settings, PolicyGradientSettings):
        level = "sequence" if case.settings.name == "gspo" else "token"
        correction = OffPolicySettings(level=level, reject="k2", reject_above=1.0)
        changes |= {"off_policy": correction, "off_policy_mask_threshold": 1.0}
    return {"max_tokens_per_micro_batch": 1, "revision": NEWEST_REVISION, **changes}


@contextmanager
def synchronisations(found: list[str]) -> Iterator[None]:
    """Every wait for the GPU within, with the line that waits."""
    if not torch.cuda.is_available():
        yield
        return
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")
    found += [f"{one.filename}:{one.lineno}" for one in caught if "synchronizing CUDA operation" in str(one.message)]


@pytest.mark.parametrize("name", NAMES)
def test_a_step_in_float32_gives_the_weights_and_metrics_of_the_cpu(gpu: str, tiny: Path, name: str) -> None:
    case = replace(case_of(name, tiny), eps=1e-4)
    grads, wanted, weights = case.train(case.batch, **corrected(case, mini_batches=2))
    other = replace(case, device=gpu)
    found_grads, result, found_weights = other.train(case.batch, **corrected(case, mini_batches=2))
    assert grads.keys() == found_grads.keys()
    largest = max(float(one.abs().max()) for one in grads.values())
    for key, one in grads.items():
        assert torch.allclose(found_grads[key].cpu(), one, rtol=1e-4, atol=1e-4 * largest), key
    tensors, found = load_tensors(weights), load_tensors(found_weights)
    for key, one in tensors.items():
        assert torch.allclose(found[key], one, rtol=1e-4, atol=1e-5), key
    assert result.metrics == pytest.approx(wanted.metrics, rel=1e-3, abs=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_a_step_in_bfloat16_is_finite_and_near_that_in_float32(gpu: str, tiny: Path, name: str) -> None:
    case = replace(case_of(name, tiny), device=gpu, eps=1e-4)
    grads, wanted, _ = case.train(case.batch, revision=NEWEST_REVISION)
    found, result, _ = replace(case, dtype="bfloat16").train(case.batch, revision=NEWEST_REVISION)
    assert all(np.isfinite(value) for value in result.metrics.values())
    assert all(value.isfinite().all() for value in found.values())
    assert any(value.abs().max() > 0 for value in found.values())
    assert distance([found[key] for key in grads], list(grads.values())) < 0.3
    assert result.metrics["loss/total"] == pytest.approx(wanted.metrics["loss/total"], rel=0.1, abs=0.05)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", NAMES)
def test_the_host_waits_for_the_gpu_twice_an_optimizer_step_and_for_no_micro_batch(
    gpu: str, tiny: Path, name: str, dtype: Any
) -> None:
    found: list[str] = []
    case = replace(case_of(name, tiny), device=gpu, dtype=dtype)
    case.train(case.batch, **corrected(case))  # what is tried or compiled at the first use waits too
    watched = replace(case, around=lambda: synchronisations(found))
    watched.train(case.batch, **corrected(case, mini_batches=2))
    assert watched.waits == {"reads a list": 2, "reads a number": 2}
    assert len(found) == (0 if gpu == "cpu" else 4), found


@pytest.mark.parametrize("lora", SETUPS, ids=["full", "lora"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_equal_steps_from_equal_weights_give_equal_bits(
    gpu: str, folder: Path, batch: BatchView, dtype: Any, lora: Any
) -> None:
    settings = ModelSettings(path=str(folder), device=gpu, dtype=dtype, lora=lora)
    options: dict[str, Any] = {"times": 2, "mini_batches": 2, "max_tokens_per_micro_batch": 1000}
    one, other = (step(settings, batch, **options) for _ in range(2))
    assert one.model.weights_bytes() == other.model.weights_bytes()
    assert one.result.metrics == other.result.metrics
    assert all(mine.equal(its) for mine, its in zip(one.weights, other.weights, strict=True)), "before rounding"


class NanAtFirst(Grpo):
    """grpo, whose first loss is not finite."""

    def __init__(self) -> None:
        self.calls = 0

    def loss(self, tokens: TokenBatch, settings: Any) -> Losses:
        found = super().loss(tokens, settings)
        self.calls += 1
        return found._replace(values=found.values * float("nan")) if self.calls == 1 else found


def test_a_step_whose_loss_is_not_finite_is_skipped_and_the_next_one_is_taken(
    gpu: str, folder: Path, batch: BatchView
) -> None:
    settings = ModelSettings(path=str(folder), device=gpu)
    before = step(settings, batch, times=0)
    skipped = step(settings, batch, loss=NanAtFirst())
    assert (skipped.result.num_optimizer_steps, skipped.result.metrics["optimizer/skipped_steps"]) == (0, 1.0)
    assert all(one.equal(other) for one, other in zip(skipped.weights, before.weights, strict=True))
    assert not skipped.optimizer.state
    again = step(settings, batch, loss=NanAtFirst(), mini_batches=2)
    assert again.result.num_optimizer_steps == 1
    assert all(one.isfinite().all() for one in again.weights)
    assert distance(again.weights, before.weights) > 0


FAST_THEN_EXACT = """
import torch
from rollstream.learner.model.policy import make_deterministic
make_deterministic(None, deterministic=False)
matrix = torch.ones(64, 64, device={device!r})
matrix @ matrix
make_deterministic(None)
print(float((matrix @ matrix)[0, 0]))
"""


def test_a_deterministic_job_can_follow_one_that_is_not(gpu: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    program = FAST_THEN_EXACT.format(device=gpu)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "64.0"), done.stderr
