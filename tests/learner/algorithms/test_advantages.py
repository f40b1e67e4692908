"""Advantages against numbers worked out by hand, and what holds for any group."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from rollstream.learner.algorithms import advantages
from rollstream.learner.algorithms.base import BatchView, Member, Row
from rollstream.learner.algorithms.builtin.grpo import Clipped
from rollstream.learner.algorithms.builtin.reinforce_pp import ReinforcePp
from rollstream.schemas.algorithms import GrpoSettings, GspoSettings, MixSettings
from rollstream.schemas.errors import RunFailedError
from rollstream.schemas.events.rollouts import Completion
from rollstream.schemas.policy_gradient import (
    Advantage,
    ClippedSettings,
    MaxRlSettings,
    OffPolicySettings,
    OverlongSettings,
    PpoSettings,
    RaeSettings,
    ReinforcePpSettings,
)
from rollstream.schemas.revisions import NEWEST_REVISION

REWARDS = [1.0, 0.0, 0.0, 1.0]


def test_group_mean_takes_the_mean_off() -> None:
    assert advantages.group_mean(REWARDS) == [0.5, -0.5, -0.5, 0.5]


def test_group_std_divides_by_the_samples_deviation() -> None:
    deviation = math.sqrt(1 / 3)
    assert advantages.group_std(REWARDS) == pytest.approx([0.5 / deviation * s for s in (1, -1, -1, 1)], rel=1e-5)


def test_a_deviation_beyond_all_numbers_gives_no_advantages_of_0() -> None:
    assert all(map(math.isnan, advantages.group_std([1e300, 0.0, 0.0])))


def test_leave_one_out_compares_with_the_others() -> None:
    assert advantages.leave_one_out([3.0, 0.0, 0.0]) == pytest.approx([3.0, -1.5, -1.5])


@pytest.mark.parametrize("estimator", ["group_std", "group_mean", "leave_one_out"])
def test_equal_rewards_and_single_members_have_no_advantage(estimator: Advantage) -> None:
    assert advantages.ESTIMATORS[estimator]([0.1] * 3) == [0.0] * 3
    assert advantages.ESTIMATORS[estimator]([0.7]) == [0.0]


def test_each_member_is_compared_with_its_own_group_in_the_order_given() -> None:
    found = advantages.by_group([1.0, 10.0, 0.0, 20.0], ["a", "b", "a", "b"], "group_mean")
    assert found == [0.5, -5.0, -0.5, 5.0]


CENTRED = sorted(advantages.ESTIMATORS.keys() - {"max_rl", "none"})


@given(st.lists(st.floats(-100, 100), min_size=1, max_size=8), st.sampled_from(CENTRED))
def test_advantages_of_a_group_add_up_to_nothing(rewards: list[float], estimator: Advantage) -> None:
    assert sum(advantages.by_group(rewards, ["g"] * len(rewards), estimator)) == pytest.approx(0, abs=1e-6)


def member(group: str, rollout: int, agent: str, reward: float) -> Member:
    return Member(group_id=group, rollout_id=f"{group}/m{rollout}", agent=agent, reward=reward)


def test_agents_are_compared_with_themselves_whatever_the_scale_of_others() -> None:
    rewards = {"prover": [0.0, 10.0], "verifier": [0.1, 0.2]}
    members = [member("g", rollout, agent, rewards[agent][rollout]) for rollout in (0, 1) for agent in rewards]
    found = advantages.of_members(members, GrpoSettings(advantage="per_agent"))
    assert found == advantages.of_members(members, GrpoSettings(advantage="group_std"))
    assert found == pytest.approx([-(0.5**0.5), -(0.5**0.5), 0.5**0.5, 0.5**0.5], rel=1e-4)


def test_answers_to_one_proposal_are_compared_with_each_other_and_proposals_across() -> None:
    members = [
        *(member("g", 0, agent, value) for agent, value in (("proposer", 1.0), ("solver_1", 0.0), ("solver_2", 1.0))),
        *(member("g", 1, agent, value) for agent, value in (("proposer", 0.0), ("solver_1", 9.0), ("solver_2", 9.0))),
    ]
    found = advantages.of_members(members, GrpoSettings(advantage="hierarchical"))
    half = 0.5**0.5
    assert found == pytest.approx([half, -half, half, -half, 0.0, 0.0], rel=1e-4)


@pytest.mark.parametrize(
    ("agent", "role"), [("solver_2", "solver"), ("solver-10", "solver"), ("O2", "O"), ("X", "X"), ("7", "7")]
)
def test_a_role_is_an_agent_s_name_without_its_number(agent: str, role: str) -> None:
    assert advantages.role_of(agent) == role


def test_a_moving_average_by_agent_goes_on_from_batch_to_batch() -> None:
    first, known = advantages.role_conditioned([1.0, 1.0, 0.0], ["X", "O", "X"], {}, 0.5)
    assert (first, known) == ([0.5, 0.5, -0.25], {"X": 0.25, "O": 0.5})
    second, known = advantages.role_conditioned([0.5], ["O"], known, 0.5)
    assert (second, known) == ([0.0], {"X": 0.25, "O": 0.5})


def test_a_moving_average_compares_no_steps() -> None:
    with pytest.raises(ValueError, match="rae compares totals, not steps"):
        GrpoSettings(advantage="rae", step_rewards="process")


def test_groups_of_equal_rewards_are_kept_where_no_group_decides() -> None:
    flat = {name: GrpoSettings(advantage=name).needs.flat_groups for name in ("rae", "hierarchical", "per_agent")}
    assert flat == {"rae": True, "hierarchical": True, "per_agent": False}


# ---- further estimators ----


def test_max_rl_divides_by_the_mean_and_is_silent_without_a_success() -> None:
    assert advantages.max_rl([1.0, 0.0, 0.0, 0.0]) == pytest.approx([3.0, -1.0, -1.0, -1.0])
    assert advantages.max_rl([0.0] * 4) == [0.0] * 4


def batch_of(rewards: list[float], *, truncated: int | None = None, revision: int = NEWEST_REVISION) -> BatchView:
    """A row of three tokens for each reward; one of them may have ended at the token limit."""
    rows = [
        Row(
            np.zeros(4, np.int32),
            np.array([False, True, True, True]),
            np.full(4, -1.0, np.float32),
            index,
            (Completion(step_index=0, start=1, length=3, finish_reason="length" if index == truncated else "stop"),),
            scores={"reference": np.full(4, -9.0 if index == truncated else -1.0 - index, np.float32)},
        )
        for index in range(len(rewards))
    ]
    return BatchView(rows, [member("g", index, "a", reward) for index, reward in enumerate(rewards)], revision=revision)


@pytest.mark.parametrize("settings", [MaxRlSettings(), GrpoSettings(advantage="max_rl")])
def test_max_rl_names_the_rollout_whose_reward_is_negative(settings: ClippedSettings) -> None:
    batch = batch_of([-1.0, 1.001])
    with pytest.raises(RunFailedError, match=r"rollout g/m0, agent a: reward -1 is negative, and .* divides by the"):
        Clipped().prepare(batch, settings)
    assert settings.needs.nonnegative_rewards
    before = replace(batch, revision=9)
    assert Clipped().prepare(before, settings).advantages == pytest.approx([-2001.0, 2001.0], rel=1e-6)
    assert Clipped().prepare(batch, GrpoSettings()).advantages == pytest.approx([-(0.5**0.5), 0.5**0.5], rel=1e-5)


def test_reinforce_pp_normalises_over_the_tokens_that_are_trained() -> None:
    settings = ReinforcePpSettings(kl_coefficient=0.1, mask_truncated=True)
    batch = batch_of([1.0, 0.0, 0.0], truncated=2)
    found = ReinforcePp().prepare(batch, settings)
    trained = np.concatenate([np.asarray(found.advantages[row])[1:] for row in (0, 1)])
    assert trained.mean() == pytest.approx(0, abs=1e-6)
    assert trained.std() == pytest.approx(1, rel=1e-4)
    recorded = ReinforcePp().prepare(replace(batch, revision=9), settings)
    every = np.concatenate([np.asarray(one)[1:] for one in recorded.advantages])
    assert (every.mean(), every.std()) == (pytest.approx(0, abs=1e-6), pytest.approx(1, rel=1e-4))


def test_gdpo_normalises_each_reward_by_itself_before_they_are_added() -> None:
    """Rewards of another scale count as much: (1, 0) and (0, 100) are equally good where each alone is."""
    found = [
        Member(group_id="g", rollout_id=f"m{index}", agent="a", reward=sum(both), rewards={"x": both[0], "y": both[1]})
        for index, both in enumerate([(1.0, 0.0), (0.0, 100.0), (1.0, 100.0), (0.0, 0.0)])
    ]
    settings = GrpoSettings(advantage="gdpo")
    equal, other, best, worst = advantages.of_members(found, settings)
    assert (equal, other) == pytest.approx((0, 0), abs=1e-5)
    assert (best, worst) == pytest.approx((math.sqrt(1.5), -math.sqrt(1.5)), rel=1e-4)
    weighted = advantages.of_members(found, settings.model_copy(update={"reward_weights": {"y": 3.0}}))
    assert weighted[1] > weighted[0]  # pyright: ignore[reportOperatorIssue]
    assert settings.needs.flat_groups, "equal sums may be unequal rewards"
    alone = advantages.of_members(found, settings.model_copy(update={"reward_weights": {"*": 0.0, "y": 2.0}}))
    assert alone[1] == alone[2] > 0 > alone[0] == alone[3]  # pyright: ignore[reportOperatorIssue]


def test_group_mean_batch_std_divides_by_the_deviation_of_the_batchs_rewards() -> None:
    rewards = [1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 0.0]
    members = [Member(f"g{index // 4}", "a", reward=reward) for index, reward in enumerate(rewards)]
    found = advantages.of_members(members, GrpoSettings(advantage="group_mean_batch_std"))
    tensor = torch.tensor(rewards, dtype=torch.float64).view(2, 4)
    expected = (tensor - tensor.mean(1, keepdim=True)) / (tensor.std() + 1e-6)
    assert found == pytest.approx(expected.flatten().tolist(), rel=1e-9)
    assert found[0] == pytest.approx(1.403, abs=1e-3)


def test_estimators_with_a_scale_of_the_batch_keep_groups_of_equal_rewards() -> None:
    for settings in (
        GrpoSettings(advantage="group_mean_batch_std"),
        GrpoSettings(advantage="reinforce_pp_baseline"),
        ReinforcePpSettings(advantage="reinforce_pp_baseline", kl_coefficient=0.1),
        ReinforcePpSettings(),
    ):
        assert settings.needs.flat_groups


def of_two_calls(*, split: bool, revision: int) -> BatchView:
    """A rollout of two calls of two tokens, in one row or in two, and another one without divergence."""

    def row(index: int, divergence: float, *steps: int) -> Row:
        mask = np.repeat([part % 2 == 1 for part in range(2 * len(steps))], 2)
        parts = tuple(Completion(step_index=step, start=4 * n + 2, length=2) for n, step in enumerate(steps))
        logprobs, given = np.where(mask, -1.0, 0).astype(np.float32), np.full(len(mask), -1 - divergence, np.float32)
        return Row(np.zeros(len(mask), np.int32), mask, logprobs, index, parts, scores={"reference": given})

    first = [row(0, 1.0, 1), row(0, 1.0, 0)] if split else [row(0, 1.0, 0, 1)]
    return BatchView([*first, row(1, 0.0, 0)], [member("g", n, "a", 1.0 - n) for n in (0, 1)], revision=revision)


@pytest.mark.parametrize(("revision", "is_equal"), [(15, True), (14, False)])
def test_the_penalty_of_reinforce_pp_is_summed_over_all_rows_of_a_rollout(revision: int, is_equal: bool) -> None:
    found = []
    for split in (False, True):
        batch = of_two_calls(split=split, revision=revision)
        prepared = ReinforcePp().prepare(batch, ReinforcePpSettings(kl_coefficient=0.5))
        values = zip(prepared.advantages, batch.rows, strict=True)
        found.append(sorted(value for given, row in values for value in np.asarray(given)[row.mask].tolist()))
    assert (found[0] == pytest.approx(found[1])) == is_equal


def test_reinforce_pp_baseline_takes_the_groups_mean_and_the_batchs_scale() -> None:
    members = [member(group, index, "a", reward) for group, rewards in (("g", [1.0, 0.0]), ("h", [4.0, 0.0]))
               for index, reward in enumerate(rewards)]  # fmt: skip
    scale = math.sqrt((0.5**2 * 2 + 2**2 * 2) / 4)
    found = advantages.of_members(members, GrpoSettings(advantage="reinforce_pp_baseline"))
    assert found == pytest.approx([0.5 / scale, -0.5 / scale, 2 / scale, -2 / scale], rel=1e-5)


def test_later_rewards_are_discounted_by_the_steps_between() -> None:
    members = [advantages.SteppedMember(frozenset({0, 1, 2}), {0: 1.0, 1: 0.0, 2: 4.0}, 5.0)]
    groups = ["g"]
    (plain,) = advantages.by_step(members, groups, "group_mean")
    (found,) = advantages.by_step(members, groups, "group_mean", 0.5)
    one, two, three = 1 - 5 / 3, -5 / 3, 4 - 5 / 3
    assert plain == pytest.approx({0: one + two + three, 1: two + three, 2: three})
    assert found == pytest.approx({0: one + 0.5 * two + 0.25 * three, 1: two + 0.5 * three, 2: three})


@pytest.mark.parametrize(("length", "penalty"), [(1, 0), (6, 0), (7, 0.25), (8, 0.5), (10, 1), (99, 1)])
def test_overlong_answers_cost_more_and_more_up_to_1(length: int, penalty: float) -> None:
    """DAPO, equation 13, with 10 tokens at most and a buffer of 4."""
    assert advantages.overlong_penalty(length, OverlongSettings(max_length=10, buffer=4)) == penalty


def test_the_length_of_a_rollout_is_that_of_all_its_completions() -> None:
    mask = np.array([False, True, True, True])
    rows = [Row(np.zeros(4, np.int32), mask, np.zeros(4, np.float32), index) for index in (0, 0, 1)]
    batch = BatchView(rows, [Member(reward=1.0), Member(reward=1.0)])
    settings = GrpoSettings(overlong=OverlongSettings(max_length=8, buffer=4))
    assert advantages.penalised(batch, settings) == [0.5, 1.0]


@pytest.mark.parametrize(
    ("options", "normaliser"),
    [
        ({}, ("tokens", 1.0)),
        ({"aggregation": "sequences"}, ("sequences", 1.0)),
        ({"aggregation": "constant", "aggregation_length": 64, "mini_batches": 2}, ("row_length", 64.0)),
    ],
)
def test_losses_are_divided_by_the_aggregations_normaliser(
    options: dict[str, Any], normaliser: tuple[str, float]
) -> None:
    assert tuple(advantages.normaliser_of(GrpoSettings(**options), batch_of([0.0] * 3))) == normaliser


def test_a_recorded_job_divides_the_rows_of_its_batch_by_the_mini_batches_it_asked_for() -> None:
    settings = GrpoSettings(aggregation="constant", aggregation_length=64, mini_batches=2)
    assert tuple(advantages.normaliser_of(settings, batch_of([0.0] * 3, revision=9))) == ("constant", 96.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"aggregation": "constant"}, "aggregation_length belong together"),
        ({"aggregation_length": 5}, "aggregation_length belong together"),
        ({"advantage": "gdpo", "step_rewards": "process"}, "gdpo compares totals, not steps"),
        ({"advantage": "gdpo", "truncation_penalty": 0.5}, "gdpo knows rewards by name"),
        ({"advantage": "gdpo", "overlong": {"max_length": 4, "buffer": 2}}, "gdpo knows rewards by name"),
        ({"overlong": {"max_length": 4, "buffer": 5}}, "buffer 5 is longer than max_length 4"),
    ],
)
def test_options_that_do_not_fit_together_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        GrpoSettings.model_validate(options)


def test_options_of_another_estimator_are_reported_as_unused() -> None:
    found = GrpoSettings(rae_decay=0.5, reward_weights={"x": 2.0}, step_discount=0.9).unused()
    assert {name for names in found.values() for name in names} == {"rae_decay", "reward_weights", "step_discount"}


def test_an_aggregation_that_is_fixed_and_a_threshold_of_no_rejection_are_reported_as_unused() -> None:
    for settings in (GspoSettings, MixSettings):
        (found,) = settings(aggregation="constant", aggregation_length=5).unused().values()
        assert found == ("aggregation", "aggregation_length")
        assert settings().unused() == {}
    for reject, expected in ((None, [("off_policy.reject_above",)]), ("k1", [])):
        off_policy = OffPolicySettings.model_validate({"reject": reject, "reject_above": 0.5})
        found = GrpoSettings(off_policy=off_policy).unused()
        assert list(found.values()) == expected


def test_ppo_has_its_own_names_for_a_discount_and_keeps_its_advantage_with_one_rollout() -> None:
    with pytest.raises(ValueError, match="ppo has gamma and gae_lambda in its place"):
        PpoSettings(step_discount=0.5)
    for settings in (PpoSettings(), RaeSettings()):
        assert settings.for_run(num_generations=1, temperature=1.0).advantage == settings.advantage
