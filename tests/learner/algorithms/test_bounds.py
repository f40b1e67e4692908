"""Bounds of losses where a single token is far off: what it weighs, and what metrics say of it."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from rollstream.learner.algorithms import table
from rollstream.learner.algorithms.base import BatchView, Counts, Member, Row
from rollstream.learner.algorithms.builtin.dppo import Dppo
from rollstream.learner.algorithms.builtin.gspo import Gspo
from rollstream.learner.algorithms.builtin.kto import reference_point
from rollstream.learner.algorithms.builtin.mix import Mix
from rollstream.learner.algorithms.builtin.opd import Opd
from rollstream.learner.algorithms.builtin.reinforce_pp import ReinforcePp
from rollstream.learner.algorithms.tokens import MAX_KL_RATIO, MAX_LOG_RATIO, TokenBatch
from rollstream.schemas.algorithms import BUILT_IN, DppoSettings, GspoSettings, MixSettings, OpdSettings
from rollstream.schemas.permissions import NOTHING
from rollstream.schemas.policy_gradient import KlPenaltySettings, ReinforcePpSettings
from rollstream.schemas.revisions import NEWEST_REVISION

WITH_UNBIASED_KL = [
    name for name, kind in BUILT_IN.items() if issubclass(kind, KlPenaltySettings) and name != "reinforce_pp"
]


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


@pytest.mark.parametrize("name", WITH_UNBIASED_KL)
def test_one_token_far_off_has_a_bounded_part_in_an_unbiased_estimate_of_kl(name: str) -> None:
    """Two tokens with a KL penalty alone: their advantages are 0. The second was sampled as it is trained."""
    settings: Any = BUILT_IN[name].model_validate({"name": name, "kl_coefficient": 1.0, "unbiased_kl": True})
    algorithm = table.algorithm(name, NOTHING)

    def gradient(far: float, revision: int = NEWEST_REVISION) -> list[float]:
        columns: dict[str, Any] = {"reference_N": torch.tensor([-1.5, -1.5]), "revision": revision}
        return gradient_of(algorithm, batch([far, -1.0], [0.0, 0.0], **columns), settings)

    k3_gradient = 1 - math.exp(-0.5)
    share = 2 if name == "gspo" else 1  # the mean over the sequence
    for far in (-9.0, -9999.0):
        assert gradient(far)[0] == pytest.approx(MAX_KL_RATIO * k3_gradient / share, rel=1e-4)
        assert gradient(far, revision=15)[0] > 500, "a recorded job trains as it did"
    assert gradient(-3.0) == gradient(-3.0, revision=15), "a ratio within the bound is as it was"


@pytest.mark.parametrize(("revision", "share"), [(15, 1.0), (16, 0.25)])
def test_an_off_policy_correction_weighs_the_entropy_bonus_of_mix(revision: int, share: float) -> None:
    entropies = torch.ones(1, requires_grad=True)
    components = {"rl": torch.ones(1), "ce": torch.zeros(1), "ref_kl": torch.zeros(1)}
    tokens = batch([-1.0], [1.0], components=components, weights_N=torch.tensor([0.25]), revision=revision)
    settings = MixSettings(entropy_coefficient=0.1)
    Mix().loss(tokens._replace(entropies_N=entropies), settings).values.sum().backward()
    assert entropies.grad is not None
    assert entropies.grad.item() == pytest.approx(-0.1 * share)


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


def sampled_rows(far: float) -> BatchView:
    """Eight rollouts of a group, whose engine has given one token a log-probability that is `far` off."""
    rng = np.random.default_rng(0)
    rows: list[Row] = []
    for index in range(8):
        reference = (-1 - rng.random(20)).astype(np.float32)
        logprobs = reference + np.float32(0.05)
        if index == 0:
            logprobs[10] -= np.float32(far)
        ids = np.arange(20, dtype=np.int32)
        rows.append(Row(ids, np.arange(20) > 4, logprobs, member=index, scores={"reference": reference}))
    return BatchView(rows, [Member(agent="a", reward=float(index % 2)) for index in range(8)])


def test_one_recorded_token_far_off_leaves_the_advantages_of_other_rollouts() -> None:
    settings = ReinforcePpSettings(kl_coefficient=0.01)

    def others(far: float, revision: int = NEWEST_REVISION) -> float:
        prepared = ReinforcePp().prepare(replace(sampled_rows(far), revision=revision), settings)
        return float(np.mean([np.abs(values).mean() for values in prepared.advantages[1:]]))

    assert others(9999.0) > 0.8 * others(0.0)
    assert others(9999.0) == pytest.approx(others(MAX_LOG_RATIO + 1), rel=1e-3)
    assert others(9999.0, revision=10) < 0.4 * others(0.0), "a recorded job trains as it did"
    assert others(19.0) == others(19.0, revision=10), "a log-ratio within the bounds is as it was, bit by bit"


def test_one_recorded_token_far_off_leaves_the_reference_point_above_0() -> None:
    def point(far: float, revision: int = NEWEST_REVISION) -> float:
        return reference_point(replace(sampled_rows(far), revision=revision))

    expected = 15 * 0.05
    assert point(0.0) == pytest.approx(expected, rel=1e-4)
    assert point(4.0) == point(4.0, revision=10) == pytest.approx(expected - 4 / 8, rel=1e-3)
    assert point(-9999.0) == pytest.approx(expected + 20 / 8, rel=1e-2)
    assert point(-9999.0, revision=10) == pytest.approx(1250, rel=1e-2), "a recorded job trains as it did"
