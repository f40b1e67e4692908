"""The event log on Kafka, by aiokafka: idempotent sends acknowledged by all replicas, readers that never skip."""

import asyncio
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, AsyncExitStack
from typing import Any

from aiokafka import AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.codec import lz4_encode
from aiokafka.coordinator.assignors.range import RangePartitionAssignor

from rollstream.eventlog.codec import encode
from rollstream.eventlog.kafka import client, topic_ids, topics
from rollstream.eventlog.kafka.client import REQUEST_TIMEOUT_MS, GroupMember, connect, log_errors, new_consumer
from rollstream.eventlog.kafka.fetch import FETCH_BYTES, WAIT_MS, Fetcher
from rollstream.eventlog.kafka.group import KafkaGroupReader
from rollstream.eventlog.kafka.reader import KafkaReader
from rollstream.eventlog.kafka.security import client_options
from rollstream.eventlog.log import (
    SEND_TIMEOUT_S,
    Encoded,
    Headers,
    OnPartitions,
    OpenedByBlock,
    Position,
    Record,
    TopicPartition,
    check_event_size,
    check_record_size,
    partition_of,
    unknown_topic,
)
from rollstream.eventlog.rebalance import Callbacks
from rollstream.schemas.base import Event
from rollstream.schemas.errors import LogError, TopicError
from rollstream.schemas.kafka import KafkaSettings
from rollstream.schemas.topics import MIB, PREFIX, TOPICS

LINGER_MS = 0
"""A record is sent at once, with all others that the event loop's turn brings. Only one request per broker is in
progress, and records that arrive meanwhile are sent together with the next: under load, this makes batches without a
wait.
"""
LZ4_LEVEL = 1
"""aiokafka has no setting for it. Its level 9 takes five times as long, and batches are 1 to 5 % smaller."""
BATCH_BYTES = 256 * 1024
MAX_REQUEST_BYTES = 9 * MIB
POLL_WAIT_MS = 100
"""Maximum milliseconds for which Kafka holds a reader's request; a new record is answered at once, a seek waits that
long.
"""
HEARTBEAT_MS = 500
"""A member learns of a rebalance by its heartbeat."""
REBALANCE_TIMEOUT_S = 30.0
MAX_POLL_INTERVAL_S = 3600.0


class KafkaLog(OpenedByBlock):
    """`EventLog` on Kafka. Use it in the event loop that called `start`."""

    def __init__(
        self,
        kafka: KafkaSettings | str,
        *,
        client_id: str = "rollstream",
        session_timeout_s: float = 10.0,
        send_timeout_s: float = SEND_TIMEOUT_S,
    ) -> None:
        """`kafka`: how to connect; a bare host:port means neither TLS nor SASL.

        `session_timeout_s`: time without a heartbeat after which a group member's partitions are reassigned.
        `send_timeout_s`: time without an acknowledgement after which a send fails.
        """
        self.kafka = KafkaSettings.of(kafka)
        self._client_id = client_id
        self._session_timeout_ms = int(session_timeout_s * 1000)
        self._num_partitions: dict[str, int] = {}
        self._producer: AIOKafkaProducer | None = None
        self._making_producer = asyncio.Lock()
        self._admin: AIOKafkaAdminClient | None = None
        self._fetcher: Fetcher | None = None
        self._send_timeout_s = send_timeout_s
        self._unacknowledged: dict[asyncio.Future[Any], tuple[float, str]] = {}
        """Deadline (event loop's time) and topic of each record in transit, oldest first."""
        self._overdue_timer: asyncio.TimerHandle | None = None

    async def start(self) -> None:
        """Connect. Raises LogError naming the address if no broker answers within seconds, ConfigError."""
        await self.start_admin()
        consumer = new_consumer(self.kafka, self._client_id, max_wait_ms=WAIT_MS, fetch_bytes=FETCH_BYTES)
        await connect(consumer, self.kafka)
        self._fetcher = Fetcher(consumer, self.kafka)

    async def _sending(self) -> AIOKafkaProducer:
        """The producer, created at the first record so that read-only use needs no ACL for writing."""
        self._require(self._admin)
        async with self._making_producer:
            if self._producer is None:
                lz4_encode.__defaults__ = (LZ4_LEVEL,)
                producer = client.new_producer(
                    **self._common_options(),
                    patience_s=self._send_timeout_s,
                    compression_type="lz4",
                    linger_ms=LINGER_MS,
                    max_batch_size=BATCH_BYTES,
                    max_request_size=MAX_REQUEST_BYTES,
                )
                await connect(producer, self.kafka)
                self._producer = producer
        return self._producer

    async def start_admin(self) -> None:
        """Connect the admin client only, which is enough for topics and committed offsets. Raises like `start`."""
        admin = AIOKafkaAdminClient(**self._common_options())
        await connect(admin, self.kafka)
        self._admin = admin

    async def close(self) -> None:
        """Flush, within CLOSE_TIMEOUT_S, and disconnect. Readers must be closed by their users."""
        if self._overdue_timer is not None:
            self._overdue_timer.cancel()
            self._overdue_timer = None
        async with AsyncExitStack() as stack:
            if self._admin is not None:
                stack.push_async_callback(self._admin.close)
            if self._fetcher is not None:
                stack.push_async_callback(self._fetcher.close)
            if self._producer is not None:
                stack.push_async_callback(client.stop_producer, self._producer)
            self._admin = self._fetcher = self._producer = None

    async def ensure_topics(self, *, num_partitions: int | None = None) -> None:
        """Create missing topics, check the others. Raises TopicError naming topic, found and wanted."""
        admin = self._require(self._admin)
        if num_partitions is None:
            num_partitions = await topics.scaled_count(admin, self.kafka)
        await topics.create_missing(admin, self.kafka, num_partitions)
        await topics.check(admin, self.kafka, num_partitions)

    async def num_partitions(self, topic: str) -> int:
        """Partition count of a topic. Raises TopicError if it does not exist."""
        if topic not in self._num_partitions:
            if topic not in TOPICS:
                raise unknown_topic(topic)
            count = await topics.count_partitions(self._require(self._admin), self.kafka, topic)
            self._num_partitions[topic] = count
        return self._num_partitions[topic]

    async def send(self, event: Event | Encoded, *, partition: int | None = None) -> Position:
        """Append one event; returns once all replicas have it."""
        encoded = encode(event)
        return await self.send_raw(
            encoded.topic, key=encoded.key, value=encoded.value, headers=encoded.headers, partition=partition
        )

    async def send_all(self, events: Sequence[Event | Encoded], *, partition: int | None = None) -> list[Position]:
        """Append events in order (per partition); returns once all are acknowledged."""
        encoded = [encode(event) for event in events]
        for event in encoded:
            check_event_size(event)
        if partition is not None:
            return await self._send_batches(encoded, partition)
        sent = [(one.topic, await self._enqueue(one.topic, one.key, one.value, one.headers, None)) for one in encoded]
        return await self._acknowledged(sent)

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
        check_record_size(topic, key, value, headers)
        future = await self._enqueue(topic, key, value, headers, partition)
        self._await_acknowledgement(topic, future)
        try:
            return await self._landed(topic, future)
        finally:
            self._forget(future)

    async def begin_offsets(self, topic: str) -> dict[int, int]:
        """Oldest kept offset by partition."""
        return await self._require(self._fetcher).ends(topic, await self.num_partitions(topic), newest=False)

    async def end_offsets(self, topic: str) -> dict[int, int]:
        """Offset after the newest record by partition."""
        return await self._require(self._fetcher).ends(topic, await self.num_partitions(topic), newest=True)

    async def reader(self, start: Mapping[TopicPartition, int]) -> KafkaReader:
        """A reader of the given partitions from the given offsets (-1: the oldest kept)."""
        await self._check_partitions(start)
        begins: dict[str, dict[int, int]] = {}
        for topic in sorted({where.topic for where in start}):
            begins[topic] = await self.begin_offsets(topic)
        offsets = {w: begins[w.topic][w.partition] if offset < 0 else offset for w, offset in start.items()}
        consumer = new_consumer(self.kafka, self._client_id, max_wait_ms=POLL_WAIT_MS)
        await connect(consumer, self.kafka)
        return KafkaReader(consumer, self.kafka, offsets)

    async def group_reader(
        self,
        group: str,
        topics: Iterable[str],
        *,
        on_assigned: OnPartitions | None = None,
        on_revoked: OnPartitions | None = None,
    ) -> KafkaGroupReader:
        """Join a consumer group; the first assignment comes after this has returned."""
        names = tuple(topics)
        for topic in names:
            await self.num_partitions(topic)
        consumer = new_consumer(
            self.kafka,
            self._client_id,
            max_wait_ms=POLL_WAIT_MS,
            group_id=group,
            session_timeout_ms=self._session_timeout_ms,
            heartbeat_interval_ms=min(HEARTBEAT_MS, self._session_timeout_ms // 3),
            rebalance_timeout_ms=int(REBALANCE_TIMEOUT_S * 1000),
            max_poll_interval_ms=int(MAX_POLL_INTERVAL_S * 1000),
            partition_assignment_strategy=(RangePartitionAssignor,),
        )
        await connect(consumer, self.kafka)
        callbacks = Callbacks(on_assigned, on_revoked)
        return KafkaGroupReader(consumer, self._require(self._admin), self.kafka, group, names, callbacks)

    async def fetch(self, positions: Iterable[Position]) -> list[Record]:
        """The records at the given positions, in the order given. Raises TruncatedError if one is gone."""
        asked = list(positions)
        await self._check_partitions({TopicPartition(position.topic, position.partition) for position in asked})
        return await self._require(self._fetcher).fetch(asked)

    async def committed_offsets(self, group: str) -> dict[TopicPartition, int]:
        """Committed offsets of a consumer group by partition, without joining it; empty if it never committed."""
        return await client.committed_offsets(self._require(self._admin), self.kafka, group)

    async def group_members(self, group: str) -> list[GroupMember]:
        """Current members of a consumer group; a killed client is included until its session times out."""
        return await client.group_members(self._require(self._admin), self.kafka, group)

    async def topic_ids(self) -> dict[str, str] | None:
        """Topic ids by name; a topic that was deleted and created again has another id.

        None if Kafka has no topic ids, or answers for no topic whether it exists.
        """
        return await topic_ids.topic_ids(self._require(self._admin), self.kafka)

    async def cluster_id(self) -> str:
        """Identity of the log: the cluster's, and the topic prefix if it is not the default."""
        with log_errors("look up the cluster's id", self.kafka, "Describe"):
            cluster = str((await self._require(self._admin).describe_cluster())["cluster_id"])
        return cluster if self.kafka.topic_prefix == PREFIX else f"{cluster}/{self.kafka.topic_prefix}"

    def _common_options(self) -> dict[str, Any]:
        return {**client_options(self.kafka), "client_id": self._client_id, "request_timeout_ms": REQUEST_TIMEOUT_MS}

    async def _enqueue(
        self, topic: str, key: bytes | None, value: bytes | None, headers: Headers, partition: int | None
    ) -> "asyncio.Future[Any]":
        chosen = await self._partition(topic, key, partition)
        producer = self._producer or await self._sending()
        if key is None and value is None:  # aiokafka checks the size of a message, but not of a batch
            batch = producer.create_batch()
            batch.append(key=None, value=None, timestamp=None, headers=list(headers))
            return await self._enqueue_batch(batch, topic, chosen)
        try:
            name = self.kafka.topic_name(topic)
            return await producer.send(name, value=value, key=key, partition=chosen, headers=list(headers))
        except Exception as error:
            with self._send_errors(topic):
                raise error

    async def _enqueue_batch(self, batch: Any, topic: str, partition: int) -> "asyncio.Future[Any]":
        producer = self._producer or await self._sending()
        try:
            sent = await producer.send_batch(batch, self.kafka.topic_name(topic), partition=partition)
        except Exception as error:
            with self._send_errors(topic):
                raise error
        return client.outcome_of(sent)

    async def _send_batches(self, events: Sequence[Encoded], partition: int) -> list[Position]:
        """Records of one partition in batches that are made here: one acknowledgement for all records of a batch.

        A partition that the caller names is its own to write, so no send of another caller has to join its batches.
        """
        sent: list[tuple[str, asyncio.Future[Any]]] = []
        counts: list[int] = []
        left = deque(events)
        while left:
            topic = left[0].topic
            await self._partition(topic, None, partition)
            batch = client.filled_batch(self._producer or await self._sending(), left)
            sent.append((topic, await self._enqueue_batch(batch, topic, partition)))
            counts.append(batch.record_count())
        landed = zip(await self._acknowledged(sent), counts, strict=True)
        return [position for first, count in landed for position in client.positions_of(first, count)]

    async def _partition(self, topic: str, key: bytes | None, partition: int | None) -> int:
        """The partition that a record goes to. Raises TopicError if it does not exist."""
        count = self._num_partitions.get(topic) or await self.num_partitions(topic)
        chosen = partition_of(key or b"", count) if partition is None else partition
        if not 0 <= chosen < count:
            raise _no_partition(topic, chosen, count)
        return chosen

    async def _check_partitions(self, partitions: Iterable[TopicPartition]) -> None:
        """Raises TopicError for one that does not exist, because aiokafka would wait for it without limit."""
        for topic, partition in partitions:
            count = await self.num_partitions(topic)
            if not 0 <= partition < count:
                raise _no_partition(topic, partition, count)

    async def _acknowledged(self, sent: "list[tuple[str, asyncio.Future[Any]]]") -> list[Position]:
        for topic, future in sent:
            self._await_acknowledgement(topic, future)
        try:
            for _, future in sent:
                if not future.done():  # those of a batch are all done with the first of them
                    await asyncio.wait({future})
            return [await self._landed(topic, future) for topic, future in sent]
        finally:
            for _, future in sent:
                self._forget(future)

    def _await_acknowledgement(self, topic: str, future: "asyncio.Future[Any]") -> None:
        self._unacknowledged[future] = asyncio.get_running_loop().time() + self._send_timeout_s, topic
        if self._overdue_timer is None:
            self._fail_overdue()

    def _forget(self, future: "asyncio.Future[Any]") -> None:
        del self._unacknowledged[future]
        if future.done() and not future.cancelled():
            future.exception()  # only the first one is raised, and none if the sender was cancelled

    async def _landed(self, topic: str, future: "asyncio.Future[Any]") -> Position:
        try:
            metadata = await future
        except Exception as error:
            with self._send_errors(topic):
                raise error
        return Position(topic, metadata.partition, metadata.offset)

    def _send_errors(self, topic: str) -> AbstractContextManager[None]:
        """Entered only with an error at hand: around every send it would cost a tenth of it."""
        return log_errors(f"send to topic {self.kafka.topic_name(topic)}", self.kafka, "Write")

    def _fail_overdue(self) -> None:
        """Fail the sends whose deadline has passed; one timer serves all, because each would cost as much as a send."""
        loop = asyncio.get_running_loop()
        self._overdue_timer = None
        for future, (deadline, topic) in self._unacknowledged.items():  # oldest first
            if deadline > loop.time():
                self._overdue_timer = loop.call_at(deadline, self._fail_overdue)
                return
            if not future.done():
                seconds = f"{self._send_timeout_s:.0f} s"
                future.set_exception(
                    LogError(f"cannot send to topic {topic}: no acknowledgement within {seconds}; check its brokers")
                )

    def _require(self, part: Any) -> Any:
        if part is None:
            raise LogError("the log is not connected; await start() first")
        return part


def _no_partition(topic: str, partition: int, count: int) -> TopicError:
    return TopicError(
        f"partition {topic}/{partition} does not exist: topic {topic} has {count} partitions; name one of these"
    )
