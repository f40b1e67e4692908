"""The interfaces of the event log: records, positions, a log that is read, one that is written too, and their readers.

Implemented by `kafka.log.KafkaLog` and `memory.log.MemoryLog` under one contract suite. Topics are named by
their short names (keys of `rollstream.schemas.topics.TOPICS`).
"""

import time
import zlib
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol, Self

from rollstream.schemas.base import Event
from rollstream.schemas.errors import LogError, TopicError, TruncatedError
from rollstream.schemas.topics import TOPICS

Headers = tuple[tuple[str, bytes | None], ...]
"""Names and contents, in order. Kafka allows null as content, which rollstream reads as it would no header."""

RECORD_OVERHEAD_BYTES = 128
"""Maximum size of a batch header and a record's own fields."""


SEND_TIMEOUT_S = 120.0
"""A producer retries without limit (`kafka.client.new_producer`), also while a partition has no leader; a service that
waits longer for acknowledgements should be restarted.
"""
MAX_METADATA_BYTES = 4096
"""Maximum size of a committed offset's metadata: Kafka's default `offset.metadata.max.bytes`, of which brokers count
characters.
"""


class TopicPartition(NamedTuple):
    """One partition of a topic, by short name."""

    topic: str
    partition: int


class Position(NamedTuple):
    """The position of a record."""

    topic: str
    partition: int
    offset: int


_position = partial(tuple.__new__, Position)
"""A position of its three parts; the class itself takes half as long again, and every record that is folded has one."""


def format_position(where: Position) -> str:
    """`topic/partition@offset`, for messages."""
    return f"{where.topic}/{where.partition}@{where.offset}"


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
        return _position((self.topic, self.partition, self.offset))


class Encoded(NamedTuple):
    """An event as a record: what to send."""

    topic: str
    key: bytes
    value: bytes
    headers: Headers
    event: Event
    num_digested: int = 0
    """Number of bytes at the beginning of the value that the digest is made of; 0 if it is not written so."""


class Received:
    """A decoded record: the input of a fold. Its digest is computed when it is first asked for."""

    __slots__ = ("_digest", "event", "position", "timestamp_ms")

    def __init__(self, event: Event, digest: str | Callable[[], str], position: Position, timestamp_ms: int) -> None:
        """`timestamp_ms`: of the record (CreateTime, wall clock of the writer); decides nothing."""
        self.event = event
        self.position = position
        self.timestamp_ms = timestamp_ms
        self._digest = digest

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Received):
            return NotImplemented
        return (self.position, self.timestamp_ms, self.event) == (other.position, other.timestamp_ms, other.event)

    def __hash__(self) -> int:
        return hash(self.position)

    def __repr__(self) -> str:
        return f"Received({self.event!r} at {self.position})"

    @property
    def digest(self) -> str:
        """Content digest (sha256, hex) of the event."""
        digest = self._digest
        if not isinstance(digest, str):
            digest = self._digest = digest()
        return digest

    def with_event(self, event: Event) -> "Received":
        """The same record with another event in it; its digest stays that of the record."""
        return Received(event, self._digest, self.position, self.timestamp_ms)


OnPartitions = Callable[[set[TopicPartition]], Awaitable[None]]


class LogReader(Protocol):
    """Reads given partitions from given offsets; keeps its position in memory only."""

    async def poll(self, *, timeout_s: float = 1.0, max_records: int = 10_000) -> list[Record]:
        """Next records, at most `max_records`; empty after `timeout_s` without any.

        Records of a partition are in order. Raises TruncatedError if the offset is no longer retained.
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
    """A member of a consumer group: partitions are assigned and revoked, commits are explicit.

    Rebalancing is eager: all partitions of a member are revoked, then its new assignment follows, even if a partition
    stays. Callbacks run one after the other, outside `poll`, the first one after `group_reader` has returned; `poll`
    waits for them. The next `poll` raises the error of a callback. `close` calls no callback.
    """

    async def poll(self, *, timeout_s: float = 1.0, max_records: int = 1000) -> list[Record]:
        """Like LogReader.poll, for the partitions assigned at the time."""
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

    async def committed_metadata(self, where: TopicPartition) -> str:
        """The text that was committed with the offset; empty if there is none."""
        ...

    async def commit(
        self, offsets: Mapping[TopicPartition, int], metadata: Mapping[TopicPartition, str] | None = None
    ) -> None:
        """Commit next offsets, each with optional metadata (at most `MAX_METADATA_BYTES`).

        Raises FencedError if a partition is no longer this member's, LogError for longer metadata.
        """
        ...

    async def close(self) -> None:
        """Leave the group."""
        ...


class OpenedByBlock(ABC):
    """Base of logs that hold connections or files: `async with` starts one, and closes it also if `start` raises."""

    @abstractmethod
    async def start(self) -> None: ...

    @abstractmethod
    async def close(self) -> None: ...

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()


class ReadableLog(Protocol):
    """Events in partitioned topics, which may be an export's."""

    async def start(self) -> None:
        """Connect. Raises LogError naming the address if no broker answers."""
        ...

    async def close(self) -> None:
        """Flush and disconnect."""
        ...

    async def num_partitions(self, topic: str) -> int:
        """Partition count of a topic."""
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

    async def fetch(self, positions: Iterable[Position]) -> list[Record]:
        """The records at the given positions, in the order given. Raises TruncatedError if one is gone."""
        ...

    async def cluster_id(self) -> str:
        """Identity of the cluster."""
        ...


class EventLog(ReadableLog, Protocol):
    """An append-only log of events in partitioned topics."""

    async def ensure_topics(self, *, num_partitions: int | None = None) -> None:
        """Create missing topics, check the others. Raises TopicError naming topic, found and wanted.

        `num_partitions`: of scaled topics; None: as many as there are, or `NUM_PARTITIONS`.
        """
        ...

    async def send(self, event: Event | Encoded, *, partition: int | None = None) -> Position:
        """Append one event, which may be encoded already; returns once all replicas have it. Default partition:
        `partition_of(key)`.
        """
        ...

    async def send_all(self, events: Sequence[Event | Encoded], *, partition: int | None = None) -> list[Position]:
        """Append events, as `send` does, in order (per partition); returns once all are acknowledged.

        None is sent if one of them is larger than its topic's limit. A partition that is named here is written by this
        caller alone.
        """
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


def wall_ms() -> int:
    """Wall clock in milliseconds since the epoch, as events and records have their times."""
    return time.time_ns() // 1_000_000


def partition_of(key: str | bytes, num_partitions: int) -> int:
    """The partitioner: CRC-32 of the (UTF-8) key, modulo the partition count."""
    return zlib.crc32(key.encode() if isinstance(key, str) else key) % num_partitions


def check_metadata(metadata: Mapping[TopicPartition, str]) -> None:
    """Raises LogError for metadata above `MAX_METADATA_BYTES`, up to which brokers with Kafka's default accept it."""
    for where, text in metadata.items():
        size = len(text.encode())
        if size > MAX_METADATA_BYTES:
            raise LogError(
                f"the metadata to commit for partition {where.partition} of topic {where.topic} has {size} bytes, more "
                f"than the limit of {MAX_METADATA_BYTES}; commit less metadata, or keep it in an artifact"
            )


def check_record_size(topic: str, key: bytes | None, value: bytes | None, headers: Headers) -> None:
    """Raises LogError if a record exceeds its topic's limit, TopicError if the topic does not exist."""
    if topic not in TOPICS:
        raise unknown_topic(topic)
    limit = TOPICS[topic].max_record_bytes
    size = record_size(key, value, headers)
    if size > limit:
        raise LogError(
            f"a record for topic {topic} has {size} bytes, more than the limit of {limit}; make its content smaller"
        )


def check_event_size(encoded: Encoded) -> None:
    """`check_record_size` of an event. Key and headers repeat ids of its value, so with a small one they are small."""
    if len(encoded.value) > TOPICS[encoded.topic].max_record_bytes // 8:
        check_record_size(encoded.topic, encoded.key, encoded.value, encoded.headers)


def unknown_topic(topic: str) -> TopicError:
    """The error of a topic that the table does not have."""
    return TopicError(f"topic {topic} is not in the topic table; name one of {', '.join(TOPICS)}")


def record_size(key: bytes | None, value: bytes | None, headers: Headers) -> int:
    """Upper bound of the uncompressed size in bytes of a record in its own batch."""
    size = len(key or b"") + len(value or b"") + RECORD_OVERHEAD_BYTES + 10 * len(headers)
    for name, content in headers:
        size += len(content or b"") + (len(name) if name.isascii() else len(name.encode()))
    return size


def check_kept(where: TopicPartition, offset: int, begin: int, end: int) -> None:
    """Raises TruncatedError if `offset` is outside the retained range `begin` to `end` - 1 of a partition."""
    if not begin <= offset <= end:
        raise truncated(where, offset, begin, end)


def check_exists(where: TopicPartition, partitions: Collection[int]) -> None:
    """Raises TopicError if a partition is not among those of its topic."""
    if where.partition not in partitions:
        raise TopicError(
            f"partition {where.topic}/{where.partition} does not exist: topic {where.topic} has {len(partitions)} "
            "partitions; the record that names it was changed, or the topic was deleted and created again"
        )


def truncated(where: TopicPartition, offset: int, begin: int, end: int) -> TruncatedError:
    """The error of an offset that is not retained."""
    range_ = f"it holds {begin} to {end - 1}" if end > begin else f"it is empty at {begin}"
    cause = "; the topic was truncated at its end, or deleted and created again" if offset > end else ""
    return TruncatedError(
        f"offset {offset} of topic {where.topic} partition {where.partition} is not kept: {range_}{cause}"
    )
