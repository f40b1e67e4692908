"""What others write into a steps partition beside its owner: a zombie may go on for seconds after it lost it.

An offset between acknowledged sends that is none of the owner's own is a stranger's record. A group that strangers
wrote to is in the state that the log tells, not in the one that its owner remembers.
"""

from rollstream.eventlog import codec
from rollstream.eventlog.log import EventLog, Position
from rollstream.producers.ownership import read
from rollstream.producers.recovery import GroupState
from rollstream.producers.steps_writer import StepsWriter
from rollstream.schemas.errors import DecodeError
from rollstream.schemas.events_rollouts import GroupEvent


class Strangers:
    """Groups of one owned partition that others wrote to."""

    def __init__(self, log: EventLog, writer: StepsWriter) -> None:
        self._log = log
        self._writer = writer
        self._first_offsets: dict[str, int] = {}
        """By group: of its first record by a stranger."""

    async def reopened(self, group: GroupState) -> GroupState | None:
        """The state of a group that is not settled, by the log, because of what strangers wrote to it; else None.

        All that the owner has sent so far is acknowledged when this returns.
        """
        await self._writer.landed()
        await self._look()
        first = self._first_offsets.get(group.group_id)
        if first is None:
            return None
        start, end = min(first, group.first_offset), self._writer.floor()
        state = await read(self._log, self._writer.partition, start, end)
        return state.groups.get(group.group_id)

    async def _look(self) -> None:
        offsets = self._writer.take_foreign()
        for record in await self._log.fetch(Position("steps", self._writer.partition, offset) for offset in offsets):
            try:
                event = codec.decode(record).event
            except DecodeError:
                continue  # assembly sends it to the dead letters
            if isinstance(event, GroupEvent):
                self._first_offsets.setdefault(event.group_id, record.offset)
