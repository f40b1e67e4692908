"""The event log as the rest of rollstream sees it: records, positions, and three small protocols.

Implemented by `kafka_log.KafkaLog` and `memory_log.MemoryLog` under one contract suite. Topics are named by
their short names (keys of `rollstream.schemas.topics.TOPICS`).
"""

import zlib
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from rollstream.schemas.base import Event
from rollstream.schemas.errors import LogError, TopicError, TruncatedError
from rollstream.schemas.topics import TOPICS

Headers = tuple[tuple[str, bytes], ...]

RECORD_OVERHEAD_BYTES = 128
"""What a batch header and a record's own fields take at most."""


MAX_NOTE_BYTES = 4096
"""Of the note of a committed offset: Kafka's default `offset.metadata.max.bytes`, of which brokers count characters."""


class TopicPartition(NamedTuple):
    """One partition of a topic, by short name."""

    topic: str
    partition: int


class Position(NamedTuple):
    """Where a record lies."""

    topic: str
    partition: int
    offset: int


@dataclass(frozen=True, slots=True)
class Record:
    """One raw record."""

    topic: str
    partition: int
    offset: int
    key: bytes | None
    value: bytes | None
    headers: Headers
    timestamp_ms: int

    @property
    def position(self) -> Position:
        """Topic, partition and offset."""
        return Position(self.topic, self.partition, self.offset)


class Received(NamedTuple):
    """A decoded record: what a fold is given."""

    event: Event
    digest: str
    """Content digest (sha256, hex) of the event."""
    position: Position
    timestamp_ms: int
    """The record's timestamp (CreateTime, wall clock of the writer); decides nothing."""


OnPartitions = Callable[[set[TopicPartition]], Awaitable[None]]


class LogReader(Protocol):
    """Reads given partitions from given offsets; keeps its place in memory only."""

    async def poll(self, *, timeout_s: float = 1.0, max_records: int = 10_000) -> list[Record]:
        """Next records, at most `max_records`; empty after `timeout_s` without any. Order holds in a partition.

        Raises TruncatedError when the offset asked for is gone.
        """
        ...

    def position(self, where: TopicPartition) -> int:
        """Offset of the next record to be read."""
        ...

    def seek(self, where: TopicPartition, offset: int) -> None:
        """Read on from `offset`."""
        ...

    async def close(self) -> None:
        """Let go of the connection."""
        ...


class GroupReader(Protocol):
    """A member of a consumer group: partitions come and go, commits are explicit.

    Rebalancing is eager: all partitions of a member are revoked, then its new share is assigned, even when a
    partition stays. Callbacks run one after the other, outside `poll`, the first one after `group_reader` has
    returned; between them `poll` waits. What a callback raises, the next `poll` raises. `close` calls no callback.
    """

    async def poll(self, *, timeout_s: float = 1.0, max_records: int = 1000) -> list[Record]:
        """As LogReader.poll, for the partitions assigned at the time."""
        ...

    def assigned(self) -> set[TopicPartition]:
        """Partitions that this member owns now."""
        ...

    def seek(self, where: TopicPartition, offset: int) -> None:
        """Read on from `offset`; only inside `on_assigned` or while assigned."""
        ...

    async def committed(self, where: TopicPartition) -> int | None:
        """The group's committed offset of a partition, None if it has none."""
        ...

    async def committed_note(self, where: TopicPartition) -> str:
        """The text that was committed with the offset; empty if there is none."""
        ...

    async def commit(
        self, offsets: Mapping[TopicPartition, int], notes: Mapping[TopicPartition, str] | None = None
    ) -> None:
        """Commit next offsets, each with an optional note (Kafka's offset metadata, at most `MAX_NOTE_BYTES`).

        Raises FencedError if a partition is no longer this member's, LogError for a longer note.
        """
        ...

    async def close(self) -> None:
        """Leave the group."""
        ...


class EventLog(Protocol):
    """An append-only log of events in partitioned topics."""

    async def start(self) -> None:
        """Connect. Raises LogError naming the address if no broker answers."""
        ...

    async def close(self) -> None:
        """Flush and disconnect."""
        ...

    async def ensure_topics(self, *, num_partitions: int) -> None:
        """Create missing topics, check the others. Raises TopicError naming topic, found and wanted."""
        ...

    async def num_partitions(self, topic: str) -> int:
        """Partition count of a topic."""
        ...

    async def send(self, event: Event, *, partition: int | None = None) -> Position:
        """Append one event; returns once all replicas have it. Default partition: `partition_of(key)`."""
        ...

    async def send_all(self, events: Sequence[Event]) -> list[Position]:
        """Append events in order (per partition); returns once all are acknowledged."""
        ...

    async def send_raw(
        self,
        topic: str,
        *,
        key: bytes | None,
        value: bytes | None,
        headers: Headers = (),
        partition: int | None = None,
    ) -> Position:
        """Append a raw record, acknowledged by all replicas."""
        ...

    async def begin_offsets(self, topic: str) -> dict[int, int]:
        """Oldest kept offset by partition."""
        ...

    async def end_offsets(self, topic: str) -> dict[int, int]:
        """Offset after the newest record by partition."""
        ...

    async def reader(self, start: Mapping[TopicPartition, int]) -> LogReader:
        """A reader of the given partitions from the given offsets (-1: the oldest kept)."""
        ...

    async def group_reader(
        self,
        group: str,
        topics: Iterable[str],
        *,
        on_assigned: OnPartitions | None = None,
        on_revoked: OnPartitions | None = None,
    ) -> GroupReader:
        """Join a consumer group. Without a commit a partition is read from its oldest kept offset."""
        ...

    async def fetch(self, positions: Iterable[Position]) -> list[Record]:
        """The records at the given positions, in the order given. Raises TruncatedError if one is gone."""
        ...

    async def cluster_id(self) -> str:
        """Identity of the cluster."""
        ...


def partition_of(key: str | bytes, num_partitions: int) -> int:
    """The one partitioner: CRC-32 of the (UTF-8) key, modulo the partition count."""
    return zlib.crc32(key.encode() if isinstance(key, str) else key) % num_partitions


def check_notes(notes: Mapping[TopicPartition, str]) -> None:
    """Raises LogError for a note above `MAX_NOTE_BYTES`: what is below it, every broker with Kafka's default keeps."""
    for where, note in notes.items():
        size = len(note.encode())
        if size > MAX_NOTE_BYTES:
            raise LogError(
                f"the note of partition {where.partition} of topic {where.topic} has {size} bytes, at most "
                f"{MAX_NOTE_BYTES} are kept with an offset"
            )


def check_record_size(topic: str, key: bytes | None, value: bytes | None, headers: Headers) -> None:
    """Raises LogError if a record is above its topic's limit, TopicError if there is no such topic."""
    if topic not in TOPICS:
        raise TopicError(f"topic {topic} is not in the topic table")
    limit = TOPICS[topic].max_record_bytes
    size = record_size(key, value, headers)
    if size > limit:
        raise LogError(f"a record for topic {topic} has {size} bytes, more than the limit of {limit}")


def record_size(key: bytes | None, value: bytes | None, headers: Headers) -> int:
    """Upper bound of a record's size in a batch of its own, in bytes, uncompressed."""
    in_headers = sum(len(name.encode()) + len(content or b"") + 10 for name, content in headers)
    return len(key or b"") + len(value or b"") + in_headers + RECORD_OVERHEAD_BYTES


def check_kept(where: TopicPartition, offset: int, begin: int, end: int) -> None:
    """Raises TruncatedError if reading cannot go on at `offset` of a partition that holds `begin` to `end` - 1."""
    if not begin <= offset <= end:
        raise truncated(where, offset, begin, end)


def truncated(where: TopicPartition, offset: int, begin: int, end: int) -> TruncatedError:
    """The error of an offset that is not kept."""
    range_ = f"it holds {begin} to {end - 1}" if end > begin else f"it is empty at {begin}"
    cause = "; the topic was cut off behind, or deleted and made again" if offset > end else ""
    return TruncatedError(
        f"offset {offset} of topic {where.topic} partition {where.partition} is not kept: {range_}{cause}"
    )
