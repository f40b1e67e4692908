"""Training candidates of a closed group: its trainable trajectories, their reward range and staleness.

Also the windowed reward store: rewards of each example over the last weight versions. Makes no decisions.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from rollstream.schemas.base import Locator
from rollstream.schemas.events import GroupClosed
from rollstream.schemas.events.training import MemberRef
from rollstream.schemas.settings import EXTERNAL


@dataclass(frozen=True, slots=True)
class Candidate:
    """Trainable trajectories of one group; `rewards` and `locators` are aligned with `members`."""

    run_id: str
    group_id: str
    example_id: str
    job_id: str
    epoch: int
    index: int
    is_demonstration: bool
    is_external: bool
    """Another training backend has the model: neither tokens nor versions are needed."""
    members: tuple[MemberRef, ...]
    rewards: tuple[float, ...]
    locators: tuple[Locator, ...]
    """Empty if the group was closed without them."""

    @property
    def mean_reward(self) -> float:
        """Mean over the trajectories."""
        return mean(self.rewards)

    @property
    def reward_range(self) -> float:
        """Largest difference of rewards between trajectories of the same agent."""
        return reward_range(self.members)

    def staleness(self, member: MemberRef, version: int) -> int:
        """Versions between a trajectory's oldest sampled token and the one it is trained at; 0 without own samples."""
        return 0 if self.is_demonstration or self.is_external else max(0, version - member.min_version)

    def is_stale(self, version: int, bound: int, oldest: int = 0) -> bool:
        """Whether any trajectory would be older than `bound` when trained at `version`, or is of a version before
        `oldest`."""
        bound = min(bound, version - oldest)
        return any(self.staleness(member, version) > bound for member in self.members)

    def only(self, indices: Sequence[int], rewards: Sequence[float] | None = None) -> "Candidate":
        """The trajectories at the given indices, in that order, optionally with other rewards."""
        return replace(
            self,
            members=tuple(self.members[index] for index in indices),
            rewards=tuple(rewards if rewards is not None else (self.rewards[index] for index in indices)),
            locators=tuple(self.locators[index] for index in indices) if self.locators else (),
        )


def candidate(event: GroupClosed) -> Candidate:
    """All complete trajectories of a closed group."""
    has_locators = len(event.locators) == len(event.members)
    return Candidate(
        run_id=event.run_id,
        group_id=event.group_id,
        example_id=event.example_id,
        job_id=event.job_id,
        epoch=event.epoch,
        index=event.index,
        is_demonstration=event.policy == "demonstration",
        is_external=event.policy == EXTERNAL,
        members=event.members,
        rewards=tuple(member.reward for member in event.members),
        locators=event.locators if has_locators else (),
    )


def is_trainable(member: MemberRef, *, needs_logprobs: bool) -> bool:
    """Whether there are sampled tokens to train on; RL also needs their log-probabilities."""
    return member.num_completion_tokens > 0 and (member.has_logprobs or not needs_logprobs)


def rollout_rewards(members: Iterable[MemberRef]) -> tuple[float, ...]:
    """One reward per rollout, by member number: the mean over its agents' trajectories."""
    by_member: dict[int, list[float]] = {}
    for member in members:
        by_member.setdefault(member.member, []).append(member.reward)
    return tuple(mean(rewards) for _, rewards in sorted(by_member.items()))


class AgentBounds(NamedTuple):
    """Smallest and largest reward of an agent."""

    agent: str
    smallest: float
    largest: float


def bounds_by_agent(rewards: Iterable[tuple[str, float]]) -> tuple[AgentBounds, ...]:
    """Smallest and largest of the rewards of each agent; `rewards`: pairs of agent and reward."""
    return united(AgentBounds(agent, reward, reward) for agent, reward in rewards)


def united(bounds: Iterable[AgentBounds]) -> tuple[AgentBounds, ...]:
    """One entry per agent, sorted by name, with the smallest and the largest of its rewards."""
    found: dict[str, AgentBounds] = {}
    for one in bounds:
        known = found.get(one.agent, one)
        found[one.agent] = AgentBounds(one.agent, min(known.smallest, one.smallest), max(known.largest, one.largest))
    return tuple(bound for _, bound in sorted(found.items()))


def largest_range(bounds: Iterable[AgentBounds]) -> float:
    """Largest difference of rewards of one agent; 0 if there are none."""
    return max((one.largest - one.smallest for one in bounds), default=0.0)


def reward_range(members: Iterable[MemberRef]) -> float:
    """Largest difference of rewards between trajectories of the same agent; 0 if there are none."""
    return largest_range(bounds_by_agent((member.agent, member.reward) for member in members))


def mean(values: Sequence[float]) -> float:
    """Mean of at least one number, with an exactly rounded sum, so that the order does not matter."""
    return math.fsum(values) / len(values)


@dataclass(frozen=True, slots=True)
class Stats:
    """Reward statistics of one example inside the window."""

    mean: float
    variance: float
    """Population variance."""
    count: int
    reward_range: float
    """Largest difference of rewards of one agent; in plans before `JUDGES_AGENTS_SINCE` of means over the agents."""


class Entry(NamedTuple):
    """Rewards of one group, one per rollout, with the newest weight version that it was sampled from."""

    version: int
    rewards: tuple[float, ...]
    bounds: tuple[AgentBounds, ...] = ()
    """Bounds of each agent's rewards; none in plans before `JUDGES_AGENTS_SINCE`."""


@dataclass(slots=True)
class Window:
    """Entries by example and group.

    Its results depend neither on the order of arrival nor on repeats. Mutable on purpose: only its fold writes it.
    """

    entries: dict[str, dict[str, Entry]] = field(default_factory=dict[str, dict[str, Entry]])

    def add(self, example_id: str, group_id: str, entry: Entry) -> None:
        """Store a group's rewards; the first entry of a group counts. Entries without rewards are ignored."""
        if entry.rewards:
            self.entries.setdefault(example_id, {}).setdefault(group_id, entry)

    def forget(self, before: int) -> None:
        """Drop entries sampled under versions older than `before`."""
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
        entries = [entry for _, entry in sorted(groups.items()) if entry.version >= since]
        rewards = [reward for entry in entries for reward in entry.rewards]
        return describe(rewards, united(one for entry in entries for one in entry.bounds)) if rewards else None

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


def describe(rewards: list[float], bounds: Sequence[AgentBounds] = ()) -> Stats:
    """Mean, population variance and count of at least one reward, by exactly rounded sums, and the range: by agent, or
    of all rewards if there are no bounds.
    """
    count = len(rewards)
    mean = math.fsum(rewards) / count
    variance = math.fsum((reward - mean) ** 2 for reward in rewards) / count
    return Stats(mean, variance, count, largest_range(bounds) if bounds else max(rewards) - min(rewards))
