"""Assembled trajectories to padded tensors, in an order that only their content decides. Knows no model and no loss."""

import bisect
import itertools
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollstream.learner.algorithms.base import TRUNCATED, BatchView, KeptRow, Member, PerToken, Prepared, Row
from rollstream.learner.model.logprobs import KeptSets
from rollstream.learner.model.prefixes import Order, PrefixTree, inputs_of, tree_of
from rollstream.schemas import tokens
from rollstream.schemas.errors import DecodeError, RunFailedError
from rollstream.schemas.events import TrajectoryAssembled
from rollstream.schemas.events.rollouts import TokenSequence

MAX_SHARING = 8
"""A micro-batch holds so many times as many tokens as it computes: keys are gathered for each row."""
T = TypeVar("T")
Unit = tuple[int, ...]
"""Rows that are trained together, so in one micro-batch: one, or the better and the worse answer of a pair."""
Units = Sequence[Unit]


@dataclass(frozen=True, slots=True)
class TrainRow:
    """A row as an algorithm has prepared it."""

    row: Row
    mask: NDArray[np.bool_]  # (T,), tokens that are trained
    advantage: PerToken = 0.0
    weight: PerToken | None = None
    group: int = 0
    """Rows of one task have the same number."""
    components: Mapping[str, PerToken] = field(default_factory=dict[str, PerToken])

    @property
    def num_tokens(self) -> int:
        """Tokens that are trained."""
        return int(self.mask.sum())


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Rows of one forward, padded on the right. A column that is not needed is None."""

    token_ids: Tensor  # (B, T) int64
    mask: Tensor  # (B, T) bool
    logprobs: Tensor  # (B, T) float32
    advantages: Tensor  # (B, T) float32
    weights: Tensor | None = None  # (B, T) float32
    versions: Tensor | None = None  # (B, T) int64
    lengths: tuple[int, ...] = ()
    """Tokens of each row that are trained."""
    groups: tuple[int, ...] = ()
    rows: tuple[int, ...] = ()
    """What each row's index is in the batch."""
    chosen: tuple[int, ...] = ()
    """Row of each pair's better answer."""
    rejected: tuple[int, ...] = ()
    num_tokens: int = 0
    """Unpadded, prompts included."""
    kept: KeptSets | None = None
    """Of the tokens on the mask, row by row, where the sampling of some was truncated."""
    tree: PrefixTree | None = None
    """Computed in place of `token_ids`: what rows have in common at their beginning is there once."""
    scores: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])  # (B, T) float32
    """Recorded log-probabilities by role, see `Row.scores`."""
    components: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])  # (B, T) float32
    """Weights by component of the loss."""
    is_filler: bool = False
    """Computed for other processes' sake, and of no weight: see `Ranks.divide`."""
    at_N: Tensor | None = None
    """int64, the tokens on the mask by their position in (B * T): known before the mask is on a GPU, which would have
    to be waited for.
    """

    def on_mask(self, values_B_T: Tensor) -> Tensor:
        """Values (N,) of the tokens on the mask, row by row."""
        return values_B_T[self.mask] if self.at_N is None else values_B_T.flatten()[self.at_N]

    @property
    def num_computed(self) -> int:
        """Tokens that the model computes, padding included."""
        return self.token_ids.numel() if self.tree is None else len(self.tree.token_ids_N)

    def to(self, device: torch.device) -> "MicroBatch":
        """The same on a device."""
        names = ("token_ids", "mask", "logprobs", "advantages", "weights", "versions", "at_N")
        columns: dict[str, Any] = {name: getattr(self, name) for name in names}
        moved = {name: value.to(device) for name, value in columns.items() if value is not None}
        kept = None if self.kept is None else KeptSets(*(one.to(device) for one in self.kept))
        scores = {role: one.to(device) for role, one in self.scores.items()}
        return replace(
            self, **moved, scores=scores, kept=kept, tree=None if self.tree is None else self.tree.to(device)
        )


def check_token_ids(trajectory: TrajectoryAssembled, size: int) -> None:
    """Raises DecodeError naming the trajectory if it has a token id that is none of a model's `size`, or one that is
    not in its kept set.
    """
    for index, sequence in enumerate(trajectory.sequences):
        where = f"trajectory {trajectory.trajectory_id}, sequence {index}"
        token_ids = tokens.decode_ids(sequence.token_ids)
        found = [np.frombuffer(token_ids, np.int32)]
        for part in sequence.completions:
            if part.kept_ids is None:
                continue
            try:
                kept = tokens.decode_kept(part.kept_ids, part.length)
                tokens.check_kept(token_ids[part.start : part.start + part.length], kept)
            except ValueError as error:
                raise DecodeError(f"{where}: {error}") from error
            found.append(np.asarray(kept.ids, np.int32))
        all_ids = np.concatenate(found)
        odd = all_ids[(all_ids < 0) | (all_ids >= size)]
        if len(odd):
            raise DecodeError(
                f"{where}: token id {odd[0]} is none of the model's {size}, and the sequence has ids up to "
                f"{all_ids.max()}, so its vocabulary has {all_ids.max() + 1} or more; give the model.path that "
                "sampled it"
            )


def is_truncated(trajectory: TrajectoryAssembled) -> bool:
    """Whether one of its completions ended at the token limit."""
    return any(part.finish_reason == TRUNCATED for sequence in trajectory.sequences for part in sequence.completions)


def member_of(trajectory: TrajectoryAssembled, *, reward: float, staleness: int = 0) -> Member:
    """A trajectory as a member of its batch. `reward`: what the manifest says of it."""
    return Member(
        group_id=trajectory.group_id,
        rollout_id=trajectory.rollout_id,
        agent=trajectory.agent,
        reward=reward,
        rewards=trajectory.rewards,
        step_rewards={int(step): value for step, value in trajectory.step_rewards.items()},
        steps=frozenset(part.step_index for sequence in trajectory.sequences for part in sequence.completions),
        is_truncated=is_truncated(trajectory),
        staleness=staleness,
    )


def rows_of(
    trajectory: TrajectoryAssembled,
    *,
    needs_logprobs: bool,
    member: int = 0,
    scores: Mapping[str, Sequence[NDArray[np.float32]]] = {},
) -> list[Row]:
    """The sequences of a trajectory that have completion tokens. `member`: its index in the batch; `scores`: recorded
    log-probabilities by role, one array (T,) a sequence.

    Where log-probabilities are needed, sequences without them are left out. Raises DecodeError naming the trajectory if
    completions and arrays do not fit each other, or if log-probabilities are needed and no sequence has them.
    """
    rows: list[Row] = []
    has_any = any(sequence.logprobs is not None for sequence in trajectory.sequences)
    for index, sequence in enumerate(trajectory.sequences):
        if needs_logprobs and has_any and sequence.logprobs is None:
            continue
        try:
            row = _row(sequence, member, needs_logprobs=needs_logprobs)
        except ValueError as error:
            raise DecodeError(f"trajectory {trajectory.trajectory_id}, sequence {index}: {error}") from error
        if row.mask.any():
            of_row = {role: values[index] for role, values in scores.items()}
            rows.append(replace(row, sequence=index, scores=of_row))
    return rows


def prepared_rows(batch: BatchView, prepared: Prepared) -> tuple[list[TrainRow], list[Unit]]:
    """The training data of a batch: rows as `prepared`, and the units that mini-batches are made of.

    Without pairs, a row that keeps no token is left out. Raises RunFailedError if a list of `prepared` does not fit, or
    if an answer of a pair keeps no token.
    """
    for name in ("advantages", "keep", "weights"):
        _check_fits(name, getattr(prepared, name), batch.rows)
    for name, weights in prepared.components.items():
        _check_fits(f"components of {name}", weights, batch.rows)
    groups: dict[str, int] = {}
    rows: list[TrainRow] = []
    for index, row in enumerate(batch.rows):
        group = batch.members[row.member].group_id if batch.members else ""
        rows.append(
            TrainRow(
                row,
                row.mask & prepared.keep[index] if prepared.keep else row.mask,
                prepared.advantages[index] if prepared.advantages else 0.0,
                prepared.weights[index] if prepared.weights else None,
                groups.setdefault(group, len(groups)),
                {name: weights[index] for name, weights in prepared.components.items()},
            )
        )
    if batch.pairs is not None:
        for index in sorted({index for pair in batch.pairs for index in pair}):
            if not rows[index].mask.any():
                raise RunFailedError(f"prepare left answer {index} of a preference pair no token; keep at least one")
        return rows, list(batch.pairs)
    return rows, [(index,) for index, row in enumerate(rows) if row.mask.any()]


def _check_fits(name: str, values: Sequence[Any], rows: Sequence[Row]) -> None:
    if len(values) not in (0, len(rows)):
        raise RunFailedError(f"prepare returned {len(values)} {name} for {len(rows)} rows; give one a row, or none")
    for index, (value, row) in enumerate(zip(values, rows, strict=False)):
        if np.shape(value) not in ((), row.mask.shape):
            raise RunFailedError(
                f"prepare returned {name} of shape {np.shape(value)} for row {index}; expected {row.mask.shape}"
            )


def mini_batches(units: Sequence[T], count: int, seed: int) -> list[list[T]]:
    """At most `count` nearly equal parts; shuffled by `seed` if there are several, in the given order if one."""
    if count == 1 or len(units) <= 1:
        return [list(units)] if units else []
    order = list(range(len(units)))
    random.Random(seed).shuffle(order)
    count = min(count, len(units))
    bounds = [len(units) * part // count for part in range(count + 1)]
    return [[units[index] for index in sorted(order[a:b])] for a, b in itertools.pairwise(bounds)]


def micro_batches(
    rows: Sequence[TrainRow], units: Iterable[Unit], max_tokens: int, *, versions: bool = False
) -> list[MicroBatch]:
    """Units from long to short, as many a tensor as `max_tokens` padded tokens hold (at least one).

    Every row is once in a micro-batch, however many pairs it is in, so pairs of one prompt go together.
    """
    batches: list[MicroBatch] = []
    waiting: list[Unit] = []
    held: set[int] = set()
    longest = 0
    for unit in sorted(units, key=lambda unit: _by_length([rows[index].row for index in unit])):
        own = max(len(rows[index].row.token_ids) for index in unit)
        if waiting and len(held.union(unit)) * max(longest, own) > max_tokens:
            batches.append(pad(rows, waiting, versions=versions))
            waiting, held, longest = [], set(), 0
        waiting.append(unit)
        held.update(unit)
        longest = max(longest, own)
    return [*batches, pad(rows, waiting, versions=versions)] if waiting else batches


def tree_micro_batches(
    rows: Sequence[TrainRow], units: Iterable[Unit], max_tokens: int, *, versions: bool = False
) -> list[MicroBatch]:
    """Units in lexicographic order of their rows, as many a prefix tree as `max_tokens` hold (at least one)."""
    order = Order([inputs_of(one.row.token_ids, one.mask) for one in rows])
    batches: list[MicroBatch] = []
    waiting: list[Unit] = []
    held: list[int] = []
    computed = given = 0
    for unit in sorted(units, key=lambda unit: sorted(order.ranks[index] for index in unit)):
        added = _added(order, held, unit)
        own = sum(len(rows[index].row.token_ids) for index in unit)
        if waiting and (computed + added > max_tokens or given + own > MAX_SHARING * max_tokens):
            batches.append(pad(rows, waiting, versions=versions, shares=True))
            waiting, held, computed, given = [], [], 0, 0
            added = _added(order, held, unit)
        waiting.append(unit)
        held = sorted({*held, *(order.ranks[index] for index in unit)})
        computed, given = computed + added, given + own
    return [*batches, pad(rows, waiting, versions=versions, shares=True)] if waiting else batches


def _added(order: Order, held: Sequence[int], unit: Unit) -> int:
    """Tokens that a unit adds to the tree of the rows `held`, by rank."""
    there, added = list(held), 0
    for rank in sorted({order.ranks[index] for index in unit} - set(held)):
        at = bisect.bisect(there, rank)
        added += order.added(there[at - 1] if at else None, rank, there[at] if at < len(there) else None)
        there.insert(at, rank)
    return added


def _by_length(rows: Sequence[Row]) -> tuple[Any, ...]:
    """Order of a unit: a row's length; of a pair its prompt, then the longer answer."""
    longest = -max(len(row.token_ids) for row in rows)
    if len(rows) == 1:
        return (longest,)
    start = int(rows[0].mask.argmax())
    return -start, rows[0].token_ids[:start].tobytes(), longest


def pad(rows: Sequence[TrainRow], units: Units, *, versions: bool = False, shares: bool = False) -> MicroBatch:
    """The rows of units as tensors (B, T), T the longest; padded with token 0, which no mask holds.

    `shares`: with their prefix tree.
    """
    index_of: dict[int, int] = {}
    columns = [tuple(index_of.setdefault(unit[side], len(index_of)) for unit in units) for side in range(len(units[0]))]
    found = [rows[index] for index in index_of]
    shape = len(found), max(len(one.row.token_ids) for one in found)
    token_ids_B_T, mask_B_T = np.zeros(shape, np.int64), np.zeros(shape, np.bool_)
    logprobs_B_T, advantages_B_T = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
    weights_B_T = np.zeros(shape, np.float32) if any(one.weight is not None for one in found) else None
    versions_B_T = np.full(shape, -1, np.int64) if versions else None
    for position, one in enumerate(found):
        length = len(one.row.token_ids)
        token_ids_B_T[position, :length] = one.row.token_ids
        mask_B_T[position, :length] = one.mask
        logprobs_B_T[position, :length] = one.row.logprobs
        advantages_B_T[position, :length] = one.advantage
        if weights_B_T is not None:
            weights_B_T[position, :length] = 1.0 if one.weight is None else one.weight
        if versions_B_T is not None:
            versions_B_T[position, :length] = one.row.versions
    arrays = (token_ids_B_T, mask_B_T, logprobs_B_T, advantages_B_T, weights_B_T, versions_B_T)
    return MicroBatch(
        *(None if array is None else torch.from_numpy(array) for array in arrays),  # pyright: ignore[reportArgumentType]
        lengths=tuple(one.num_tokens for one in found),
        groups=tuple(one.group for one in found),
        rows=tuple(index_of),
        chosen=columns[0] if len(columns) == 2 else (),
        rejected=columns[1] if len(columns) == 2 else (),
        num_tokens=sum(len(one.row.token_ids) for one in found),
        kept=_kept_of(found),
        tree=tree_of([one.row.token_ids for one in found], [one.mask for one in found]) if shares else None,
        at_N=torch.from_numpy(np.flatnonzero(mask_B_T)),
        scores=_columns([one.row.scores for one in found], [len(one.row.token_ids) for one in found]),
        components=_columns([one.components for one in found], [len(one.row.token_ids) for one in found]),
    )


def _columns(rows: Sequence[Mapping[str, PerToken]], lengths: Sequence[int]) -> dict[str, Tensor]:
    """(B, T) by name from values of the rows, which have the same names."""
    columns = {name: np.zeros((len(rows), max(lengths)), np.float32) for name in rows[0]}
    for name, values_B_T in columns.items():
        for position, (row, length) in enumerate(zip(rows, lengths, strict=True)):
            values_B_T[position, :length] = row[name]
    return {name: torch.from_numpy(values_B_T) for name, values_B_T in columns.items()}


def _kept_of(rows: Sequence[TrainRow]) -> KeptSets | None:
    if all(one.row.kept is None for one in rows):
        return None
    lengths = [
        np.zeros(one.num_tokens, np.int64) if one.row.kept is None else one.row.kept.lengths[one.mask] for one in rows
    ]
    ids = [kept.ids[np.repeat(one.mask, kept.lengths)] for one in rows if (kept := one.row.kept) is not None]
    return KeptSets(torch.from_numpy(np.concatenate(ids).astype(np.int64)), torch.from_numpy(np.concatenate(lengths)))


def _row(sequence: TokenSequence, member: int, *, needs_logprobs: bool) -> Row:
    token_ids = np.frombuffer(tokens.decode_ids(sequence.token_ids), np.int32)
    num_sampled = sum(completion.length for completion in sequence.completions)
    if sequence.logprobs is None and needs_logprobs:
        raise DecodeError("it has no log-probabilities of the behaviour policy; record them, or train by SFT")
    sampled = np.zeros(num_sampled, np.float32)
    if sequence.logprobs is not None:
        sampled = np.frombuffer(tokens.decode_floats(sequence.logprobs), np.float32)
    if len(sampled) != num_sampled:
        raise DecodeError(f"{len(sampled)} log-probabilities for {num_sampled} completion tokens")
    if not np.isfinite(sampled).all():
        raise DecodeError("a log-probability is not a finite number")
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
    return Row(token_ids, mask, logprobs, member, sequence.completions, _kept_row(sequence) if needs_logprobs else None)


def _kept_row(sequence: TokenSequence) -> KeptRow | None:
    if all(part.kept_ids is None for part in sequence.completions):
        return None
    lengths = np.zeros(tokens.count(sequence.token_ids), np.int64)
    ids = [np.empty(0, np.int32)]
    for part in sorted(sequence.completions, key=lambda part: part.start):
        if part.kept_ids is not None:
            kept = tokens.decode_kept(part.kept_ids, part.length)
            lengths[part.start : part.start + part.length] = kept.lengths
            ids.append(np.asarray(kept.ids, np.int32))
    return KeptRow(lengths, np.concatenate(ids))
