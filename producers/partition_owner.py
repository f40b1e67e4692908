"""The owner of one tasks partition and of the steps partition of the same number, while it is the owner.

Takes tasks in, keeps track of what is not settled, and says up to where the tasks can be committed. Reading and
committing are the worker's.
"""

import asyncio
import json
import re
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from rollstream.eventlog import codec
from rollstream.eventlog.log import Record, partition_of
from rollstream.producers.group_run import CANCELLED, RUN_ENDED, GroupRun, Producer
from rollstream.producers.recovery import PartitionState
from rollstream.producers.steps_writer import StepsWriter
from rollstream.producers.strangers import Strangers
from rollstream.schemas import ids
from rollstream.schemas.errors import DecodeError
from rollstream.schemas.events import GroupStarted, TaskCancelled, TaskRequested, Tick

_GROUP_ID = re.compile(r"(?P<job>[^/]+/[^/]+)/(?P<kind>[ev])(?P<epoch>\d+)(-[0-9a-f]+)?/t(?P<index>\d+)")

Work = Callable[[], Coroutine[Any, Any, None]]
"""No coroutine yet: a task that is cancelled before its first step leaves none unawaited."""
Spawn = Callable[[Coroutine[Any, Any, None]], "asyncio.Task[None]"]


class PartitionOwner:
    """Tasks of one partition that are not settled, and the partition's event time."""

    def __init__(
        self,
        producer: Producer,
        writer: StepsWriter,
        recovered: PartitionState,
        *,
        tasks: range,
        num_partitions: int,
        spawn: Spawn,
        ended_runs: set[str],
        on_progress: Callable[[], None],
    ) -> None:
        """`tasks`: offsets of the tasks that are there already and not committed; `num_partitions`: of their topic.
        `spawn` runs a coroutine whose error ends the worker; `on_progress` is called when `commit_point` moves.
        """
        self._producer = producer
        self._writer = writer
        self._strangers = Strangers(producer.log, writer)
        self._recovered = recovered
        self._num_partitions = num_partitions
        self._spawn = spawn
        self._ended_runs = ended_runs
        self._on_progress = on_progress
        self._settled = set(recovered.settled)
        self._cancelled: set[str] = set()
        self._runs: dict[str, GroupRun] = {}
        self._unsettled: dict[int, None] = {}
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
            self._begin(record.offset, partial(self._bury, record, error))
        else:
            if isinstance(event, TaskRequested):
                self._request(record.offset, event)
            elif isinstance(event, TaskCancelled):
                self._cancel(event)
        self._next_offset = record.offset + 1
        self._drop_orphans()
        self._on_progress()

    def end_run(self, run_id: str) -> None:
        """Settle all tasks of a run without running them."""
        for run in self._runs.values():
            if run.task.run_id == run_id:
                run.stop(RUN_ENDED)
        self._settled = {group_id for group_id in self._settled if ids.run_of(group_id) != run_id}

    def commit_point(self) -> tuple[int, str]:
        """Offset of the oldest unsettled task and the note to commit with it."""
        opened = [group.first_offset for group in self._recovered.groups.values()]
        opened += [run.state.first_offset for run in self._runs.values() if run.state is not None]
        note = json.dumps({"steps": min([self._writer.floor(), *opened])})
        return next(iter(self._unsettled), self._next_offset), note

    async def tick(self) -> None:
        """Let event time pass in the log, if a group is open."""
        if self._writer.is_paused:
            return
        has_open = any(run.state is not None for run in self._runs.values())
        if has_open or self._recovered.groups:
            time_ms = self._writer.clock()
            await self._writer.send(
                Tick(run_id="", time_ms=time_ms, partition=self._writer.partition, owner=self._producer.name)
            )

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

    def _drop_orphans(self) -> None:
        """A task is committed once its group is settled: an open group without a task was started again by a zombie."""
        if self._next_offset >= self._tasks_end:
            self._recovered.groups.clear()

    def _request(self, offset: int, task: TaskRequested) -> None:
        if task.group_id in self._runs or task.group_id in self._settled:
            return
        recovered = self._recovered.groups.pop(task.group_id, None)
        run = GroupRun(self._producer, self._writer, self._strangers, task, recovered)
        if task.run_id in self._ended_runs:
            run.stop(RUN_ENDED)
        elif task.group_id in self._cancelled:
            run.stop(CANCELLED)
        self._runs[task.group_id] = run
        self._begin(offset, partial(self._run, run))

    async def _run(self, run: GroupRun) -> None:
        await run.run()
        self._settled.add(run.task.group_id)
        del self._runs[run.task.group_id]

    def _cancel(self, event: TaskCancelled) -> None:
        if event.group_id in self._runs:
            self._runs[event.group_id].stop(CANCELLED)
        elif event.group_id not in self._settled:
            self._cancelled.add(event.group_id)

    async def _bury(self, record: Record, error: DecodeError) -> None:
        """1. The dead letter. 2. The group that its key names, if it is ours and none we know of, is opened void."""
        await self._producer.dead_letter(record, error)
        group_id = (record.key or b"").decode(errors="replace")
        named = _GROUP_ID.fullmatch(group_id)
        if named is None or group_id in self._runs or group_id in self._settled:
            return
        if partition_of(group_id, self._num_partitions) != record.partition:
            return
        self._settled.add(group_id)
        started = GroupStarted(
            run_id=ids.run_of(group_id),
            time_ms=self._writer.clock(),
            group_id=group_id,
            example_id="",
            job_id=named["job"],
            epoch=int(named["epoch"]),
            index=int(named["index"]),
            purpose="validation" if named["kind"] == "v" else "train",
            size=0,
            minimum=0,
            timeout_ms=1,
            seed=0,
            void_cause="undecodable",
            owner=self._producer.name,
        )
        await self._writer.send(started)

    def _begin(self, offset: int, work: Work) -> None:
        self._unsettled[offset] = None
        task = self._spawn(self._settle(offset, work))
        self._working.add(task)
        task.add_done_callback(self._working.discard)

    async def _settle(self, offset: int, work: Work) -> None:
        await work()
        del self._unsettled[offset]
        self._on_progress()
