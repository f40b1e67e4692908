"""Trajectories to rows, mini-batches and padded tensors."""

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rollstream.learner.algorithms.base import BatchView, Member, Prepared
from rollstream.learner.model import collate
from rollstream.learner.model.collate import Row, TrainRow
from rollstream.schemas import tokens
from rollstream.schemas.errors import DecodeError, RunFailedError
from rollstream.schemas.events import TrajectoryAssembled
from rollstream.schemas.events.rollouts import Completion, TokenSequence


def trajectory(*sequences: TokenSequence) -> TrajectoryAssembled:
    names: dict[str, Any] = dict.fromkeys(("run_id", "group_id", "rollout_id", "agent", "example_id", "job_id"), "x")
    return TrajectoryAssembled(
        **names, time_ms=0, trajectory_id="x/agent", model_group="x/m", member=0, attempt=0, epoch=0, reward=1.0,
        sequences=sequences, num_steps=1, steps_digest="0" * 64,
    )  # fmt: skip


def sequence(ids: list[int], spans: list[tuple[int, int]], logprobs: list[float] | None) -> TokenSequence:
    return TokenSequence(
        token_ids=tokens.encode_ids(ids),
        logprobs=None if logprobs is None else tokens.encode_floats(logprobs),
        completions=tuple(Completion(start=start, length=length, step_index=0) for start, length in spans),
    )


def row(length: int) -> TrainRow:
    mask = np.arange(length) > 0
    return TrainRow(Row(np.arange(length, dtype=np.int32), mask, np.zeros(length, np.float32)), mask, 1.0)


def micro_batches(lengths: list[int], max_tokens: int) -> list[collate.MicroBatch]:
    return collate.micro_batches([row(length) for length in lengths], [(n,) for n in range(len(lengths))], max_tokens)


def test_completions_take_their_log_probabilities_in_order() -> None:
    (found,) = collate.rows_of(
        trajectory(sequence([5, 6, 7, 8, 9], [(1, 1), (3, 2)], [-1.0, -2.0, -3.0])), needs_logprobs=True
    )
    assert found.token_ids.tolist() == [5, 6, 7, 8, 9]
    assert found.mask.tolist() == [False, True, False, True, True]
    assert found.logprobs.tolist() == [0, -1, 0, -2, -3]
    assert found.num_completion_tokens == 3


def test_every_sequence_of_a_trajectory_is_a_row_if_it_has_a_completion() -> None:
    some = sequence([1, 2], [(1, 1)], [-1.0])
    assert len(collate.rows_of(trajectory(some, sequence([1, 2], [], []), some), needs_logprobs=True)) == 2


def test_a_token_without_one_before_it_is_not_trained() -> None:
    (found,) = collate.rows_of(trajectory(sequence([1, 2], [(0, 2)], [-1.0, -1.0])), needs_logprobs=True)
    assert found.mask.tolist() == [False, True]


def test_demonstrations_need_no_log_probabilities() -> None:
    (found,) = collate.rows_of(trajectory(sequence([1, 2], [(1, 1)], None)), needs_logprobs=False)
    assert found.logprobs.tolist() == [0, 0]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (sequence([1, 2], [(1, 1)], None), "no log-probabilities"),
        (sequence([1, 2], [(1, 2)], [-1.0, -1.0]), "ends at token 3 of 2"),
        (sequence([1, 2], [(1, 1)], [-1.0, -1.0]), "2 log-probabilities for 1"),
        (sequence([1, 2, 3], [(0, 2), (1, 1)], [-1.0] * 3), "overlap"),
        (sequence([1, 2, 3], [(1, 2)], [-1.0, float("nan")]), "not a finite number"),
        (sequence([1, 2, 3], [(1, 2)], [float("-inf"), -1.0]), "not a finite number"),
    ],
)
def test_arrays_that_do_not_fit_are_named(bad: TokenSequence, message: str) -> None:
    with pytest.raises(DecodeError, match=rf"trajectory x/agent, sequence 0: .*{message}"):
        collate.rows_of(trajectory(bad), needs_logprobs=True)


@pytest.mark.parametrize("odd", [32, -1])
def test_a_token_id_that_the_model_does_not_have_is_named(odd: int) -> None:
    collate.check_token_ids(trajectory(sequence([0, 31], [(1, 1)], None)), 32)
    with pytest.raises(
        DecodeError, match=f"x/agent, sequence 0: token id {odd} is outside the model's vocabulary of 32"
    ):
        collate.check_token_ids(trajectory(sequence([1, odd], [(1, 1)], None)), 32)


def test_a_larger_vocabulary_is_named_with_both_sizes_and_the_remedy() -> None:
    recorded = trajectory(sequence([1, 40, 57, 31], [(1, 3)], None))
    with pytest.raises(
        DecodeError, match=r"id 40 is outside the model's vocabulary of 32, .* vocabulary has 58 or more; "
    ):
        collate.check_token_ids(recorded, 32)


def test_an_answer_of_a_pair_that_keeps_no_token_is_named() -> None:
    rows = [row(3).row, row(4).row]
    prepared = Prepared(keep=[rows[0].mask, np.zeros(4, np.bool_)])
    with pytest.raises(RunFailedError, match="prepare left answer 1 of a preference pair no token; keep at least one"):
        collate.prepared_rows(BatchView(rows, [], [(0, 1)]), prepared)


def test_padding_stands_on_the_right_and_off_the_mask() -> None:
    found = collate.pad([row(3), row(2)], [(0,), (1,)])
    assert found.token_ids.tolist() == [[0, 1, 2], [0, 1, 0]]
    assert found.mask.tolist() == [[False, True, True], [False, True, False]]
    assert found.advantages.tolist() == [[1, 1, 1], [1, 1, 0]]


def test_micro_batches_hold_so_many_padded_tokens_and_every_row_once() -> None:
    found = micro_batches([3, 9, 2, 5, 5, 7], 12)
    assert [tuple(batch.token_ids.shape) for batch in found] == [(1, 9), (1, 7), (2, 5), (2, 3)]
    assert micro_batches([], 12) == []


def test_a_row_above_the_budget_goes_alone() -> None:
    assert [tuple(b.token_ids.shape) for b in micro_batches([9, 9], 4)] == [(1, 9), (1, 9)]


def test_mini_batches_share_all_rows_out_by_seed() -> None:
    rows = list(range(2, 12))
    parts = collate.mini_batches(rows, 3, seed=1)
    assert sorted(one for part in parts for one in part) == rows
    assert [len(part) for part in parts] == [3, 3, 4]

    assert parts == collate.mini_batches(rows, 3, seed=1) != collate.mini_batches(rows, 3, seed=2)
    assert collate.mini_batches(rows, 1, seed=1) == [rows]
    assert len(collate.mini_batches(rows[:2], 5, seed=1)) == 2


def test_sequences_without_log_probabilities_are_left_out_where_they_are_needed_and_others_have_them() -> None:
    known, unknown = sequence([1, 2], [(1, 1)], [-1.0]), sequence([1, 2, 3], [(2, 1)], None)
    (found,) = collate.rows_of(trajectory(known, unknown), needs_logprobs=True)
    assert found.token_ids.tolist() == [1, 2]
    assert len(collate.rows_of(trajectory(known, unknown), needs_logprobs=False)) == 2


def test_a_row_is_as_long_as_what_is_computed_of_it() -> None:
    """A tree leaves out what predicts nothing, so one of 5 tokens needs 4 positions there."""
    for limit, shares in ((5, False), (4, True)):
        collate.check_lengths([row(5).row], limit, lambda _: "x", shares=shares)
        with pytest.raises(
            DecodeError, match=rf"x is computed from {limit} tokens, .* or a shorter algorithm\.context$"
        ):
            collate.check_lengths(
                [row(5).row], limit - 1, lambda _: "x", shares=shares, shorten="a shorter algorithm.context"
            )
    collate.check_lengths([row(5).row], None, lambda _: "x", shares=False)


@pytest.mark.parametrize(
    ("name", "value"), [("advantage", 1e150), ("advantage", -1e39), ("weight", float("nan")), ("weight in ce", 1e39)]
)
def test_a_number_beyond_float32_is_reported_with_its_rollout_and_reward(name: str, value: float) -> None:
    row = Row(np.arange(4, dtype=np.int32), np.arange(4) > 1, np.zeros(4, np.float32), 1)
    members = [Member("g", "g/m0"), Member("g", "g/m1", reward=1e150)]
    per_token = [np.asarray([np.inf, 0, 0, 0]), np.asarray([0, 0, 0, value])]
    unused, used = replace(row, member=0), row
    given: dict[str, Any] = {"advantage": {"advantages": per_token}, "weight": {"weights": per_token}}
    prepared = Prepared(**given.get(name, {"components": {"ce": per_token}}))
    batch = BatchView([unused, used], members)
    remedy = "scale the rewards down" if name == "advantage" else "correct the algorithm"
    expected = rf"rollout g/m1 of group g has the reward 1e\+150 and the {name} {re.escape(f'{value:g}')}, .*{remedy}"
    with pytest.raises(RunFailedError, match=expected):
        collate.prepared_rows(batch, prepared)
    trained, _ = collate.prepared_rows(replace(batch, revision=13), prepared)
    assert len(trained) == 2
