"""What an algorithm carries from batch to batch: it survives restarts, and a replay finds the same."""

import asyncio
from typing import Any

import pytest

from rollstream.eventlog import codec
from rollstream.learner.progress import Manifest
from rollstream.learner.retrain import RecordedJob, Retraining
from rollstream.schemas.algorithms import GrpoSettings
from rollstream.schemas.events import BatchPlanned, JobSucceeded, StepTrained, WeightsPublished

DECAY = 0.75


def averages(batches: list[BatchPlanned]) -> list[float]:
    """The moving average after each batch, by definition."""
    average, found = 0.0, []
    for batch in batches:
        for member in batch.members:
            average = DECAY * average + (1 - DECAY) * member.reward
        found.append(average)
    return found


@pytest.mark.parametrize("checkpoint_every", [1, 2, 10])
def test_a_moving_average_survives_a_restart_and_a_replay_from_a_checkpoint(lab: Any, checkpoint_every: int) -> None:
    async def scenario() -> None:
        algorithm = GrpoSettings(advantage="rae", rae_decay=DECAY)
        job = await lab.submit(num_versions=5, algorithm=algorithm, checkpoint_every=checkpoint_every)
        planned = await lab.plan(job, 3, seal=False)
        await lab.work(lab.has(StepTrained, "weights", 3))
        previous = codec.content_digest(planned[-1])
        planned += await lab.plan(job, 2, first=3, previous=previous)
        await lab.work(lab.has(JobSucceeded))
        steps = {step.version: step for step in await lab.events("weights", StepTrained)}
        assert [steps[v].metrics["baseline/agent"] for v in range(1, 6)] == averages(planned)
        await assert_replayed(lab, job, steps, first=4)

    asyncio.run(scenario())


async def assert_replayed(lab: Any, job: Any, steps: dict[int, StepTrained], *, first: int) -> None:
    received = [one for one in await lab.received("batches") if isinstance(one.event, BatchPlanned)]
    manifests = {one.event.index: Manifest(one.event, one.digest, one.position.offset) for one in received}
    base = next(one for one in await lab.events("weights", WeightsPublished) if one.version == 0)
    retraining = Retraining(RecordedJob(job, base, manifests, steps), threads=1, permissions=lab.permissions)
    began = retraining.begin(lab.artifacts, lab.folder / "checkpoints", version=first - 1, until=5)
    compared = [
        (codec.content_digest(before), codec.content_digest(after))
        async for before, after in retraining.steps(lab.log, until=5)
    ]
    assert len(compared) == 5 - began
    assert all(before == after for before, after in compared)
