"""The owner of one tasks partition and of the steps partition of the same number, while it is the owner.

Accepts tasks, keeps track of those that are not settled, and determines the offset up to which they can be committed.
Reading and committing are the worker's.
"""

import asyncio
import heapq
from collections.abc import Callable, Container, Coroutine
from functools import partial
from typing import Any, NamedTuple

from rollstream.eventlog import codec
from rollstream.eventlog.attempts import Cause
from rollstream.eventlog.log import Record, partition_of
from rollstream.eventlog.recent_set import RecentSet
from rollstream.producers.group_execution import (
    EXTENSION_SHARE,
    RUN_ENDED,
    GroupExecution,
    WorkerContext,
)
from rollstream.producers.steps_writer import StepsWriter
from rollstream.producers.takeover import ForeignWrites, GroupProgress, PartitionState
from rollstream.producers.taking_up import extend
from rollstream.schemas import ids
from rollstream.schemas.errors import DecodeError
from rollstream.schemas.events import GroupStarted, TaskCancelled, TaskRequested, Tick

MAX_SETTLED = 10_000
"""Groups of one partition that are remembered when they are settled, and cancelled groups: a task that is sent again
comes soon after the first, when its sender was restarted."""
MIN_LEFT_MS = 10_000
"""Event time that the group of a held task has left at least, so that ticks keep up with it."""

Work = Callable[[], Coroutine[Any, Any, None]]
"""No coroutine yet: a task that is cancelled before its first step leaves none unawaited."""
Spawn = Callable[[Coroutine[Any, Any, None]], "asyncio.Task[None]"]


class OpenTask(NamedTuple):
    """A task that is not worked on here, because another process serves its run. It keeps its offset uncommitted."""

    offset: int
    task: TaskRequested
    state: GroupProgress | None
    """Progress of its group, if an earlier owner has started it."""
    left_ms: int
    """Event time that the group had when it was found."""


class _Beginnings:
    """First offsets in `steps` of the groups of settled tasks after one that is not settled."""

    def __init__(self) -> None:
        self._by_first: list[tuple[int, int]] = []
        """A heap of first offset in `steps` and offset of the task."""
        self._newest = -1

    def add(self, offset: int, first: int) -> None:
        """The group of the task at `offset` begins at `first`."""
        heapq.heappush(self._by_first, (first, offset))
        self._newest = max(self._newest, offset)

    def oldest(self, offset: int) -> int | None:
        """The lowest first offset of a task at `offset` or after it; earlier ones are forgotten."""
        if self._newest < offset:
            self._by_first.clear()
        while self._by_first and self._by_first[0][1] < offset:
            heapq.heappop(self._by_first)
        return self._by_first[0][0] if self._by_first else None


class PartitionOwner:
    """Tasks of one partition that are not settled, and the partition's event time."""

    def __init__(
        self,
        producer: WorkerContext,
        writer: StepsWriter,
        recovered: PartitionState,
        *,
        tasks: range,
        num_partitions: int,
        spawn: Spawn,
        ended_runs: Container[str],
        on_progress: Callable[[], None],
    ) -> None:
        """`tasks`: offsets of the tasks that are there already and not committed; `num_partitions`: of their topic.
        `spawn` runs a coroutine whose error ends the worker; `on_progress` is called when `commit_point` moves.
        """
        self._producer = producer
        self._writer = writer
        self._foreign_writes = ForeignWrites(producer.log, writer, is_settled=self._is_settled)
        self._recovered = recovered
        self._num_partitions = num_partitions
        self._spawn = spawn
        self._ended_runs = ended_runs
        self._on_progress = on_progress
        self._settled = RecentSet(MAX_SETTLED)
        self._first_offsets: dict[str, int] = {}
        """First offsets in `steps` of the settled groups that were run here, of as many as are remembered."""
        self._repeats: dict[str, int] = {}
        """Offsets of tasks that were sent again, by group id, until they are settled."""
        self._cancelled = RecentSet(MAX_SETTLED)
        self._runs: dict[str, GroupExecution] = {}
        self._held: dict[str, OpenTask] = {}
        """Tasks of runs that others serve, by group id."""
        self._in_progress: dict[int, None] = {}
        self._settled_from = _Beginnings()
        self._ticking: asyncio.Task[None] | None = None
        self._next_offset = tasks.start
        self._tasks_end = tasks.stop
        self._working: set[asyncio.Task[None]] = set()
        self._drop_orphans()

    def accept(self, record: Record) -> None:
        """Take the next record of the tasks partition; what it asks for is begun at once. A repeat changes nothing."""
        if record.offset < self._next_offset:
            return
        try:
            event = codec.decode(record, num_partitions=self._num_partitions).event
        except DecodeError as error:
            self._begin(record.offset, partial(self._send_dead_letter, record, error))
        else:
            if isinstance(event, TaskRequested):
                self._request(record.offset, event)
            elif isinstance(event, TaskCancelled):
                self._cancel(event)
        self._next_offset = record.offset + 1
        self._drop_orphans()
        self._on_progress()

    def end_run(self, run_id: str) -> None:
        """Complete all tasks of a run without running them."""
        for run in self._runs.values():
            if run.task.run_id == run_id:
                run.stop(RUN_ENDED)
        for held in [held for held in self._held.values() if held.task.run_id == run_id]:
            self._let_go(held, RUN_ENDED)
        for groups in (self._settled, self._cancelled):
            for group_id in [one for one in groups if ids.run_of(one) == run_id]:
                groups.discard(group_id)
                self._first_offsets.pop(group_id, None)

    def owns(self, group_id: str) -> bool:
        """Whether a group is of this partition."""
        return partition_of(group_id, self._num_partitions) == self._writer.partition

    def is_over(self, rollout_id: str) -> bool:
        """Whether a rollout of this partition that was once begun goes on no more; False as long as that is unknown."""
        group_id = ids.group_of(rollout_id)
        run = self._runs.get(group_id)
        if run is None:
            is_open = group_id in self._held or group_id in self._recovered.groups
            return self._next_offset >= self._tasks_end and not is_open
        begun = None if run.state is None else run.state.begun(rollout_id)
        return begun is not None and begun[1] not in begun[0].open_attempts

    def may_have_begun(self, rollout_id: str) -> bool:
        """Whether a rollout of this partition has begun; True as long as that is unknown, or its group is settled."""
        group_id = ids.group_of(rollout_id)
        run = self._runs.get(group_id)
        if run is not None:
            return run.state is not None and run.state.begun(rollout_id) is not None
        is_read = self._next_offset >= self._tasks_end
        return not is_read or group_id in self._held or self._is_settled(group_id)

    def commit_point(self) -> tuple[int, int]:
        """Offset of the oldest task in progress, and where in `steps` the oldest open group begins, or one that was
        settled after that task.
        """
        offset = next(iter(self._in_progress), self._next_offset)
        opened = [group.first_offset for group in self._recovered.groups.values()]
        opened += [run.state.first_offset for run in self._runs.values() if run.state is not None]
        opened += [held.state.first_offset for held in self._held.values() if held.state is not None]
        settled_from = self._settled_from.oldest(offset)
        return offset, min([self._writer.floor(), *opened, *([] if settled_from is None else [settled_from])])

    def tick(self) -> None:
        """Have event time pass in the log, if a group is open; nothing if the last tick is still on its way."""
        if self._writer.is_paused or (self._ticking is not None and not self._ticking.done()):
            return
        self._ticking = self._spawn(self._write_tick())
        self._work_on(self._ticking)

    async def _write_tick(self) -> None:
        await self._extend_held()
        has_open = any(run.state is not None for run in self._runs.values())
        if has_open or self._recovered.groups:
            time_ms = self._writer.clock()
            tick = Tick(run_id="", time_ms=time_ms, partition=self._writer.partition, owner=self._producer.name)
            await self._writer.send(codec.encode(tick))

    async def pause(self) -> None:
        """Write nothing from now on, while rollouts go on; what is sent already is acknowledged then."""
        await self._writer.pause()

    def resume(self, steps_end: int) -> bool:
        """Go on after a pause, if nobody wrote in between; `steps_end` is where the steps partition ends now."""
        if not self._writer.is_end(steps_end):
            return False
        self._writer.resume()
        return True

    async def release(self) -> None:
        """Stop at once and write nothing more."""
        for task in self._working:
            task.cancel()
        if self._working:
            await asyncio.wait(self._working)
        await self._writer.close()

    def _drop_orphans(self) -> None:
        """A task is committed once its group is settled: an open group without a task was started again by a zombie."""
        if self._next_offset >= self._tasks_end:
            self._recovered.groups.clear()
            while self._recovered.settled:
                self._settled.add(self._recovered.settled.pop())

    def _is_settled(self, group_id: str) -> bool:
        """Whether a task is settled. Exact for tasks that existed before: each of them is requested once more."""
        return group_id in self._settled or group_id in self._recovered.settled

    def _request(self, offset: int, task: TaskRequested) -> None:
        is_settled = self._is_settled(task.group_id)
        first_offset = self._first_offsets.get(task.group_id, self._recovered.first_offset)
        if is_settled and first_offset is not None:  # the next owner has to find that this task is settled, too
            self._settled_from.add(offset, first_offset)
        if is_settled:
            self._recovered.settled.discard(task.group_id)
            self._settled.add(task.group_id)
        if task.group_id in self._runs or task.group_id in self._held:
            self._repeats[task.group_id] = offset
            return
        if is_settled:
            return
        recovered = self._recovered.groups.pop(task.group_id, None)
        self._recovered.attempts.pop(task.group_id, None)
        cause = Cause.CANCELLED if task.group_id in self._cancelled else None
        cause = RUN_ENDED if task.run_id in self._ended_runs else cause
        held = OpenTask(
            offset, task, recovered, 0 if recovered is None else recovered.deadline_ms - self._writer.clock()
        )
        if cause is None and self._producer.runs and task.run_id not in self._producer.runs:
            self._held[task.group_id] = held
            self._in_progress[offset] = None
        else:
            self._let_go(held, cause)

    def _let_go(self, held: "OpenTask", cause: str | None) -> None:
        """Have a task be settled: its group is run, or stopped at once if there is a cause."""
        self._held.pop(held.task.group_id, None)
        run = GroupExecution(self._producer, self._writer, self._foreign_writes, held.task, held.state)
        if cause is not None:
            run.stop(cause)
        self._runs[held.task.group_id] = run
        self._begin(held.offset, partial(self._run, held.offset, run))

    async def _extend_held(self) -> None:
        """Stop the time of groups that were started and are left to others."""
        for held in list(self._held.values()):
            state, left_ms = held.state, max(held.left_ms, MIN_LEFT_MS)
            if state is not None and self._writer.clock() + left_ms - state.deadline_ms > left_ms * EXTENSION_SHARE:
                await extend(self._writer, self._producer.name, held.task, state, left_ms)

    async def _run(self, offset: int, run: GroupExecution) -> None:
        await run.run()
        self._settled.add(run.task.group_id)
        repeated = self._repeats.pop(run.task.group_id, offset)
        if run.state is not None:
            self._settled_from.add(repeated, run.state.first_offset)
            self._first_offsets[run.task.group_id] = run.state.first_offset
            if len(self._first_offsets) > MAX_SETTLED:
                del self._first_offsets[next(iter(self._first_offsets))]
        self._cancelled.discard(run.task.group_id)
        self._foreign_writes.forget(run.task.group_id)
        del self._runs[run.task.group_id]

    def _cancel(self, event: TaskCancelled) -> None:
        if event.group_id in self._runs:
            self._runs[event.group_id].stop(Cause.CANCELLED)
        elif event.group_id in self._held:
            self._let_go(self._held[event.group_id], Cause.CANCELLED)
        elif not self._is_settled(event.group_id) and event.run_id not in self._ended_runs:
            self._cancelled.add(event.group_id)

    async def _send_dead_letter(self, record: Record, error: DecodeError) -> None:
        """1. The dead letter. 2. The group that its key names, if it is ours and none we know of, is opened void."""
        await self._producer.dead_letter(record, error)
        group_id = (record.key or b"").decode(errors="replace")
        named = ids.parsed_group(group_id)
        if named is None or group_id in self._runs or self._is_settled(group_id) or group_id in self._held:
            return
        if not self.owns(group_id):
            return
        self._settled.add(group_id)
        started = GroupStarted(
            run_id=ids.run_of(group_id),
            time_ms=self._writer.clock(),
            group_id=group_id,
            example_id="",
            job_id=named.job_id,
            epoch=named.epoch,
            index=named.index,
            purpose="validation" if named.is_validation else "train",
            size=0,
            minimum=0,
            timeout_ms=1,
            seed=0,
            void_cause="undecodable",
            owner=self._producer.name,
        )
        await self._writer.send(codec.encode(started))

    def _begin(self, offset: int, work: Work) -> None:
        self._in_progress[offset] = None
        self._work_on(self._spawn(self._complete(offset, work)))

    def _work_on(self, task: "asyncio.Task[None]") -> None:
        self._working.add(task)
        task.add_done_callback(self._working.discard)

    async def _complete(self, offset: int, work: Work) -> None:
        await work()
        del self._in_progress[offset]
        self._on_progress()
