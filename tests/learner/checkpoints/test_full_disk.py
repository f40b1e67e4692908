"""A learner on a disk that is full for a while: it waits, says so, and comes to the same bits."""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollstream.eventlog import codec
from rollstream.eventlog.blocking_calls import Retry
from rollstream.learner.worker import Worker
from rollstream.schemas.events import JobFailed, JobSucceeded, WeightsPublished

pytestmark = pytest.mark.slow
SOON = Retry(first_wait_s=0.01, max_wait_s=0.02)


def waiting(caplog: pytest.LogCaptureFixture, what: str) -> list[str]:
    """Log lines about waiting for space."""
    return [line for r in caplog.records if "waiting for free space" in (line := r.getMessage()) and what in line]


async def undisturbed(lab: Any, folder: Path) -> tuple[Any, ...]:
    other = type(lab)(folder, lab.model)
    await other.plan(await other.submit())
    await other.work(other.has(JobSucceeded))
    return await other.outcome()


@pytest.mark.parametrize(
    ("what", "folder"), [("write weights v2", "checkpoints"), ("store weights of run-1/main", "artifacts")]
)
def test_a_disk_that_is_full_for_a_while_costs_time_only(
    lab: Any, tmp_path: Path, small_disk: Callable[[int], Any], what: str, folder: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        expected = await undisturbed(lab, tmp_path / "undisturbed")
        disk = small_disk(2)
        (disk.folder / folder).mkdir()
        (lab.folder / folder).symlink_to(disk.folder / folder)
        job = await lab.submit()
        first = await lab.plan(job, 1, seal=False)
        worker = Worker(
            lab.log,
            lab.artifacts,
            name="l",
            checkpoints=lab.folder / "checkpoints",
            threads=1,
            permissions=lab.permissions,
            retry=SOON,
        )
        working = asyncio.create_task(worker.run())
        while not await lab.has(WeightsPublished, "weights", 2)():
            await asyncio.sleep(0.01)
        disk.fill()
        await lab.plan(job, 2, first=1, previous=codec.content_digest(first[-1]))
        while not waiting(caplog, what):
            assert not working.done()
            await asyncio.sleep(0.01)
        assert not list(disk.folder.rglob("*.aside"))
        disk.free()
        while not await lab.has(JobSucceeded)():
            assert not working.done()
            await asyncio.sleep(0.01)
        working.cancel()
        assert await lab.events("jobs", JobFailed) == []
        assert await lab.outcome() == expected

    with caplog.at_level(logging.WARNING):
        asyncio.run(scenario())
    assert len(waiting(caplog, "")) == 1
    assert f"the disk of {lab.folder / folder}" in waiting(caplog, what)[0]
    assert "bytes are needed, 0 are free" in waiting(caplog, what)[0]
