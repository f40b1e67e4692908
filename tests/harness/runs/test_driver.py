"""The conductor on a log in memory, with a scripted learner and curate on the other side."""

import asyncio
import contextlib
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rollstream.eventlog.artifacts import ArtifactStore
from rollstream.eventlog.codec import decode
from rollstream.eventlog.failpoints import Killed
from rollstream.eventlog.log import Encoded, Position, TopicPartition
from rollstream.eventlog.memory.log import MemoryLog
from rollstream.eventlog.run_offsets import start_offsets_of
from rollstream.harness.config import file as config_file
from rollstream.harness.config.jobs import RunLocation
from rollstream.harness.runs import conductor
from rollstream.harness.runs.conductor import POLL_S, Conductor, background_work
from rollstream.harness.runs.driver import give_signs_of_life, is_over, lacking, located, reason_to_stop
from rollstream.harness.runs.plan import RunPlan
from rollstream.harness.runs.progress import Progress, evolve
from rollstream.harness.runs.run_context import RunContext, WorkspaceLease
from rollstream.harness.services.supervisor import Supervisor
from rollstream.schemas.base import Event
from rollstream.schemas.errors import LogError
from rollstream.schemas.events import EpochStarted, JobFailed, JobStarted, JobSubmitted, RunContinued
from rollstream.schemas.kafka import KafkaSettings


async def written_ids(log: MemoryLog, *topics: str) -> list[str]:
    reader = await log.reader({TopicPartition(topic, 0): 0 for topic in topics})
    return [decode(record).event.event_id for record in await reader.poll(timeout_s=0)]


def fold(run_id: str, *events: Event) -> Progress:
    progress = Progress(run_id)
    for event in events:
        progress = evolve(progress, event)
    return progress


async def conducted(script, log, jobs, counterpart=None, *, on_progress=lambda _: None, is_new=True, **how):
    async def work() -> Progress:
        async with Conductor(log, RunPlan(script.run_started(), tuple(jobs), is_new), on_progress) as conducting:
            return await conducting.conduct(**how)

    return await script.with_counterpart(counterpart or script.counterpart(log), work())


def test_a_run_of_one_job_is_conducted_epoch_by_epoch(script: SimpleNamespace) -> None:
    async def scenario() -> None:
        log = MemoryLog(num_partitions=2)
        progress = await conducted(script, log, [script.job_spec(num_epochs=3)])
        assert progress.version == 3
        assert progress.job("run-1/rl").outcome == "succeeded"
        assert await written_ids(log, "groups") == [
            "run_started:run-1",
            "job_started:run-1/rl",
            *(f"epoch_started:run-1/rl/e{epoch}" for epoch in range(3)),
        ]

    asyncio.run(scenario())


def test_a_second_job_begins_at_the_version_that_the_first_reached(script: SimpleNamespace) -> None:
    async def scenario() -> None:
        log = MemoryLog(num_partitions=2)
        jobs = [script.job_spec("sft", num_epochs=2), script.job_spec("rl", num_epochs=1)]
        progress = await conducted(script, log, jobs)
        assert progress.version == 3
        started = progress.job("run-1/rl").started
        assert started is not None
        assert started.base_version == 2
        assert "job_submitted:run-1/rl" in await written_ids(log, "jobs")

    asyncio.run(scenario())


def test_nothing_is_written_twice_by_one_conductor(script: SimpleNamespace) -> None:
    async def scenario() -> None:
        log = MemoryLog(num_partitions=2)
        await conducted(script, log, [script.job_spec("sft"), script.job_spec("rl")])
        ids = [*await written_ids(log, "groups"), *await written_ids(log, "jobs")]
        assert len(ids) == len(set(ids))

    asyncio.run(scenario())


def test_a_failed_job_ends_the_conducting_with_its_error(script: SimpleNamespace) -> None:
    async def scenario() -> None:
        log = MemoryLog(num_partitions=2)
        progress = await conducted(script, log, [script.job_spec()], script.counterpart(log, fails_at=1))
        assert progress.job("run-1/rl").outcome == "failed"
        assert progress.job("run-1/rl").error == "out of memory"

    asyncio.run(scenario())


def test_a_stopped_run_ends_the_conducting(script: SimpleNamespace) -> None:
    async def scenario() -> None:
        log = MemoryLog(num_partitions=2)
        progress = await conducted(script, log, [script.job_spec()], script.counterpart(log, stops_at=1))
        assert progress.ended is not None
        assert progress.ended.cause == "stopped"

    asyncio.run(scenario())


def test_a_run_is_resumed_from_any_point_and_only_what_is_lacking_is_written(script: SimpleNamespace) -> None:
    async def scenario(cut: int) -> None:
        full = MemoryLog(num_partitions=2)
        jobs = [script.job_spec("sft", num_epochs=2), script.job_spec("rl", num_epochs=2)]
        await conducted(script, full, jobs)
        counterpart = script.counterpart(log := MemoryLog(num_partitions=2))
        stop_after = Stopping(cut)
        with contextlib.suppress(InterruptedError):
            await conducted(script, log, jobs, counterpart, on_progress=stop_after)
        progress = await conducted(script, log, jobs, counterpart, is_new=False)
        assert progress.version == 4
        for topic in ("groups", "jobs"):
            ids = await written_ids(log, topic)
            assert list(dict.fromkeys(ids)) == await written_ids(full, topic)

    for cut in range(1, 12):
        asyncio.run(scenario(cut))


class Stopping:
    """Interrupts the conductor after so many looks at the progress."""

    def __init__(self, cut: int) -> None:
        self.left = cut

    def __call__(self, _: Progress) -> None:
        self.left -= 1
        if self.left == 0:
            raise InterruptedError


def test_an_epoch_waits_until_it_may_start(script: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conductor, "POLL_S", 0.01)

    async def scenario() -> None:
        log = MemoryLog(num_partitions=2)
        asked: list[int] = []

        def may_start_epoch() -> bool:
            asked.append(1)
            return len(asked) > 2

        progress = await conducted(script, log, [script.job_spec(num_epochs=1)], may_start_epoch=may_start_epoch)
        assert progress.version == 1
        assert len(asked) == 3

    asyncio.run(scenario())


def test_a_sealed_epoch_is_answered_without_a_wait(script: SimpleNamespace) -> None:
    async def scenario() -> None:
        log, num_epochs = MemoryLog(num_partitions=2), 100
        async with asyncio.timeout(POLL_S * num_epochs / 2):
            await conducted(script, log, [script.job_spec(num_epochs=num_epochs)])

    asyncio.run(scenario())


def test_events_of_other_runs_change_nothing(script: SimpleNamespace) -> None:
    async def scenario() -> None:
        log = MemoryLog(num_partitions=2)
        await log.send(script.sealed("other-1/rl", 0, is_last=True, run_id="other-1"))
        await log.send_raw("groups", key=b"run-1", value=b"not an event")
        progress = await conducted(script, log, [script.job_spec(num_epochs=1)], is_new=False)
        assert list(progress.jobs) == ["run-1/rl"]

    asyncio.run(scenario())


def test_a_missing_event_has_the_time_of_its_cause(script: SimpleNamespace) -> None:
    spec = script.job_spec()
    submitted = lacking(Progress(script.run), script.run_started(), [spec])[1]
    assert isinstance(submitted, JobSubmitted)
    progress = fold(script.run, script.run_started(), submitted, script.published(0, spec.job_id))
    started, epoch = lacking(progress, script.run_started(), [spec])
    assert isinstance(started, JobStarted)
    assert isinstance(epoch, EpochStarted)
    assert (submitted.time_ms, started.time_ms, epoch.time_ms) == (1000, 2000, 2000)
    progress = fold(
        script.run,
        *(script.run_started(), submitted, script.published(0, spec.job_id), started, epoch),
        script.sealed(spec.job_id, 0, is_last=False),
    )
    assert [event.time_ms for event in lacking(progress, script.run_started(), [spec])] == [3000]


def test_nothing_is_lacking_while_a_learner_is_awaited(script: SimpleNamespace) -> None:
    spec = script.job_spec()
    events = lacking(Progress(script.run), script.run_started(), [spec])
    progress = fold(script.run, *events)
    assert lacking(progress, script.run_started(), [spec]) == []
    assert not is_over(progress, [spec])


def test_signs_of_life_come_as_long_as_a_run_is_conducted(script: SimpleNamespace) -> None:
    async def scenario() -> None:
        log = MemoryLog(num_partitions=2)
        started = script.run_started().model_copy(update={"idle_timeout_s": 0.01})
        reader = await log.reader({TopicPartition("groups", 0): 0})
        task = asyncio.create_task(give_signs_of_life(log, started, is_new=False))
        found = []
        while len(found) < 3:
            found += [decode(record).event for record in await reader.poll()]
        task.cancel()
        assert {type(event) for event in found} == {RunContinued}
        assert len({event.event_id for event in found}) == len(found)

    asyncio.run(scenario())


class KilledLog(MemoryLog):
    """A log whose user is killed at its write `num_writes`, of which the jobs come through and nothing else."""

    num_writes = 0

    async def send_all(self, events: Sequence[Event | Encoded], *, partition: int | None = None) -> list[Position]:
        self.num_writes -= 1
        if self.num_writes == 0:
            await super().send_all([e for e in events if isinstance(e, JobSubmitted)], partition=partition)
            raise Killed("send")
        return await super().send_all(events, partition=partition)


def test_a_job_is_sent_once_the_start_of_its_run_is_acknowledged(script: SimpleNamespace) -> None:
    async def scenario() -> None:
        log = KilledLog(num_partitions=2)
        log.num_writes, begun = 1, asyncio.Event()
        async with Conductor(log, RunPlan(script.run_started(), (script.job_spec(),), True)) as conducting:
            conducting.on_begun = begun.set
            with pytest.raises(Killed):
                await conducting.announce()
            assert not begun.is_set()
            assert await written_ids(log, "groups", "jobs") == []
            await conducting.announce()
            assert begun.is_set()

    asyncio.run(scenario())


def test_a_run_that_is_resumed_without_a_job_begins_where_its_start_is(script: SimpleNamespace) -> None:
    async def scenario() -> None:
        log = MemoryLog(num_partitions=2)
        other = {"run_id": "other-1", "time_ms": 1, "model_group": "other-1/policy"}
        for _ in range(5):
            await log.send(RunContinued(run_id="other-1", time_ms=5))
            await log.send(JobFailed(**other, job_id="other-1/rl", error="no"))
        await log.send(script.run_started())  # a kill came before its job
        await log.send(RunContinued(run_id="other-1", time_ms=6))
        plan = RunPlan(script.run_started(), (script.job_spec(),), False)
        async with Conductor(log, plan) as conducting:
            await conducting.announce()
        found = await start_offsets_of(log, "run-1")
        assert found == {"groups": 5, "batches": 0, "jobs": 5, "weights": 0}

    asyncio.run(scenario())


def test_a_resumed_run_keeps_the_offsets_of_its_first_job_also_where_it_has_none(script: SimpleNamespace) -> None:
    async def scenario() -> None:
        spec = script.job_spec()
        log, jobs = MemoryLog(num_partitions=2), lacking(Progress("run-1"), script.run_started(), [spec])[1:]
        for offsets in ({"groups": 3}, None):
            known = [job.model_copy(update={"start_offsets": offsets}) for job in jobs]
            progress = fold("run-1", script.run_started(), *known)
            assert await located(log, progress, jobs) == known

    asyncio.run(scenario())


class StuckLog(MemoryLog):
    """A log whose broker has stopped answering writes."""

    async def send_all(self, events: Sequence[Event | Encoded], *, partition: int | None = None) -> list[Position]:
        await asyncio.Event().wait()
        return []


def test_a_service_that_fails_ends_the_conducting_also_while_a_write_is_waited_for(script: SimpleNamespace) -> None:
    async def fails() -> None:
        raise LogError("the broker is gone")

    async def scenario() -> None:
        conducting = Conductor(StuckLog(num_partitions=2), RunPlan(script.run_started(), (script.job_spec(),), True))
        await conducting.start(fails())
        try:
            with pytest.raises(LogError, match="the broker is gone"):
                await conducting.conduct()
        finally:
            await conducting.close()

    asyncio.run(scenario())


def test_activity_is_what_the_run_writes_but_not_its_own_signs_of_life(script: SimpleNamespace) -> None:
    async def scenario() -> None:
        log, active = MemoryLog(num_partitions=2), []
        run = RunPlan(script.run_started(), (script.job_spec(),), True)
        async with Conductor(log, run, on_activity=lambda: active.append(1)) as conducting:
            await log.send(RunContinued(run_id="run-1", time_ms=5))
            await log.send_raw("groups", key=b"other-1", value=b"x")
            await log.send(script.run_started())
            await conducting.wait_for(lambda: conducting.progress.run)
            assert conducting.num_changes == 1
        assert active == [1]

    asyncio.run(scenario())


def test_a_job_that_the_run_did_not_plan_does_not_end_it(script: SimpleNamespace) -> None:
    spec, other = script.job_spec("rl"), script.job_spec("other")
    failed = JobFailed(run_id="run-1", time_ms=1, job_id=other.job_id, model_group=other.model_group, error="no")
    progress = fold("run-1", script.run_started(), failed)
    assert reason_to_stop(progress, [spec]) is None
    assert reason_to_stop(progress, [spec, other]) == f"job {other.job_id} failed: no"


def test_a_run_fails_at_once_with_the_error_of_its_signs_of_life(
    script: SimpleNamespace, written: dict[str, Any], tmp_path: Path
) -> None:
    class OddLog(MemoryLog):
        async def send(self, event: Event | Encoded, *, partition: int | None = None) -> Position:
            raise ValueError("odd")

    async def scenario() -> None:
        log, config = OddLog(num_partitions=2), config_file.resolve(written).config
        plan = RunPlan(script.run_started(), (script.job_spec(),), False)
        signs = asyncio.create_task(give_signs_of_life(log, plan.started, is_new=False))
        location = RunLocation(KafkaSettings(bootstrap_servers="127.0.0.1:1"), "", tmp_path)
        run = RunContext(log, ArtifactStore(str(tmp_path)), plan, Supervisor([], tmp_path), asyncio.Event(), signs)
        conducting = Conductor(log, plan)
        await conducting.start(*background_work(WorkspaceLease(location, None), run, config, print))
        try:
            async with asyncio.timeout(20):
                with pytest.raises(ValueError, match="odd"):
                    await conducting.wait_for(lambda: None)
        finally:
            await conducting.close()

    asyncio.run(scenario())
