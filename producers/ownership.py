"""Taking over steps partitions: reads each from where its predecessor's note points to its end, and folds it."""

import json
from collections.abc import Mapping

from rollstream.eventlog import codec
from rollstream.eventlog.log import EventLog, TopicPartition, check_kept
from rollstream.producers.recovery import PartitionState, evolve
from rollstream.schemas.errors import DecodeError


async def recover(log: EventLog, notes: Mapping[int, str]) -> dict[int, tuple[PartitionState, int]]:
    """State and end offset of each steps partition; `notes` are the committed notes by partition.

    Without a note a partition is read from its beginning; the last record is always read, for its event time.
    Raises TruncatedError if what a note points to was removed, or the partition ends before it.
    """
    begins, ends = await log.begin_offsets("steps"), await log.end_offsets("steps")
    states = {partition: PartitionState() for partition in notes}
    starts = {
        TopicPartition("steps", partition): _start(partition, note, begins[partition], ends[partition])
        for partition, note in notes.items()
    }
    filled = {where: start for where, start in starts.items() if start < ends[where.partition]}
    if filled:
        await _read(log, filled, states, ends)
    return {partition: (state, ends[partition]) for partition, state in states.items()}


async def read(log: EventLog, partition: int, start: int, end: int) -> PartitionState:
    """State of a steps partition by its records of `start` to `end`."""
    state = PartitionState()
    await _read(log, {TopicPartition("steps", partition): start}, {partition: state}, {partition: end})
    return state


def _start(partition: int, note: str, begin: int, end: int) -> int:
    offset = int(json.loads(note)["steps"]) if note else begin
    check_kept(TopicPartition("steps", partition), offset, begin, end)
    return max(begin, min(offset, end - 1))


async def _read(
    log: EventLog, start: Mapping[TopicPartition, int], states: Mapping[int, PartitionState], ends: Mapping[int, int]
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
