"""A log in memory that counts the records that its readers take, by topic."""

import asyncio
from collections import Counter
from collections.abc import Mapping
from typing import Any

from rollstream.eventlog.log import Encoded, Headers, Position, Record, TopicPartition
from rollstream.eventlog.memory.groups import MemoryReader
from rollstream.eventlog.memory.log import MemoryLog
from rollstream.schemas.base import Event


class CountingReader(MemoryReader):
    """A plain reader that counts."""

    num_read: Counter[str]

    def take(self, limit: int) -> list[Record]:
        """Take like MemoryReader, and count the records."""
        taken = super().take(limit)
        self.num_read.update(record.topic for record in taken)
        return taken


class CountingLog(MemoryLog):
    """Counts what plain readers read; tells of events as they are sent."""

    def __init__(self, *, num_partitions: int = 6) -> None:
        super().__init__(num_partitions=num_partitions)
        self.num_read: Counter[str] = Counter()
        self._awaited: list[tuple[type[Event], asyncio.Future[None]]] = []

    async def reader(self, start: Mapping[TopicPartition, int]) -> MemoryReader:
        """A reader that counts."""
        reader = CountingReader(self._store, start)
        reader.num_read = self.num_read
        return reader

    def has_sent(self, kind: type[Event]) -> "asyncio.Future[None]":
        """Done once an event of this kind is sent."""
        found: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._awaited.append((kind, found))
        return found

    async def send(self, event: Event | Encoded, *, partition: int | None = None) -> Position:
        """Send like MemoryLog, and resolve the futures that await such an event."""
        position = await super().send(event, partition=partition)
        sent = event.event if isinstance(event, Encoded) else event
        for kind, found in self._awaited:
            if isinstance(sent, kind) and not found.done():
                found.set_result(None)
        return position

    async def send_many(self, topic: str, count: int, *, key: bytes, value: bytes, headers: Headers = ()) -> None:
        """Fill a topic with equal records."""
        for _ in range(count):
            await self.send_raw(topic, key=key, value=value, headers=headers)


def counted(log: Any) -> Counter[str]:
    """Records read since the last call, by topic."""
    found = Counter(log.num_read)
    log.num_read.clear()
    return found
