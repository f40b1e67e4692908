"""Which records have a dead letter: whoever reads a partition again passes them over, whatever it would make of them.

A letter decides: code that has learnt to read such a record meanwhile must not fold it where it lies, for nobody has
answered it there. Sent again, it counts.
"""

from rollstream.eventlog.dead_letters import origin, redriven
from rollstream.eventlog.log import EventLog, TopicPartition
from rollstream.eventlog.reading import read_to_end
from rollstream.schemas.errors import LogError


class Buried:
    """Offsets of dead records by their partition, as far as `dlq` has been read."""

    def __init__(self, log: EventLog) -> None:
        self._log = log
        self._next_offset = 0
        self._offsets: dict[TopicPartition, set[int]] = {}

    async def refresh(self) -> None:
        """Read `dlq` on to its end."""
        end = (await self._log.end_offsets("dlq"))[0]
        if self._next_offset >= end:
            return
        begin = max(self._next_offset, (await self._log.begin_offsets("dlq"))[0])
        async for record in read_to_end(self._log, "dlq", {0: begin}, {0: end}):
            if redriven(record) is not None:
                continue
            try:
                topic, partition, offset = origin(record.headers)
            except LogError:
                continue  # no letter of ours
            self.offsets(TopicPartition(topic, partition)).add(offset)
        self._next_offset = end

    def offsets(self, where: TopicPartition) -> set[int]:
        """Offsets of the dead records of a partition; the set grows when `refresh` finds more."""
        return self._offsets.setdefault(where, set())
