"""The curriculum as pure functions: which examples to roll out next, and which groups of an epoch to keep.

`choose` steers by the windowed reward store; `classic_filter` filters one epoch's groups as NAT's trainer does.
All randomness comes from derived seeds over example ids, so nothing depends on the order of a dataset.
"""

import math
import random
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rollstream.processors.window import Stats
from rollstream.schemas.ids import derive_seed
from rollstream.schemas.settings import CurriculumSettings

_SEED_RANGE = 2**63


@dataclass(frozen=True, slots=True)
class Progress:
    """How far the curriculum has opened."""

    percentile: float
    last_expansion_epoch: int = -1


class GroupRewards(NamedTuple):
    """What the classic filter looks at: one group's rewards."""

    group_id: str
    example_id: str
    rewards: tuple[float, ...]


class Kept(NamedTuple):
    """A group that passed the filter, and the positions of the rewards that did."""

    group_id: str
    members: tuple[int, ...]


def begin(settings: CurriculumSettings) -> Progress:
    """The progress before the first epoch; everything is open when the curriculum is off."""
    return Progress(settings.initial_percentile if settings.enabled else 1.0)


def expand(progress: Progress, epoch: int, settings: CurriculumSettings) -> Progress:
    """The progress in `epoch`: one increment every `expansion_interval` epochs, up to 1.

    Counting starts at epoch -1, as in NAT: with an interval of 5 the first expansion is at epoch 4.
    """
    if progress.percentile >= 1 or epoch - progress.last_expansion_epoch < settings.expansion_interval:
        return progress
    return Progress(min(1.0, progress.percentile + settings.increment_percentile), epoch)


def share_of(count: int, share: float) -> int:
    """`count * share` rounded up, where float noise below 1e-9 does not count as a rest."""
    return math.ceil(round(count * share, 9))


def classic_filter(
    groups: Sequence[GroupRewards],
    settings: CurriculumSettings,
    progress: Progress,
    epoch: int,
    seed: int,
    rng: random.Random | None = None,
) -> tuple[Progress, list[Kept]]:
    """NAT's curriculum over one epoch's groups: the progress after it, and what is kept, in order of rank.

    Drops empty groups and those whose rewards differ by less than `min_reward_diff`, sorts by mean reward
    (descending is easiest first; ties by example and group id), takes `max(1, ceil(kept * percentile))`, then caps
    by `random_subsample` of the groups that differ. The progress expands only when there is something to sort. Without
    `filter_single_group` exactly one group skips all of it but the subsample, which then draws trajectories. `rng`
    draws the subsample where `seeded_subsample` is off.
    """
    if not settings.enabled:
        return progress, [Kept(group.group_id, tuple(range(len(group.rewards)))) for group in groups]
    draw = _Draw(seed, epoch, None if settings.seeded_subsample else rng)
    if len(groups) == 1 and not settings.filter_single_group:
        return progress, _subsample_members(groups[0], settings.random_subsample, draw)
    differing = [g for g in groups if g.rewards and max(g.rewards) - min(g.rewards) >= settings.min_reward_diff]
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


def walk(examples: Collection[str], start: int, count: int, seed: int) -> list[str]:
    """`count` examples from place `start` of an endless walk: one seeded permutation of all of them after another."""
    chosen: list[str] = []
    while examples and len(chosen) < count:
        turn, place = divmod(start + len(chosen), len(examples))
        permutation = sorted(examples, key=lambda example_id: (derive_seed(seed, "walk", turn, example_id), example_id))
        chosen += permutation[place : place + count - len(chosen)]
    return chosen


def included(known: Mapping[str, Stats], settings: CurriculumSettings, progress: Progress) -> list[str]:
    """Known examples that the curriculum lets in, by rank.

    `max(1, ceil(known * percentile))` of all known ones, taken among those whose rewards inside the window differ by
    at least `min_reward_diff`: an example that is always solved or never solved teaches nothing now.
    """
    ranked = sorted(
        (example_id for example_id, stats in known.items() if stats.spread >= settings.min_reward_diff),
        key=lambda example_id: (_rank(known[example_id].mean, settings), example_id),
    )
    return ranked[: max(1, share_of(len(known), progress.percentile))]


def choose(
    examples: Collection[str],
    known: Mapping[str, Stats],
    last_asked: Mapping[str, int],
    settings: CurriculumSettings,
    progress: Progress,
    *,
    epoch: int,
    count: int,
    seed: int,
) -> list[str]:
    """The examples of an epoch's `count` tasks, by task index; empty if there are no examples.

    The pool is what the curriculum includes (less what `random_subsample` leaves out) and every unknown example; it
    is walked from the longest not asked for (`last_asked`: epoch by example), in seeded order, round and round.
    Each task is instead drawn from the excluded examples with probability `explore_share`. If everything is
    excluded, the excluded examples are the pool: an epoch is never empty for want of variance in the past.
    """
    existing = frozenset(examples)
    known = {example_id: stats for example_id, stats in known.items() if example_id in existing}
    let_in = included(known, settings, progress)
    if settings.random_subsample is not None:
        size = share_of(len(let_in), settings.random_subsample)
        let_in = _shuffled(let_in, seed, "subsample", epoch)[:size]
    unknown = [example_id for example_id in examples if example_id not in known]
    excluded = _shuffled(set(known).difference(let_in), seed, "excluded", epoch)
    pool = _shuffled([*let_in, *unknown], seed, "pool", epoch)
    if not pool:
        pool, excluded = excluded, []
    pool.sort(key=lambda example_id: last_asked.get(example_id, -1))
    return _mix(pool, excluded, settings.explore_share, epoch, count, seed)


def _mix(pool: list[str], excluded: list[str], share: float, epoch: int, count: int, seed: int) -> list[str]:
    """Tasks from the pool, with some from `excluded` (none twice) by each task's own derived seed."""
    chosen: list[str] = []
    next_place = 0
    for index in range(count if pool else 0):
        if excluded and derive_seed(seed, "explore", epoch, index) < share * _SEED_RANGE:
            chosen.append(excluded.pop())
        else:
            chosen.append(pool[next_place % len(pool)])
            next_place += 1
    return chosen


def _rank(mean: float, settings: CurriculumSettings) -> float:
    return mean if settings.sort_ascending else -mean


def _shuffled(examples: Iterable[str], seed: int, *purpose: str | int) -> list[str]:
    return sorted(examples, key=lambda example_id: (derive_seed(seed, *purpose, example_id), example_id))


class _Draw(NamedTuple):
    """Where the numbers of a subsample come from: derived seeds, or chance."""

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
