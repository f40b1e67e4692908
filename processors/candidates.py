"""A closed group as something to train on: its trainable trajectories, how their rewards differ, how old they are."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from rollstream.schemas.base import Locator
from rollstream.schemas.events import GroupClosed
from rollstream.schemas.events_training import MemberRef


@dataclass(frozen=True, slots=True)
class Candidate:
    """Trajectories of one group that may be trained on; `rewards` and `locators` are aligned with `members`."""

    run_id: str
    group_id: str
    example_id: str
    job_id: str
    epoch: int
    index: int
    is_demonstration: bool
    members: tuple[MemberRef, ...]
    rewards: tuple[float, ...]
    locators: tuple[Locator, ...]
    """Empty if the group was closed without them."""

    @property
    def mean_reward(self) -> float:
        """Mean over the trajectories."""
        return mean(self.rewards)

    @property
    def spread(self) -> float:
        """Largest difference of rewards between trajectories of the same agent."""
        return spread(self.members)

    def staleness(self, member: MemberRef, version: int) -> int:
        """Versions between a trajectory's oldest sampled token and the one it is trained at; 0 for a demonstration."""
        return 0 if self.is_demonstration else max(0, version - member.min_version)

    def is_stale(self, version: int, bound: int) -> bool:
        """Whether any trajectory would be older than `bound` when trained at `version`."""
        return any(self.staleness(member, version) > bound for member in self.members)

    def only(self, places: Sequence[int], rewards: Sequence[float] | None = None) -> "Candidate":
        """The trajectories at the given places, in that order, optionally with other rewards."""
        return replace(
            self,
            members=tuple(self.members[place] for place in places),
            rewards=tuple(rewards if rewards is not None else (self.rewards[place] for place in places)),
            locators=tuple(self.locators[place] for place in places) if self.locators else (),
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
        members=event.members,
        rewards=tuple(member.reward for member in event.members),
        locators=event.locators if has_locators else (),
    )


def is_trainable(member: MemberRef, *, needs_logprobs: bool) -> bool:
    """Whether there are sampled tokens to train on; reinforcement also needs their log-probabilities."""
    return member.num_completion_tokens > 0 and (member.has_logprobs or not needs_logprobs)


def rollout_rewards(members: Iterable[MemberRef]) -> tuple[float, ...]:
    """One reward a rollout, by member number: the mean over its agents' trajectories."""
    by_member: dict[int, list[float]] = {}
    for member in members:
        by_member.setdefault(member.member, []).append(member.reward)
    return tuple(mean(rewards) for _, rewards in sorted(by_member.items()))


def spread(members: Iterable[MemberRef]) -> float:
    """Largest difference of rewards between trajectories of the same agent; 0 if there are none."""
    by_agent: dict[str, list[float]] = {}
    for member in members:
        by_agent.setdefault(member.agent, []).append(member.reward)
    return max((max(rewards) - min(rewards) for rewards in by_agent.values()), default=0.0)


def mean(values: Sequence[float]) -> float:
    """Mean of at least one number, by an exactly rounded sum: the order does not matter."""
    return math.fsum(values) / len(values)
