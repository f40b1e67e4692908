"""Consumer groups in memory: members, eager range rebalancing like Kafka's, commits with metadata.

Also partitions in memory and their plain reader.
"""

import asyncio
from collections import deque
from collections.abc import Iterable, Mapping

from rollstream.eventlog.log import Position, Record, TopicPartition, check_metadata, truncated, unknown_topic
from rollstream.eventlog.rebalance import Callbacks
from rollstream.schemas.errors import FencedError, LogError, TopicError


class Partition:
    """Retained records of one partition, and the offset of the first."""

    def __init__(self) -> None:
        self.begin = 0
        self.records: list[Record] = []

    @property
    def end(self) -> int:
        """Offset after the newest record."""
        return self.begin + len(self.records)


class Store:
    """All partitions by topic and number."""

    def __init__(self, partitions: Iterable[TopicPartition]) -> None:
        self._partitions = {where: Partition() for where in partitions}
        self._waiting: set[asyncio.Future[None]] = set()

    def num_partitions(self, topic: str) -> int:
        """Partition count of a topic. Raises TopicError if the topic does not exist."""
        count = sum(1 for where in self._partitions if where.topic == topic)
        if not count:
            raise unknown_topic(topic)
        return count

    def begin(self, where: TopicPartition) -> int:
        """Oldest kept offset."""
        return self._partition(where).begin

    def end(self, where: TopicPartition) -> int:
        """Offset after the newest record."""
        return self._partition(where).end

    def append(self, record: Record) -> None:
        """Append a record and wake waiting readers."""
        self._partition(TopicPartition(record.topic, record.partition)).records.append(record)
        self.wake()

    def wake(self) -> None:
        """Wake all waiting readers."""
        for waiting in self._waiting:
            if not waiting.done():
                waiting.set_result(None)
        self._waiting.clear()

    async def wait(self, timeout_s: float) -> None:
        """Return at the next wake, or after `timeout_s`."""
        waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.add(waiting)
        try:
            await asyncio.wait({waiting}, timeout=timeout_s)
        finally:
            self._waiting.discard(waiting)

    def read(self, where: TopicPartition, offset: int, limit: int) -> list[Record]:
        """Up to `limit` records from `offset`. Raises TruncatedError."""
        partition = self._partition(where)
        if not partition.begin <= offset <= partition.end:
            raise truncated(where, offset, partition.begin, partition.end)
        first = offset - partition.begin
        return partition.records[first : first + limit]

    def at(self, position: Position) -> Record:
        """The record at a position. Raises TruncatedError."""
        where = TopicPartition(position.topic, position.partition)
        found = self.read(where, position.offset, 1)
        if not found:
            raise truncated(where, position.offset, self.begin(where), self.end(where))
        return found[0]

    def truncate(self, where: TopicPartition, before: int) -> None:
        """Forget the records before an offset."""
        partition = self._partition(where)
        num_gone = min(max(0, before - partition.begin), len(partition.records))
        del partition.records[:num_gone]
        partition.begin += num_gone

    def _partition(self, where: TopicPartition) -> Partition:
        if where not in self._partitions:
            raise TopicError(f"partition {where.topic}/{where.partition} does not exist; name one that does")
        return self._partitions[where]


class MemoryReader:
    """`LogReader` in memory."""

    def __init__(self, store: Store, start: Mapping[TopicPartition, int]) -> None:
        self._store = store
        self._next = {where: store.begin(where) if offset < 0 else offset for where, offset in start.items()}
        self._turn = deque(self._next)

    async def poll(self, *, timeout_s: float = 1.0, max_records: int = 10_000) -> list[Record]:
        """Next records; empty after `timeout_s` without any. Raises TruncatedError."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        while not (records := self.take(max_records)):
            left = deadline - asyncio.get_running_loop().time()
            if left <= 0:
                return []
            await self._store.wait(left)
        await asyncio.sleep(0)
        return records

    def take(self, limit: int) -> list[Record]:
        """Available records; the first partition rotates between calls."""
        self._turn.rotate(-1)
        taken: list[Record] = []
        for where in self._turn:
            found = self._store.read(where, self._next[where], limit - len(taken))
            self._next[where] += len(found)
            taken += found
        return taken

    def position(self, where: TopicPartition) -> int:
        """Offset of the next record to be read."""
        return self._next[where]

    def seek(self, where: TopicPartition, offset: int) -> None:
        """Read on from `offset`."""
        self._next[where] = offset
        self._store.wake()

    async def close(self) -> None:
        """Do nothing."""


class Group:
    """Members and commits of one group."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.commits: dict[TopicPartition, tuple[int, str]] = {}
        self._members: list[MemoryGroupReader] = []
        self._changed = False
        self._task: asyncio.Task[None] | None = None

    def join(self, member: "MemoryGroupReader") -> None:
        """Add a member and schedule a rebalance."""
        self._members.append(member)
        self._rebalance_soon()

    async def leave(self, member: "MemoryGroupReader") -> None:
        """Remove a member; returns once its partitions are reassigned."""
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
                raise LogError("this member has left its group; open another reader")
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
        """Continue reading at `offset`. Raises FencedError if the partition is not owned by this member."""
        self._check_owned([where])
        assert self.reader is not None
        self.reader.seek(where, offset)

    async def committed(self, where: TopicPartition) -> int | None:
        """The group's committed offset of a partition, None if it has none."""
        commit = self._group.commits.get(where)
        return None if commit is None else commit[0]

    async def committed_metadata(self, where: TopicPartition) -> str:
        """The text that was committed with the offset; empty if there is none."""
        return self._group.commits.get(where, (0, ""))[1]

    async def commit(
        self, offsets: Mapping[TopicPartition, int], metadata: Mapping[TopicPartition, str] | None = None
    ) -> None:
        """Commit next offsets, each with optional metadata. Raises FencedError, LogError."""
        self._check_owned(offsets)
        check_metadata(metadata or {})
        for where, offset in offsets.items():
            self._group.commits[where] = (offset, (metadata or {}).get(where, ""))

    async def close(self) -> None:
        """Leave the group; `on_revoked` is not called."""
        self._is_closed = True
        self._owned = set()
        self._group.store.wake()
        await self._group.leave(self)

    async def revoke(self) -> None:
        """Revoke all partitions after `on_revoked`."""
        self._is_ready = False
        await self._callbacks.revoked(self._owned)
        self._owned = set()
        self.reader = None

    async def assign(self, share: set[TopicPartition]) -> None:
        """Assign `share` at the committed offsets; `on_assigned` may seek before the first record is read."""
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
                raise FencedError(
                    f"partition {where.partition} of topic {where.topic} is no longer owned by this member"
                )
