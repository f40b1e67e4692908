"""Rebalance callbacks of a group member: awaited one by one; an error is kept for the next poll."""

import asyncio
from collections.abc import Awaitable

from rollstream.eventlog.log import OnPartitions, TopicPartition


class Callbacks:
    """`on_assigned` and `on_revoked` of one member."""

    def __init__(self, on_assigned: OnPartitions | None, on_revoked: OnPartitions | None) -> None:
        self._on_assigned = on_assigned
        self._on_revoked = on_revoked
        self._failure: BaseException | None = None

    async def assigned(self, share: set[TopicPartition]) -> None:
        """Report the partitions that the member owns now."""
        if self._on_assigned is not None:
            await self.run(self._on_assigned(set(share)))

    async def revoked(self, share: set[TopicPartition]) -> None:
        """Report the partitions that are being revoked; not called for none."""
        if share and self._on_revoked is not None:
            await self.run(self._on_revoked(set(share)))

    async def run(self, work: Awaitable[None]) -> None:
        """Await `work` and keep its error, which the caller, Kafka's coordinator, would only log."""
        task = asyncio.ensure_future(work)
        await asyncio.wait({task})
        if not task.cancelled():
            self._failure = self._failure or task.exception()

    def check(self) -> None:
        """Raise the error of a callback."""
        if self._failure is not None:
            raise self._failure
