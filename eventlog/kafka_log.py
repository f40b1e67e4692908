"""The event log on Kafka, by aiokafka: idempotent sends acknowledged by all replicas, readers that never skip."""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from aiokafka import AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.coordinator.assignors.range import RangePartitionAssignor

from rollstream.eventlog import kafka_offsets, kafka_topic_ids, kafka_topics
from rollstream.eventlog.callbacks import Callbacks
from rollstream.eventlog.codec import encode
from rollstream.eventlog.kafka_client import REQUEST_TIMEOUT_MS, connect, log_errors, new_consumer
from rollstream.eventlog.kafka_fetch import FETCH_BYTES, WAIT_MS, Fetcher
from rollstream.eventlog.kafka_group import KafkaGroupReader
from rollstream.eventlog.kafka_readers import KafkaReader
from rollstream.eventlog.log import (
    Headers,
    OnPartitions,
    Position,
    Record,
    TopicPartition,
    check_record_size,
    partition_of,
)
from rollstream.schemas.base import Event
from rollstream.schemas.errors import LogError, TopicError
from rollstream.schemas.topics import MIB, TOPICS

LINGER_MS = 2
BATCH_BYTES = 256 * 1024
MAX_REQUEST_BYTES = 9 * MIB
SEND_TIMEOUT_S = 120.0
"""An idempotent producer tries for ever; a service that waits longer is better restarted."""
POLL_WAIT_MS = 100
"""How long Kafka may hold a reader's request; a new record is answered at once, a seek waits that long."""
HEARTBEAT_MS = 500
"""A member learns of a rebalance by its heartbeat."""
REBALANCE_TIMEOUT_S = 30.0
MAX_POLL_INTERVAL_S = 3600.0


class KafkaLog:
    """`EventLog` on Kafka. Use it in the event loop that called `start`."""

    def __init__(
        self, bootstrap_servers: str, *, client_id: str = "rollstream", session_timeout_s: float = 10.0
    ) -> None:
        """`session_timeout_s`: after so long without a heartbeat a group member's partitions go to others."""
        self._bootstrap_servers = bootstrap_servers
        self._client_id = client_id
        self._session_timeout_ms = int(session_timeout_s * 1000)
        self._num_partitions: dict[str, int] = {}
        self._producer: AIOKafkaProducer | None = None
        self._admin: AIOKafkaAdminClient | None = None
        self._fetcher: Fetcher | None = None

    async def start(self) -> None:
        """Connect. Raises LogError naming the address if no broker answers within seconds."""
        common: dict[str, Any] = {"bootstrap_servers": self._bootstrap_servers, "client_id": self._client_id}
        common["request_timeout_ms"] = REQUEST_TIMEOUT_MS
        producer = AIOKafkaProducer(
            **common,
            acks="all",
            enable_idempotence=True,
            compression_type="lz4",
            linger_ms=LINGER_MS,
            max_batch_size=BATCH_BYTES,
            max_request_size=MAX_REQUEST_BYTES,
        )
        await connect(producer, self._bootstrap_servers)
        self._producer = producer
        admin = AIOKafkaAdminClient(**common)
        await connect(admin, self._bootstrap_servers)
        self._admin = admin
        consumer = new_consumer(self._bootstrap_servers, self._client_id, max_wait_ms=WAIT_MS, fetch_bytes=FETCH_BYTES)
        await connect(consumer, self._bootstrap_servers)
        self._fetcher = Fetcher(consumer)

    async def close(self) -> None:
        """Flush and disconnect. Readers are closed by who opened them."""
        if self._producer is not None:
            producer, self._producer = self._producer, None
            await producer.stop()
        if self._fetcher is not None:
            fetcher, self._fetcher = self._fetcher, None
            await fetcher.close()
        if self._admin is not None:
            admin, self._admin = self._admin, None
            await admin.close()

    async def ensure_topics(self, *, num_partitions: int) -> None:
        """Create missing topics, check the others. Raises TopicError naming topic, found and wanted."""
        await kafka_topics.create_missing(self._require(self._admin), num_partitions)
        await kafka_topics.check(self._require(self._admin), num_partitions)

    async def num_partitions(self, topic: str) -> int:
        """Partition count of a topic. Raises TopicError if it does not exist."""
        if topic not in self._num_partitions:
            if topic not in TOPICS:
                raise TopicError(f"topic {topic} is not in the topic table")
            count = await kafka_topics.count_partitions(self._require(self._admin), TOPICS[topic])
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
        sent: list[tuple[str, asyncio.Future[Any]]] = []
        for event in events:
            encoded = encode(event)
            future = await self._enqueue(encoded.topic, encoded.key, encoded.value, encoded.headers, None)
            sent.append((encoded.topic, future))
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
        sent = [(topic, await self._enqueue(topic, key, value, headers, partition))]
        return (await self._acknowledged(sent))[0]

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
        consumer = new_consumer(self._bootstrap_servers, self._client_id, max_wait_ms=POLL_WAIT_MS)
        await connect(consumer, self._bootstrap_servers)
        return KafkaReader(consumer, offsets)

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
            self._bootstrap_servers,
            self._client_id,
            max_wait_ms=POLL_WAIT_MS,
            group_id=group,
            session_timeout_ms=self._session_timeout_ms,
            heartbeat_interval_ms=min(HEARTBEAT_MS, self._session_timeout_ms // 3),
            rebalance_timeout_ms=int(REBALANCE_TIMEOUT_S * 1000),
            max_poll_interval_ms=int(MAX_POLL_INTERVAL_S * 1000),
            partition_assignment_strategy=(RangePartitionAssignor,),
        )
        await connect(consumer, self._bootstrap_servers)
        return KafkaGroupReader(consumer, self._require(self._admin), group, names, Callbacks(on_assigned, on_revoked))

    async def fetch(self, positions: Iterable[Position]) -> list[Record]:
        """The records at the given positions, in the order given. Raises TruncatedError if one is gone."""
        asked = list(positions)
        await self._check_partitions({TopicPartition(position.topic, position.partition) for position in asked})
        return await self._require(self._fetcher).fetch(asked)

    async def committed_offsets(self, group: str) -> dict[TopicPartition, int]:
        """Next offset by partition of a consumer group, for who looks on; empty if it never committed."""
        return await kafka_offsets.committed_offsets(self._require(self._admin), group)

    async def topic_ids(self) -> dict[str, str]:
        """Identity by topic that exists; another one after it was deleted and made again. Empty if Kafka has none."""
        return await kafka_topic_ids.topic_ids(self._require(self._admin))

    async def cluster_id(self) -> str:
        """Identity of the cluster."""
        with log_errors("look up the cluster's id"):
            return str((await self._require(self._admin).describe_cluster())["cluster_id"])

    async def _enqueue(
        self, topic: str, key: bytes | None, value: bytes | None, headers: Headers, partition: int | None
    ) -> "asyncio.Future[Any]":
        check_record_size(topic, key, value, headers)
        count = await self.num_partitions(topic)
        chosen = partition_of(key or b"", count) if partition is None else partition
        if not 0 <= chosen < count:
            raise _no_partition(topic, chosen, count)
        name, producer = TOPICS[topic].name, self._require(self._producer)
        with log_errors(f"send to topic {name}"):
            if key is None and value is None:  # aiokafka refuses it as a message, but not as a batch
                batch = producer.create_batch()
                batch.append(key=None, value=None, timestamp=None, headers=list(headers))
                return await producer.send_batch(batch, name, partition=chosen)
            return await producer.send(name, value=value, key=key, partition=chosen, headers=list(headers))

    async def _check_partitions(self, partitions: Iterable[TopicPartition]) -> None:
        """Raises TopicError for one that does not exist: aiokafka would wait for it, and for ever."""
        for topic, partition in partitions:
            count = await self.num_partitions(topic)
            if not 0 <= partition < count:
                raise _no_partition(topic, partition, count)

    async def _acknowledged(self, sent: "list[tuple[str, asyncio.Future[Any]]]") -> list[Position]:
        if not sent:
            return []
        _, late = await asyncio.wait({future for _, future in sent}, timeout=SEND_TIMEOUT_S)
        failed = [(topic, error) for topic, future in sent if future.done() and (error := future.exception())]
        for topic, error in failed:
            with log_errors(f"send to topic {TOPICS[topic].name}"):
                raise error
        if late:
            raise LogError(f"cannot send to topic {sent[0][0]}: no acknowledgement within {SEND_TIMEOUT_S:.0f} s")
        return [Position(topic, told.partition, told.offset) for topic, told in ((t, f.result()) for t, f in sent)]

    def _require(self, part: Any) -> Any:
        if part is None:
            raise LogError("the log is not connected: await start() first")
        return part


def _no_partition(topic: str, partition: int, count: int) -> TopicError:
    return TopicError(f"there is no partition {partition} of topic {topic}: it has {count}")
