"""A learner's memory and reads at a start: proportional to what is open, however long the log is."""

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from rollstream.eventlog.run_offsets import LETTERS, PARTITIONED, TOPICS, start_offsets_of
from rollstream.learner.inbox import LOOK_BACK, Inbox
from rollstream.learner.progress import anchors
from rollstream.schemas.events import (
    JobCancelled,
    JobProgressed,
    JobSubmitted,
    JobSucceeded,
    LearnerClaimed,
    RunEnded,
    WeightsPublished,
)
from rollstream.schemas.settings import ArtifactRef
from tests.learner.conftest import submit


async def publish(lab: Any, job: JobSubmitted, version: int, term: int = 1) -> None:
    sha256 = f"{version:064d}"
    ids = {"run_id": job.run_id, "time_ms": 1, "model_group": job.model_group}
    if not version:
        await lab.log.send(LearnerClaimed(**ids, term=term, learner="one"))
    await lab.log.send(
        WeightsPublished(
            **ids,
            job_id=job.job_id,
            batch_id=None,
            version=version,
            parent=None,
            term=term,
            weights_sha256=sha256,
            weights_format="full",
            base_model="model",
            lora=None,
            artifact=ArtifactRef(uri="file:///x", sha256=sha256, size_bytes=1),
        )
    )
    await lab.log.send(
        JobProgressed(
            run_id=job.run_id,
            time_ms=1,
            job_id=job.job_id,
            model_group=job.model_group,
            version=version,
            percent=0,
        )
    )


async def ended_run(lab: Any, run_id: str, num_versions: int) -> None:
    """A run as other learners and conductors would have left it."""
    job = await submit(lab, run_id)
    for version in range(num_versions):
        await publish(lab, job, version)
        await lab.log.send_raw(
            "groups", key=run_id.encode(), value=b"{}", headers=(("ce_type", b"rollstream.group_closed.v1"),)
        )
    ids = {"run_id": run_id, "time_ms": 1}
    await lab.log.send(JobSucceeded(**ids, job_id=job.job_id, model_group=job.model_group, final_version=num_versions))
    await lab.log.send(RunEnded(**ids, cause="completed"))


def entries(inbox: Inbox) -> int:
    """Everything that the state holds."""
    state = inbox.state
    held = [len(anchors(state)), len(state.jobs), len(state.queues), len(state.groups), len(state.owners)]
    return sum(held) + len(state.ends)


def test_ended_runs_leave_nothing_in_the_state(lab: Any) -> None:
    async def scenario() -> None:
        inbox = await Inbox.open(lab.log)
        for number in range(20):
            run_id = f"run-{number:03d}"
            job = await submit(lab, run_id)
            await inbox.catch_up()
            await inbox.follow(job)
            for version in range(10):
                await publish(lab, job, version)
            await inbox.catch_up()
            assert inbox.state.group(job.model_group).newest_version == 9
            ids = {"run_id": run_id, "time_ms": 1, "job_id": job.job_id, "model_group": job.model_group}
            await lab.log.send(JobSucceeded(**ids, final_version=9))
            await lab.log.send(RunEnded(run_id=run_id, time_ms=1, cause="completed"))
            await inbox.catch_up()
            assert entries(inbox) == 0
        await inbox.close()

    asyncio.run(scenario())


def test_a_long_job_holds_what_lies_after_its_checkpoint(lab: Any) -> None:
    async def scenario() -> None:
        inbox = await Inbox.open(lab.log)
        job = await submit(lab, "run-1")
        await inbox.catch_up()
        await inbox.follow(job)
        sizes: set[int] = set()
        previous = "0" * 64
        for index in range(30):
            (planned,) = await lab.plan(job, 1, first=index, previous=previous, seal=False)
            await publish(lab, job, index)
            await inbox.catch_up()
            previous = inbox.state.job(job.job_id).manifests[index].digest
            inbox.forget(job, next_index=index + 1, version=index)
            assert planned.index not in inbox.state.job(job.job_id).manifests
            sizes.add(entries(inbox))
        assert len(sizes) <= 2
        assert set(inbox.state.group(job.model_group).published) == {0, 29}
        await inbox.close()

    asyncio.run(scenario())


async def followed(lab: Any, run: str, file: Path) -> JobSubmitted:
    """A run's job that a learner follows whose position was saved in `file`."""
    job = await submit(lab, run)
    await publish(lab, job, 0)
    inbox = await Inbox.open(lab.log, file=file)
    await inbox.follow(job)
    inbox.save(every_s=0.0)
    await inbox.close()
    return job


def test_a_start_reads_on_where_the_one_before_it_stopped(counting_lab: Any, tmp_path: Path) -> None:
    lab, file = counting_lab, tmp_path / "learner.position.json"

    async def start() -> tuple[Counter[str], Inbox]:
        lab.log.num_read.clear()
        inbox = await Inbox.open(lab.log, file=file)
        inbox.save(every_s=0.0)
        await inbox.close()
        return Counter(lab.log.num_read), inbox

    async def scenario() -> None:
        job = await followed(lab, "run-open", file)
        for number in range(30):
            await ended_run(lab, f"run-{number}", 50)
        await start()
        read, inbox = await start()
        assert read.total() == 0
        assert inbox.is_followed(job)
        assert inbox.state.group(job.model_group).newest_version == 0
        assert [one.job_id for queue in inbox.state.queues.values() for one in queue] == [job.job_id]
        await lab.log.send(RunEnded(run_id=job.run_id, time_ms=1, cause="stopped"))
        read, _ = await start()
        assert read.total() == 1
        _, inbox = await start()  # the end of a run whose job is still open is not lost
        assert inbox.state.to_cancel() == [job]

    asyncio.run(scenario())


@pytest.mark.parametrize("num_runs", [10, 100])
def test_a_first_start_reads_little_beside_the_small_topic_jobs(counting_lab: Any, num_runs: int) -> None:
    lab = counting_lab

    async def scenario() -> None:
        for number in range(num_runs):
            await ended_run(lab, f"run-{number}", 5000 // num_runs)
        job = await submit(lab, "run-open")
        await publish(lab, job, 0)
        lab.log.num_read.clear()
        inbox = await Inbox.open(lab.log)
        assert lab.log.num_read["groups"] <= LOOK_BACK
        assert lab.log.num_read["weights"] <= LOOK_BACK
        lab.log.num_read.clear()
        await inbox.follow(job)
        assert lab.log.num_read.total() <= 10
        assert inbox.state.group(job.model_group).newest_version == 0
        await inbox.close()

    asyncio.run(scenario())


def test_where_a_run_begins_is_found_from_the_end_of_jobs(counting_lab: Any) -> None:
    lab = counting_lab

    async def scenario() -> None:
        for number in range(10):
            await ended_run(lab, f"run-{number}", 1000)
        job = await submit(lab, "run-new")
        lab.log.num_read.clear()
        everywhere = (*TOPICS, LETTERS, *PARTITIONED)
        assert await start_offsets_of(lab.log, "run-new", everywhere) == job.start_offsets
        assert lab.log.num_read == {"jobs": 2000}
        old = (await lab.events("jobs", JobSubmitted))[0]
        assert await start_offsets_of(lab.log, "run-0", everywhere) == old.start_offsets
        assert await start_offsets_of(lab.log, "run-") == {}
        await submit(lab, "run-unplaced", offsets=False)
        assert set((await start_offsets_of(lab.log, "run-unplaced")).values()) == {0}

    asyncio.run(scenario())


@pytest.mark.parametrize("content", [b"", b"{", b'{"cluster_id": 1}'])
def test_a_position_file_that_cannot_be_read_is_done_without(lab: Any, tmp_path: Path, content: bytes) -> None:
    async def scenario() -> None:
        file = tmp_path / "learner.position.json"
        file.write_bytes(content)
        job = await submit(lab, "run-1")
        inbox = await Inbox.open(lab.log, file=file)
        assert inbox.state.queues == {job.model_group: [job]}
        await inbox.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("change", ["cluster_id", "next_offsets", "anchors", "model_groups"])
def test_a_position_of_another_log_is_done_without(lab: Any, tmp_path: Path, change: str) -> None:
    async def scenario() -> None:
        file = tmp_path / "learner.position.json"
        job = await followed(lab, "run-1", file)
        saved = json.loads(file.read_text())
        wrong: dict[str, Any] = {
            "cluster_id": "other",
            "next_offsets": {**saved["next_offsets"], "weights": 99},
            "anchors": {**saved["anchors"], "weights": [77]},
            "model_groups": ["run-9/main"],
        }
        file.write_text(json.dumps(saved | {change: wrong[change]}))
        inbox = await Inbox.open(lab.log, file=file)
        assert not inbox.is_followed(job)
        assert inbox.state.queues == {job.model_group: [job]}
        await inbox.follow(job)
        assert inbox.state.group(job.model_group).newest_version == 0
        await inbox.close()

    asyncio.run(scenario())


def test_jobs_of_model_groups_that_another_learner_serves_are_not_held(lab: Any) -> None:
    async def scenario() -> None:
        inbox = await Inbox.open(lab.log, model_groups=("run-1/main",))
        jobs = [await submit(lab, run_id) for run_id in ("run-1", "run-2")]
        for job in jobs:
            await lab.plan(job, 3)
        await inbox.catch_up()
        assert inbox.state.queues == {"run-1/main": [jobs[0]]}
        assert list(inbox.state.jobs) == ["run-1/rl"]
        await inbox.close()

    asyncio.run(scenario())


@pytest.mark.slow
def test_a_restart_in_mid_job_reads_little_and_trains_the_same_bits(counting_lab: Any, tmp_path: Path) -> None:
    async def scenario() -> None:
        undisturbed = type(counting_lab)(tmp_path / "undisturbed", counting_lab.model)
        await undisturbed.plan(await undisturbed.submit(num_versions=14), 14)
        await undisturbed.work(undisturbed.has(JobSucceeded))
        lab = counting_lab
        job = await lab.submit(num_versions=14)
        first = await lab.plan(job, 12, seal=False)
        await lab.work(lab.has(JobProgressed, count=12))
        lab.log.num_read.clear()
        previous = next(r.digest for r in await lab.received("batches") if r.event == first[-1])
        planned = await lab.plan(job, 2, first=12, previous=previous)
        lab.log.num_read.clear()
        done = lab.log.has_sent(JobSucceeded)
        worker = asyncio.create_task(lab.worker().run())
        await asyncio.wait_for(done, 60)
        worker.cancel()
        await asyncio.wait({worker})
        assert lab.log.num_read["batches"] <= len(planned) + 1
        assert lab.log.num_read.total() < 40
        assert await lab.outcome() == await undisturbed.outcome()

    asyncio.run(scenario())


def test_the_end_of_a_run_is_found_by_a_learner_without_a_position(lab: Any) -> None:
    async def scenario() -> None:
        job = await submit(lab, "run-1")
        await lab.log.send(RunEnded(run_id="run-1", time_ms=1, cause="stopped"))
        for number in range(LOOK_BACK + 1):
            await lab.log.send(RunEnded(run_id=f"other-{number}", time_ms=1, cause="stopped"))
        await lab.work(lab.has(JobCancelled))
        assert [event.job_id for event in await lab.events("jobs", JobCancelled)] == [job.job_id]
        assert await lab.events("weights", WeightsPublished) == []

    asyncio.run(scenario())
