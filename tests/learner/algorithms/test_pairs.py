"""Preference pairs: which answers are compared, by which score, and that no order of them matters."""

import random
from array import array
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollstream.learner.algorithms.base import Prepared
from rollstream.learner.algorithms.pairs import Item, Pair, items_of, pairs_of
from rollstream.learner.model.collate import prepared_rows
from rollstream.learner.scoring.scored_batch import batch_of
from rollstream.learner.scoring.scores import spans_of
from rollstream.schemas import ids, tokens
from rollstream.schemas.algorithms import DpoSettings
from rollstream.schemas.errors import DecodeError
from rollstream.schemas.events import BatchPlanned, TrajectoryAssembled
from rollstream.schemas.events.rollouts import Completion, TokenSequence
from rollstream.schemas.events.training import BatchMember
from tests.rigs.pair_items import item_of, packed

GROUP = "run-1/rl/e00000/t00000"


def item(answer: int, *, score: float | None = None, reward: float | None = None, total: float = 0.0) -> Item:
    """One of several answers to the prompt 1, 2."""
    return item_of((GROUP, "agent"), (1, 2), (answer,), (score, reward, total))


def tokens_and_score(pairs: list[Pair]) -> list[tuple[int, int, float]]:
    """Chosen and rejected token, and the difference."""
    return [
        (array("i", pair.chosen_ids)[0], array("i", pair.rejected_ids)[0], round(pair.score_diff, 9)) for pair in pairs
    ]


def pairs(*items: Item, **settings: Any) -> list[tuple[int, int, float]]:
    return tokens_and_score(pairs_of(items, DpoSettings(**settings)))


def trajectory(*sequences: TokenSequence, member: int = 0, **changes: Any) -> TrajectoryAssembled:
    rollout = ids.rollout_id(GROUP, member, 0)
    fields: dict[str, Any] = {
        "run_id": "run-1",
        "time_ms": 5,
        "group_id": GROUP,
        "rollout_id": rollout,
        "trajectory_id": ids.trajectory_id(rollout, "agent"),
        "agent": "agent",
        "model_group": "run-1/policy",
        "member": member,
        "attempt": 0,
        "example_id": "x",
        "job_id": "run-1/rl",
        "epoch": 0,
        "reward": 0.5,
        "sequences": sequences,
        "num_steps": 2,
        "steps_digest": "0" * 64,
    }
    return TrajectoryAssembled(**(fields | changes))


def sequence(*token_ids: int, completions: dict[int, tuple[int, int]]) -> TokenSequence:
    """`completions`: start and length by step."""
    parts = (Completion(start=at, length=num, step_index=step) for step, (at, num) in completions.items())
    return TokenSequence(token_ids=tokens.encode_ids(token_ids), completions=tuple(parts))


def test_every_two_answers_that_differ_in_score_are_a_pair_with_the_largest_difference_first() -> None:
    answers = (item(7, score=0.0), item(8, score=1.0), item(9, score=-1.0))
    assert pairs(*answers) == [(8, 9, 2.0), (7, 9, 1.0), (8, 7, 1.0)]
    assert pairs(*answers, exhaustive_pairs=False) == [(8, 9, 2.0)]
    assert pairs(*answers, max_pairs_per_turn=2) == [(8, 9, 2.0), (7, 9, 1.0)]
    assert pairs(*answers, min_score_diff=1.5) == [(8, 9, 2.0)]


def test_equal_scores_or_equal_answers_make_no_pair() -> None:
    assert pairs(item(7, score=1.0), item(8, score=1.0)) == []
    assert pairs(item(7, score=1.0), item(8, score=1.0), exhaustive_pairs=False) == []
    assert pairs(item(7, score=1.0), item(7, score=0.0)) == []
    assert pairs(item(7, score=1.0)) == []


def test_an_answer_that_comes_more_than_once_counts_once_with_its_mean_score() -> None:
    assert pairs(item(7, total=1.0), item(7, total=0.0), item(8, total=0.25)) == [(7, 8, 0.25)]
    assert pairs(*[item(7, total=0.1)] * 3, item(8, total=0.1)) == []


def test_answers_to_different_prompts_of_different_groups_or_agents_are_not_compared() -> None:
    better, worse = item(7, total=1.0), item(8, total=0.0)
    assert pairs(better, worse) == [(7, 8, 1.0)]
    assert pairs(better, item_of(worse.owner, (1, 3), (8,), worse.scores)) == []
    assert pairs(better, worse._replace(owner=("run-1/rl/e00000/t00001", "agent"))) == []
    assert pairs(better, worse._replace(owner=(GROUP, "other"))) == []


def test_the_finest_score_that_all_answers_have_decides() -> None:
    both = item(7, score=1.0, reward=0.0, total=0.0), item(8, score=0.0, reward=1.0, total=1.0)
    assert pairs(*both) == [(7, 8, 1.0)]
    assert pairs(*both, item(9, reward=0.5, total=5.0)) == [(8, 7, 1.0), (8, 9, 0.5), (9, 7, 0.5)]
    assert pairs(*both, item(9, total=0.5)) == [(8, 7, 1.0), (8, 9, 0.5), (9, 7, 0.5)]


@given(st.data())
def test_no_order_of_the_answers_changes_a_pair(data: st.DataObject) -> None:
    scores = st.sampled_from([None, -1.0, 0.1, 0.2, 1.0])
    rng = random.Random(data.draw(st.integers(0, 2**32)))
    items = [
        item_of(
            (data.draw(st.sampled_from(["g", "h"])), "agent"),
            data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=2)),
            (data.draw(st.integers(0, 3)),),
            (data.draw(scores), data.draw(scores), rng.choice([0.1, 0.3])),
        )
        for _ in range(data.draw(st.integers(0, 12)))
    ]
    settings = DpoSettings(
        name="dpo",
        exhaustive_pairs=data.draw(st.booleans()),
        max_pairs_per_turn=data.draw(st.sampled_from([None, 1, 2])),
    )
    found = pairs_of(items, settings)
    shuffled = items.copy()
    rng.shuffle(shuffled)
    assert pairs_of(shuffled, settings) == found
    assert all(pair.score_diff > 0 and pair.chosen_ids != pair.rejected_ids for pair in found)


def test_the_answers_of_a_trajectory_have_the_tokens_before_them_as_prompt() -> None:
    two_turns = sequence(1, 2, 7, 3, 8, 9, completions={0: (2, 1), 2: (4, 2)})
    branch = sequence(1, 2, 6, completions={1: (2, 1)})
    scores = {"0": 1.0, "1": -1.0}
    found = items_of(trajectory(two_turns, branch, step_rewards={"2": 0.25}, step_scores=scores), 0.75)
    assert [(one.prompt_ids, one.completion_ids, one.scores) for one in found] == [
        (packed(1, 2), packed(7), (1.0, None, 0.75)),
        (packed(1, 2, 7, 3), packed(8, 9), (None, 0.25, 0.75)),
        (packed(1, 2), packed(6), (-1.0, None, 0.75)),
    ]
    assert tokens_and_score(pairs_of(found, DpoSettings())) == [(7, 6, 2.0)]


def test_a_long_conversation_is_held_once_and_only_turns_with_several_answers_are_compared() -> None:
    turns = {number: (2 + 2 * number, 1) for number in range(1000)}
    long, other = (sequence(*range(1, 2002), last, completions=turns | {1000: (2001, 1)}) for last in (7, 8))
    found = [*items_of(trajectory(long), 1.0), *items_of(trajectory(other, member=1), 0.0)]
    assert len(found) == 2002
    assert len({id(one.sequence) for one in found}) == 2
    (pair,) = pairs_of(found, DpoSettings())
    assert (pair.prompt_ids, pair.chosen_ids, pair.rejected_ids) == (packed(*range(1, 2002)), packed(7), packed(8))


def test_a_completion_without_tokens_or_prompt_is_passed_over_and_one_outside_named() -> None:
    assert items_of(trajectory(sequence(1, 2, completions={0: (0, 1), 1: (1, 0)})), 1.0) == []
    with pytest.raises(DecodeError, match=r"m0/a0/agent: a completion ends at token 4 of 2"):
        items_of(trajectory(sequence(1, 2, completions={0: (1, 3)})), 1.0)


def test_a_chosen_and_a_rejected_rollout_are_the_same_pair_as_two_scored_answers_of_one() -> None:
    chosen = trajectory(sequence(1, 2, 7, completions={0: (2, 1)}), member=0)
    rejected = trajectory(sequence(1, 2, 8, completions={0: (2, 1)}), member=1)
    in_two = [*items_of(chosen, 1.0), *items_of(rejected, 0.0)]
    answers = sequence(1, 2, 7, completions={0: (2, 1)}), sequence(1, 2, 8, completions={1: (2, 1)})
    in_one = trajectory(*answers, step_scores={"0": 1.0, "1": 0.0})
    settings = DpoSettings()
    assert pairs_of(in_two, settings) == pairs_of(items_of(in_one, 0.5), settings) != []


def test_rows_of_pairs_name_the_member_and_the_group_that_gave_the_answer() -> None:
    other = "run-1/rl/e00000/t00001"
    answers = {0: (GROUP, 3), 1: (GROUP, 4), 2: (other, 5), 3: (other, 6), 4: (other, 5)}
    trajectories = [
        trajectory(
            sequence(1, 2, answer, completions={0: (2, 1)}), member=member, group_id=group, reward=float(member**2)
        )
        for member, (group, answer) in answers.items()
    ]
    members = tuple(
        BatchMember(
            trajectory_id=one.trajectory_id,
            rollout_id=one.rollout_id,
            group_id=one.group_id,
            digest="0" * 64,
            reward=one.reward,
            staleness=0,
        )
        for one in trajectories
    )
    batch = batch_of(DpoSettings(), BatchPlanned.model_construct(members=members), trajectories)
    assert {int(row.token_ids[-1]): row.member for row in batch.rows} == {3: 0, 4: 1, 5: 2, 6: 3}
    assert [row.member for row in batch.rows] == [span.member for span in spans_of(batch.rows, trajectories)]
    assert batch.pairs is not None
    rows, _ = prepared_rows(batch, Prepared())
    assert {(rows[chosen].group, rows[rejected].group) for chosen, rejected in batch.pairs} == {(0, 0), (1, 1)}
    before = batch_of(DpoSettings(), BatchPlanned.model_construct(members=members), trajectories, revision=13)
    assert (before.pairs, before.score_diffs) == (batch.pairs, batch.score_diffs)
    assert {row.member for row in before.rows} == {0}
