"""A job that ends while its version waits for space on a full disk: the version is dropped, and the learner goes on."""

import asyncio
import errno
import logging
from typing import Any

import pytest

from rollstream.eventlog.artifacts import ArtifactStore
from rollstream.eventlog.blocking_calls import Retry
from rollstream.learner.checkpoints.checkpoint import CheckpointFolder
from rollstream.schemas.events import JobCancelled, JobFailed, JobSubmitted, JobSucceeded, RunEnded, WeightsPublished
from tests.learner.conftest import GROUP, RUN

SOON = Retry(first_wait_s=0.01, max_wait_s=0.02)
PATIENCE_S = 60.0


def fill(monkeypatch: pytest.MonkeyPatch, owner: type, method: str, version: int) -> None:
    """Have a method fail, as on a full disk, for what is from a version on of the model group `main`."""
    plain = getattr(owner, method)

    def full(self: Any, given: Any, *others: Any) -> Any:
        if isinstance(self, ArtifactStore):
            of, number = given.path.parent.name, int(given.path.name[1:].split(".")[0])
        else:
            of, number = self.path.name, given if isinstance(given, int) else given.position.version
        if of.endswith("main") and number >= version:
            raise OSError(errno.ENOSPC, "No space left on device")
        return plain(self, given, *others)

    monkeypatch.setattr(owner, method, full)


async def until_waiting(working: "asyncio.Task[None]", caplog: pytest.LogCaptureFixture) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while "waiting for free space" not in caplog.text:
            assert not working.done()
            await asyncio.sleep(0.01)


def end_of(job: JobSubmitted, *, is_run: bool) -> JobCancelled | RunEnded:
    if is_run:
        return RunEnded(run_id=RUN, time_ms=2, cause="stopped")
    return JobCancelled(run_id=RUN, time_ms=2, job_id=job.job_id, model_group=GROUP)


@pytest.mark.parametrize("is_run", [False, True])
@pytest.mark.parametrize(
    ("owner", "method"),
    [(CheckpointFolder, "save"), (CheckpointFolder, "write_weights"), (ArtifactStore, "put_hashed")],
)
@pytest.mark.parametrize("version", [0, 2])
def test_a_version_that_waits_for_space_is_dropped_with_its_job(
    lab: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    owner: type,
    method: str,
    version: int,
    is_run: bool,
) -> None:
    fill(monkeypatch, owner, method, version)

    async def scenario() -> None:
        unhandled: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: unhandled.append(context))
        job = await lab.submit(num_versions=4)
        await lab.plan(job, 4)
        working = asyncio.create_task(lab.worker(retry=SOON).run())
        await until_waiting(working, caplog)
        await lab.log.send(end_of(job, is_run=is_run))
        if not is_run:
            other = await lab.submit("other", model_group=f"{RUN}/other", num_versions=1)
            await lab.plan(other, 1)
        async with asyncio.timeout(PATIENCE_S):
            while not await lab.has(JobCancelled if is_run else JobSucceeded)():
                assert not working.done()
                await asyncio.sleep(0.01)
        working.cancel()
        await asyncio.wait([working])
        assert working.cancelled()
        assert [one.job_id for one in await lab.events("jobs", JobCancelled)] == [job.job_id]
        assert await lab.events("jobs", JobFailed) == []
        published = [one.version for one in await lab.events("weights", WeightsPublished) if one.model_group == GROUP]
        assert published == list(range(len(published)))
        assert len(published) <= max(version, 1)
        assert not list((lab.folder / "checkpoints").rglob("*.aside"))
        assert unhandled == []

    with caplog.at_level(logging.ERROR):
        asyncio.run(scenario())
