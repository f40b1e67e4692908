"""State that an algorithm carries from batch to batch: it survives restarts, and a replay finds the same."""

import asyncio
from typing import Any

import pytest

from rollstream.eventlog import codec
from rollstream.schemas.algorithms import GrpoSettings
from rollstream.schemas.events import BatchPlanned, JobSucceeded, StepTrained
from tests.rigs.runs.retrained import assert_retrained, steps_of

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
        steps = await steps_of(lab)
        assert [steps[v].metrics["baseline/agent"] for v in range(1, 6)] == averages(planned)
        await assert_retrained(lab, job, steps, first=4)

    asyncio.run(scenario())
