"""aiokafka's consumer with metadata in commits: Faust 0.15.3 commits and reads offsets only."""

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.consumer.group_coordinator import GroupCoordinator
from aiokafka.structs import OffsetAndMetadata

_committed_as: ContextVar[tuple[int, str] | None] = ContextVar("_committed_as", default=None)
"""Generation and member id of the commit that the current task has sent."""


class _Coordinator(GroupCoordinator):
    """Joins its group again after a refused commit only if the generation is still the commit's, as Kafka's Java client
    does.

    A commit that is sent while the member joins is read by the broker after the join, with the generation before it.
    aiokafka 0.14 joins again for that, and a commit every second meets the next join, too, so that groups rebalanced
    for minutes.
    """

    async def _do_commit_offsets(self, assignment: Any, offsets: Any) -> None:
        _committed_as.set((self.generation, self.member_id))  # in a task of the commit's own (`commit_offsets`)
        await super()._do_commit_offsets(assignment, offsets)

    def reset_generation(self) -> None:
        sent = _committed_as.get()
        if sent is None or sent == (self.generation, self.member_id):
            super().reset_generation()


class MetadataConsumer(AIOKafkaConsumer):
    """Adds metadata to commits, and keeps the metadata of committed offsets that are read."""

    def __init__(self, metadata_of: Callable[[TopicPartition, int], str], **options: Any) -> None:
        """`metadata_of`: the metadata to commit with an offset of a partition."""
        super().__init__(**options)
        self._metadata_of = metadata_of
        self._read: dict[TopicPartition, str] = {}

    async def start(self) -> None:
        """Connect, and find the group's coordinator."""
        await super().start()
        if isinstance(self._coordinator, GroupCoordinator):
            self._coordinator.__class__ = _Coordinator  # `start` takes no other class

    def metadata_read(self, topic: str, partition: int) -> str:
        """The metadata of the offset that `committed` read last; empty if there is none."""
        return self._read.get(TopicPartition(topic, partition), "")

    async def committed(self, partition: TopicPartition) -> int | None:
        """The group's committed offset; aiokafka's method drops the metadata."""
        coordinator: Any = self._coordinator
        found: OffsetAndMetadata | None = (await coordinator.fetch_committed_offsets([partition])).get(partition)
        if found is None or found.offset < 0:
            self._read.pop(partition, None)
            return None
        self._read[partition] = found.metadata or ""
        return found.offset

    async def commit(self, offsets: Mapping[TopicPartition, OffsetAndMetadata] | None = None) -> None:
        """Commit offsets, each with its metadata."""
        offsets_and_metadata = {
            where: OffsetAndMetadata(found.offset, self._metadata_of(where, found.offset))
            for where, found in (offsets or {}).items()
        }
        await super().commit(offsets_and_metadata)

    async def stop(self) -> None:
        """Leave the group and close. No connection stays open: not if leaving fails or is cancelled, and not if a task
        of this consumer is connecting or connects later, for which aiokafka does not look."""
        client: Any = self._client
        try:
            await super().stop()
        finally:
            client._get_conn = _no_connection
            async with client._get_conn_lock:
                await client.close()


async def _no_connection(*_: object, **__: object) -> None:
    """The result of aiokafka's client for a broker that it cannot connect to."""
