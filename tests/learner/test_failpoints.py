"""A learner killed at each of its failpoints, twenty times: what it publishes is what an undisturbed one publishes."""

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import pytest

from rollstream.eventlog.failpoints import FAILPOINTS, Killed, armed
from rollstream.schemas.algorithms import GrpoSettings
from rollstream.schemas.events import (
    JobCancelled,
    JobFailed,
    JobProgressed,
    JobSucceeded,
    StepTrained,
    WeightsPublished,
)
from rollstream.schemas.settings import ModelSettings

KILLS = 20
VERSIONS = KILLS + 2
POINTS = [name for name in FAILPOINTS if name.startswith("learner/")]


async def _prepare(lab: Any) -> None:
    scored = GrpoSettings(kl_coefficient=0.1)
    await lab.plan(await lab.submit(num_versions=VERSIONS, keep_last=1, algorithm=scored), VERSIONS)


def stored(lab: Any) -> set[str]:
    """Names in the artifact store, without collected weights."""
    return {Path(name).name for name in lab.artifacts.listing()}


@pytest.mark.slow
@pytest.mark.parametrize("failpoint", POINTS)
def test_twenty_kills_at_a_failpoint_change_nothing_of_what_is_published(
    lab: Any, tmp_path: Path, failpoint: str
) -> None:
    async def scenario() -> None:
        undisturbed = type(lab)(tmp_path / "undisturbed", lab.model)
        await _prepare(undisturbed)
        await undisturbed.work(undisturbed.has(JobSucceeded))
        await _prepare(lab)
        num_kills = 0
        for _ in range(KILLS):
            with armed(failpoint) as kill, contextlib.suppress(Killed):
                await lab.work(lab.has(JobSucceeded))
            num_kills += len(kill.fired)
        await lab.work(lab.has(JobSucceeded))
        assert num_kills == KILLS
        assert await lab.outcome() == await undisturbed.outcome()
        assert stored(lab) == stored(undisturbed)

    asyncio.run(scenario())


@pytest.mark.parametrize("is_deterministic", [True, False])
def test_a_job_that_is_cancelled_after_a_kill_before_it_publishes_leaves_its_version_to_the_next_job(
    lab: Any, is_deterministic: bool
) -> None:
    model = ModelSettings(path=str(lab.model), device="cpu", deterministic=is_deterministic)

    async def scenario() -> None:
        first = await lab.submit("first", model=model)
        await lab.plan(first)
        with armed("learner/between-step-and-weights", 2) as kill, contextlib.suppress(Killed):
            await lab.work(lab.has(JobSucceeded))
        assert kill.fired
        ended = {"job_id": first.job_id, "model_group": first.model_group, "cause": "user"}
        await lab.log.send(JobCancelled(run_id=first.run_id, time_ms=5, **ended))
        following = await lab.submit("next", base_version=1, model=model)
        await lab.plan(following)
        for _ in range(2):  # the second worker begins with the state in the position file
            await lab.work(lab.has(JobSucceeded))
        assert await lab.events("jobs", JobFailed) == []
        steps = await lab.events("weights", StepTrained)
        assert [(step.job_id, step.version) for step in steps] == [
            *((first.job_id, version) for version in (1, 2)),
            *((following.job_id, version) for version in (2, 3, 4)),
        ]
        published = {one.version: one.weights_sha256 for one in await lab.events("weights", WeightsPublished)}
        assert [published[step.version] for step in steps[2:]] == [step.weights_sha256 for step in steps[2:]]
        assert published[2] != steps[1].weights_sha256
        progressed = await lab.events("jobs", JobProgressed)
        assert [one.version for one in progressed if one.job_id == following.job_id] == [2, 3, 4]

    asyncio.run(scenario())
