"""The event log on Kafka, by aiokafka: idempotent sends acknowledged by all replicas, readers that never skip."""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from aiokafka import AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.coordinator.assignors.range import RangePartitionAssignor

from rollstream.eventlog.codec import encode
from rollstream.eventlog.kafka import client, topic_ids, topics
from rollstream.eventlog.kafka.client import REQUEST_TIMEOUT_MS, GroupMember, connect, log_errors, new_consumer
from rollstream.eventlog.kafka.fetch import FETCH_BYTES, WAIT_MS, Fetcher
from rollstream.eventlog.kafka.group import KafkaGroupReader
from rollstream.eventlog.kafka.reader import KafkaReader
from rollstream.eventlog.kafka.security import client_options
from rollstream.eventlog.kafka.sending import BATCH_BYTES, Sender
from rollstream.eventlog.log import (
    SEND_TIMEOUT_S,
    Headers,
    OnPartitions,
    OpenedByBlock,
    Position,
    Record,
    TopicPartition,
    check_record_size,
    partition_of,
)
from rollstream.eventlog.rebalance import Callbacks
from rollstream.schemas.base import Event
from rollstream.schemas.errors import LogError, TopicError
from rollstream.schemas.kafka import KafkaSettings
from rollstream.schemas.topics import MIB, PREFIX, TOPICS

MAX_REQUEST_BYTES = 9 * MIB
POLL_WAIT_MS = 100
"""How long Kafka may hold a reader's request; a new record is answered at once, a seek waits that long."""
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
        self._sender: Sender | None = None
        self._making_sender = asyncio.Lock()
        self._admin: AIOKafkaAdminClient | None = None
        self._fetcher: Fetcher | None = None
        self._send_timeout_s = send_timeout_s

    async def start(self) -> None:
        """Connect. Raises LogError naming the address if no broker answers within seconds, ConfigError."""
        await self.start_admin()
        consumer = new_consumer(self.kafka, self._client_id, max_wait_ms=WAIT_MS, fetch_bytes=FETCH_BYTES)
        await connect(consumer, self.kafka)
        self._fetcher = Fetcher(consumer, self.kafka)

    async def _sending(self) -> Sender:
        """With the producer, created at the first record so that read-only use needs no ACL for writing."""
        self._require(self._admin)
        async with self._making_sender:
            if self._sender is None:
                producer = AIOKafkaProducer(
                    **self._common_options(),
                    acks="all",
                    enable_idempotence=True,
                    compression_type="lz4",
                    max_batch_size=BATCH_BYTES,
                    max_request_size=MAX_REQUEST_BYTES,
                )
                await connect(producer, self.kafka)
                self._sender = Sender(producer, self.kafka, self._send_timeout_s)
        return self._sender

    async def start_admin(self) -> None:
        """Connect the admin client only, which is enough for topics and committed offsets. Raises like `start`."""
        admin = AIOKafkaAdminClient(**self._common_options())
        await connect(admin, self.kafka)
        self._admin = admin

    async def close(self) -> None:
        """Flush and disconnect. Readers must be closed by their users."""
        if self._sender is not None:
            sender, self._sender = self._sender, None
            await sender.close()
        if self._fetcher is not None:
            fetcher, self._fetcher = self._fetcher, None
            await fetcher.close()
        if self._admin is not None:
            admin, self._admin = self._admin, None
            await admin.close()

    async def ensure_topics(self, *, num_partitions: int) -> None:
        """Create missing topics, check the others. Raises TopicError naming topic, found and wanted."""
        await topics.create_missing(self._require(self._admin), self.kafka, num_partitions)
        await topics.check(self._require(self._admin), self.kafka, num_partitions)

    async def num_partitions(self, topic: str) -> int:
        """Partition count of a topic. Raises TopicError if it does not exist."""
        if topic not in self._num_partitions:
            if topic not in TOPICS:
                raise TopicError(f"topic {topic} is not in the topic table")
            count = await topics.count_partitions(self._require(self._admin), self.kafka, topic)
            self._num_partitions[topic] = count
        return self._num_partitions[topic]

    async def send(self, event: Event, *, partition: int | None = None) -> Position:
        """Append one event; returns once all replicas have it."""
        encoded = encode(event)
        return await self.send_raw(
            encoded.topic, key=encoded.key, value=encoded.value, headers=encoded.headers, partition=partition
        )

    async def send_all(self, events: Sequence[Event]) -> list[Position]:
        """Append events in order (per partition); returns once all are acknowledged."""
        sent: list[tuple[Position, asyncio.Future[int]]] = []
        for event in events:
            encoded = encode(event)
            sent.append(await self._put(encoded.topic, encoded.key, encoded.value, encoded.headers, None))
        return await self._require(self._sender).acknowledged(sent) if sent else []

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
        sent = [await self._put(topic, key, value, headers, partition)]
        return (await self._require(self._sender).acknowledged(sent))[0]

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

    async def topic_ids(self) -> dict[str, str]:
        """Topic ids by name; a topic that was deleted and created again has another id.

        Empty if Kafka has no topic ids.
        """
        return await topic_ids.topic_ids(self._require(self._admin), self.kafka)

    async def cluster_id(self) -> str:
        """Identity of the log: the cluster's, and the topic prefix if it is not the default."""
        with log_errors("look up the cluster's id", self.kafka, "Describe"):
            cluster = str((await self._require(self._admin).describe_cluster())["cluster_id"])
        return cluster if self.kafka.topic_prefix == PREFIX else f"{cluster}/{self.kafka.topic_prefix}"

    def _common_options(self) -> dict[str, Any]:
        return {**client_options(self.kafka), "client_id": self._client_id, "request_timeout_ms": REQUEST_TIMEOUT_MS}

    async def _put(
        self, topic: str, key: bytes | None, value: bytes | None, headers: Headers, partition: int | None
    ) -> "tuple[Position, asyncio.Future[int]]":
        """Topic and partition, and the future offset in it."""
        check_record_size(topic, key, value, headers)
        count = self._num_partitions.get(topic) or await self.num_partitions(topic)
        chosen = partition_of(key or b"", count) if partition is None else partition
        if not 0 <= chosen < count:
            raise _no_partition(topic, chosen, count)
        sender = self._sender or await self._sending()
        return Position(topic, chosen, -1), sender.put(topic, chosen, key, value, headers)

    async def _check_partitions(self, partitions: Iterable[TopicPartition]) -> None:
        """Raises TopicError for one that does not exist, because aiokafka would wait for it without limit."""
        for topic, partition in partitions:
            count = await self.num_partitions(topic)
            if not 0 <= partition < count:
                raise _no_partition(topic, partition, count)

    def _require(self, part: Any) -> Any:
        if part is None:
            raise LogError("the log is not connected; await start() first")
        return part


def _no_partition(topic: str, partition: int, count: int) -> TopicError:
    return TopicError(f"partition {topic}/{partition} does not exist: topic {topic} has {count} partitions")
