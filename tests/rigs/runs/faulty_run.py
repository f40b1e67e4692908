"""A recorded run in which much goes wrong: the real folds; producers and learner are played, and nothing is trained."""

import asyncio
from typing import Any

import orjson

from rollstream.eventlog import codec
from rollstream.eventlog.codec import partition_of
from rollstream.processors.assemble.shell import AssembleShell
from rollstream.processors.curate.shell import CurateShell
from rollstream.schemas.events import (
    BatchPlanned,
    EpochStarted,
    GroupExtended,
    JobCancelled,
    JobFailed,
    JobStarted,
    JobSubmitted,
    LearnerClaimed,
    RolloutFailed,
    RunEnded,
    RunStarted,
    TaskCancelled,
    TaskRequested,
    Tick,
)
from tests.rigs.runs.epochwise_rig import publish
from tests.rigs.runs.recorded_run import (
    GROUP,
    JOB,
    RUN,
    RecordedRun,
    attempt_at,
    attempt_start,
    group_start,
    rollouts_of,
)

TASKS = 4
EXTENDED_MS = 1_000_000
"""Event time at which the group that was extended closes; its task gives it ten minutes."""


class FaultyRun(RecordedRun):
    """An epoch with a group of each sort, and one that the run's end cuts off.

    By task: complete; rewarded equally; with failed attempts; extended, then timed out by a Tick.
    """

    def __init__(self, folder, *, fails=False, times_out=False):
        """`fails`: the job does, which ends the run; else the run is stopped, which cancels the job.

        `times_out`: of the group that is timed out the last member has failed, and the one before it does not end.
        """
        (folder / "model").mkdir()
        (folder / "model" / "config.json").write_text("{}")
        super().__init__(folder, folder / "model")
        self.fails, self.times_out = fails, times_out

    def configuration(self):
        written = super().configuration()
        written["trainer_adapters"]["learner"]["tasks_per_epoch"] = TASKS
        return written

    async def record(self):
        common: dict[str, Any] = {"run_id": RUN, "time_ms": 1}
        names: dict[str, Any] = {"job_id": JOB, "model_group": GROUP}
        submitted = await self._begin(common, names)
        shells = AssembleShell(self.log, None, service="p"), CurateShell(self.log, self.artifacts, service="p")
        await self.log.send(EpochStarted(**common, job_id=JOB, epoch=0))
        await self._epoch(*shells, version=0)
        for batch in await self.events("batches", BatchPlanned):
            await publish(self.log, self.artifacts, submitted, batch.yields_version, batch)
        await self.log.send(EpochStarted(**common, job_id=JOB, epoch=1))
        await self._fold(*shells)
        (first, *_) = await self.events("tasks", TaskRequested)
        await self.log.send_all(list(rollouts_of(first, 1)))
        await self._fold(*shells)
        failed = JobFailed(**common, **names, error="out of memory")
        cancelled = JobCancelled(**common, **names, cause="run stopped")
        ended = RunEnded(**common, cause="failed" if self.fails else "stopped")
        await self.log.send_all([failed, ended] if self.fails else [ended, cancelled])
        await self._fold(*shells)
        tasks = {task.group_id: task for task in await self._all("tasks", TaskRequested)}
        for event in await self.events("tasks", TaskCancelled):
            void = {"size": 0, "minimum": 0, "void_cause": "cancelled"}
            await self.log.send(group_start(tasks[event.group_id]).model_copy(update=void))
        await self._fold(*shells)
        return self

    async def _begin(self, common, names):
        lines = b"\n".join(orjson.dumps({"example_id": f"x{n}", "inputs": {"n": n}}) for n in range(TASKS))
        written = self.configuration()
        spec = self.spec(written)
        dataset = self.artifacts.put_bytes(lines, ".jsonl")
        run = RunStarted(
            **common, name="run", config=written, seed=5, dataset=dataset, num_examples=TASKS, num_partitions=2
        )
        job = {**common, **names, "base_version": 0}
        submitted = JobSubmitted(**job, settings=spec.job, run_sha256=codec.content_digest(run))
        digest = codec.content_digest(submitted)
        claimed = LearnerClaimed(**common, model_group=GROUP, term=1, learner="learner-1")
        await self.log.send_all([run, submitted, claimed])
        await publish(self.log, self.artifacts, submitted, 0, None)
        await self.log.send(JobStarted(**job, plan=spec.plan, rollout=spec.rollout, job_sha256=digest))
        return submitted

    async def roll_out(self, task, version):
        """Write the rollouts that belong to the task's index."""
        match task.index:
            case 0:
                await super().roll_out(task, version)
            case 1:
                await self.log.send_all(list(rollouts_of(task, version, reward=lambda member: 1.0)))
            case 2:
                await self.log.send_all(list(_with_failures(task, version)))
            case _:
                await self._out_of_time(task, version)

    async def _out_of_time(self, task, version):
        """The last member never ends; the one before it ends only because the group was extended."""
        partition = partition_of(task.group_id.encode(), await self.log.num_partitions("steps"))
        due_ms = 1 + int(task.settings.group_timeout_s * 1000)
        extended = GroupExtended(run_id=RUN, time_ms=1, group_id=task.group_id, deadline_ms=EXTENDED_MS, owner="p")
        await self.log.send_all([group_start(task), extended])
        for member in (0, 1):
            await self.log.send_all(list(attempt_at(task, member, version, reward=float(member))))
        last = attempt_start(task, 3)
        await self.log.send(last)
        if self.times_out:
            await self.log.send(_failure(task, last, cause="timeout", is_final=True))
        await self.log.send(Tick(run_id="", time_ms=due_ms, partition=partition, owner="p"), partition=partition)
        if not self.times_out:
            await self.log.send_all(list(attempt_at(task, 2, version, reward=2.0, time_ms=due_ms + 1)))
        closing = Tick(run_id="", time_ms=EXTENDED_MS + 1000, partition=partition, owner="p")
        await self.log.send(closing, partition=partition)

    async def _fold(self, assembling, curating):
        """Until nothing more follows."""
        for _ in range(2):
            await self._pump(curating, "groups")
            await self._pump(assembling, "steps")
            await assembling.drain()
        await self._pump(curating, "groups")

    async def _all(self, topic, kind):
        self._read_up_to = {name: at for name, at in self._read_up_to.items() if name[0] != (topic, kind.__name__)}
        return await self.events(topic, kind)


def _with_failures(task, version):
    """Member 0 succeeds at its second attempt, member 3 is not tried again."""
    first, last = attempt_start(task, 0), attempt_start(task, 3)
    yield group_start(task)
    yield first
    yield _failure(task, first, cause="environment_error")
    yield from attempt_at(task, 1, version, reward=1.0)
    yield from attempt_at(task, 2, version, reward=2.0)
    yield last
    yield _failure(task, last, cause="environment_error", is_final=True)
    yield from attempt_at(task, 0, version, reward=0.0, attempt=1)


def _failure(task, began, **how):
    rollout = {"run_id": RUN, "time_ms": 1, "group_id": task.group_id, "rollout_id": began.rollout_id}
    return RolloutFailed(**rollout, message="it broke", **how)


def record(folder, **how):
    """A whole run."""
    return asyncio.run(FaultyRun(folder, **how).record())
