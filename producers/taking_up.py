"""The parts of a group begun by another process that a new owner continues: open attempts, and the time left."""

from collections.abc import Mapping

from rollstream.eventlog import codec
from rollstream.eventlog.log import EventLog, TopicPartition
from rollstream.producers.rollout.continuing import RecordedAttempt
from rollstream.producers.steps_writer import StepsWriter
from rollstream.producers.takeover import GroupProgress
from rollstream.schemas import ids
from rollstream.schemas.errors import DecodeError
from rollstream.schemas.events import GroupExtended, RewardRecorded, RolloutStarted, StepRecorded, TaskRequested

CONTINUED = ("gateway",)
"""Environments whose agents are outside, and still there when a producer is lost."""


async def continued_attempts(
    log: EventLog, writer: StepsWriter, task: TaskRequested, state: GroupProgress
) -> dict[tuple[int, int], RecordedAttempt]:
    """Records of the attempts that continue here, by member and attempt. Empty for environments in which no agent
    waits.
    """
    if task.settings.environment not in CONTINUED:
        return {}
    wanted = {
        ids.rollout_id(task.group_id, index, max(member.open_attempts)): (index, max(member.open_attempts))
        for index, member in state.members.items()
        if len(member.open_attempts) == 1 and not member.is_settled
    }
    found = await _read(log, writer, state.first_offset, wanted)
    return {wanted[rollout_id]: attempt for rollout_id, attempt in found.items()}


async def _read(
    log: EventLog, writer: StepsWriter, start: int, wanted: Mapping[str, object]
) -> dict[str, RecordedAttempt]:
    """Recorded attempts that began, by rollout id."""
    found: dict[str, RecordedAttempt] = {}
    where, end = TopicPartition("steps", writer.partition), writer.floor()
    if not wanted or start >= end:
        return found
    reader = await log.reader({where: start})
    try:
        while reader.position(where) < end:
            for record in await reader.poll():
                if record.offset >= end:
                    continue
                try:
                    received = codec.decode(record)
                except DecodeError:
                    continue  # assembly sends it to the dead letters
                event = received.event
                if isinstance(event, RolloutStarted) and event.rollout_id in wanted:
                    found.setdefault(event.rollout_id, RecordedAttempt({}, {}))
                elif isinstance(event, StepRecorded) and event.rollout_id in found:
                    found[event.rollout_id].steps.setdefault(event.step_index, (event, received.digest))
                elif isinstance(event, RewardRecorded) and event.rollout_id in found:
                    found[event.rollout_id].rewards.setdefault(event.reward_index, (event, received.digest))
    finally:
        await reader.close()
    return found


async def extend(writer: StepsWriter, owner: str, task: TaskRequested, state: GroupProgress, left_ms: int) -> None:
    """Move the deadline of a group on in the log, to `left_ms` from now."""
    time_ms = writer.clock()
    state.deadline_ms = time_ms + left_ms
    extended = GroupExtended(
        run_id=task.run_id, time_ms=time_ms, group_id=task.group_id, deadline_ms=state.deadline_ms, owner=owner
    )
    await writer.send(codec.encode(extended))
