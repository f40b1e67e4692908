"""Partitions in memory and the plain reader over them; what wakes waiting readers is here too."""

import asyncio
from collections import deque
from collections.abc import Iterable, Mapping

from rollstream.eventlog.log import Position, Record, TopicPartition, truncated
from rollstream.schemas.errors import TopicError


class Partition:
    """Kept records of one partition, and the offset of the first of them."""

    def __init__(self) -> None:
        self.begin = 0
        self.records: list[Record] = []

    @property
    def end(self) -> int:
        """Offset after the newest record."""
        return self.begin + len(self.records)


class Store:
    """All partitions by topic and number."""

    def __init__(self, partitions: Iterable[TopicPartition]) -> None:
        self._partitions = {where: Partition() for where in partitions}
        self._waiting: set[asyncio.Future[None]] = set()

    def num_partitions(self, topic: str) -> int:
        """Partition count of a topic. Raises TopicError if there is no such topic."""
        count = sum(1 for where in self._partitions if where.topic == topic)
        if not count:
            raise TopicError(f"topic {topic} is not in the topic table")
        return count

    def begin(self, where: TopicPartition) -> int:
        """Oldest kept offset."""
        return self._partition(where).begin

    def end(self, where: TopicPartition) -> int:
        """Offset after the newest record."""
        return self._partition(where).end

    def append(self, record: Record) -> None:
        """Append a record and wake who waits."""
        self._partition(TopicPartition(record.topic, record.partition)).records.append(record)
        self.wake()

    def wake(self) -> None:
        """Let every waiting reader look again."""
        for waiting in self._waiting:
            if not waiting.done():
                waiting.set_result(None)
        self._waiting.clear()

    async def wait(self, timeout_s: float) -> None:
        """Return at the next wake, or after `timeout_s`."""
        waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.add(waiting)
        try:
            await asyncio.wait({waiting}, timeout=timeout_s)
        finally:
            self._waiting.discard(waiting)

    def read(self, where: TopicPartition, offset: int, limit: int) -> list[Record]:
        """Up to `limit` records from `offset`. Raises TruncatedError."""
        partition = self._partition(where)
        if not partition.begin <= offset <= partition.end:
            raise truncated(where, offset, partition.begin, partition.end)
        first = offset - partition.begin
        return partition.records[first : first + limit]

    def at(self, position: Position) -> Record:
        """The record at a position. Raises TruncatedError."""
        where = TopicPartition(position.topic, position.partition)
        found = self.read(where, position.offset, 1)
        if not found:
            raise truncated(where, position.offset, self.begin(where), self.end(where))
        return found[0]

    def truncate(self, where: TopicPartition, before: int) -> None:
        """Forget the records before an offset."""
        partition = self._partition(where)
        num_gone = min(max(0, before - partition.begin), len(partition.records))
        del partition.records[:num_gone]
        partition.begin += num_gone

    def _partition(self, where: TopicPartition) -> Partition:
        if where not in self._partitions:
            raise TopicError(f"there is no partition {where.partition} of topic {where.topic}")
        return self._partitions[where]


class MemoryReader:
    """`LogReader` in memory."""

    def __init__(self, store: Store, start: Mapping[TopicPartition, int]) -> None:
        self._store = store
        self._next = {where: store.begin(where) if offset < 0 else offset for where, offset in start.items()}
        self._turn = deque(self._next)

    async def poll(self, *, timeout_s: float = 1.0, max_records: int = 10_000) -> list[Record]:
        """Next records; empty after `timeout_s` without any. Raises TruncatedError."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        while not (records := self.take(max_records)):
            left = deadline - asyncio.get_running_loop().time()
            if left <= 0:
                return []
            await self._store.wait(left)
        await asyncio.sleep(0)
        return records

    def take(self, limit: int) -> list[Record]:
        """Records that are there now; the partition that comes first changes from call to call."""
        self._turn.rotate(-1)
        taken: list[Record] = []
        for where in self._turn:
            found = self._store.read(where, self._next[where], limit - len(taken))
            self._next[where] += len(found)
            taken += found
        return taken

    def position(self, where: TopicPartition) -> int:
        """Offset of the next record to be read."""
        return self._next[where]

    def seek(self, where: TopicPartition, offset: int) -> None:
        """Read on from `offset`."""
        self._next[where] = offset
        self._store.wake()

    async def close(self) -> None:
        """Nothing to let go of."""
