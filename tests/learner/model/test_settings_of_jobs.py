"""Jobs of several model groups in one learner: each computes with the threads and the algorithms that it asks for."""

import asyncio
from typing import Any

import torch

from rollstream.learner.scoring.models import ScoringModels
from rollstream.producers.engines.transformers import TransformersEngine
from rollstream.schemas.algorithms import GrpoSettings
from rollstream.schemas.devices import own_threads
from rollstream.schemas.engine_settings import TransformersSettings
from rollstream.schemas.events import JobSucceeded, StepTrained
from rollstream.schemas.settings import ModelSettings


async def submit(lab: Any, name: str, *, deterministic: bool, threads: int | None) -> None:
    """A job of a model group of its own, with two manifests."""
    model = ModelSettings(path=str(lab.model), device="cpu", deterministic=deterministic)
    algorithm = GrpoSettings(kl_coefficient=0.1)
    changes = {"num_versions": 2, "threads": threads, "model": model, "algorithm": algorithm}
    job = await lab.submit(name, model_group=f"run-1/{name}", **changes)
    await lab.plan(job, 2)


def test_jobs_in_turn_compute_with_the_settings_of_their_own(lab: Any, monkeypatch: Any) -> None:
    """All jobs are loaded before the first one trains."""
    seen: set[tuple[int, bool]] = set()
    score = ScoringModels.score

    def watched(models: ScoringModels, *arguments: Any) -> Any:
        result = score(models, *arguments)
        seen.add((torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()))
        return result

    monkeypatch.setattr(ScoringModels, "score", watched)

    async def scenario() -> None:
        await submit(lab, "exact", deterministic=True, threads=1)
        await submit(lab, "fast", deterministic=False, threads=2)
        await submit(lab, "unset", deterministic=True, threads=None)
        await lab.work(lab.has(JobSucceeded, "jobs", 3), lab.worker(threads=None))
        steps = await lab.events("weights", StepTrained)
        own = own_threads(torch.get_num_threads)
        found = {(step.model_group, step.threads) for step in steps}
        assert found == {("run-1/exact", 1), ("run-1/fast", 2), ("run-1/unset", own)}
        assert seen == {(1, True), (2, False), (own, True)}

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
