"""A learner that is stopped while it reads the log, or reads something twice, goes on as if it had not been."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollstream.eventlog.dead_letters import origin
from rollstream.eventlog.log import Record, TopicPartition
from rollstream.eventlog.memory.log import MemoryLog
from rollstream.learner import inbox as inbox_module
from rollstream.learner.inbox import Inbox
from rollstream.schemas.events import (
    JobCancelled,
    JobFailed,
    JobProgressed,
    JobSubmitted,
    JobSucceeded,
    LearnerClaimed,
    RunEnded,
    WeightsPublished,
)
from rollstream.schemas.settings import ArtifactRef
from tests.learner.conftest import submit

PATIENCE_S = 30.0
BROKEN = b"\xff{"
NUM_VERSIONS = 40


def of(job: JobSubmitted) -> dict[str, Any]:
    return {"run_id": job.run_id, "time_ms": 1, "model_group": job.model_group}


def published(job: JobSubmitted, version: int) -> WeightsPublished:
    sha256 = f"{version:064d}"
    return WeightsPublished(
        **of(job),
        job_id=job.job_id,
        batch_id=None,
        version=version,
        parent=None,
        term=2,
        weights_sha256=sha256,
        weights_format="full",
        base_model="model",
        lora=None,
        artifact=ArtifactRef(uri="file:///x", sha256=sha256, size_bytes=1),
    )


async def stopped(task: "asyncio.Task[Any]") -> None:
    task.cancel()
    await asyncio.wait([task], timeout=PATIENCE_S)
    assert task.cancelled()


async def reopened(inbox: Inbox, log: Any, file: Path) -> Inbox:
    """The inbox of the learner that is started after the one of `inbox` was stopped."""
    inbox.save(every_s=0.0)
    await inbox.close()
    return await Inbox.open(log, file=file)


def stop_at(monkeypatch: pytest.MonkeyPatch, is_there: Callable[[Record], bool]) -> asyncio.Event:
    """An event that is set when `follow` has read as far as a record, after which it waits until it is stopped."""
    reached, read_to_end = asyncio.Event(), inbox_module.read_to_end

    async def halting(*args: Any, **options: Any) -> Any:
        async for record in read_to_end(*args, **options):
            yield record
            if is_there(record):
                reached.set()
                await asyncio.Event().wait()

    monkeypatch.setattr(inbox_module, "read_to_end", halting)
    return reached


@pytest.mark.parametrize("was_followed", [False, True])
def test_a_learner_that_is_stopped_while_it_reads_a_job_does_not_take_half_of_it_for_the_whole(
    lab: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, was_followed: bool
) -> None:
    async def scenario() -> None:
        file = tmp_path / "learner.position.json"
        job = await submit(lab, "run-1")
        await lab.log.send(LearnerClaimed(**of(job), term=1, learner="one"))
        await lab.log.send_all([published(job, version) for version in range(NUM_VERSIONS // 2)])
        await lab.log.send(LearnerClaimed(**of(job), term=2, learner="two"))
        await lab.log.send_all([published(job, version) for version in range(NUM_VERSIONS)])
        await lab.log.send(JobProgressed(**of(job), job_id=job.job_id, version=3, percent=0))
        inbox = await Inbox.open(lab.log, file=file)
        if was_followed:
            await inbox.follow(job)
        with monkeypatch.context() as patched:
            reached = stop_at(patched, lambda record: record.topic == "weights" and record.offset == 10)
            following = asyncio.create_task(inbox.follow(job))
            await asyncio.wait_for(reached.wait(), PATIENCE_S)
            await stopped(following)
        inbox = await reopened(inbox, lab.log, file)
        assert inbox.is_followed(job) == was_followed
        if not was_followed:
            await inbox.follow(job)
        assert inbox.is_followed(job)
        assert inbox.state.owners[job.model_group].term == 2
        assert inbox.state.group(job.model_group).newest_version == NUM_VERSIONS - 1
        assert list(inbox.state.group(job.model_group).progressed) == [3]
        await inbox.close()

    asyncio.run(scenario())


class HaltingLog(MemoryLog):
    """A log whose dead letters are not acknowledged until `goes_on` is set."""

    def __init__(self) -> None:
        super().__init__(num_partitions=2)
        self.asked, self.goes_on = asyncio.Event(), asyncio.Event()

    async def send_raw(self, topic: str, **options: Any) -> Any:
        if topic == "dlq":
            self.asked.set()
            await self.goes_on.wait()
        return await super().send_raw(topic, **options)


async def dead_letters(log: MemoryLog) -> list[tuple[str, int]]:
    """Positions that they are about."""
    reader = await log.reader({TopicPartition("dlq", 0): 0})
    found = [origin(record.headers) for record in await reader.poll(timeout_s=0)]
    return [(topic, offset) for topic, _, offset in found]


@pytest.mark.parametrize("is_restarted", [True, False])
def test_records_behind_one_whose_dead_letter_was_not_sent_yet_are_not_lost_by_a_stop(
    lab: Any, tmp_path: Path, is_restarted: bool
) -> None:
    async def scenario() -> None:
        lab.log, file = HaltingLog(), tmp_path / "learner.position.json"
        job = await submit(lab, "run-1")
        inbox = await Inbox.open(lab.log, file=file)
        await inbox.follow(job)
        await lab.log.send(published(job, 0))
        await lab.log.send_raw("weights", key=job.model_group.encode(), value=BROKEN)
        await lab.log.send_all([published(job, version) for version in (1, 2)])
        polling = asyncio.create_task(inbox.poll(timeout_s=1.0))
        await asyncio.wait_for(lab.log.asked.wait(), PATIENCE_S)
        await stopped(polling)
        lab.log.goes_on.set()
        if is_restarted:
            inbox = await reopened(inbox, lab.log, file)
        await inbox.catch_up()
        assert inbox.is_followed(job)
        assert sorted(inbox.state.group(job.model_group).published) == [0, 1, 2]
        assert await dead_letters(lab.log) == [("weights", 1)]
        await inbox.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("kind", [JobSucceeded, JobFailed, JobCancelled])
@pytest.mark.parametrize("has_run_ended", [False, True])
def test_a_job_that_is_over_is_not_opened_again_by_a_repeat_after_a_restart(
    lab: Any, tmp_path: Path, kind: Any, has_run_ended: bool
) -> None:
    async def scenario() -> None:
        file = tmp_path / "learner.position.json"
        job = await submit(lab, "run-1")
        inbox = await Inbox.open(lab.log, file=file)
        await inbox.follow(job)
        last = {JobSucceeded: {"final_version": 3}, JobFailed: {"error": "broken"}, JobCancelled: {}}[kind]
        await lab.log.send(kind(**of(job), job_id=job.job_id, **last))
        if has_run_ended:
            await lab.log.send(RunEnded(run_id=job.run_id, time_ms=1, cause="completed"))
        await inbox.catch_up()
        inbox = await reopened(inbox, lab.log, file)
        await lab.log.send(job)
        await inbox.catch_up()
        await inbox.follow(job)
        assert not inbox.is_followed(job)
        assert not inbox.state.queues
        assert not inbox.state.jobs
        await lab.log.send(job)
        await inbox.catch_up()
        assert not inbox.state.queues
        await inbox.close()

    asyncio.run(scenario())


def test_a_worker_goes_on_beside_a_repeat_of_a_job_that_is_over(lab: Any) -> None:
    async def scenario() -> None:
        job = await lab.submit()
        await lab.plan(job)
        await lab.work(lab.has(JobSucceeded))
        await lab.log.send(job)
        await lab.submit("other", base_version=9)
        await lab.work(lab.has(JobFailed))
        (failed,) = await lab.events("jobs", JobFailed)
        assert failed.job_id.endswith("other")
        assert len(await lab.events("jobs", JobSucceeded)) == 1

    asyncio.run(scenario())
