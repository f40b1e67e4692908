"""The trajectories of manifests, by reference: fetched at their locators, held against their digests.

Those of the next manifest are read while one is trained, so that training does not wait for the log.
"""

import asyncio
from collections.abc import Sequence

from rollstream.eventlog import codec
from rollstream.eventlog.log import Position, ReadableLog, Record, format_position
from rollstream.schemas.errors import DecodeError, retrieve_exception
from rollstream.schemas.events import BatchPlanned, TrajectoryAssembled

FORK = "begin a new run with `rollstream finetune --fork`"
"""Remedy for a log that cannot be trained on."""

Members = list[TrajectoryAssembled]


class MemberReader:
    """Reads the members of a job's manifests, of one manifest ahead at most: two batches are in memory, not more.

    What is read ahead decides nothing: it is given out when that same manifest is asked for, and dropped when another
    one is. What went wrong with it is raised when it is asked for, and never if it is not.
    """

    def __init__(self, log: ReadableLog) -> None:
        self._log = log
        self._ahead: tuple[BatchPlanned, asyncio.Task[Members]] | None = None

    def begin(self, planned: BatchPlanned) -> None:
        """Begin to read the members that will be needed next, in place of those that were read ahead before.

        Nothing is read of a manifest that adopts a version.
        """
        self._drop()
        if planned.adopts is None:
            task = asyncio.create_task(self._read(planned))
            task.add_done_callback(retrieve_exception)  # it may be dropped before anybody asks for its error
            self._ahead = planned, task

    async def members(self, planned: BatchPlanned) -> Members:
        """The trajectories of a manifest, in its order.

        Raises DecodeError if locators are missing or a record is not what the manifest says, TruncatedError if one is
        gone, LogError.
        """
        if self._ahead is None or self._ahead[0] != planned:
            self._drop()
            return await self._read(planned)
        (_, task), self._ahead = self._ahead, None
        return await task

    async def close(self) -> None:
        """Drop what is read ahead, and wait until it is."""
        task = self._drop()
        if task is not None:
            await asyncio.wait([task])

    def _drop(self) -> "asyncio.Task[Members] | None":
        if self._ahead is None:
            return None
        (_, task), self._ahead = self._ahead, None
        task.cancel()
        return task

    async def _read(self, planned: BatchPlanned) -> Members:
        records = await fetch_records(self._log, planned)
        return await asyncio.to_thread(check_members, planned, records)


async def fetch_records(log: ReadableLog, planned: BatchPlanned) -> list[Record]:
    """The records of a manifest's members, in its order.

    Raises DecodeError if locators are missing, TruncatedError if a record is gone.
    """
    if len(planned.locators) != len(planned.members):
        raise DecodeError(
            f"manifest {planned.batch_id} has {len(planned.locators)} locators for {len(planned.members)} members; "
            f"{FORK}"
        )
    return await log.fetch(
        [Position("trajectories", locator.partition, locator.offset) for locator in planned.locators]
    )


def check_members(planned: BatchPlanned, records: Sequence[Record]) -> list[TrajectoryAssembled]:
    """Decode the members' records. Raises DecodeError naming the first that is not what the manifest says."""
    trajectories: list[TrajectoryAssembled] = []
    for member, record in zip(planned.members, records, strict=True):
        where = f"manifest {planned.batch_id}, trajectory {member.trajectory_id} at {format_position(record.position)}"
        try:
            received = codec.decode(record)
        except DecodeError as error:
            raise DecodeError(f"{where}: {error}; {FORK}") from error
        event = received.event
        if not isinstance(event, TrajectoryAssembled) or event.trajectory_id != member.trajectory_id:
            raise DecodeError(f"{where}: the record there is {event.event_id}; {FORK}")
        if received.digest != member.digest:
            raise DecodeError(f"{where}: its digest is {received.digest}, not {member.digest}; it was changed: {FORK}")
        trajectories.append(event)
    return trajectories
