"""A learner killed at each of its failpoints, twenty times: what it publishes is what an undisturbed one publishes."""

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import pytest

from rollstream.eventlog.failpoints import FAILPOINTS, Killed, armed
from rollstream.schemas.events import JobProgressed, JobSucceeded, StepTrained, WeightsPublished

KILLS = 20
VERSIONS = KILLS + 2
POINTS = [name for name in FAILPOINTS if name.startswith("learner/")]


async def _outcome(lab: Any) -> tuple[Any, ...]:
    """What a run came to, without terms, durations and places."""
    steps = [(one.version, one.weights_sha256, one.metrics) for one in await lab.events("weights", StepTrained)]
    published = [
        (one.version, one.weights_sha256, one.batch_id) for one in await lab.events("weights", WeightsPublished)
    ]
    progress = [(one.version, one.percent) for one in await lab.events("jobs", JobProgressed)]
    return steps, published, progress, [one.final_version for one in await lab.events("jobs", JobSucceeded)]


async def _prepare(lab: Any) -> None:
    await lab.plan(await lab.submit(num_versions=VERSIONS), VERSIONS)


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
        assert await _outcome(lab) == await _outcome(undisturbed)

    asyncio.run(scenario())
