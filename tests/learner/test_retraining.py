"""A recorded job trained again: with each version's number of threads, from a checkpoint of the recorded weights."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from rollstream.eventlog import codec
from rollstream.learner.checkpoints.checkpoint import CheckpointFolder
from rollstream.learner.progress import Manifest
from rollstream.learner.retrain import RecordedJob, Retraining, threads_of
from rollstream.schemas.events import BatchPlanned, JobSucceeded, StepTrained, WeightsPublished
from tests.rigs.runs.retrained import assert_retrained, steps_of


def test_every_version_is_trained_again_with_its_own_number_of_threads(lab: Any) -> None:
    async def scenario() -> None:
        job = await lab.submit(num_versions=4, threads=None)
        await lab.plan(job, 4)

        async def is_half_way() -> bool:
            return len(await lab.events("weights", StepTrained)) >= 2

        await lab.work(is_half_way, lab.worker(threads=2))
        await lab.work(lab.has(JobSucceeded), lab.worker(threads=1))
        steps = await steps_of(lab)
        threads = [steps[version].threads for version in range(1, 5)]
        assert (threads[:2], threads[-1]) == ([2, 2], 1)
        received = [one for one in await lab.received("batches") if isinstance(one.event, BatchPlanned)]
        manifests = {one.event.index: Manifest(one.event, one.digest, one.position.offset) for one in received}
        base = next(one for one in await lab.events("weights", WeightsPublished) if one.version == 0)
        recorded = RecordedJob(job, base, manifests, steps)
        assert threads_of(recorded) == 2
        again = Retraining(recorded, threads=threads_of(recorded), permissions=lab.permissions)
        again.begin(lab.artifacts, None, version=3)
        found = [pair async for pair in again.steps(lab.log, until=4)]
        assert [step.threads for _, step in found] == threads
        assert all(codec.content_digest(before) == codec.content_digest(after) for before, after in found)

    asyncio.run(scenario())


def test_a_checkpoint_of_another_run_with_the_same_id_is_passed_over(
    lab: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Here the newest one: its weights are those of version 3, and not the recorded ones of version 2."""

    async def scenario() -> None:
        job = await lab.submit(num_versions=3)
        await lab.plan(job, 3)
        await lab.work(lab.has(JobSucceeded))
        steps = await steps_of(lab)
        folder = CheckpointFolder(lab.folder / "checkpoints", job.model_group)
        own, other = (folder.newest(job_id=job.job_id, max_version=version) for version in (2, 3))
        assert own is not None
        assert own.path is not None
        assert other is not None
        own.path.unlink()
        folder.save(replace(other, position=own.position.model_copy(update={"step": other.position.step})))
        await assert_retrained(lab, job, steps, first=3)
        assert "weights that the log does not record for version 2" in caplog.text

    asyncio.run(scenario())


def test_a_checkpoint_whose_header_was_changed_is_passed_over(lab: Any, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        job = await lab.submit(num_versions=3)
        await lab.plan(job, 3)
        await lab.work(lab.has(JobSucceeded))
        steps = await steps_of(lab)
        folder = CheckpointFolder(lab.folder / "checkpoints", job.model_group)
        own = folder.newest(job_id=job.job_id, max_version=2)
        assert own is not None
        assert own.path is not None
        own.path.write_bytes(own.path.read_bytes().replace(b"weights_sha256", b"weights_sha25x"))
        await assert_retrained(lab, job, steps, first=3)
        assert "is damaged; going back to the one before it" in caplog.text

    asyncio.run(scenario())
