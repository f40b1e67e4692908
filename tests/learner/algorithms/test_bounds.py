"""Bounds of losses where a single token is far off: what it weighs, and what metrics say of it."""

from typing import Any

import pytest
import torch

from rollstream.learner.algorithms.base import Counts
from rollstream.learner.algorithms.builtin.dppo import Dppo
from rollstream.learner.algorithms.builtin.gspo import Gspo
from rollstream.learner.algorithms.builtin.mix import Mix
from rollstream.learner.algorithms.builtin.opd import Opd
from rollstream.learner.algorithms.tokens import MAX_LOG_RATIO, TokenBatch
from rollstream.schemas.algorithms import DppoSettings, GspoSettings, MixSettings, OpdSettings


def batch(behaviour: list[float], advantages: list[float], **columns: Any) -> TokenBatch:
    """One row of tokens, each of log-probability -1 under the current policy."""
    count = len(behaviour)
    current = torch.full((count,), -1.0, requires_grad=True)
    others = [torch.zeros(count), torch.tensor(behaviour), torch.tensor(advantages)]
    return TokenBatch(current, *others, rows_N=torch.zeros(count, dtype=torch.int64), lengths_B=(count,), **columns)


def gradient_of(algorithm: Any, tokens: TokenBatch, settings: Any) -> list[float]:
    algorithm.loss(tokens, settings).values.sum().backward()
    assert tokens.logprobs_N.grad is not None
    return tokens.logprobs_N.grad.tolist()


@pytest.mark.parametrize("teacher", [-200.0, -8999.0])
@pytest.mark.parametrize("name", ["opd", "mix"])
def test_a_token_that_the_teacher_holds_for_impossible_has_a_bounded_gradient(name: str, teacher: float) -> None:
    algorithm: Any = {"opd": Opd(), "mix": Mix()}[name]
    settings: Any = {"opd": OpdSettings(teacher="t"), "mix": MixSettings(rl=0, ref_kl=1, teacher="t")}[name]
    weights = {"rl": torch.zeros(1), "ce": torch.zeros(1), "ref_kl": torch.ones(1)}
    columns: dict[str, Any] = {"teacher_N": torch.tensor([teacher]), "components": weights}
    assert gradient_of(algorithm, batch([-1.0], [0.0], **columns), settings) == [MAX_LOG_RATIO]
    before = batch([-1.0], [0.0], **columns, revision=9)
    assert gradient_of(algorithm, before, settings) == [-1.0 - teacher], "a recorded job trains as it did"


def test_one_token_far_off_outweighs_a_sequence_of_gspo_unless_dual_clip_bounds_it() -> None:
    far = [-101.0, -1.0]
    assert gradient_of(Gspo(), batch(far, [-1.0, -1.0]), GspoSettings())[1] == pytest.approx(11013, rel=1e-4)
    settings = GspoSettings(dual_clip=3.0)
    assert gradient_of(Gspo(), batch(far, [-1.0, -1.0]), settings) == [0.0, 0.0]
    found = Gspo().loss(batch(far, [-1.0, -1.0]), settings)
    assert found.values.tolist() == [3.0]
    metrics = Gspo().metrics({name: float(value) for name, value in found.sums.items()}, Counts(2, 1, 0))
    assert metrics["clip/dual"] == 1.0
    near = [-1.1, -1.0]
    free = gradient_of(Gspo(), batch(near, [-1.0, -1.0]), GspoSettings())
    assert gradient_of(Gspo(), batch(near, [-1.0, -1.0]), settings) == free


def test_the_threshold_of_dppo_goes_by_its_divergence_unless_it_is_given() -> None:
    assert DppoSettings().delta == 0.15
    assert DppoSettings(divergence="binary_kl").delta == 0.05
    assert DppoSettings(divergence="binary_kl", delta=0.15).delta == 0.15
    recorded = {**DppoSettings().model_dump(mode="json"), "divergence": "binary_kl"}
    assert DppoSettings.model_validate(recorded).delta == 0.15, "records have it"


@pytest.mark.parametrize(("revision", "share"), [(9, 1.0), (10, 0.5)])
def test_a_token_without_an_advantage_is_not_counted_as_masked(revision: int, share: float) -> None:
    tokens = batch([-0.1, -0.1], [0.0, -1.0], revision=revision)
    found = Dppo().loss(tokens, DppoSettings())
    metrics = Dppo().metrics({name: float(value) for name, value in found.sums.items()}, Counts(2, 1, 0))
    assert metrics["clip/divergence"] == share
