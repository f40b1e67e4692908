"""A tiny rollout, tasks to run it on, and a log whose wire can be cut, for tests of the worker."""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any, TypeVar

from rollstream.eventlog import codec
from rollstream.eventlog.log import TopicPartition, partition_of
from rollstream.producers.engines.scripted import ScriptedEngine
from rollstream.producers.group_execution import WorkerContext
from rollstream.producers.slots import Pace, Slots
from rollstream.producers.worker import RolloutWorker
from rollstream.schemas import ids
from rollstream.schemas.base import Event
from rollstream.schemas.errors import LogError
from rollstream.schemas.events import (
    GroupStarted,
    RewardRecorded,
    RolloutEnded,
    RolloutFailed,
    RolloutStarted,
    StepRecorded,
    TaskRequested,
)
from rollstream.schemas.settings import RolloutSettings

RUN = "run-1"
NUM_STEPS = 2
TICK_S = COMMIT_S = 0.02
E = TypeVar("E", bound=Event)


def task(index=0, *, run_id=RUN, num_rollouts=2, min_version=0, enough=0, **settings):
    settings = {"environment": "tiny", "agents": {"agent": f"{run_id}/policy"}} | settings
    return TaskRequested(
        run_id=run_id,
        time_ms=1,
        group_id=ids.group_id(run_id, "rl", 0, index),
        example_id=f"x{index}",
        job_id=ids.job_id(run_id, "rl"),
        epoch=0,
        index=index,
        inputs={"number": index},
        num_rollouts=num_rollouts,
        enough=enough,
        minimum=1,
        seed=7 + index,
        min_version=min_version,
        settings=RolloutSettings(**settings),
    )


def task_in(partition, num_partitions, nth=0, **how):
    """The nth task that belongs to a partition."""
    found = [index for index in range(99) if partition_of(task(index).key, num_partitions) == partition]
    return task(found[nth], **how)


def started(task, member, attempt, time_ms=1):
    return RolloutStarted(
        run_id=task.run_id,
        time_ms=time_ms,
        group_id=task.group_id,
        rollout_id=ids.rollout_id(task.group_id, member, attempt),
        member=member,
        attempt=attempt,
        seed=task.seed,
    )


def step(task, member, attempt, index, time_ms=1, text="hi"):
    rollout_id = ids.rollout_id(task.group_id, member, attempt)
    return StepRecorded(
        run_id=task.run_id,
        time_ms=time_ms,
        group_id=task.group_id,
        rollout_id=rollout_id,
        step_index=index,
        agent="agent",
        event_type="LLM_END",
        uuid=f"{rollout_id}/s{index}",
        data={"output": text},
    )


def reward(task, member, attempt, time_ms=1, value=1.0):
    return RewardRecorded(
        run_id=task.run_id,
        time_ms=time_ms,
        group_id=task.group_id,
        rollout_id=ids.rollout_id(task.group_id, member, attempt),
        reward_index=0,
        name="reward",
        value=value,
    )


def ended(task, member, attempt, contents, time_ms=1):
    rollout_id = ids.rollout_id(task.group_id, member, attempt)
    return RolloutEnded(
        run_id=task.run_id,
        time_ms=time_ms,
        group_id=task.group_id,
        rollout_id=rollout_id,
        num_steps=sum(1 for event in contents if isinstance(event, StepRecorded)),
        num_rewards=sum(1 for event in contents if isinstance(event, RewardRecorded)),
        digest=codec.chain(rollout_id, [codec.content_digest(event) for event in contents]),
    )


def failed(task, member, attempt, cause="environment_error", *, is_final, time_ms=1):
    return RolloutFailed(
        run_id=task.run_id,
        time_ms=time_ms,
        group_id=task.group_id,
        rollout_id=ids.rollout_id(task.group_id, member, attempt),
        cause=cause,
        is_final=is_final,
    )


class Rollouts:
    """A stand-in for `record_rollout`: `NUM_STEPS` steps and a reward; fails or hangs where it is told to."""

    def __init__(self):
        self.calls = []
        self.fails = set()
        """(member, attempt) that fail."""
        self.hangs = set()
        """(member, attempt) that stop after their first step until `go_on` is set."""
        self.go_on = asyncio.Event()
        self.num_running = 0
        self.most_running = 0

    async def __call__(self, task, *, member, attempt, is_last, engine, emit, clock, acknowledged, before=None):
        self.calls.append((task.group_id, member, attempt))
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        try:
            await self._play(task, member, attempt, is_last, emit, clock)
        finally:
            self.num_running -= 1

    async def _play(self, task, member, attempt, is_last, emit, clock):
        await emit(codec.encode(started(task, member, attempt, clock())))
        contents = []
        for index in range(NUM_STEPS):
            contents.append(step(task, member, attempt, index, clock()))
            await emit(codec.encode(contents[-1]))
            await asyncio.sleep(0.001)
            if (member, attempt) in self.hangs:
                await self.go_on.wait()
        if (member, attempt) in self.fails:
            await emit(codec.encode(failed(task, member, attempt, is_final=is_last, time_ms=clock())))
            return
        contents.append(reward(task, member, attempt, clock()))
        await emit(codec.encode(contents[-1]))
        await emit(codec.encode(ended(task, member, attempt, contents, clock())))


class Weights:
    """A stand-in for the weight follower: one version for all groups."""

    def __init__(self, version=0):
        self._version = version
        self._changed = asyncio.Condition()

    async def load(self, version):
        async with self._changed:
            self._version = version
            self._changed.notify_all()

    async def wait_for(self, model_group, version):
        async with self._changed:
            await self._changed.wait_for(lambda: self._version >= version)


class Wire:
    """One process's connection to a shared log. `cut` is its death: nothing it does is seen any more.

    `is_zombie`: it is never told that its partitions are revoked, and goes on writing until it is cut.
    """

    def __init__(self, log, *, is_zombie=False, cut_after=None):
        self._log = log
        self._is_zombie = is_zombie
        self.is_cut = False
        self.commits = True
        self.on_records: Callable[[], object] = lambda: None
        """Called when records are there, before they are handed on."""
        self.member = None
        self._num_left = cut_after

    def __getattr__(self, name):
        return getattr(self._log, name)

    def cut(self):
        self.is_cut = True

    async def expel(self):
        """The group takes it for dead, and it does not know."""
        assert self.member is not None, "it is not a member yet"
        await self.member.close()

    async def send(self, event, *, partition=None):
        await self._pass()
        return await self._log.send(event, partition=partition)

    async def send_raw(self, topic, **record):
        await self._pass()
        return await self._log.send_raw(topic, **record)

    async def send_all(self, events, *, partition=None):
        return [
            await self.send_raw(one.topic, key=one.key, value=one.value, headers=one.headers, partition=partition)
            for one in events
        ]

    async def _pass(self):
        if self._num_left is not None and not self.is_cut:
            self.is_cut = self._num_left == 0
            self._num_left -= 1
        if self.is_cut:
            await asyncio.Event().wait()

    async def group_reader(self, group, topics, *, on_assigned=None, on_revoked=None):
        on_revoked = None if self._is_zombie else on_revoked
        reader = await self._log.group_reader(group, topics, on_assigned=on_assigned, on_revoked=on_revoked)
        self.member = WireReader(self, reader)
        return self.member


class WireReader:
    """The group reader of a `Wire`."""

    def __init__(self, wire, reader):
        self._wire = wire
        self._reader = reader

    def __getattr__(self, name):
        return getattr(self._reader, name)

    async def poll(self, *, timeout_s=1.0, max_records=1000):
        try:
            found = await self._reader.poll(timeout_s=timeout_s, max_records=max_records)
        except LogError:  # a dead or paused process hears nothing
            found = await asyncio.Future()
        if found:
            self._wire.on_records()
        return found

    async def commit(self, offsets, metadata=None):
        if not self._wire.is_cut and self._wire.commits:
            await self._reader.commit(offsets, metadata)


class Process:
    """A worker in a task, with the parts that it was given."""

    def __init__(
        self,
        log,
        *,
        rollouts=None,
        weights=None,
        name="producer-1",
        slots=64,
        tick_s=TICK_S,
        runs=(),
        pace=None,
        **times,
    ):
        self.wire = log if isinstance(log, Wire) else Wire(log)
        self.rollouts = rollouts or Rollouts()
        self.weights = weights or Weights()
        self.dead_letters = []
        log_on_wire: Any = self.wire  # an `EventLog` by what it hands on
        producer = WorkerContext(
            log=log_on_wire,
            engine=ScriptedEngine(),
            weights=self.weights,
            rollout=self.rollouts,
            dead_letter=self._send_dead_letter,
            slots=Slots(slots),
            pace=pace or Pace(),
            runs=frozenset(runs),
            name=name,
        )
        self.worker = RolloutWorker(producer, tick_interval_s=tick_s, commit_interval_s=COMMIT_S, **times)
        self.task = asyncio.create_task(self.worker.run())

    async def _send_dead_letter(self, record, error):
        self.dead_letters.append((record.position, str(error)))

    async def kill(self):
        """Die at once; the group notices, and nobody hears what becomes of the tasks that are left.

        Their errors would be logged whenever they are collected, amid any other test: Python 3.11 parses source lines
        for a traceback, and a parse that this interrupts fails.
        """
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)
        self.wire.cut()
        await self.stop()

    async def stop(self):
        """Shut down in order."""
        self.task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self.task

    async def __aenter__(self):
        return self

    async def __aexit__(self, *error):
        await self.stop()


async def wait_until(condition, timeout_s=30.0):
    """Wait until `condition()` holds (or awaits to true)."""
    async with asyncio.timeout(timeout_s):
        while True:
            found = condition()
            if asyncio.iscoroutine(found):
                found = await found
            if found:
                return found
            await asyncio.sleep(0.002)


async def records(log, topic, partition=0):
    """All events of a partition, in order."""
    end = (await log.end_offsets(topic))[partition]
    reader = await log.reader({TopicPartition(topic, partition): 0})
    found = []
    while len(found) < end:
        found += await reader.poll()
    await reader.close()
    return [codec.decode(record) for record in found]


async def steps(log, kind: type[E] = Event, partition=0) -> list[E]:
    """Events of a steps partition, all or of one kind."""
    events = [received.event for received in await records(log, "steps", partition)]
    return [event for event in events if isinstance(event, kind)]


async def commit_of(process, partition=0):
    """Committed offset and metadata of a tasks partition."""
    member, where = process.wire.member, TopicPartition("tasks", partition)
    if member is None:
        return None, ""
    return await member.committed(where), await member.committed_metadata(where)


async def all_settled(log, num_groups, partition=0):
    """Whether so many groups were started, and each is settled by what the log says."""
    from rollstream.producers.takeover import fold

    state = fold(await records(log, "steps", partition))
    return len(state.settled) == num_groups and not state.groups


async def all_ended(log, num_rollouts, partition=0):
    """Whether at least so many rollouts have ended."""
    return len(await steps(log, RolloutEnded, partition)) >= num_rollouts


def only(events, kind: type[E] = GroupStarted) -> E:
    """The one event of a kind."""
    (found,) = [event for event in events if isinstance(event, kind)]
    return found
