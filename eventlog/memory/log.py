"""The event log in memory of one process: for tests and for folds that need no broker. Nothing is written to disk."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from rollstream.eventlog.codec import encode
from rollstream.eventlog.log import (
    Encoded,
    Headers,
    OnPartitions,
    Position,
    Record,
    TopicPartition,
    check_event_size,
    check_record_size,
    partition_of,
    wall_ms,
)
from rollstream.eventlog.memory.groups import Group, MemoryGroupReader, MemoryReader, Store
from rollstream.eventlog.rebalance import Callbacks
from rollstream.schemas.base import Event
from rollstream.schemas.errors import TopicError
from rollstream.schemas.topics import NUM_PARTITIONS, TOPICS


class MemoryLog:
    """`EventLog` in memory; usable at once, without `start`. One event loop only."""

    def __init__(self, *, num_partitions: int = NUM_PARTITIONS) -> None:
        """`num_partitions`: partition count of the scaled topics."""
        self._num_scaled = num_partitions
        self._store = Store(
            TopicPartition(topic.short, partition)
            for topic in TOPICS.values()
            for partition in range(num_partitions if topic.scaled else 1)
        )
        self._groups: defaultdict[str, Group] = defaultdict(lambda: Group(self._store))

    async def start(self) -> None:
        """Do nothing."""

    async def close(self) -> None:
        """Do nothing; the records are kept for tests."""

    async def ensure_topics(self, *, num_partitions: int | None = None) -> None:
        """Check the partition count. Raises TopicError if one is given that is not the one of the constructor."""
        if num_partitions not in (None, self._num_scaled):
            raise TopicError(f"topic tasks has {self._num_scaled} partitions, expected {num_partitions}")

    async def num_partitions(self, topic: str) -> int:
        """Partition count of a topic."""
        return self._store.num_partitions(topic)

    async def send(self, event: Event | Encoded, *, partition: int | None = None) -> Position:
        """Append one event."""
        encoded = encode(event)
        return self._append(encoded.topic, encoded.key, encoded.value, encoded.headers, partition)

    async def send_all(self, events: Sequence[Event | Encoded], *, partition: int | None = None) -> list[Position]:
        """Append events in order."""
        encoded = [encode(event) for event in events]
        for event in encoded:
            check_event_size(event)
        return [await self.send(event, partition=partition) for event in encoded]

    async def send_raw(
        self,
        topic: str,
        *,
        key: bytes | None,
        value: bytes | None,
        headers: Headers = (),
        partition: int | None = None,
    ) -> Position:
        """Append a raw record."""
        return self._append(topic, key, value, headers, partition)

    async def begin_offsets(self, topic: str) -> dict[int, int]:
        """Oldest kept offset by partition."""
        return {p: self._store.begin(TopicPartition(topic, p)) for p in range(self._store.num_partitions(topic))}

    async def end_offsets(self, topic: str) -> dict[int, int]:
        """Offset after the newest record by partition."""
        return {p: self._store.end(TopicPartition(topic, p)) for p in range(self._store.num_partitions(topic))}

    async def reader(self, start: Mapping[TopicPartition, int]) -> MemoryReader:
        """A reader of the given partitions from the given offsets (-1: the oldest kept)."""
        return MemoryReader(self._store, start)

    async def group_reader(
        self,
        group: str,
        topics: Iterable[str],
        *,
        on_assigned: OnPartitions | None = None,
        on_revoked: OnPartitions | None = None,
    ) -> MemoryGroupReader:
        """Join a consumer group; the first assignment comes after this has returned."""
        names = tuple(topics)
        for topic in names:
            await self.num_partitions(topic)
        member = MemoryGroupReader(self._groups[group], names, Callbacks(on_assigned, on_revoked))
        self._groups[group].join(member)
        return member

    async def fetch(self, positions: Iterable[Position]) -> list[Record]:
        """The records at the given positions, in the order given. Raises TruncatedError if one is gone."""
        return [self._store.at(position) for position in positions]

    async def cluster_id(self) -> str:
        """A fixed name."""
        return "memory"

    def truncate(self, where: TopicPartition, before: int) -> None:
        """Forget the records before an offset, as retention would."""
        self._store.truncate(where, before)

    def _append(
        self, topic: str, key: bytes | None, value: bytes | None, headers: Headers, partition: int | None
    ) -> Position:
        check_record_size(topic, key, value, headers)
        if partition is None:
            partition = partition_of(key or b"", self._store.num_partitions(topic))
        where = TopicPartition(topic, partition)
        now_ms = wall_ms()
        record = Record(topic, partition, self._store.end(where), key, value, headers, now_ms)
        self._store.append(record)
        return record.position
