"""A learner killed at each of its failpoints, twenty times: what it publishes is what an undisturbed one publishes."""

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import pytest

from rollstream.eventlog.failpoints import FAILPOINTS, Killed, armed
from rollstream.schemas.algorithms import GrpoSettings
from rollstream.schemas.events import JobSucceeded

KILLS = 20
VERSIONS = KILLS + 2
POINTS = [name for name in FAILPOINTS if name.startswith("learner/")]


async def _prepare(lab: Any) -> None:
    scored = {"algorithm": GrpoSettings(kl_coefficient=0.1), "revision": 6}
    await lab.plan(await lab.submit(num_versions=VERSIONS, keep_last=1, **scored), VERSIONS)


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
