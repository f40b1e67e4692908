"""The rules of an attempt, used by takeover, assembly and the scoring of recorded rollouts.

Pure. An attempt of an open group starts at its first record of any kind, because its RolloutStarted may be undecodable.
The first record of an index counts; a second one with other content shows that two producers wrote the attempt. The
first RolloutEnded or RolloutFailed decides it.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

from rollstream.eventlog import codec
from rollstream.schemas import ids
from rollstream.schemas.events.rollouts import RolloutEnded

Incompleteness = Literal["", "incomplete", "digest", "no_score"]


class Cause(StrEnum):
    """Cause of a RolloutFailed."""

    ENVIRONMENT_ERROR = "environment_error"
    """The environment raised an error or broke its contract."""
    REWARD_ERROR = "reward_error"
    """A reward function or an evaluator raised an error."""
    ENGINE_ERROR = "engine_error"
    """The engine could not answer, or could not load the weights of the group, which then has this attempt only."""
    TIMEOUT = "timeout"
    """The attempt, or its group, took longer than its limit."""
    PRODUCER_LOST = "producer_lost"
    """The attempt ended with its producer."""
    CANCELLED = "cancelled"
    """The task was cancelled, or its run has ended."""
    NOT_ALLOWED = "not_allowed"
    """The local configuration does not allow the task or the weights; the group has this attempt only."""
    OVERSAMPLED = "oversampled"
    """It was in progress when enough others of its group were complete."""


# Called for every attempt: `dict[int, str]()` takes five times as long.
def _no_digests() -> dict[int, str]:
    return {}


@dataclass(slots=True)
class Recorded:
    """Content digests, by index, of the records of an undecided attempt."""

    rollout_id: str
    member: int
    number: int
    """Number of the attempt among those of its member, from 0 on."""
    steps: dict[int, str] = field(default_factory=_no_digests)
    rewards: dict[int, str] = field(default_factory=_no_digests)
    is_spliced: bool = False
    """Whether two producers wrote it: an index has two contents."""

    def take_step(self, index: int, digest: str) -> bool:
        """Add a StepRecorded; returns whether it is the first of its index and therefore counts."""
        first = self.steps.get(index)
        if first is None:
            self.steps[index] = digest
            return True
        self.is_spliced = self.is_spliced or first != digest
        return False

    def take_reward(self, index: int, digest: str) -> bool:
        """Add a RewardRecorded; returns whether it is the first of its index and therefore counts."""
        first = self.rewards.get(index)
        if first is None:
            self.rewards[index] = digest
            return True
        self.is_spliced = self.is_spliced or first != digest
        return False

    def incompleteness(self, ended: RolloutEnded) -> Incompleteness:
        """The reason why the attempt is incomplete at its end, by count, digest and scores; empty if it is complete."""
        if len(self.steps) != ended.num_steps or len(self.rewards) != ended.num_rewards:
            return "incomplete"  # lengths first, because the count in a record is unbounded
        try:
            digests = [self.steps[index] for index in range(ended.num_steps)]
            digests += [self.rewards[index] for index in range(ended.num_rewards)]
        except KeyError:
            return "incomplete"
        if codec.chain(ended.rollout_id, digests) != ended.digest:
            return "digest"
        return "no_score" if ended.missing_scores else ""

    def is_spliced_at(self, ended: RolloutEnded) -> bool:
        """Whether two producers wrote the attempt; the partition owner sees this too and starts another attempt."""
        has_more = max(self.steps, default=-1) >= ended.num_steps
        return self.is_spliced or has_more or max(self.rewards, default=-1) >= ended.num_rewards


def attempt_in(group_id: str, size: int, rollout_id: str) -> tuple[int, int] | None:
    """Member and attempt number of a rollout id; None if it is not an attempt of a member of the group."""
    found = ids.attempt_of(group_id, rollout_id)
    return None if found is None or found[0] >= size else found


def counts_as_attempt(cause: str) -> bool:
    """Whether a failed attempt is one of the `max_attempts` of its member."""
    return cause != Cause.PRODUCER_LOST


def is_settled(*, is_complete: bool, is_final: bool, has_open_attempts: bool) -> bool:
    """Whether a member is settled when one of its attempts is decided; it stays settled.

    It is settled once it has a complete attempt, or will not be retried (`is_final`) and has no attempt in progress.
    """
    return is_complete or (is_final and not has_open_attempts)


def is_group_settled(*, size: int, num_settled: int, num_complete: int, enough: int) -> bool:
    """Whether a group of `size` members is settled: all of them are, or `enough` are complete (0: there is no such)."""
    return num_settled == size or 0 < enough <= num_complete
