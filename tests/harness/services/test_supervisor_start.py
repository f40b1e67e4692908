"""A child that the system cannot start for a moment is one that has exited: it is started again."""

import asyncio
import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rollstream.eventlog.broker.restarts import MAX_RESTARTS
from rollstream.harness.services.supervisor import ChildSpec, Supervisor
from rollstream.schemas.errors import RunFailedError


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each of the next starts succeeds; those after them do."""
    results, start = list[bool](), subprocess.Popen

    def popen(*arguments: Any, **named: Any) -> Any:
        if results and not results.pop(0):
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return start(*arguments, **named)

    monkeypatch.setattr(subprocess, "Popen", popen)
    return results


def supervisor_of(folder: Path, *, is_needed: bool) -> Supervisor:
    spec = ChildSpec("one", [sys.executable, "-c", "import time; time.sleep(60)"], is_needed=is_needed)
    return Supervisor([spec], folder, first_backoff_s=0.0, unneeded_backoff_s=0.0)


@pytest.mark.parametrize("is_needed", [True, False])
def test_a_child_that_cannot_be_started_is_started_later(tmp_path: Path, starts: list[bool], is_needed: bool) -> None:
    starts += [False, False]
    supervisor = supervisor_of(tmp_path, is_needed=is_needed)
    supervisor.start()
    assert not supervisor.pids()
    for _ in range(2):
        supervisor.check()
    assert "one" in supervisor.pids()
    supervisor.kill()


def test_a_needed_child_that_can_never_be_started_ends_the_run_with_the_reason(
    tmp_path: Path, starts: list[bool]
) -> None:
    starts += [False] * 20
    supervisor = supervisor_of(tmp_path, is_needed=True)
    supervisor.start()
    for _ in range(MAX_RESTARTS - 1):
        supervisor.check()
    with pytest.raises(RunFailedError, match=r"could not be started .*Resource temporarily unavailable"):
        supervisor.check()


def test_a_log_whose_name_is_taken_by_a_folder_does_not_end_the_watch(tmp_path: Path) -> None:
    (tmp_path / "one.log").mkdir()

    async def scenario() -> None:
        supervisor = supervisor_of(tmp_path, is_needed=False)
        supervisor.start()
        watching = asyncio.create_task(supervisor.watch())
        await asyncio.sleep(0.5)
        assert not watching.done()
        watching.cancel()

    asyncio.run(scenario())
