"""Advantages against numbers worked out by hand, and what holds for any group."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollstream.learner import advantages
from rollstream.learner.advantages import Estimator

REWARDS = [1.0, 0.0, 0.0, 1.0]


def test_group_mean_takes_the_mean_off() -> None:
    assert advantages.group_mean(REWARDS) == [0.5, -0.5, -0.5, 0.5]


def test_group_std_divides_by_the_samples_deviation() -> None:
    deviation = math.sqrt(1 / 3)
    assert advantages.group_std(REWARDS) == pytest.approx([0.5 / deviation * s for s in (1, -1, -1, 1)], rel=1e-5)


def test_leave_one_out_compares_with_the_others() -> None:
    assert advantages.leave_one_out([3.0, 0.0, 0.0]) == pytest.approx([3.0, -1.5, -1.5])


@pytest.mark.parametrize("estimator", ["group_std", "group_mean", "leave_one_out"])
def test_equal_rewards_and_single_members_have_no_advantage(estimator: Estimator) -> None:
    assert advantages.ESTIMATORS[estimator]([0.1] * 3) == [0.0] * 3
    assert advantages.ESTIMATORS[estimator]([0.7]) == [0.0]


def test_each_member_is_compared_with_its_own_group_in_the_order_given() -> None:
    found = advantages.by_group([1.0, 10.0, 0.0, 20.0], ["a", "b", "a", "b"], "group_mean")
    assert found == [0.5, -5.0, -0.5, 5.0]


@given(st.lists(st.floats(-100, 100), min_size=1, max_size=8), st.sampled_from(sorted(advantages.ESTIMATORS)))
def test_advantages_of_a_group_add_up_to_nothing(rewards: list[float], estimator: Estimator) -> None:
    assert sum(advantages.by_group(rewards, ["g"] * len(rewards), estimator)) == pytest.approx(0, abs=1e-6)
