"""Jobs of several model groups in one learner: each computes with the threads and the algorithms that it asks for."""

import asyncio
from functools import partial
from typing import Any

import pytest
import torch

from rollstream.eventlog import codec
from rollstream.learner.scoring.models import ScoringModels
from rollstream.learner.trainer import JobTrainer
from rollstream.producers.engines.transformers import TransformersEngine
from rollstream.schemas.algorithms import GrpoSettings
from rollstream.schemas.devices import own_threads
from rollstream.schemas.engine_settings import TransformersSettings
from rollstream.schemas.events import JobFailed, JobSucceeded, StepTrained, WeightsPublished
from rollstream.schemas.settings import ModelSettings
from tests.learner.checkpoints.restart_rig import adopt


async def submit(lab: Any, name: str, *, deterministic: bool, threads: int | None) -> None:
    """A job of a model group of its own, with two manifests."""
    model = ModelSettings(path=str(lab.model), device="cpu", deterministic=deterministic)
    algorithm = GrpoSettings(kl_coefficient=0.1)
    changes = {"num_versions": 2, "threads": threads, "model": model, "algorithm": algorithm}
    job = await lab.submit(name, model_group=f"run-1/{name}", **changes)
    await lab.plan(job, 2)


def test_jobs_in_turn_compute_with_the_settings_of_their_own(lab: Any, monkeypatch: Any) -> None:
    """All jobs are loaded before the first one trains."""
    own = own_threads(torch.get_num_threads)
    seen: set[tuple[int, bool]] = set()
    score = ScoringModels.score

    def watched(models: ScoringModels, *arguments: Any) -> Any:
        result = score(models, *arguments)
        seen.add((torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()))
        return result

    monkeypatch.setattr(ScoringModels, "score", watched)

    async def scenario() -> None:
        await submit(lab, "exact", deterministic=True, threads=own + 1)
        await submit(lab, "fast", deterministic=False, threads=own + 2)
        await submit(lab, "unset", deterministic=True, threads=None)
        await lab.work(lab.has(JobSucceeded, "jobs", 3), lab.worker(threads=None))
        steps = await lab.events("weights", StepTrained)
        found = {(step.model_group, step.threads) for step in steps}
        assert found == {("run-1/exact", own + 1), ("run-1/fast", own + 2), ("run-1/unset", own)}
        assert seen == {(own + 1, True), (own + 2, False), (own, True)}

    asyncio.run(scenario())


def test_a_job_does_not_take_over_the_threads_of_an_engine_that_is_in_its_process(lab: Any) -> None:
    """A thread that begins after torch was given a number in another one begins with that number."""
    own = torch.get_num_threads()
    own_threads.cache_clear()

    async def scenario() -> None:
        engine = TransformersEngine(TransformersSettings(device="cpu", threads=own + 1))
        await engine.start()
        try:
            await submit(lab, "unset", deterministic=True, threads=None)
            await lab.work(lab.has(JobSucceeded), lab.worker(threads=None))
        finally:
            await engine.close()
        assert {step.threads for step in await lab.events("weights", StepTrained)} == {own}

    asyncio.run(scenario())


@pytest.fixture
def bits_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the number of threads decide the bits, as it does for larger models."""
    train = JobTrainer.train

    def to_bits_of_threads(trainer: JobTrainer, *given: Any, **options: Any) -> Any:
        result = train(trainer, *given, **options)
        factor = 1 + torch.get_num_threads() * 1e-3
        trainer.model.load_weights({name: tensor * factor for name, tensor in trainer.model.published().items()})
        return result

    monkeypatch.setattr(JobTrainer, "train", to_bits_of_threads)


async def is_over(lab: Any) -> bool:
    return bool(await lab.events("jobs", JobSucceeded) or await lab.events("jobs", JobFailed))


@pytest.mark.usefixtures("bits_of_threads")
def test_a_learner_with_other_threads_trains_known_versions_again_with_those_of_their_time(lab: Any) -> None:
    async def scenario() -> None:
        job = await lab.submit(threads=None, checkpoint_every=3)
        first = await lab.plan(job, 2, seal=False)
        await lab.work(lab.has(WeightsPublished, "weights", 3), lab.worker(threads=1))
        await lab.plan(job, 1, first=2, previous=codec.content_digest(first[-1]))
        await lab.work(partial(is_over, lab), lab.worker(threads=2))
        assert await lab.events("jobs", JobFailed) == []
        steps = await lab.events("weights", StepTrained)
        assert [(step.version, step.threads) for step in steps] == [(1, 1), (2, 1), (3, 2)]

    asyncio.run(scenario())


@pytest.mark.usefixtures("bits_of_threads")
def test_a_rollback_trains_a_pruned_version_again_with_the_threads_of_its_time(lab: Any) -> None:
    async def scenario() -> None:
        job = await lab.submit(threads=None, num_versions=9, keep_last=1, keep_every=100)
        planned = await lab.plan(job, 3, seal=False)
        await lab.work(lab.has(WeightsPublished, "weights", 4), lab.worker(threads=1))
        await adopt(lab, job, planned, 2)
        await lab.seal(job, 4)
        await lab.work(partial(is_over, lab), lab.worker(threads=2))
        assert await lab.events("jobs", JobFailed) == []
        steps = {step.version: step for step in await lab.events("weights", StepTrained)}
        assert steps[4].weights_sha256 == steps[2].weights_sha256
        assert steps[4].threads == 2

    asyncio.run(scenario())
