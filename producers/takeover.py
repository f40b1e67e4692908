"""State of a steps partition's groups: a pure fold, with which a new owner continues where another stopped.

Only GroupStarted opens a group; records of groups that were not seen to open belong to closed ones. Attempts are
decided and members settled by the rules of `eventlog.attempts`, as in assembly. Timeouts are left to the owner.

Takeover of steps partitions: reads each from the offset in its predecessor's commit metadata to its end, and folds it.

Foreign writes into a steps partition: a zombie may go on writing for seconds after it lost the partition. An offset
between acknowledged sends that is none of the owner's own is a foreign write. A group with foreign writes has the state
that the log shows, not the one that its owner remembers.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field

from rollstream.eventlog import codec
from rollstream.eventlog.attempts import Recorded, attempt_in, counts_as_attempt, is_group_settled, is_settled
from rollstream.eventlog.log import ReadableLog, Received, Record, TopicPartition, check_kept
from rollstream.eventlog.reading import read_to_end
from rollstream.producers.ended_runs import CommitMetadata
from rollstream.producers.steps_writer import StepsWriter
from rollstream.schemas import ids
from rollstream.schemas.base import MAX_TIME_MS
from rollstream.schemas.errors import DecodeError
from rollstream.schemas.events import (
    GroupExtended,
    GroupStarted,
    RewardRecorded,
    RolloutEnded,
    RolloutFailed,
    RolloutStarted,
    StepRecorded,
)
from rollstream.schemas.events.rollouts import GroupEvent

MAX_START_MS = MAX_TIME_MS - 2**50
"""Latest event time at which an owner's clock may begin, so that its own times can be written for 35,000 years. Only a
forged record has a later one, and times out the groups that are open at it.
"""
MAX_DEADLINE_MS = MAX_TIME_MS - 2**49
"""Latest deadline that an owner moves on, for the same reason."""
LOOKS_BACK = (100, 1000, 10_000)
"""Numbers of earlier records that are read in turn for the event time, where the last ones are not events."""


@dataclass(slots=True)
class MemberState:
    """Progress of one member of a group."""

    open_attempts: set[int] = field(default_factory=set)
    next_attempt: int = 0
    num_failed: int = 0
    """Attempts that failed by themselves, not because their producer was lost."""
    is_final: bool = False
    """It is not tried again."""
    is_complete: bool = False
    is_settled: bool = False
    """It has a complete attempt, or is not tried again and had no attempt under way when one was decided."""


@dataclass(slots=True)
class GroupProgress:
    """A group that was started and is not settled."""

    group_id: str
    size: int
    deadline_ms: int
    """Event time after which the group closes with what it has."""
    first_offset: int
    """Lower bound of the offset of its first record in `steps`."""
    enough: int = 0
    """Complete members that settle it; 0: all members have to be settled."""
    members: dict[int, MemberState] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for index in range(self.size):
            self.members.setdefault(index, MemberState())

    @property
    def is_settled(self) -> bool:
        """Every member is settled, or enough are complete."""
        members = self.members.values()
        return is_group_settled(
            size=len(members),
            num_settled=sum(member.is_settled for member in members),
            num_complete=sum(member.is_complete for member in members),
            enough=self.enough,
        )

    def begun(self, rollout_id: str) -> tuple[MemberState, int] | None:
        """Member and number of an attempt that has begun; None of any other."""
        member, number = ids.attempt_of(self.group_id, rollout_id) or (-1, 0)
        found = self.members.get(member)
        return None if found is None or number >= found.next_attempt else (found, number)

    def begin(self, member: int, attempt: int) -> None:
        """An attempt began."""
        found = self.members.setdefault(member, MemberState())
        found.open_attempts.add(attempt)
        found.next_attempt = max(found.next_attempt, attempt + 1)

    def complete(self, member: int, attempt: int) -> None:
        """An attempt is complete, unless it was decided before: the first record that decides it counts."""
        found = self.members[member]
        if attempt not in found.open_attempts:
            return
        found.open_attempts.discard(attempt)
        found.is_complete = found.is_settled = True

    def fail(self, member: int, attempt: int, *, is_final: bool, is_counted: bool) -> None:
        """An attempt failed, unless it was decided before; `is_final`: its member is not tried again, `is_counted`: it
        used an attempt up.
        """
        found = self.members[member]
        if attempt not in found.open_attempts:
            return
        found.open_attempts.discard(attempt)
        found.num_failed += is_counted
        found.is_final = found.is_final or is_final
        found.is_settled = found.is_settled or is_settled(
            is_complete=False, is_final=found.is_final, has_open_attempts=bool(found.open_attempts)
        )


@dataclass(slots=True)
class PartitionState:
    """The fold's state for one steps partition."""

    first_offset: int | None = None
    """Offset of the first record that was read."""
    groups: dict[str, GroupProgress] = field(default_factory=dict)
    """Open groups by id, oldest first."""
    settled: set[str] = field(default_factory=set)
    last_event_ms: int | None = None
    attempts: dict[str, dict[str, Recorded | None]] = field(default_factory=dict)
    """Attempts of open groups, by group id and rollout id; None of those that are decided."""


def fold(records: Iterable[Received]) -> PartitionState:
    """State of a partition after its records, in order."""
    state = PartitionState()
    for received in records:
        evolve(state, received)
    return state


def evolve(state: PartitionState, received: Received) -> None:
    """Take one record of the partition into its state."""
    event = received.event
    if state.first_offset is None:
        state.first_offset = received.position.offset
    state.last_event_ms = max(state.last_event_ms or 0, min(event.time_ms, MAX_START_MS))
    if isinstance(event, GroupStarted):
        _open(state, event, received.position.offset)
    elif isinstance(event, GroupExtended):
        _extend(state, event)
    elif isinstance(event, RolloutStarted | StepRecorded | RewardRecorded | RolloutEnded | RolloutFailed):
        group = state.groups.get(event.group_id)
        attempt = None if group is None else _attempt_of(state, group, event.rollout_id)
        if group is not None and attempt is not None:
            _continue(state, group, attempt, event, received.digest)


def _open(state: PartitionState, event: GroupStarted, offset: int) -> None:
    if event.group_id in state.groups or event.group_id in state.settled:
        return
    deadline_ms = min(event.time_ms + event.timeout_ms, MAX_DEADLINE_MS)
    group = GroupProgress(event.group_id, event.size, deadline_ms, offset, enough=event.enough)
    state.groups[event.group_id] = group
    state.attempts[event.group_id] = {}
    _close_if_settled(state, group)


def _extend(state: PartitionState, event: GroupExtended) -> None:
    group = state.groups.get(event.group_id)
    if group is not None:
        group.deadline_ms = max(group.deadline_ms, min(event.deadline_ms, MAX_DEADLINE_MS))


def _attempt_of(state: PartitionState, group: GroupProgress, rollout_id: str) -> Recorded | None:
    """The attempt that a record is about, opened by its first one; None if it is decided, or none at a member."""
    attempts = state.attempts[group.group_id]
    if rollout_id not in attempts:
        found = attempt_in(group.group_id, group.size, rollout_id)
        if found is None:
            return None
        attempts[rollout_id] = Recorded(rollout_id, *found)
        group.begin(*found)
    return attempts[rollout_id]


def _continue(
    state: PartitionState,
    group: GroupProgress,
    attempt: Recorded,
    event: RolloutStarted | StepRecorded | RewardRecorded | RolloutEnded | RolloutFailed,
    digest: str,
) -> None:
    if isinstance(event, StepRecorded):
        attempt.take_step(event.step_index, digest)
    elif isinstance(event, RewardRecorded):
        attempt.take_reward(event.reward_index, digest)
    elif not isinstance(event, RolloutStarted):
        _decide(group, attempt, event)
        state.attempts[group.group_id][attempt.rollout_id] = None
        _close_if_settled(state, group)


def _decide(group: GroupProgress, attempt: Recorded, event: RolloutEnded | RolloutFailed) -> None:
    member, number = attempt.member, attempt.number
    if isinstance(event, RolloutFailed):
        group.fail(member, number, is_final=event.is_final, is_counted=counts_as_attempt(event.cause))
    elif not attempt.incompleteness(event):
        group.complete(member, number)
    else:
        group.fail(member, number, is_final=not attempt.is_spliced_at(event), is_counted=False)


def _close_if_settled(state: PartitionState, group: GroupProgress) -> None:
    if group.is_settled:
        del state.groups[group.group_id]
        del state.attempts[group.group_id]
        state.settled.add(group.group_id)


async def recover(
    log: ReadableLog, metadata: Mapping[int, CommitMetadata | None]
) -> dict[int, tuple[PartitionState, int]]:
    """State and end offset of each steps partition; `metadata`: of the committed offsets, by partition.

    Without metadata a partition is read from its beginning; the last record is always read, for its event time, and
    earlier ones as long as none can be decoded. Raises TruncatedError if what the metadata points to was removed, or
    the partition ends before it.
    """
    begins, ends = await log.begin_offsets("steps"), await log.end_offsets("steps")
    states = {partition: PartitionState() for partition in metadata}
    starts = {
        TopicPartition("steps", partition): _start(partition, found, begins[partition], ends[partition])
        for partition, found in metadata.items()
    }
    filled = {where: start for where, start in starts.items() if start < ends[where.partition]}
    if filled:
        await _read(log, filled, states, ends)
    for where, start in filled.items():
        state = states[where.partition]
        if state.last_event_ms is None:
            state.last_event_ms = await _newest_event_ms(log, where.partition, begins[where.partition], start)
    return {partition: (state, ends[partition]) for partition, state in states.items()}


async def _newest_event_ms(log: ReadableLog, partition: int, begin: int, end: int) -> int | None:
    """Event time of the last records before `end` of which one is an event; None if that is too far back."""
    for size in LOOKS_BACK:
        start = max(begin, end - size)
        if start == end:
            return None
        found = (await read(log, partition, start, end)).last_event_ms
        if found is not None:
            return found
        end = start
    return None


async def read(log: ReadableLog, partition: int, start: int, end: int) -> PartitionState:
    """State of a steps partition by its records of `start` to `end`."""
    state = PartitionState()
    await _read(log, {TopicPartition("steps", partition): start}, {partition: state}, {partition: end})
    return state


def _start(partition: int, metadata: CommitMetadata | None, begin: int, end: int) -> int:
    offset = begin if metadata is None else metadata.steps
    check_kept(TopicPartition("steps", partition), offset, begin, end)
    return max(begin, min(offset, end - 1))


async def _read(
    log: ReadableLog, start: Mapping[TopicPartition, int], states: Mapping[int, PartitionState], ends: Mapping[int, int]
) -> None:
    reader = await log.reader(start)
    try:
        while any(reader.position(where) < ends[where.partition] for where in start):
            for record in await reader.poll():
                if record.offset >= ends[record.partition]:
                    continue
                try:
                    evolve(states[record.partition], codec.decode(record))
                except DecodeError:
                    continue  # assembly sends it to the dead letters; it is nothing that an owner wrote
    finally:
        await reader.close()


class ForeignWrites:
    """Groups of one owned partition that others wrote to."""

    def __init__(self, log: ReadableLog, writer: StepsWriter, *, is_settled: Callable[[str], bool]) -> None:
        """`is_settled`: whether the owner is done with a group, so that it asks for it no more."""
        self._log = log
        self._is_settled = is_settled
        self._writer = writer
        self._first_offsets: dict[str, int] = {}
        """Offset of the first foreign write, by group."""
        self._reading = asyncio.Lock()

    async def reopened(self, group: GroupProgress) -> GroupProgress | None:
        """The state of a group that is not settled, by the log, because of foreign writes to it; else None.

        All that the owner has sent so far is acknowledged when this returns.
        """
        await self._writer.landed()
        await self._take_foreign_writes()
        first = self._first_offsets.get(group.group_id)
        if first is None:
            return None
        start, end = min(first, group.first_offset), self._writer.floor()
        state = await read(self._log, self._writer.partition, start, end)
        return state.groups.get(group.group_id)

    def forget(self, group_id: str) -> None:
        """The group is settled."""
        self._first_offsets.pop(group_id, None)

    async def _take_foreign_writes(self) -> None:
        """Read the records at offsets that are not own ones; the control record of a transaction is none."""
        async with self._reading:  # a second call needs the records that the first is reading
            offsets = set(self._writer.take_foreign())
            if not offsets:
                return
            where = self._writer.partition
            starts, ends = {where: min(offsets)}, {where: max(offsets) + 1}
            async with aclosing(read_to_end(self._log, "steps", starts, ends)) as records:
                async for record in records:
                    if record.offset in offsets:
                        self._take_foreign_write(record)

    def _take_foreign_write(self, record: Record) -> None:
        try:
            event = codec.decode(record).event
        except DecodeError:
            return  # assembly sends it to the dead letters
        if isinstance(event, GroupEvent) and not self._is_settled(event.group_id):
            self._first_offsets.setdefault(event.group_id, record.offset)
