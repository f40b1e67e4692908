"""Records by position, and the ends of partitions: looked up through one consumer that is kept between calls."""

import asyncio
from collections import defaultdict
from collections.abc import Iterable

from aiokafka import AIOKafkaConsumer
from aiokafka import TopicPartition as KafkaPartition
from aiokafka.errors import OffsetOutOfRangeError
from aiokafka.structs import ConsumerRecord

from rollstream.eventlog.kafka.client import kafka_partition, log_errors, our_record, out_of_range, stop
from rollstream.eventlog.log import Position, Record, TopicPartition, truncated
from rollstream.schemas.kafka import KafkaSettings

WAIT_MS = 5
"""Maximum milliseconds for which Kafka holds a request: a seek after it has to wait that long."""
FETCH_BYTES = 1 << 16
"""Maximum bytes of a partition in one answer (at least one batch). Everything sent is decoded, wanted or not: with the
mebibyte of readers, the fetch of a batch's 74 trajectories took 80 ms, with this 7 ms."""
READ_ON = 64
"""A gap of fewer records is read over, a larger one is sought over."""
PATIENCE_S = 0.5
"""After so long without a record the kept range is looked up."""


class Fetcher:
    """Lookups over one aiokafka consumer that has been started, with waits of WAIT_MS and fetches of FETCH_BYTES."""

    def __init__(self, consumer: AIOKafkaConsumer, kafka: KafkaSettings) -> None:
        self._kafka = kafka
        self._consumer = consumer
        self._lock = asyncio.Lock()

    async def close(self) -> None:
        """Disconnect."""
        await asyncio.sleep(0)  # aiokafka cannot cancel its own task before it has started
        await stop(self._consumer)

    async def ends(self, topic: str, num_partitions: int, *, newest: bool) -> dict[int, int]:
        """Offset of the oldest record, or the end offset, by partition."""
        partitions = [kafka_partition(self._kafka, TopicPartition(topic, p)) for p in range(num_partitions)]
        with log_errors(f"look up the offsets of topic {topic}", self._kafka, "Describe"):
            look_up = self._consumer.end_offsets if newest else self._consumer.beginning_offsets
            return {where.partition: offset for where, offset in (await look_up(partitions)).items()}

    async def fetch(self, positions: Iterable[Position]) -> list[Record]:
        """The records at the given positions, in the order given. Raises TruncatedError."""
        asked = list(positions)
        wanted: defaultdict[TopicPartition, set[int]] = defaultdict(set)
        for position in asked:
            wanted[TopicPartition(position.topic, position.partition)].add(position.offset)
        found: dict[Position, Record] = {}
        async with self._lock:
            for where, offsets in wanted.items():
                await self._read(where, sorted(offsets, reverse=True), found)
        return [found[position] for position in asked]

    async def _read(self, where: TopicPartition, left: list[int], found: dict[Position, Record]) -> None:
        """Read the offsets in `left` (falling) of one partition into `found`."""
        partition = kafka_partition(self._kafka, where)
        self._turn_to(partition)
        next_offset = -READ_ON - 1
        try:
            while left:
                if not 0 <= left[-1] - next_offset < READ_ON:
                    self._consumer.seek(partition, left[-1])
                records = await self._more(where, partition, left[-1])
                for record in records:
                    if left and record.offset == left[-1]:
                        found[Position(*where, record.offset)] = our_record(where.topic, record)
                        left.pop()
                    elif left and record.offset > left[-1]:
                        raise await self._gone(where, partition, left[-1])
                next_offset = records[-1].offset + 1
        finally:
            self._consumer.seek(partition, 0)  # drops prefetched records: aiokafka would wait 0.1 s for its consumer
            self._consumer.pause(partition)

    def _turn_to(self, partition: KafkaPartition) -> None:
        assigned = self._consumer.assignment()
        if partition in assigned:
            self._consumer.resume(partition)
            return
        self._consumer.assign([*assigned, partition])
        for other in assigned:
            self._consumer.seek(other, 0)
            self._consumer.pause(other)

    async def _more(
        self, where: TopicPartition, partition: KafkaPartition, offset: int
    ) -> "list[ConsumerRecord[bytes, bytes]]":
        with log_errors(
            f"fetch offset {offset} of topic {where.topic} partition {where.partition}", self._kafka, "Read"
        ):
            while True:
                try:
                    batches = await self._consumer.getmany(partition, timeout_ms=int(PATIENCE_S * 1000))
                except OffsetOutOfRangeError as error:
                    raise await out_of_range(self._kafka, self._consumer, error) from error
                if records := batches.get(partition):
                    return records
                if offset >= (await self._consumer.end_offsets([partition]))[partition]:
                    raise await self._gone(where, partition, offset)

    async def _gone(self, where: TopicPartition, partition: KafkaPartition, offset: int) -> Exception:
        begin = (await self._consumer.beginning_offsets([partition]))[partition]
        end = (await self._consumer.end_offsets([partition]))[partition]
        return truncated(where, offset, begin, end)
