"""The windowed reward store: what each example earned over the last weight versions. No decisions are made here."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class Stats:
    """Rewards of one example inside the window."""

    mean: float
    variance: float
    """Population variance."""
    count: int
    spread: float
    """Largest minus smallest reward."""


class Entry(NamedTuple):
    """Rewards of one group, one a rollout, under the newest weight version that it was sampled from."""

    version: int
    rewards: tuple[float, ...]


@dataclass(slots=True)
class Window:
    """Entries by example and group. What it answers depends neither on the order of arrival nor on repeats.

    Mutable on purpose: it belongs to one fold, which is its only writer.
    """

    entries: dict[str, dict[str, Entry]] = field(default_factory=dict[str, dict[str, Entry]])

    def add(self, example_id: str, group_id: str, entry: Entry) -> None:
        """Store a group's rewards; the first entry of a group counts. An entry without rewards is none."""
        if entry.rewards:
            self.entries.setdefault(example_id, {}).setdefault(group_id, entry)

    def forget(self, before: int) -> None:
        """Drop what was sampled under versions older than `before`."""
        for example_id in list(self.entries):
            groups = self.entries[example_id]
            kept = {group_id: entry for group_id, entry in groups.items() if entry.version >= before}
            if kept:
                self.entries[example_id] = kept
            else:
                del self.entries[example_id]

    def stats(self, example_id: str, since: int) -> Stats | None:
        """Statistics over entries of version `since` and newer; None for an example without any."""
        groups = self.entries.get(example_id, {})
        rewards = [reward for _, entry in sorted(groups.items()) if entry.version >= since for reward in entry.rewards]
        return describe(rewards) if rewards else None

    def known(self, since: int) -> Mapping[str, Stats]:
        """Statistics of every example that has an entry of version `since` or newer."""
        found = ((example_id, self.stats(example_id, since)) for example_id in sorted(self.entries))
        return {example_id: stats for example_id, stats in found if stats is not None}

    def content(self, since: int) -> dict[str, dict[str, list[int | list[float]]]]:
        """The window as a JSON value, for digests."""
        content: dict[str, dict[str, list[int | list[float]]]] = {}
        for example_id, groups in self.entries.items():
            kept = {g: [e.version, list(e.rewards)] for g, e in groups.items() if e.version >= since}
            if kept:
                content[example_id] = kept
        return content


def describe(rewards: list[float]) -> Stats:
    """Mean, population variance, count and spread of at least one reward, by exactly rounded sums."""
    count = len(rewards)
    mean = math.fsum(rewards) / count
    variance = math.fsum((reward - mean) ** 2 for reward in rewards) / count
    return Stats(mean, variance, count, max(rewards) - min(rewards))
