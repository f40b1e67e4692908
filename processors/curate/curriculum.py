"""The curriculum as pure functions: which examples to roll out next, and which groups of an epoch to keep.

`choose` selects adaptively by the windowed reward store; `epochwise_filter` filters one epoch's groups like NAT's
trainer. All randomness comes from seeds derived from example ids, so nothing depends on the order of a dataset.
"""

import math
import random
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import nsmallest
from typing import Any, NamedTuple

from rollstream.processors.curate.candidates import Stats
from rollstream.schemas.ids import derive_seed, seeder
from rollstream.schemas.settings import CurriculumSettings

_SEED_RANGE = 2**63


@dataclass(frozen=True, slots=True)
class CurriculumProgress:
    """Progress of the curriculum: its current percentile."""

    percentile: float
    last_expansion_epoch: int = -1


class GroupRewards(NamedTuple):
    """Input of the epochwise filter: one group's rewards."""

    group_id: str
    example_id: str
    rewards: tuple[float, ...]
    range_by_agent: float | None = None
    """Largest difference of rewards of one agent; None: that of all rewards counts."""

    @property
    def reward_range(self) -> float:
        """Difference of rewards that the curriculum goes by; 0 if there are none."""
        if self.range_by_agent is not None:
            return self.range_by_agent
        return max(self.rewards) - min(self.rewards) if self.rewards else 0.0


class Kept(NamedTuple):
    """A group that passed the filter, with the indices of its kept rewards."""

    group_id: str
    members: tuple[int, ...]


def begin(settings: CurriculumSettings) -> CurriculumProgress:
    """The progress before the first epoch; all examples are included if the curriculum is off."""
    return CurriculumProgress(settings.initial_percentile if settings.enabled else 1.0)


def expand(progress: CurriculumProgress, epoch: int, settings: CurriculumSettings) -> CurriculumProgress:
    """The progress in `epoch`: one increment every `expansion_interval` epochs, up to 1.

    Counting starts at epoch -1, as in NAT: with an interval of 5 the first expansion is at epoch 4.
    """
    if progress.percentile >= 1 or epoch - progress.last_expansion_epoch < settings.expansion_interval:
        return progress
    return CurriculumProgress(min(1.0, progress.percentile + settings.increment_percentile), epoch)


def share_of(count: int, share: float) -> int:
    """`count * share` rounded up, ignoring float noise below 1e-9."""
    return math.ceil(round(count * share, 9))


def epochwise_filter(
    groups: Sequence[GroupRewards],
    settings: CurriculumSettings,
    progress: CurriculumProgress,
    epoch: int,
    seed: int,
    rng: random.Random | None = None,
) -> tuple[CurriculumProgress, list[Kept]]:
    """NAT's curriculum over one epoch's groups: returns the progress after it and the kept groups by rank.

    Drops empty groups and those whose rewards differ by less than `min_reward_diff`, sorts by mean reward
    (descending is easiest first; ties by example and group id), takes `max(1, ceil(kept * percentile))`, then caps
    by `random_subsample` of the groups that differ. The progress expands only if there are groups to sort. Without
    `filter_single_group` a single group skips everything but the subsample, which then draws trajectories. `rng` draws
    the subsample if `seeded_subsample` is off.
    """
    if not settings.enabled:
        return progress, [Kept(group.group_id, tuple(range(len(group.rewards)))) for group in groups]
    draw = _Draw(seed, epoch, None if settings.seeded_subsample else rng)
    if len(groups) == 1 and not settings.filter_single_group:
        return progress, _subsample_members(groups[0], settings.random_subsample, draw)
    differing = [g for g in groups if g.rewards and g.reward_range >= settings.min_reward_diff]
    if not differing:
        return progress, []
    progress = expand(progress, epoch, settings)
    ranked = sorted(
        differing, key=lambda g: (_rank(math.fsum(g.rewards) / len(g.rewards), settings), g.example_id, g.group_id)
    )
    taken = ranked[: max(1, share_of(len(ranked), progress.percentile))]
    if settings.random_subsample is not None:
        size = share_of(len(ranked), settings.random_subsample)
        drawn = {
            group.group_id for group in sorted(taken, key=lambda g: (draw.number(g.example_id), g.group_id))[:size]
        }
        taken = [group for group in taken if group.group_id in drawn]
    return progress, [Kept(group.group_id, tuple(range(len(group.rewards)))) for group in taken]


class Permutation(NamedTuple):
    """All examples of a dataset in the order of one turn, which the epochs of the turn share."""

    examples: Collection[str]
    turn: int
    order: list[str]


def epoch_permutation(examples: Collection[str], start: int, count: int, seed: int) -> list[str]:
    """`count` examples from index `start` of consecutive epoch permutations, each a seeded permutation of all
    examples."""
    if examples and start % len(examples) == 0 and count <= len(examples):  # its beginning: not sorted as a whole
        return _first(count, examples, _shuffling(seed, "walk", start // len(examples)))
    return continue_permutation(examples, start, count, seed, None)[0]


def continue_permutation(
    examples: Collection[str], start: int, count: int, seed: int, newest: Permutation | None
) -> tuple[list[str], Permutation | None]:
    """The same, and the permutation that it ends in. `newest`: the one of an earlier call with the same seed, which is
    used again for the same object `examples`.
    """
    chosen: list[str] = []
    while examples and len(chosen) < count:
        turn, index = divmod(start + len(chosen), len(examples))
        if newest is None or newest.turn != turn or newest.examples is not examples:
            newest = Permutation(examples, turn, _shuffled(examples, seed, "walk", turn))
        chosen += newest.order[index : index + count - len(chosen)]
    return chosen, newest


def included(known: Mapping[str, Stats], settings: CurriculumSettings, progress: CurriculumProgress) -> list[str]:
    """Known examples that the curriculum admits, by rank.

    `max(1, ceil(known * percentile))` of all known ones, chosen among those whose rewards inside the window differ by
    at least `min_reward_diff`: an example that is always or never solved gives no advantage.
    """
    ranked = sorted(
        (example_id for example_id, stats in known.items() if stats.reward_range >= settings.min_reward_diff),
        key=lambda example_id: (_rank(known[example_id].mean, settings), example_id),
    )
    return ranked[: max(1, share_of(len(known), progress.percentile))]


def choose(
    examples: Collection[str],
    known: Mapping[str, Stats],
    last_asked: Mapping[str, int],
    settings: CurriculumSettings,
    progress: CurriculumProgress,
    *,
    epoch: int,
    count: int,
    seed: int,
) -> list[str]:
    """The examples of an epoch's `count` tasks, by task index; empty if there are no examples.

    The pool is the included examples (after `random_subsample`) and every unknown example, in order of the longest time
    since the last request (`last_asked`: epoch by example), ties in seeded order, repeated as needed. Each task is
    instead drawn from the excluded examples with probability `explore_share`. If all examples are excluded, they are
    the pool, so an epoch is never empty because of low variance in the past.
    """
    existing = frozenset(examples)
    known = {example_id: stats for example_id, stats in known.items() if example_id in existing}
    admitted = included(known, settings, progress)
    if settings.random_subsample is not None:
        size = share_of(len(admitted), settings.random_subsample)
        admitted = _shuffled(admitted, seed, "subsample", epoch)[:size]
    unknown = [example_id for example_id in examples if example_id not in known]
    excluded = _shuffled(set(known).difference(admitted), seed, "excluded", epoch)
    pool, drawn = [*admitted, *unknown], _shuffling(seed, "pool", epoch)

    def asked_in(name: str) -> int:
        return last_asked.get(name, -1)

    if pool:
        newest = max(nsmallest(count, map(asked_in, pool)), default=-1)
        pool = [name for name in pool if asked_in(name) <= newest]  # what was asked for later needs no seed
        pool = _first(count, pool, lambda name: (asked_in(name), drawn(name)))
    else:
        pool, excluded = sorted(excluded, key=asked_in), []
    return _mix(pool, excluded, settings.explore_share, epoch, count, seed)


def _first(count: int, names: Collection[str], key: Callable[[str], Any]) -> list[str]:
    """The first `count` of the sorted names, without sorting all where they are few: else sorting is faster."""
    return nsmallest(count, names, key=key) if count * 8 <= len(names) else sorted(names, key=key)[:count]


def _mix(pool: list[str], excluded: list[str], share: float, epoch: int, count: int, seed: int) -> list[str]:
    """Tasks from the pool, with some from `excluded` (none twice) by each task's own derived seed."""
    chosen: list[str] = []
    next_index = 0
    for index in range(count if pool else 0):
        if excluded and derive_seed(seed, "explore", epoch, index) < share * _SEED_RANGE:
            chosen.append(excluded.pop())
        else:
            chosen.append(pool[next_index % len(pool)])
            next_index += 1
    return chosen


def _rank(mean: float, settings: CurriculumSettings) -> float:
    return mean if settings.sort_ascending else -mean


def _shuffled(examples: Iterable[str], seed: int, *purpose: str | int) -> list[str]:
    return sorted(examples, key=_shuffling(seed, *purpose))


def _shuffling(seed: int, *purpose: str | int) -> Callable[[str], tuple[int, str]]:
    """Sort key of a seeded order of examples."""
    drawn = seeder(seed, *purpose)
    return lambda example_id: (drawn(example_id), example_id)


class _Draw(NamedTuple):
    """Random numbers of a subsample: from derived seeds or from `rng`."""

    seed: int
    epoch: int
    rng: random.Random | None

    def number(self, *what: str | int) -> int:
        if self.rng is not None:
            return self.rng.getrandbits(63)
        return derive_seed(self.seed, "subsample", self.epoch, *what)


def _subsample_members(group: GroupRewards, share: float | None, draw: _Draw) -> list[Kept]:
    members = list(range(len(group.rewards)))
    if share is not None:
        members.sort(key=lambda member: draw.number(group.example_id, member))
        members = sorted(members[: share_of(len(members), share)])
    return [Kept(group.group_id, tuple(members))] if members else []
