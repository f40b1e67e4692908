"""Metrics of a run that grows, and a tracker that fails where a test wants it to."""

import asyncio
import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from rollstream.eventlog.memory.log import MemoryLog
from rollstream.metrics.projection.connection import connect, metrics_file
from rollstream.metrics.projection.projector import project_to_end
from rollstream.metrics.sql.result import plain
from rollstream.metrics.trackers.points import Ask, Point, TrackedJob
from rollstream.schemas.base import Event
from tests.metrics.conftest import SyntheticRun, empty_file

RUN = "demo-000001"
Projected = Callable[[Sequence[Event]], Path]


class Crash(BaseException):
    """The process is killed."""


class KeptTracker:
    """A tracker whose points outlive it, by number, with their number of arrivals."""

    def __init__(self) -> None:
        self.points: dict[str, dict[int, Point]] = {}
        self.again: list[tuple[str, int]] = []
        self.closed: list[tuple[str, str | None]] = []
        self.crashes: set[int] = set()
        self.calls = itertools.count()

    def open(self, job: TrackedJob, kept: Mapping[str, Any]) -> "OpenJob":
        return OpenJob(self, job.job_id, kept)


class OpenJob:
    def __init__(self, tracker: KeptTracker, job_id: str, kept: Mapping[str, Any]) -> None:
        self._tracker, self._job_id, self.kept = tracker, job_id, kept

    def log(self, points: Sequence[Point], first: int) -> Mapping[str, Any]:
        call = next(self._tracker.calls)
        if 2 * call in self._tracker.crashes:
            raise Crash
        mine = self._tracker.points.setdefault(self._job_id, {})
        for number, point in enumerate(points, first):
            if number in mine:
                assert mine[number] == point
                self._tracker.again.append((self._job_id, number))
            mine[number] = point
        if 2 * call + 1 in self._tracker.crashes:
            raise Crash
        return {"calls": call}

    def close(self, state: str | None) -> None:
        self._tracker.closed.append((self._job_id, state))


def asking(workspace: Path) -> Ask:
    """Queries of the metrics as the SQL service answers them, without its processes."""

    def ask(sql: str) -> list[list[Any]]:
        with connect(metrics_file(workspace), read_only=True) as connection:
            return [[plain(value) for value in row] for row in connection.execute(sql).fetchall()]

    return ask


@pytest.fixture
def projected(tmp_path: Path) -> Projected:
    """Puts events into the metrics of a workspace, again and again."""
    file = empty_file(tmp_path)
    log = MemoryLog(num_partitions=2)

    def project(found: Sequence[Event]) -> Path:
        async def scenario() -> None:
            await log.send_all(list(found))
            await project_to_end(log, file)

        asyncio.run(scenario())
        return tmp_path

    return project


@pytest.fixture
def run_events(synthetic: SyntheticRun) -> list[Event]:
    """The events of a whole run with an SFT job of one epoch and an RL job of two."""
    return list(synthetic.all_events())
