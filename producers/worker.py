"""The rollout worker: a member of the group that owns tasks partitions, running all of theirs at once.

1. A task's events are acknowledged. 2. The task is settled. 3. Its offset is committed, with metadata that tells a new
owner where in `steps` to begin reading. What one task needs is in `group_execution`.

During a rebalance, rollouts continue and nothing is written; where a partition stays and nobody else
wrote to it or committed, they are never interrupted.
"""

import asyncio
import logging
from collections.abc import Callable
from time import monotonic as system_monotonic

from rollstream.eventlog.failpoints import failpoint
from rollstream.eventlog.log import EventLog, GroupReader, TopicPartition, check_kept, wall_ms
from rollstream.producers.clock import EventClock, start_ms
from rollstream.producers.ended_runs import CommitMetadata, EndedRuns
from rollstream.producers.group_execution import WorkerContext
from rollstream.producers.partition_owner import PartitionOwner
from rollstream.producers.steps_writer import StepsWriter
from rollstream.producers.takeover import recover
from rollstream.schemas import ids
from rollstream.schemas.errors import FencedError, first_error

GROUP = "rollstream-producers"
COMMIT_INTERVAL_S = 0.2

logger = logging.getLogger(__name__)


class RolloutWorker:
    """Owns partitions for as long as `run` runs."""

    def __init__(
        self,
        producer: WorkerContext,
        *,
        tick_interval_s: float,
        commit_interval_s: float = COMMIT_INTERVAL_S,
        group: str = GROUP,
        wall: Callable[[], int] = wall_ms,
        monotonic: Callable[[], float] = system_monotonic,
    ) -> None:
        """`wall` in milliseconds, `monotonic` in seconds; `group`: the consumer group of all producers."""
        self._producer = producer
        self._log: EventLog = producer.log
        self._tick_interval_s = tick_interval_s
        self._commit_interval_s = commit_interval_s
        self._group = group
        self._wall = wall
        self._monotonic = monotonic
        self._owners: dict[int, PartitionOwner] = {}
        self._ended_runs: EndedRuns | None = None
        self._kept: dict[int, PartitionOwner] = {}
        """Owners that pause during a rebalance."""
        self._committed: dict[int, tuple[int | None, str]] = {}
        """Committed offset of the group and its metadata, by partition, as far as this member knows."""
        self._progress = asyncio.Event()
        self._tasks: asyncio.TaskGroup | None = None
        self._reader: GroupReader | None = None

    async def run(self, on_ready: Callable[[], None] = lambda: None) -> None:
        """Work until cancelled, then leave the group. Raises the first error of any of its tasks."""
        self._ended_runs = await EndedRuns.open(self._log, self._end_run)
        try:
            await self._work(self._ended_runs, on_ready)
        except BaseExceptionGroup as failed:
            raise first_error(failed) from failed
        finally:
            await self._ended_runs.close()
            await self._leave()

    def is_over(self, rollout_id: str) -> bool:
        """Whether a rollout that was once begun goes on no more; False if its partition is not owned here."""
        group_id = ids.group_of(rollout_id)
        return any(owner.is_over(rollout_id) for owner in self._owners.values() if owner.owns(group_id))

    def may_have_begun(self, rollout_id: str) -> bool:
        """Whether a rollout has begun by the log; True as long as that is unknown, as where its partition is not owned.

        Of groups that were settled before the last commit nothing is known after a restart: False.
        """
        group_id = ids.group_of(rollout_id)
        if ids.parsed_group(group_id) is None or ids.attempt_of(group_id, rollout_id) is None:
            return False
        owners = [owner for owner in self._owners.values() if owner.owns(group_id)]
        return not owners or any(owner.may_have_begun(rollout_id) for owner in owners)

    async def _work(self, ended_runs: EndedRuns, on_ready: Callable[[], None]) -> None:
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            self._reader = await self._log.group_reader(
                self._group, ["tasks"], on_assigned=self._on_assigned, on_revoked=self._on_revoked
            )
            tasks.create_task(self._poll(self._reader))
            tasks.create_task(self._commit_progress())
            tasks.create_task(self._tick())
            tasks.create_task(ended_runs.follow())
            if self._producer.opponents is not None:
                tasks.create_task(self._producer.opponents.unload_ended())
            on_ready()

    async def _poll(self, reader: GroupReader) -> None:
        while True:
            for record in await reader.poll():
                owner = self._owners.get(record.partition)
                if owner is not None:
                    owner.accept(record)

    async def _on_assigned(self, partitions: set[TopicPartition]) -> None:
        assert self._reader is not None
        assert self._tasks is not None
        assert self._ended_runs is not None
        found = {
            where.partition: (await self._reader.committed(where), await self._reader.committed_metadata(where))
            for where in sorted(partitions)
        }
        stayed = await self._resume_kept(found)
        self._committed = found
        metadata = {
            partition: CommitMetadata.of(text) for partition, (_, text) in found.items() if partition not in stayed
        }
        tasks = await self._uncommitted({partition: found[partition][0] for partition in metadata})
        await self._ended_runs.read_back(found for partition, found in metadata.items() if tasks[partition])
        num_partitions = await self._log.num_partitions("tasks")
        failpoint("producer/during-hand-over")
        for partition, (state, end) in (await recover(self._log, metadata)).items():
            event_clock = EventClock(start_ms(state.last_event_ms, self._wall), self._monotonic)
            self._owners[partition] = PartitionOwner(
                self._producer,
                StepsWriter(self._log, partition, event_clock, end),
                state,
                tasks=tasks[partition],
                num_partitions=num_partitions,
                spawn=self._tasks.create_task,
                ended_runs=self._ended_runs.ended,
                on_progress=self._progress.set,
            )
        logger.info("assigned partitions=%s stayed=%s", sorted(metadata), sorted(stayed))

    async def _resume_kept(self, committed: dict[int, tuple[int | None, str]]) -> set[int]:
        """Partitions that stay, with their running tasks. Those that are gone, or had another owner, are given up."""
        kept, self._kept = self._kept, {}
        ends = await self._log.end_offsets("steps") if kept else {}
        for partition, owner in kept.items():
            is_same = partition in committed and committed[partition] == self._committed.get(partition)
            if is_same and owner.resume(ends[partition]):
                self._owners[partition] = owner
            else:
                await owner.release()
        return kept.keys() & self._owners.keys()

    async def _uncommitted(self, committed: dict[int, int | None]) -> dict[int, range]:
        """Offsets of the tasks that are there. Raises TruncatedError if what comes next after a commit is not."""
        begins, ends = await self._log.begin_offsets("tasks"), await self._log.end_offsets("tasks")
        for partition, offset in committed.items():
            if offset is not None:
                check_kept(TopicPartition("tasks", partition), offset, begins[partition], ends[partition])
        return {p: range(begins[p] if offset is None else offset, ends[p]) for p, offset in committed.items()}

    async def _on_revoked(self, partitions: set[TopicPartition]) -> None:
        paused = {w.partition: self._owners.pop(w.partition) for w in partitions if w.partition in self._owners}
        self._kept.update(paused)
        await asyncio.gather(*(owner.pause() for owner in paused.values()))
        await self._commit(paused)
        logger.info("revoked partitions=%s", sorted(paused))

    async def _commit_progress(self) -> None:
        while True:
            await self._progress.wait()
            self._progress.clear()
            await self._commit(self._owners)
            await asyncio.sleep(self._commit_interval_s)

    async def _commit(self, owners: dict[int, PartitionOwner]) -> None:
        points = {partition: self._commit_point(owner) for partition, owner in owners.items()}
        moved = {p: point for p, point in points.items() if self._committed.get(p) != point}
        if not moved or self._reader is None:
            return
        try:
            await self._reader.commit(
                {TopicPartition("tasks", p): offset for p, (offset, _) in moved.items()},
                {TopicPartition("tasks", p): text for p, (_, text) in moved.items()},
            )
        except FencedError as error:  # the next owner completes again what it finds settled in `steps`
            logger.info("not committed partitions=%s: %s", sorted(moved), error)
            return
        self._committed.update(moved)

    def _commit_point(self, owner: PartitionOwner) -> tuple[int, str]:
        """Offset of the oldest task in progress and the metadata to commit with it."""
        assert self._ended_runs is not None
        offset, steps = owner.commit_point()
        return offset, self._ended_runs.metadata(steps).text()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(self._tick_interval_s)
            for owner in self._owners.values():
                owner.tick()

    def _end_run(self, run_id: str) -> None:
        for owner in (*self._owners.values(), *self._kept.values()):
            owner.end_run(run_id)
        if self._producer.opponents is not None:
            self._producer.opponents.end_run(run_id)

    async def _leave(self) -> None:
        """1. Stop. 2. Commit what is settled. 3. Leave the group."""
        await asyncio.gather(*(owner.release() for owner in (*self._owners.values(), *self._kept.values())))
        if self._reader is not None:
            try:
                await self._commit(self._owners)
            finally:
                await self._reader.close()
