"""What a steps partition says about its groups: a pure fold, by which a new owner goes on where another stopped.

Only GroupStarted opens a group; records of groups that were not seen to open belong to closed ones. The first
occurrence of an event counts, the first terminal event of an attempt decides it, and members are settled as assembly
settles them. Timeouts are left to the owner.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from rollstream.eventlog import codec
from rollstream.eventlog.log import Received
from rollstream.schemas.events import (
    GroupStarted,
    RewardRecorded,
    RolloutEnded,
    RolloutFailed,
    RolloutStarted,
    StepRecorded,
)

PRODUCER_LOST = "producer_lost"
"""Cause of an attempt that ended with its producer."""


@dataclass(slots=True)
class Member:
    """How far one member of a group is."""

    open_attempts: set[int] = field(default_factory=set)
    next_attempt: int = 0
    num_failed: int = 0
    """Attempts that failed by themselves, not because their producer was lost."""
    is_final: bool = False
    """It is not tried again."""
    is_settled: bool = False
    """It has a complete attempt, or is not tried again and had no attempt under way when one was decided."""


@dataclass(slots=True)
class GroupState:
    """A group that was started and is not settled."""

    group_id: str
    size: int
    deadline_ms: int
    """Event time after which the group closes with what it has."""
    first_offset: int
    """At most the offset of its first record in `steps`."""
    members: dict[int, Member] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for index in range(self.size):
            self.members.setdefault(index, Member())

    @property
    def is_settled(self) -> bool:
        """Every member is settled."""
        return all(member.is_settled for member in self.members.values())

    def begin(self, member: int, attempt: int) -> None:
        """An attempt began."""
        found = self.members.setdefault(member, Member())
        found.open_attempts.add(attempt)
        found.next_attempt = max(found.next_attempt, attempt + 1)

    def complete(self, member: int, attempt: int) -> None:
        """An attempt is complete."""
        found = self.members[member]
        found.open_attempts.discard(attempt)
        found.is_settled = True

    def fail(self, member: int, attempt: int, *, is_final: bool, is_counted: bool) -> None:
        """An attempt failed; `is_final`: its member is not tried again, `is_counted`: it used an attempt up."""
        found = self.members[member]
        found.open_attempts.discard(attempt)
        found.num_failed += is_counted
        found.is_final = found.is_final or is_final
        found.is_settled = found.is_settled or (found.is_final and not found.open_attempts)


@dataclass(slots=True)
class Attempt:
    """What is recorded of one attempt: content digests by index, until it is decided."""

    member: int
    attempt: int
    steps: dict[int, str] = field(default_factory=dict)
    rewards: dict[int, str] = field(default_factory=dict)
    is_spliced: bool = False
    """Two producers wrote it: an index has two contents."""
    is_decided: bool = False


@dataclass(slots=True)
class PartitionState:
    """The fold's state for one steps partition."""

    groups: dict[str, GroupState] = field(default_factory=dict)
    """Open groups by id, oldest first."""
    settled: set[str] = field(default_factory=set)
    last_event_ms: int | None = None
    attempts: dict[str, dict[str, Attempt]] = field(default_factory=dict)
    """Attempts of open groups, by group id and rollout id."""


def fold(records: Iterable[Received]) -> PartitionState:
    """State of a partition after its records, in order."""
    state = PartitionState()
    for received in records:
        evolve(state, received)
    return state


def evolve(state: PartitionState, received: Received) -> None:
    """Take one record of the partition into its state."""
    event = received.event
    state.last_event_ms = max(state.last_event_ms or 0, event.time_ms)
    if isinstance(event, GroupStarted):
        _open(state, event, received.position.offset)
    elif isinstance(event, RolloutStarted):
        _begin(state, event)
    elif isinstance(event, StepRecorded | RewardRecorded | RolloutEnded | RolloutFailed):
        attempt = state.attempts.get(event.group_id, {}).get(event.rollout_id)
        if attempt is not None and not attempt.is_decided:
            _continue(state, attempt, event, received.digest)


def is_complete(attempt: Attempt, ended: RolloutEnded) -> bool:
    """Every step and reward that the end counts is there, and its digest names just these."""
    has_all = set(attempt.steps) == set(range(ended.num_steps)) and set(attempt.rewards) == set(
        range(ended.num_rewards)
    )
    if not has_all:
        return False
    in_order = [attempt.steps[index] for index in range(ended.num_steps)]
    in_order += [attempt.rewards[index] for index in range(ended.num_rewards)]
    return codec.chain(ended.rollout_id, in_order) == ended.digest


def _open(state: PartitionState, event: GroupStarted, offset: int) -> None:
    if event.group_id in state.groups or event.group_id in state.settled:
        return
    group = GroupState(event.group_id, event.size, event.time_ms + event.timeout_ms, offset)
    state.groups[event.group_id] = group
    state.attempts[event.group_id] = {}
    _close_if_settled(state, group)


def _begin(state: PartitionState, event: RolloutStarted) -> None:
    group = state.groups.get(event.group_id)
    if group is None or event.rollout_id in state.attempts[event.group_id]:
        return
    state.attempts[event.group_id][event.rollout_id] = Attempt(event.member, event.attempt)
    group.begin(event.member, event.attempt)


def _continue(
    state: PartitionState,
    attempt: Attempt,
    event: StepRecorded | RewardRecorded | RolloutEnded | RolloutFailed,
    digest: str,
) -> None:
    if isinstance(event, StepRecorded):
        first = attempt.steps.setdefault(event.step_index, digest)
        attempt.is_spliced = attempt.is_spliced or first != digest
    elif isinstance(event, RewardRecorded):
        first = attempt.rewards.setdefault(event.reward_index, digest)
        attempt.is_spliced = attempt.is_spliced or first != digest
    else:
        attempt.is_decided = True
        group = state.groups[event.group_id]
        _decide(group, attempt, event)
        _close_if_settled(state, group)


def _decide(group: GroupState, attempt: Attempt, event: RolloutEnded | RolloutFailed) -> None:
    member, number = attempt.member, attempt.attempt
    if isinstance(event, RolloutFailed):
        group.fail(member, number, is_final=event.is_final, is_counted=event.cause != PRODUCER_LOST)
    elif is_complete(attempt, event):
        group.complete(member, number)
    else:
        group.fail(member, number, is_final=not _is_spliced(attempt, event), is_counted=False)


def _is_spliced(attempt: Attempt, ended: RolloutEnded) -> bool:
    has_more = max(attempt.steps, default=-1) >= ended.num_steps
    return attempt.is_spliced or has_more or max(attempt.rewards, default=-1) >= ended.num_rewards


def _close_if_settled(state: PartitionState, group: GroupState) -> None:
    if group.is_settled:
        del state.groups[group.group_id]
        del state.attempts[group.group_id]
        state.settled.add(group.group_id)
