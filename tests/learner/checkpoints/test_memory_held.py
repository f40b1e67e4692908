"""Memory that lacks for a version that is trained again, where it fitted before: something else may hold it."""

import asyncio
from typing import Any

import pytest
import torch

from rollstream.eventlog import codec
from rollstream.learner.model.memory import MemoryHeldError
from rollstream.learner.model.policy import PolicyModel
from rollstream.schemas.events import JobFailed, JobSucceeded, WeightsPublished
from rollstream.schemas.settings import ModelSettings
from tests.learner.checkpoints.faults_rig import failing, fault_files, versions

NO_MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")


async def planned_again(lab: Any, **changes: Any) -> None:
    """Publish two versions without a checkpoint, and plan the third: the next learner trains all of them."""
    job = await lab.submit(checkpoint_every=3, **changes)
    first = await lab.plan(job, 2, seal=False)
    await lab.work(lab.has(WeightsPublished, "weights", 3))
    await lab.plan(job, 1, first=2, previous=codec.content_digest(first[-1]))


@pytest.mark.parametrize(
    ("owner", "method"), [(PolicyModel, "completion_terms"), (torch.optim.AdamW, "step")], ids=["forward", "optimizer"]
)
def test_memory_that_lacks_for_a_version_that_is_trained_again_ends_the_process_and_not_the_job(
    lab: Any, monkeypatch: pytest.MonkeyPatch, owner: type, method: str
) -> None:
    async def scenario() -> None:
        await planned_again(lab)
        monkeypatch.setattr(owner, method, failing(getattr(owner, method), NO_MEMORY, 1, 1))
        with pytest.raises(MemoryHeldError):
            await lab.work(lab.has(JobSucceeded))
        await lab.work(lab.has(JobSucceeded))
        assert await versions(lab) == [0, 1, 2, 3]
        assert await lab.events("jobs", JobFailed) == []
        assert fault_files(lab) == []

    asyncio.run(scenario())


def test_memory_that_lacks_for_it_twice_fails_the_job_with_a_learners_remedy(
    lab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        await planned_again(lab)
        monkeypatch.setattr(PolicyModel, "completion_terms", failing(PolicyModel.completion_terms, NO_MEMORY))
        for _ in range(2):
            with pytest.raises(MemoryHeldError):
                await lab.work(lab.has(JobFailed))
        await lab.work(lab.has(JobFailed))
        (failed,) = await lab.events("jobs", JobFailed)
        assert failed.error.startswith("manifest 0 ended process 0 of the learner: out of memory with micro-batches of")
        assert "trained again fitted before (CUDA out of memory. Tried to allocate 20.00 MiB); end what" in failed.error
        assert "replay" not in failed.error

    asyncio.run(scenario())


def test_without_determinism_memory_that_lacks_for_a_version_trained_again_halves_its_micro_batches(
    lab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        await planned_again(lab, model=ModelSettings(path=str(lab.model), device="cpu", deterministic=False))
        monkeypatch.setattr(PolicyModel, "completion_terms", failing(PolicyModel.completion_terms, NO_MEMORY, 1, 1))
        await lab.work(lab.has(JobSucceeded))
        assert await versions(lab) == [0, 1, 2, 3]

    asyncio.run(scenario())
