"""Expert iteration: which rollouts are imitated, how much each counts, and what a relabelled answer replaces."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollstream.learner.algorithms.base import BatchView, Member, Prepared, Row
from rollstream.learner.algorithms.builtin.expert_iteration import ExpertIteration, weights_of
from rollstream.schemas.algorithms import ExpertIterationSettings
from rollstream.schemas.events.rollouts import Completion, VersionSpan

PROMPT = (1, 2)


def row(member: int, *answer: int, prompt: tuple[int, ...] = PROMPT, sampled: bool = True, cut: bool = False) -> Row:
    """A prompt and one answer."""
    token_ids = np.asarray((*prompt, *answer), np.int32)
    mask = np.arange(len(token_ids)) >= len(prompt)
    span = VersionSpan(model_group="run-1/policy", version=3, length=len(answer))
    part = Completion(
        start=len(prompt),
        length=len(answer),
        step_index=0,
        spans=(span,) if sampled else (),
        finish_reason="length" if cut else "stop",
    )
    return Row(token_ids, mask, np.zeros(len(token_ids), np.float32), member, (part,))


def prepared(rows: list[Row], rewards: list[float], agents: str = "", **settings: Any) -> Prepared:
    members = [Member(agent=agent, reward=reward) for agent, reward in zip(agents or "v" * 99, rewards, strict=False)]
    return ExpertIteration().prepare(BatchView(rows, members), ExpertIterationSettings(**settings))


def trained(rows: list[Row], found: Prepared) -> list[list[int]]:
    return [one.token_ids[one.mask & kept].tolist() for one, kept in zip(rows, found.keep, strict=True)]


def test_rollouts_of_the_threshold_or_more_are_imitated_alike() -> None:
    rows = [row(0, 7), row(1, 8, 9), row(2, 6)]
    found = prepared(rows, [0.9, 0.89, 1.0])
    assert trained(rows, found) == [[7], [], [6]]
    assert not found.weights
    assert found.metrics["expert_iteration/selected"] == pytest.approx(2 / 3)
    assert trained(rows, prepared(rows, [0.0, 0.5, 1.0], reward_threshold=0.5)) == [[], [8, 9], [6]]


def test_nothing_is_imitated_where_no_rollout_was_good_enough() -> None:
    rows = [row(0, 7), row(1, 8)]
    assert trained(rows, prepared(rows, [0.1, 0.2])) == [[], []]


def test_truncated_answers_are_left_out_on_demand() -> None:
    rows = [row(0, 7, cut=True), row(0, 8)]
    assert trained(rows, prepared(rows, [1.0])) == [[7], [8]]
    assert trained(rows, prepared(rows, [1.0], mask_truncated=True)) == [[], [8]]


def test_weights_are_shares_of_the_reward_above_the_minimum() -> None:
    settings = ExpertIterationSettings(selection="weighted", weighting_epsilon=0.0)
    assert weights_of([0.0, 1.0, 3.0], settings) == [0.0, 0.75, 2.25]
    assert weights_of([1.0, 2.0, 4.0], settings) == [0.0, 0.75, 2.25], "the lowest reward is the minimum"
    given_minimum = settings.model_copy(update={"weighting_minimum": -1.0})
    assert weights_of([-3.0, 0.0, 1.0], given_minimum) == [0.0, 1.0, 2.0]
    assert weights_of([2.0, 2.0], settings) == [1.0, 1.0]
    assert weights_of([], settings) == []


@given(st.lists(st.floats(-10, 10), min_size=1, max_size=9), st.floats(0, 2))
def test_weights_have_a_mean_of_one_and_the_order_of_the_rewards(rewards: list[float], epsilon: float) -> None:
    found = weights_of(rewards, ExpertIterationSettings(selection="weighted", weighting_epsilon=epsilon))
    assert sum(found) == pytest.approx(len(rewards))
    ranked = [weight for _, weight in sorted(zip(rewards, found, strict=True))]
    assert ranked == sorted(ranked)


def test_each_agent_is_weighed_by_its_own_rewards() -> None:
    rows = [row(member, 7 + member) for member in range(4)]
    found = prepared(rows, [0.0, 1.0, 10.0, 30.0], "vvpp", selection="weighted", weighting_epsilon=0.0)
    assert found.weights == [0.0, 2.0, 0.0, 2.0]
    assert trained(rows, found) == [[7], [8], [9], [10]]


@pytest.mark.parametrize(("revision", "kept"), [(14, [[], [8]]), (15, [[7], [8]])])
def test_a_rollout_of_weight_0_counts_in_the_mean_as_one_of_a_small_weight(revision: int, kept: list[Any]) -> None:
    rows, members = [row(0, 7), row(1, 8)], [Member(agent="v", reward=reward) for reward in (0.0, 1.0)]
    settings = ExpertIterationSettings(selection="weighted", weighting_epsilon=0.0)
    found = ExpertIteration().prepare(BatchView(rows, members, revision=revision), settings)
    assert trained(rows, found) == kept
    assert found.weights == [0.0, 2.0]


def test_a_relabelled_answer_is_imitated_in_place_of_the_one_that_was_sampled_whatever_the_reward() -> None:
    asked, verdict = row(0, 5), row(0, 7, prompt=(1, 2, 5, 3))
    right = row(0, 8, prompt=(1, 2, 5, 3), sampled=False)
    other = row(1, 9)
    rows = [asked, verdict, right, other]
    for selection in ("threshold", "weighted"):
        found = prepared(rows, [-1.0, 0.0], selection=selection)
        assert trained(rows, found)[:3] == [[5], [], [8]]
    assert found.weights[:3] == [1.0, 1.0, 1.0]
    assert found.metrics["expert_iteration/relabelled"] == 0.5


def test_rollouts_that_were_recorded_without_versions_are_selected_as_others_are() -> None:
    rows = [row(0, 7, sampled=False), row(1, 8, sampled=False)]
    found = prepared(rows, [1.0, 0.0])
    assert trained(rows, found) == [[7], []]
    assert found.metrics["expert_iteration/relabelled"] == 0
