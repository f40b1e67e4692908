"""The plain reader on Kafka: given partitions from given offsets, no consumer group, nothing committed."""

import asyncio
from collections.abc import Mapping

from aiokafka import AIOKafkaConsumer

from rollstream.eventlog.kafka_client import kafka_partition, stop
from rollstream.eventlog.kafka_polling import Polling
from rollstream.eventlog.log import Record, TopicPartition


class KafkaReader:
    """`LogReader` on an aiokafka consumer that has been started."""

    def __init__(self, consumer: AIOKafkaConsumer, start: Mapping[TopicPartition, int]) -> None:
        """`start`: offsets, none of them negative."""
        self._consumer = consumer
        self._polling = Polling(consumer)
        self._next = dict(start)
        consumer.assign([kafka_partition(where) for where in start])
        for where, offset in start.items():
            consumer.seek(kafka_partition(where), offset)

    async def poll(self, *, timeout_s: float = 1.0, max_records: int = 10_000) -> list[Record]:
        """Next records; empty after `timeout_s` without any. Raises TruncatedError."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while True:
            records = await self._polling.take(max(0.0, deadline - loop.time()), max_records)
            for record in records:
                self._next[TopicPartition(record.topic, record.partition)] = record.offset + 1
            if records or loop.time() >= deadline:
                return records

    def position(self, where: TopicPartition) -> int:
        """Offset of the next record to be read."""
        return self._next[where]

    def seek(self, where: TopicPartition, offset: int) -> None:
        """Read on from `offset`."""
        self._polling.forget([where])
        self._consumer.seek(kafka_partition(where), offset)
        self._next[where] = offset

    async def close(self) -> None:
        """Disconnect."""
        self._polling.forget([])
        await asyncio.sleep(0)  # aiokafka cannot cancel a task of its own that has not begun
        await stop(self._consumer)
