"""Assembled trajectories to micro-batches, in an order that only their content decides. Knows no model and no loss."""

import bisect
import itertools
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from rollstream.learner.algorithms.base import TRUNCATED, BatchView, KeptRow, Member, PerToken, Prepared, Row
from rollstream.learner.model.micro_batch import MicroBatch, TrainRow, Unit, pad
from rollstream.learner.model.prefixes import Order, inputs_of
from rollstream.schemas import tokens
from rollstream.schemas.errors import DecodeError, RunFailedError
from rollstream.schemas.events import TrajectoryAssembled
from rollstream.schemas.events.rollouts import TokenSequence
from rollstream.schemas.revisions import CHECKS_PREPARED_SINCE

MAX_SHARING = 8
"""A micro-batch holds so many times as many tokens as it computes: keys are gathered for each row."""
T = TypeVar("T")


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
                raise DecodeError(f"{where}: {error}; correct the engine that recorded it") from error
            found.append(np.asarray(kept.ids, np.int32))
        all_ids = np.concatenate(found)
        odd = all_ids[(all_ids < 0) | (all_ids >= size)]
        if len(odd):
            raise DecodeError(
                f"{where}: token id {odd[0]} is outside the model's vocabulary of {size}, and the sequence has ids "
                f"up to {all_ids.max()}, so its vocabulary has {all_ids.max() + 1} or more; give the model.path that "
                "sampled it"
            )


def check_lengths(
    rows: Iterable[Row], limit: int | None, name: Callable[[Row], str], *, shares: bool, shorten: str = ""
) -> None:
    """Raises DecodeError for a row of more tokens than a model has positions for; None: it can have any.

    `name`: where a row is from. `shares`: rows are computed as a prefix tree, so only up to the token that predicts
    their last one. `shorten`: what else can be made shorter.
    """
    for row in rows if limit is not None else ():
        num_inputs = len(inputs_of(row.token_ids, row.mask)) if shares else len(row.token_ids)
        if limit is not None and num_inputs > limit:
            raise DecodeError(
                f"{name(row)} is computed from {num_inputs} tokens, more than the {limit} positions of the model; give "
                f"a model with more positions, or {shorten or 'shorter rollouts'}"
            )


def holder_of(row: Row, trajectories: Iterable[TrajectoryAssembled]) -> str:
    """The sequence that a row is, or begins: an answer of a preference pair may be that of several trajectories."""
    found = (
        f"trajectory {one.trajectory_id}, sequence {index}"
        for one in trajectories
        for index, sequence in enumerate(one.sequences)
        if tokens.decode_ids(sequence.token_ids).tobytes().startswith(row.token_ids.tobytes())
    )
    return next(found, "a row")


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
    model_group: str | None = None,
) -> list[Row]:
    """The sequences of a trajectory that have completion tokens. `member`: its index in the batch; `scores`: recorded
    log-probabilities by role, one array (T,) a sequence; `model_group`: see `Row`.

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
            rows.append(replace(row, sequence=index, scores=of_row, model_group=model_group))
    return rows


def prepared_rows(
    batch: BatchView, prepared: Prepared, check: Callable[[list[TrainRow]], None] | None = None
) -> tuple[list[TrainRow], list[Unit]]:
    """The training data of a batch: rows as `prepared`, and the units that mini-batches are made of.

    `check` raises if a row of a unit cannot be trained. Without pairs, a row that keeps no token is left out. Raises
    RunFailedError if a list of `prepared` does not fit or has a number that float32 does not hold, or if an answer of a
    pair keeps no token.
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
                {name: weights[index] for name, weights in prepared.components.items() if len(weights)},
            )
        )
    if batch.pairs is not None:
        for index in sorted({index for pair in batch.pairs for index in pair}):
            if not rows[index].mask.any():
                raise RunFailedError(f"prepare left answer {index} of a preference pair no token; keep at least one")
    units: list[Unit] = _kept(rows) if batch.pairs is None else list(batch.pairs)
    trained = [rows[index] for index in sorted({index for unit in units for index in unit})]
    if batch.revision >= CHECKS_PREPARED_SINCE:
        _check_finite(trained, batch.members)
    if check is not None:
        check(trained)
    return rows, units


def _check_finite(rows: Iterable[TrainRow], members: Sequence[Member]) -> None:
    """Raises RunFailedError naming a rollout with an advantage or a weight that is not a finite number in float32."""
    for one in rows:
        components = {f"weight in {name}": weight for name, weight in one.components.items()}
        for name, value in {"advantage": one.advantage, "weight": one.weight, **components}.items():
            odd_T = _odd(1.0 if value is None else value, one.mask)
            if len(odd_T):
                member = members[one.row.member] if members else Member()
                is_large = name == "advantage" and not np.isnan(odd_T[0])
                remedy = "choose an algorithm.advantage that divides by their standard deviation"
                raise RunFailedError(
                    f"rollout {member.rollout_id} of group {member.group_id} has the reward {member.reward:g} and the "
                    f"{name} {odd_T[0]:g}, which is not a finite number in float32; "
                    + (f"scale the rewards down, or {remedy}" if is_large else "correct the algorithm that computed it")
                )


def _odd(value: PerToken, mask: NDArray[np.bool_]) -> NDArray[Any]:
    """Values of the tokens on a mask that are not finite in float32."""
    with np.errstate(over="ignore"):
        is_odd = ~np.isfinite(np.asarray(value, np.float32))
    return np.broadcast_to(np.asarray(value), mask.shape)[mask & is_odd] if is_odd.any() else np.empty(0)


def _kept(rows: Sequence[TrainRow]) -> list[Unit]:
    return [(index,) for index, row in enumerate(rows) if row.mask.any()]


def _check_fits(name: str, values: Sequence[Any], rows: Sequence[Row]) -> None:
    if len(values) not in (0, len(rows)):
        raise RunFailedError(f"prepare returned {len(values)} {name} for {len(rows)} rows; give one a row, or none")
    for index, (value, row) in enumerate(zip(values, rows, strict=False)):
        if np.shape(value) not in ((), row.mask.shape):
            raise RunFailedError(
                f"prepare returned {name} of shape {np.shape(value)} for row {index}; expected {row.mask.shape}"
            )


def mini_batches(units: Sequence[T], count: int, seed: int) -> list[list[T]]:
    """Divide into at most `count` nearly equal parts; shuffled by `seed` if there are several, in the given order if
    one.
    """
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


def _row(sequence: TokenSequence, member: int, *, needs_logprobs: bool) -> Row:
    token_ids = np.frombuffer(tokens.decode_ids(sequence.token_ids), np.int32)
    num_sampled = sum(completion.length for completion in sequence.completions)
    if sequence.logprobs is None and needs_logprobs:
        raise DecodeError("it has no log-probabilities of the behaviour policy; record them, or train by SFT")
    sampled = np.zeros(num_sampled, np.float32)
    if sequence.logprobs is not None:
        sampled = np.frombuffer(tokens.decode_floats(sequence.logprobs), np.float32)
    if len(sampled) != num_sampled:
        raise DecodeError(f"{len(sampled)} log-probabilities for {num_sampled} completion tokens; record one for each")
    if not np.isfinite(sampled).all():
        raise DecodeError("a log-probability is not a finite number; record finite ones")
    mask = np.zeros(len(token_ids), np.bool_)
    logprobs = np.zeros(len(token_ids), np.float32)
    taken = 0
    for completion in sequence.completions:
        end = completion.start + completion.length
        if end > len(token_ids):
            raise DecodeError(
                f"a completion ends at token {end} of {len(token_ids)}; correct the program that recorded it"
            )
        if mask[completion.start : end].any():
            raise DecodeError(
                f"two completions overlap at token {completion.start}; correct the program that recorded them"
            )
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
