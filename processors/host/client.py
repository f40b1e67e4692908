"""aiokafka's consumer with metadata in commits: Faust 0.15.3 commits and reads offsets only."""

from collections.abc import Callable, Mapping
from typing import Any

from aiokafka import TopicPartition
from aiokafka.structs import OffsetAndMetadata

from rollstream.eventlog.kafka.membership import MemberConsumer


class MetadataConsumer(MemberConsumer):
    """Adds metadata to commits, and keeps the metadata of committed offsets that are read."""

    def __init__(self, metadata_of: Callable[[TopicPartition, int], str], **options: Any) -> None:
        """`metadata_of`: the metadata to commit with an offset of a partition."""
        super().__init__(**options)
        self._metadata_of = metadata_of
        self._read: dict[TopicPartition, str] = {}

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
