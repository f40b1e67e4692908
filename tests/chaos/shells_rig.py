"""Assembly and curation on a log in memory, driven batch by batch as their host does it, killed and started again.

A life begins at the committed marks, ends at a failpoint or when everything is read; nothing but the log, the commits
and the artifacts outlives it.
"""

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rollstream.eventlog.artifacts import ArtifactStore
from rollstream.eventlog.failpoints import Armed, Killed, armed
from rollstream.eventlog.log import Encoded, Headers, Position, TopicPartition
from rollstream.eventlog.memory.log import MemoryLog
from rollstream.processors.assemble.shell import AssembleShell
from rollstream.processors.curate.shell import CurateShell
from rollstream.processors.host.app import Batch, Shell
from rollstream.schemas.base import Event
from tests.chaos.chaos_workload import PARTITIONS, Workload

COMMITS = 0.2
"""Share of batches after which the marks are committed."""
MAX_BATCH = 48


class Connection:
    """A process's way to a log that outlives it: others come between its records, and its death cuts it."""

    def __init__(self, log: MemoryLog, rng: random.Random, is_dead: Callable[[], bool]) -> None:
        self._log = log
        self._rng = rng
        self._is_dead = is_dead

    def __getattr__(self, name: str) -> object:
        return getattr(self._log, name)

    async def send_all(self, events: Sequence[Event | Encoded], *, partition: int | None = None) -> list[Position]:
        """Each record some time after the one before; the acknowledgements later still."""
        positions: list[Position] = []
        for event in events:
            await self._wait()
            positions.append(await self._log.send(event, partition=partition))
        await self._wait()
        return positions

    async def send_raw(self, topic: str, *, key: bytes | None, value: bytes | None, headers: Headers = ()) -> Position:
        await self._wait()
        return await self._log.send_raw(topic, key=key, value=value, headers=headers)

    async def _wait(self) -> None:
        for _ in range(self._rng.randrange(3)):
            await asyncio.sleep(0)
        if self._is_dead():
            raise Killed("the process is gone")


@dataclass
class Processors:
    """Parts that outlive the process: log, artifacts, committed marks; and functions that start the process again."""

    log: MemoryLog
    artifacts: ArtifactStore
    rng: random.Random
    assemble: Callable[..., AssembleShell] = AssembleShell
    curate: Callable[..., CurateShell] = CurateShell
    committed: dict[TopicPartition, int] = field(default_factory=dict)
    metadata: dict[TopicPartition, str] = field(default_factory=dict)
    num_kills: int = 0

    async def live(self, kill: Armed | None = None) -> None:
        """One life, to the end of the log. Raises Killed where `kill` strikes."""
        bystanders = asyncio.all_tasks()

        def is_dead() -> bool:
            return kill is not None and bool(kill.fired)

        try:
            await self._work(Connection(self.log, self.rng, is_dead), is_dead)
        finally:
            await asyncio.sleep(0)  # what has just begun gets as far as the cut connection
            left = asyncio.all_tasks() - bystanders
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)

    async def _work(self, log: Connection, is_dead: Callable[[], bool]) -> None:
        assembling = self.assemble(log, self.artifacts, service="p")
        shells: dict[str, Shell] = {"steps": assembling, "groups": self.curate(log, self.artifacts, service="p")}
        partitions = [TopicPartition("steps", number) for number in range(PARTITIONS)] + [TopicPartition("groups", 0)]
        reading = {where: self.committed.get(where, 0) for where in partitions}
        for where, offset in reading.items():
            await shells[where.topic].prepare(where.partition, offset, self.metadata.get(where, ""))
        while left := await self._left(reading):
            where = self.rng.choice(left)
            reader = await self.log.reader({where: reading[where]})
            records = await reader.poll(timeout_s=0.0, max_records=self.rng.randrange(1, MAX_BATCH))
            reading[where] += len(records)
            await shells[where.topic].take(Batch(where.partition, 1, records))
            if is_dead():
                raise Killed("the process is gone")
            if self.rng.random() < COMMITS:
                self._commit(shells, partitions)
            if not await self._left(reading):
                await assembling.drain()
        self._commit(shells, partitions)

    async def _left(self, reading: dict[TopicPartition, int]) -> list[TopicPartition]:
        ends = {topic: await self.log.end_offsets(topic) for topic in ("steps", "groups")}
        return [where for where, offset in reading.items() if offset < ends[where.topic][where.partition]]

    def _commit(self, shells: dict[str, Shell], partitions: list[TopicPartition]) -> None:
        for where in partitions:
            offset = shells[where.topic].commit_offset(where.partition)
            if offset is not None:
                self.committed[where] = offset
                self.metadata[where] = shells[where.topic].metadata(where.partition)

    async def live_and_die(self, failpoint: str, *, kills: int, max_hit: int = 6) -> None:
        """So many lives that end at a failpoint, each at another of its hits, then one that comes to the end."""
        for _ in range(kills):
            with armed(failpoint, self.rng.randint(1, max_hit)) as kill:
                try:
                    await self.live(kill)
                except Killed:
                    self.num_kills += 1
        await self.live()


async def write(log: MemoryLog, workload: Workload, artifacts: ArtifactStore) -> None:
    """The run's beginning, and every record of the workload in its partition."""
    for partition, lines in enumerate(workload.partitions):
        for line in lines:
            await log.send_raw("steps", key=line.key, value=line.value, headers=line.headers, partition=partition)
    for number, event in enumerate(workload.run_events(artifacts)):
        await log.send(event)
        await log.send_raw("groups", key=b"k", value=b"poison %d" % number)
