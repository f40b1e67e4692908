"""A job that is cancelled while a batch of it is trained: the version is dropped, and the next job begins there."""

import asyncio
from typing import Any

import pytest

from rollstream.learner.publisher import Publisher
from rollstream.learner.trainer import JobTrainer
from rollstream.schemas.events import JobCancelled, JobFailed, JobSubmitted, JobSucceeded, StepTrained, WeightsPublished


@pytest.mark.parametrize("when", ["in training", "in storing"])
def test_a_version_of_a_job_that_was_cancelled_meanwhile_is_dropped(
    lab: Any, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    async def cancel_and_retry(job: JobSubmitted) -> None:
        common: dict[str, Any] = {"run_id": "run-1", "time_ms": 1, "model_group": job.model_group}
        await lab.log.send(JobCancelled(**common, job_id=job.job_id, cause="x"))
        await lab.plan(await lab.submit("again", num_versions=2, base_version=1), 2)

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        job = await lab.submit("first")
        train, put = JobTrainer.train, Publisher.put

        def trained(trainer: JobTrainer, planned: Any, *arguments: Any, **options: Any) -> Any:
            result = train(trainer, planned, *arguments, **options)
            if when == "in training" and (planned.job_id, planned.yields_version) == (job.job_id, 2):
                asyncio.run_coroutine_threadsafe(cancel_and_retry(job), loop).result()
            return result

        stored: list[Any] = []

        async def storing(publisher: Publisher, job_of: JobSubmitted, weights: Any) -> Any:
            stored.append(weights)
            if when == "in storing" and len(stored) == 3:
                await cancel_and_retry(job)
            return await put(publisher, job_of, weights)

        monkeypatch.setattr(JobTrainer, "train", trained)
        monkeypatch.setattr(Publisher, "put", storing)
        await lab.plan(job, 3)

        async def over() -> bool:
            return bool(await lab.events("jobs", JobSucceeded) + await lab.events("jobs", JobFailed))

        await lab.work(over)
        assert not await lab.events("jobs", JobFailed)
        published = await lab.events("weights", WeightsPublished)
        again = "run-1/again"
        assert [(one.version, one.job_id) for one in published] == [
            (0, job.job_id), (1, job.job_id), (2, again), (3, again),
        ]  # fmt: skip
        assert [(one.version, one.job_id) for one in await lab.events("weights", StepTrained)] == [
            (1, job.job_id), (2, again), (3, again),
        ]  # fmt: skip

    asyncio.run(scenario())
