"""Consumer groups in memory: members, eager range rebalancing as Kafka does it, commits with notes."""

import asyncio
from collections.abc import Mapping

from rollstream.eventlog.callbacks import Callbacks
from rollstream.eventlog.log import Record, TopicPartition, check_notes
from rollstream.eventlog.memory_store import MemoryReader, Store
from rollstream.schemas.errors import FencedError, LogError


class Group:
    """Members and commits of one group."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.commits: dict[TopicPartition, tuple[int, str]] = {}
        self._members: list[MemoryGroupReader] = []
        self._changed = False
        self._task: asyncio.Task[None] | None = None

    def join(self, member: "MemoryGroupReader") -> None:
        """Take a member in; partitions move soon after."""
        self._members.append(member)
        self._rebalance_soon()

    async def leave(self, member: "MemoryGroupReader") -> None:
        """Let a member go; returns once the others have its partitions."""
        if member in self._members:
            self._members.remove(member)
            member.reader = None
            self._rebalance_soon()
        if self._task is not None:
            await asyncio.wait({self._task})

    def _rebalance_soon(self) -> None:
        self._changed = True
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._rebalance())

    async def _rebalance(self) -> None:
        while self._changed:
            self._changed = False
            for member in list(self._members):
                await member.revoke()
            shares = self._shares()
            for member, share in shares.items():
                if member in self._members:
                    await member.assign(share)

    def _shares(self) -> "dict[MemoryGroupReader, set[TopicPartition]]":
        """Range assignment: each topic's partitions in consecutive runs, in order of joining."""
        shares: dict[MemoryGroupReader, set[TopicPartition]] = {member: set() for member in self._members}
        for topic in sorted({topic for member in self._members for topic in member.topics}):
            takers = [member for member in self._members if topic in member.topics]
            num = self.store.num_partitions(topic)
            for partition in range(num):
                shares[takers[partition * len(takers) // num]].add(TopicPartition(topic, partition))
        return shares


class MemoryGroupReader:
    """`GroupReader` in memory."""

    def __init__(
        self,
        group: Group,
        topics: tuple[str, ...],
        callbacks: Callbacks,
    ) -> None:
        self.topics = topics
        self.reader: MemoryReader | None = None
        self._group = group
        self._callbacks = callbacks
        self._owned: set[TopicPartition] = set()
        self._is_ready = False
        self._is_closed = False

    async def poll(self, *, timeout_s: float = 1.0, max_records: int = 1000) -> list[Record]:
        """Next records of the partitions owned at the time. Raises what a callback raised."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while True:
            self._callbacks.check()
            if self._is_closed:
                raise LogError("this member has left its group")
            records = self.reader.take(max_records) if self.reader is not None and self._is_ready else []
            left = deadline - loop.time()
            if records or left <= 0:
                await asyncio.sleep(0)
                return records
            await self._group.store.wait(left)

    def assigned(self) -> set[TopicPartition]:
        """Partitions that this member owns now."""
        return set(self._owned)

    def seek(self, where: TopicPartition, offset: int) -> None:
        """Read on from `offset`. Raises FencedError if the partition is not this member's."""
        self._check_owned([where])
        assert self.reader is not None
        self.reader.seek(where, offset)

    async def committed(self, where: TopicPartition) -> int | None:
        """The group's committed offset of a partition, None if it has none."""
        commit = self._group.commits.get(where)
        return None if commit is None else commit[0]

    async def committed_note(self, where: TopicPartition) -> str:
        """The text that was committed with the offset; empty if there is none."""
        return self._group.commits.get(where, (0, ""))[1]

    async def commit(
        self, offsets: Mapping[TopicPartition, int], notes: Mapping[TopicPartition, str] | None = None
    ) -> None:
        """Commit next offsets, each with an optional note. Raises FencedError, LogError."""
        self._check_owned(offsets)
        check_notes(notes or {})
        for where, offset in offsets.items():
            self._group.commits[where] = (offset, (notes or {}).get(where, ""))

    async def close(self) -> None:
        """Leave the group; `on_revoked` is not called."""
        self._is_closed = True
        self._owned = set()
        self._group.store.wake()
        await self._group.leave(self)

    async def revoke(self) -> None:
        """Give all partitions back, once `on_revoked` is done with them."""
        self._is_ready = False
        await self._callbacks.revoked(self._owned)
        self._owned = set()
        self.reader = None

    async def assign(self, share: set[TopicPartition]) -> None:
        """Own `share` from the committed offsets on; `on_assigned` may seek before the first record is read."""
        if self._is_closed:
            return
        start = {where: self._group.commits.get(where, (-1, ""))[0] for where in sorted(share)}
        self._owned = set(share)
        self.reader = MemoryReader(self._group.store, start)
        await self._callbacks.assigned(share)
        self._is_ready = True
        self._group.store.wake()

    def _check_owned(self, partitions: Mapping[TopicPartition, int] | list[TopicPartition]) -> None:
        for where in partitions:
            if where not in self._owned:
                raise FencedError(f"partition {where.partition} of topic {where.topic} is no longer this member's")
