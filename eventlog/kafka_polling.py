"""One pending request for records over an aiokafka consumer, kept from poll to poll, so that a cancelled poll loses
nothing; shared by the plain reader and the group reader."""

import asyncio
from collections import deque
from collections.abc import Iterable

from aiokafka import AIOKafkaConsumer
from aiokafka import TopicPartition as KafkaPartition
from aiokafka.errors import NoOffsetForPartitionError, OffsetOutOfRangeError
from aiokafka.structs import ConsumerRecord

from rollstream.eventlog.kafka_client import log_errors, our_partition, our_record, out_of_range
from rollstream.eventlog.log import Record, TopicPartition

Batches = dict[KafkaPartition, list["ConsumerRecord[bytes, bytes]"]]
PENDING_MS = 3_600_000


class Polling:
    """Records that an aiokafka consumer has ready, in order by partition."""

    def __init__(self, consumer: AIOKafkaConsumer) -> None:
        self._consumer = consumer
        self._pending: asyncio.Task[Batches] | None = None
        self._held: deque[Record] = deque()

    async def take(self, timeout_s: float, limit: int) -> list[Record]:
        """At most `limit` records; empty after `timeout_s`, or sooner if `forget` was called meanwhile.

        Raises TruncatedError, and LogError for whatever else Kafka refuses.
        """
        if not self._held:
            await self._fill(timeout_s)
        return [self._held.popleft() for _ in range(min(limit, len(self._held)))]

    def forget(self, gone: Iterable[TopicPartition]) -> None:
        """Drop what was read of these partitions, before they are sought or given back.

        A request that is under way is given up: cancelled while it waits, it has taken no record.
        """
        pending, self._pending = self._pending, None
        if pending is not None and not pending.cancel() and pending.exception() is None:
            self._hold(pending.result())
        dropped = set(gone)
        self._held = deque(r for r in self._held if TopicPartition(r.topic, r.partition) not in dropped)

    async def _fill(self, timeout_s: float) -> None:
        if self._pending is None:
            self._pending = asyncio.create_task(self._consumer.getmany(timeout_ms=PENDING_MS))
        pending = self._pending
        await asyncio.wait({pending}, timeout=timeout_s)
        if not pending.done() or pending is not self._pending:
            return
        self._pending = None
        with log_errors("read records"):
            try:
                self._hold(pending.result())
            except OffsetOutOfRangeError as error:
                raise await out_of_range(self._consumer, error) from error
            except NoOffsetForPartitionError:
                return  # a partition was looked at before `on_assigned` had set where to begin

    def _hold(self, batches: Batches) -> None:
        for where, found in batches.items():
            topic = our_partition(where).topic
            self._held.extend(our_record(topic, record) for record in found)
