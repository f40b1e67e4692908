"""A consumer group's member on Kafka: range assignment, explicit commits, and the start offset without a commit."""

import asyncio
from collections.abc import Mapping
from typing import Any

from aiokafka import AIOKafkaConsumer, ConsumerRebalanceListener
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import CommitFailedError, IllegalStateError, KafkaError
from aiokafka.structs import OffsetAndMetadata
from aiokafka.structs import TopicPartition as KafkaPartition

from rollstream.eventlog.kafka.client import kafka_partition, log_errors, our_partition, stop, within
from rollstream.eventlog.kafka.reader import Polling
from rollstream.eventlog.log import Record, TopicPartition, check_metadata
from rollstream.eventlog.rebalance import Callbacks
from rollstream.schemas.errors import FencedError
from rollstream.schemas.kafka import KafkaSettings

COMMIT_TIMEOUT_S = 30.0
ATTEMPTS = 20


class KafkaGroupReader(ConsumerRebalanceListener):
    """`GroupReader` on an aiokafka consumer that has been started with a group id."""

    def __init__(
        self,
        consumer: AIOKafkaConsumer,
        admin: AIOKafkaAdminClient,
        kafka: KafkaSettings,
        group: str,
        topics: tuple[str, ...],
        callbacks: Callbacks,
    ) -> None:
        self._consumer = consumer
        self._admin = admin
        self._kafka = kafka
        self._group = group
        self._callbacks = callbacks
        self._polling = Polling(consumer, kafka)
        self._owned: set[TopicPartition] = set()
        self._settled = asyncio.Event()
        self._consumer.subscribe([kafka.topic_name(topic) for topic in topics], listener=self)

    async def poll(self, *, timeout_s: float = 1.0, max_records: int = 1000) -> list[Record]:
        """Next records of the partitions owned at the time. Raises what a callback raised."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while True:
            records: list[Record] = []
            if not await self._is_settled(deadline - loop.time()):
                self._check_membership()
            self._callbacks.check()
            if self._settled.is_set():  # false if partitions were revoked before this task ran
                records = await self._polling.take(max(0.0, deadline - loop.time()), max_records)
            if records or loop.time() >= deadline:
                return records

    def assigned(self) -> set[TopicPartition]:
        """Partitions that this member owns now."""
        return set(self._owned)

    def seek(self, where: TopicPartition, offset: int) -> None:
        """Continue reading at `offset`. Raises FencedError if the partition is not owned by this member."""
        self._check_owned([where])
        self._polling.forget([where])
        self._consumer.seek(kafka_partition(self._kafka, where), offset)

    async def committed(self, where: TopicPartition) -> int | None:
        """The group's committed offset of a partition, None if it has none."""
        return await within(
            COMMIT_TIMEOUT_S,
            f"read the committed offset of group {self._group}",
            self._consumer.committed(kafka_partition(self._kafka, where)),
            kafka=self._kafka,
        )

    async def committed_metadata(self, where: TopicPartition) -> str:
        """The text that was committed with the offset; empty if there is none."""
        found = await within(
            COMMIT_TIMEOUT_S,
            f"read the committed metadata of group {self._group}",
            self._commit_of(kafka_partition(self._kafka, where)),
            kafka=self._kafka,
        )
        return found.metadata or ""

    async def commit(
        self, offsets: Mapping[TopicPartition, int], metadata: Mapping[TopicPartition, str] | None = None
    ) -> None:
        """Commit next offsets, each with optional metadata. Raises FencedError, LogError."""
        self._check_owned(offsets)
        check_metadata(metadata or {})
        offsets_and_metadata = {
            kafka_partition(self._kafka, where): OffsetAndMetadata(offset, (metadata or {}).get(where, ""))
            for where, offset in offsets.items()
        }
        doing = f"commit offsets of group {self._group}"
        await within(COMMIT_TIMEOUT_S, doing, self._commit(offsets_and_metadata), kafka=self._kafka, operation="Read")

    async def close(self) -> None:
        """Leave the group; `on_revoked` is not called."""
        self._settled.clear()
        self._owned = set()
        self._polling.forget([])
        await stop(self._consumer)

    def on_partitions_revoked(self, revoked: Any) -> Any:
        """Called and awaited by aiokafka: stop reading, then call the callback."""
        return self._give_back(revoked)

    def on_partitions_assigned(self, assigned: Any) -> Any:
        """Called and awaited by aiokafka: set the start offsets, call the callback, then read."""
        return self._take_over(assigned)

    async def _give_back(self, revoked: Any) -> None:
        self._settled.clear()
        self._polling.forget(self._owned)
        await self._callbacks.revoked({our_partition(self._kafka, where) for where in revoked})
        self._owned = set()

    async def _take_over(self, assigned: Any) -> None:
        self._owned = {our_partition(self._kafka, where) for where in assigned}
        await self._callbacks.run(self._begin(list(assigned)))
        await self._callbacks.assigned(self._owned)
        self._settled.set()

    async def _begin(self, partitions: list[KafkaPartition]) -> None:
        with log_errors(f"look up the start offsets of group {self._group}", self._kafka, "Read"):
            without = [where for where in partitions if await self._consumer.committed(where) is None]
            if without:
                for where, offset in (await self._consumer.beginning_offsets(without)).items():
                    self._consumer.seek(where, offset)

    async def _commit(self, offsets_and_metadata: dict[KafkaPartition, OffsetAndMetadata]) -> None:
        try:
            await self._consumer.commit(offsets_and_metadata)
        except (CommitFailedError, IllegalStateError) as error:
            raise FencedError(f"group {self._group} has assigned a partition to another member: {error}") from error

    async def _is_settled(self, timeout_s: float) -> bool:
        if self._settled.is_set():
            return True
        try:
            async with asyncio.timeout(timeout_s):  # wait_for of Python 3.11 may forget that it was cancelled
                await self._settled.wait()
        except TimeoutError:
            return False
        return True

    def _check_membership(self) -> None:
        """Raises the error of joining the group, which aiokafka raises only on a request for records."""
        with log_errors(f"join group {self._group}", self._kafka, "Read"):
            coordinator: Any = self._consumer._coordinator
            coordinator.check_errors()

    async def _commit_of(self, where: KafkaPartition) -> OffsetAndMetadata:
        for attempt in range(ATTEMPTS):
            try:
                found = await self._admin.list_consumer_group_offsets(self._group, partitions=[where])
                return found[where]
            except KafkaError as error:
                if not error.retriable or attempt == ATTEMPTS - 1:
                    raise
                await asyncio.sleep(0.2)
        raise AssertionError("unreachable")

    def _check_owned(self, partitions: Mapping[TopicPartition, int] | list[TopicPartition]) -> None:
        for where in partitions:
            if where not in self._owned:
                raise FencedError(
                    f"partition {where.partition} of topic {where.topic} is no longer owned by this member of "
                    f"{self._group}"
                )
