"""One pending request for records over an aiokafka consumer, kept between polls so that a cancelled poll loses no
records; shared by the plain reader and the group reader. The plain reader reads given partitions from given offsets
without a consumer group or commits.
"""

import asyncio
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

from aiokafka import AIOKafkaConsumer
from aiokafka import TopicPartition as KafkaPartition
from aiokafka.errors import NoOffsetForPartitionError, OffsetOutOfRangeError
from aiokafka.structs import ConsumerRecord

from rollstream.eventlog.kafka.client import kafka_partition, log_errors, our_partition, our_record, out_of_range, stop
from rollstream.eventlog.log import Record, TopicPartition
from rollstream.schemas.kafka import KafkaSettings

Batches = dict[KafkaPartition, list["ConsumerRecord[bytes, bytes]"]]
PENDING_MS = 3_600_000


class Polling:
    """Fetched records of an aiokafka consumer, in order by partition."""

    def __init__(self, consumer: AIOKafkaConsumer, kafka: KafkaSettings) -> None:
        self._kafka = kafka
        self._consumer = consumer
        self._pending: asyncio.Task[Batches] | None = None
        self._held: deque[Record] = deque()

    async def take(self, timeout_s: float, limit: int) -> list[Record]:
        """Return at most `limit` records; none after `timeout_s`, or sooner if `forget` is called meanwhile.

        Raises TruncatedError, and LogError for other errors of Kafka.
        """
        if not self._held:
            await self._fill(timeout_s, limit)
        return [self._held.popleft() for _ in range(min(limit, len(self._held)))]

    def forget(self, gone: Iterable[TopicPartition]) -> None:
        """Drop fetched records of these partitions before a seek or revocation.

        A pending request is cancelled; it has taken no records yet.
        """
        pending, self._pending = self._pending, None
        if pending is not None and not pending.cancel() and pending.exception() is None:
            self._hold(pending.result())
        dropped = set(gone)
        self._held = deque(r for r in self._held if TopicPartition(r.topic, r.partition) not in dropped)

    async def _fill(self, timeout_s: float, limit: int) -> None:
        # without a limit, all fetched records are returned at once and block the event loop for seconds
        if self._pending is None:
            fetching = self._consumer.getmany(timeout_ms=PENDING_MS, max_records=limit)
            self._pending = asyncio.create_task(fetching)
        pending = self._pending
        await asyncio.wait({pending}, timeout=timeout_s)
        if not pending.done() or pending is not self._pending:
            return
        self._pending = None
        with log_errors("read records", self._kafka, "Read"):
            try:
                self._hold(pending.result())
            except OffsetOutOfRangeError as error:
                raise await out_of_range(self._kafka, self._consumer, error) from error
            except NoOffsetForPartitionError:
                return  # a partition was polled before `on_assigned` had set its start offset

    def _hold(self, batches: Batches) -> None:
        for where, found in batches.items():
            topic = our_partition(self._kafka, where).topic
            self._held.extend(our_record(topic, record) for record in found)


class KafkaReader:
    """`LogReader` on an aiokafka consumer that has been started."""

    def __init__(self, consumer: AIOKafkaConsumer, kafka: KafkaSettings, start: Mapping[TopicPartition, int]) -> None:
        """`start`: non-negative offsets."""
        self._consumer = consumer
        self._kafka = kafka
        self._polling = Polling(consumer, kafka)
        self._next = dict(start)
        consumer.assign([kafka_partition(kafka, where) for where in start])
        for where, offset in start.items():
            consumer.seek(kafka_partition(kafka, where), offset)

    async def poll(self, *, timeout_s: float = 1.0, max_records: int = 10_000) -> list[Record]:
        """Next records; empty after `timeout_s` without any. Raises TruncatedError."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while True:
            records = await self._polling.take(max(0.0, deadline - loop.time()), max_records)
            for record in records:
                self._next[TopicPartition(record.topic, record.partition)] = record.offset + 1
            if not records:
                self._pass_over_control_records()
            if records or loop.time() >= deadline:
                return records

    def position(self, where: TopicPartition) -> int:
        """Offset of the next record to be read."""
        return self._next[where]

    def seek(self, where: TopicPartition, offset: int) -> None:
        """Read on from `offset`."""
        self._polling.forget([where])
        self._consumer.seek(kafka_partition(self._kafka, where), offset)
        self._next[where] = offset

    def _pass_over_control_records(self) -> None:
        """Move on to where aiokafka has read without a record: it skips the ends of transactions, which other programs
        may write. Without an await since nothing was taken, so that it has not found records meanwhile.
        """
        assignment: Any = self._consumer._subscription.subscription.assignment
        for where, known in self._next.items():
            state = assignment.state_value(kafka_partition(self._kafka, where))
            if state.has_valid_position:
                self._next[where] = max(known, state.position)

    async def close(self) -> None:
        """Disconnect."""
        self._polling.forget([])
        await asyncio.sleep(0)  # aiokafka cannot cancel its own task before it has started
        await stop(self._consumer)
