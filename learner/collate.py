"""Assembled trajectories to padded tensors, in an order that only their content decides. Knows no model and no loss."""

import itertools
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollstream.schemas import tokens
from rollstream.schemas.errors import DecodeError
from rollstream.schemas.events import TrajectoryAssembled
from rollstream.schemas.events_rollouts import TokenSequence

Unit = TypeVar("Unit")
StepAdvantages = Mapping[int, float]
"""Advantage by step index, of every step that a trajectory has tokens of."""


@dataclass(frozen=True, slots=True)
class Row:
    """One training sequence."""

    token_ids: NDArray[np.int32]  # (T,)
    mask: NDArray[np.bool_]  # (T,), true on completion tokens that have a token before them
    logprobs: NDArray[np.float32]  # (T,), under the behaviour policy; 0 off the mask
    advantage: float | NDArray[np.float32]
    """One for all tokens, or one a token (T,)."""

    @property
    def num_completion_tokens(self) -> int:
        """Tokens that are trained on."""
        return int(self.mask.sum())


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Rows of one forward, padded on the right."""

    token_ids: Tensor  # (B, T) int64
    mask: Tensor  # (B, T) bool
    logprobs: Tensor  # (B, T) float32
    advantages: Tensor  # (B, T) float32

    def to(self, device: torch.device) -> "MicroBatch":
        """The same on a device."""
        moved: list[Any] = [x.to(device) for x in (self.token_ids, self.mask, self.logprobs, self.advantages)]
        return MicroBatch(*moved)


def check_token_ids(trajectory: TrajectoryAssembled, size: int) -> None:
    """Raises DecodeError naming the trajectory if it has a token id that is none of a model's `size`."""
    for index, sequence in enumerate(trajectory.sequences):
        token_ids = np.frombuffer(tokens.decode_ids(sequence.token_ids), np.int32)
        odd = token_ids[(token_ids < 0) | (token_ids >= size)]
        if len(odd):
            raise DecodeError(
                f"trajectory {trajectory.trajectory_id}, sequence {index}: token id {odd[0]} is none of the model's "
                f"{size}; does its tokenizer have more tokens than the model?"
            )


def rows_of(trajectory: TrajectoryAssembled, advantage: float | StepAdvantages, *, needs_logprobs: bool) -> list[Row]:
    """The sequences of a trajectory that have completion tokens, with one advantage for all of them or one by step.

    Where log-probabilities are needed, sequences without them are left out. Raises DecodeError naming the trajectory if
    completions and arrays do not fit each other, or if log-probabilities are needed and no sequence has them.
    """
    rows: list[Row] = []
    has_any = any(sequence.logprobs is not None for sequence in trajectory.sequences)
    for index, sequence in enumerate(trajectory.sequences):
        if needs_logprobs and has_any and sequence.logprobs is None:
            continue
        try:
            row = _row(sequence, advantage, needs_logprobs=needs_logprobs)
        except ValueError as error:
            raise DecodeError(f"trajectory {trajectory.trajectory_id}, sequence {index}: {error}") from error
        if row.mask.any():
            rows.append(row)
    return rows


def mini_batches(rows: Sequence[Unit], count: int, seed: int) -> list[list[Unit]]:
    """At most `count` nearly equal parts; shuffled by `seed` if there are several, in the given order if one.

    `rows`: of tokens, or whatever a loss counts.
    """
    if count == 1 or len(rows) <= 1:
        return [list(rows)] if rows else []
    order = list(range(len(rows)))
    random.Random(seed).shuffle(order)
    count = min(count, len(rows))
    bounds = [len(rows) * part // count for part in range(count + 1)]
    return [[rows[place] for place in sorted(order[a:b])] for a, b in itertools.pairwise(bounds)]


def micro_batches(rows: Sequence[Row], max_tokens: int) -> list[MicroBatch]:
    """Rows from long to short, as many a tensor as `max_tokens` padded tokens hold (at least one)."""
    batches: list[MicroBatch] = []
    waiting: list[Row] = []
    for row in sorted(rows, key=lambda row: -len(row.token_ids)):
        if waiting and (len(waiting) + 1) * len(waiting[0].token_ids) > max_tokens:
            batches.append(pad(waiting))
            waiting = []
        waiting.append(row)
    return [*batches, pad(waiting)] if waiting else batches


def pad(rows: Sequence[Row]) -> MicroBatch:
    """Rows as tensors (B, T), T the longest; padded with token 0, which no mask holds."""
    shape = len(rows), max(len(row.token_ids) for row in rows)
    token_ids_B_T = np.zeros(shape, np.int64)
    mask_B_T = np.zeros(shape, np.bool_)
    logprobs_B_T = np.zeros(shape, np.float32)
    advantages_B_T = np.zeros(shape, np.float32)
    for place, row in enumerate(rows):
        length = len(row.token_ids)
        token_ids_B_T[place, :length] = row.token_ids
        mask_B_T[place, :length] = row.mask
        logprobs_B_T[place, :length] = row.logprobs
        advantages_B_T[place, :length] = row.advantage
    return MicroBatch(*(torch.from_numpy(x) for x in (token_ids_B_T, mask_B_T, logprobs_B_T, advantages_B_T)))


def num_completion_tokens(rows: Iterable[Row]) -> int:
    """Tokens that a loss is summed over."""
    return sum(row.num_completion_tokens for row in rows)


def _row(sequence: TokenSequence, advantage: float | StepAdvantages, *, needs_logprobs: bool) -> Row:
    token_ids = np.frombuffer(tokens.decode_ids(sequence.token_ids), np.int32)
    num_sampled = sum(completion.length for completion in sequence.completions)
    if sequence.logprobs is None and needs_logprobs:
        raise DecodeError("it has no log-probabilities of the behaviour policy")
    sampled = np.zeros(num_sampled, np.float32)
    if sequence.logprobs is not None:
        sampled = np.frombuffer(tokens.decode_floats(sequence.logprobs), np.float32)
    if len(sampled) != num_sampled:
        raise DecodeError(f"{len(sampled)} log-probabilities for {num_sampled} completion tokens")
    if not np.isfinite(sampled).all():
        raise DecodeError("a log-probability is no finite number")
    mask = np.zeros(len(token_ids), np.bool_)
    logprobs = np.zeros(len(token_ids), np.float32)
    taken = 0
    for completion in sequence.completions:
        end = completion.start + completion.length
        if end > len(token_ids):
            raise DecodeError(f"a completion ends at token {end} of {len(token_ids)}")
        if mask[completion.start : end].any():
            raise DecodeError(f"two completions overlap at token {completion.start}")
        mask[completion.start : end] = True
        logprobs[completion.start : end] = sampled[taken : taken + completion.length]
        taken += completion.length
    mask[:1] = False
    return Row(token_ids, mask, logprobs, _by_token(sequence, advantage))


def _by_token(sequence: TokenSequence, advantage: float | StepAdvantages) -> float | NDArray[np.float32]:
    """Each completion's tokens get the advantage of its step (T,); 0 on prompts."""
    if isinstance(advantage, (int, float)):
        return advantage
    advantages_T = np.zeros(tokens.count(sequence.token_ids), np.float32)
    for part in sequence.completions:
        advantages_T[part.start : part.start + part.length] = advantage[part.step_index]
    return advantages_T
