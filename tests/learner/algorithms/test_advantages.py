"""Advantages against numbers worked out by hand, and what holds for any group."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollstream.learner.algorithms import advantages
from rollstream.learner.algorithms.base import Member
from rollstream.schemas.algorithm_settings import Advantage
from rollstream.schemas.algorithms import GrpoSettings

REWARDS = [1.0, 0.0, 0.0, 1.0]


def test_group_mean_takes_the_mean_off() -> None:
    assert advantages.group_mean(REWARDS) == [0.5, -0.5, -0.5, 0.5]


def test_group_std_divides_by_the_samples_deviation() -> None:
    deviation = math.sqrt(1 / 3)
    assert advantages.group_std(REWARDS) == pytest.approx([0.5 / deviation * s for s in (1, -1, -1, 1)], rel=1e-5)


def test_leave_one_out_compares_with_the_others() -> None:
    assert advantages.leave_one_out([3.0, 0.0, 0.0]) == pytest.approx([3.0, -1.5, -1.5])


@pytest.mark.parametrize("estimator", ["group_std", "group_mean", "leave_one_out"])
def test_equal_rewards_and_single_members_have_no_advantage(estimator: Advantage) -> None:
    assert advantages.ESTIMATORS[estimator]([0.1] * 3) == [0.0] * 3
    assert advantages.ESTIMATORS[estimator]([0.7]) == [0.0]


def test_each_member_is_compared_with_its_own_group_in_the_order_given() -> None:
    found = advantages.by_group([1.0, 10.0, 0.0, 20.0], ["a", "b", "a", "b"], "group_mean")
    assert found == [0.5, -5.0, -0.5, 5.0]


@given(st.lists(st.floats(-100, 100), min_size=1, max_size=8), st.sampled_from(sorted(advantages.ESTIMATORS)))
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
