"""Gives a tracker every point of a run once, also over crashes of this process and outages of the tracker.

A file of the workspace says what a tracker has of each job. Before points are sent, it says which; a process that finds
such a note sends the same points again under the same numbers.
"""

import fcntl
import hashlib
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from pydantic import BaseModel, Field

from rollstream.eventlog.files import move, read_json, write_whole
from rollstream.metrics.trackers.points import (
    Ask,
    Point,
    Series,
    TrackedJob,
    file_name,
    jobs_of,
    new_points,
    points_between,
    reach_of,
)
from rollstream.metrics.trackers.table import JobTracker, OpenTracker
from rollstream.schemas.errors import RollstreamError
from rollstream.schemas.trackers import TrackerSettings

OPEN, ENDED = "open", "ended"
"""Folders of the runs that have not ended, and of those of which the tracker has everything."""
LOCK = ".lock"
MAX_OPEN = 8
"""Jobs whose trackers are open at a time: a run may have many that follow one another."""
logger = logging.getLogger(__name__)


class SentPoints(BaseModel):
    """Points of a job that its tracker has."""

    reach: dict[Series, int] = Field(default_factory=dict)
    num_points: int = 0
    sending: dict[Series, int] | None = None
    """The reach after points that are being sent."""
    kept: dict[str, Any] = Field(default_factory=dict)
    """Result of the tracker's last `log`, for when it is opened again."""
    state: str = ""
    """State at the job's end that the tracker was given."""


class TrackedRun:
    """A run and a tracker. One thread at a time uses it."""

    def __init__(self, run_id: str, settings: TrackerSettings, open_tracker: OpenTracker, workspace: Path) -> None:
        self._run_id = run_id
        self._open = open_tracker
        self._folders = {name: folder_of(workspace, settings) / name / file_name(run_id) for name in (OPEN, ENDED)}
        self._lock: int | None = None
        self._positions: dict[str, SentPoints] = {}
        self._trackers: dict[str, JobTracker] = {}
        self._is_finished = False
        self.num_points = 0
        """Points that this process has sent."""

    def send_new(self, ask: Ask) -> None:
        """Send new points.

        Raises QueryError if the metrics cannot be asked, RollstreamError if another process sends the same, and
        whatever the tracker raises; the next call continues.
        """
        jobs = jobs_of(ask, self._run_id)
        is_over = bool(jobs) and all(job.is_over for job in jobs)
        if not jobs or (is_over and self._is_finished):
            return
        self._take()
        for job in jobs:
            self._send_again(ask, job)
        reaches = {job.job_id: self._position(job.job_id).reach for job in jobs}
        found = new_points(ask, self._run_id, reaches, is_over=is_over)
        for job in jobs:
            if points := found.get(job.job_id):
                self._send(job, points)
        if is_over and not found:
            self._finish(jobs)

    def close(self) -> None:
        """Close the trackers and let other processes send."""
        while self._trackers:
            self._trackers.popitem()[1].close(None)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _take(self) -> None:
        """Lock the run's folder, and have it be an open one."""
        if self._lock is not None:
            return
        folder = self._folders[OPEN]
        folder.parent.mkdir(parents=True, exist_ok=True)
        if not folder.exists() and self._folders[ENDED].exists():  # the run was resumed, or is sent once more
            move(self._folders[ENDED], folder)
        folder.mkdir(exist_ok=True)
        lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(lock)
            raise RollstreamError(
                f"run {self._run_id}: another process sends it to this tracker ({folder / LOCK} is locked); stop that "
                "one, or leave it to it"
            ) from error
        self._lock = lock

    def _send_again(self, ask: Ask, job: TrackedJob) -> None:
        position = self._position(job.job_id)
        if position.sending is not None:
            self._deliver(job, points_between(ask, job, position.reach, position.sending), position.sending)

    def _send(self, job: TrackedJob, points: list[Point]) -> None:
        position = self._position(job.job_id)
        reach = reach_of(points, position.reach)
        self._write(job.job_id, position.model_copy(update={"sending": reach}))
        self._deliver(job, points, reach)

    def _deliver(self, job: TrackedJob, points: list[Point], reach: Mapping[Series, int]) -> None:
        first = self._position(job.job_id).num_points
        kept = self._tracker(job).log(points, first)
        self._write(job.job_id, SentPoints(reach=dict(reach), num_points=first + len(points), kept=dict(kept)))
        self.num_points += len(points)

    def _finish(self, jobs: list[TrackedJob]) -> None:
        """Tell the trackers how their jobs ended."""
        for job in jobs:
            position = self._position(job.job_id)
            if position.num_points and position.state != job.state:
                self._tracker(job).close(job.state)
                self._trackers.pop(job.job_id)
                self._write(job.job_id, position.model_copy(update={"state": job.state}))
        self.close()
        self._is_finished = True
        self._folders[ENDED].parent.mkdir(parents=True, exist_ok=True)
        move(self._folders[OPEN], self._folders[ENDED])

    def _tracker(self, job: TrackedJob) -> JobTracker:
        """The tracker of a job, which becomes the newest of those that are open."""
        found = self._trackers.pop(job.job_id, None)
        if found is None:
            if len(self._trackers) >= MAX_OPEN:
                self._trackers.pop(next(iter(self._trackers))).close(None)
            found = self._open(job, self._position(job.job_id).kept)
        self._trackers[job.job_id] = found
        return found

    def _position(self, job_id: str) -> SentPoints:
        if job_id not in self._positions:
            self._positions[job_id] = _read(self._file(job_id))
        return self._positions[job_id]

    def _write(self, job_id: str, position: SentPoints) -> None:
        write_whole(self._file(job_id), position.model_dump_json())
        self._positions[job_id] = position

    def _file(self, job_id: str) -> Path:
        return self._folders[OPEN] / f"{file_name(job_id)}.json"


def folder_of(workspace: Path, settings: TrackerSettings) -> Path:
    """Folder for the points that a tracker has. The polling interval does not make it another tracker."""
    target = hashlib.sha256(settings.model_dump_json(exclude={"poll_interval_s"}).encode()).hexdigest()[:8]
    return workspace / "trackers" / f"{file_name(settings.kind)}-{target}"


def unfinished_runs(workspace: Path, settings: TrackerSettings) -> list[str]:
    """Runs of which a tracker has a part."""
    folder = folder_of(workspace, settings) / OPEN
    return sorted(unquote(one.name) for one in folder.iterdir()) if folder.exists() else []


def _read(path: Path) -> SentPoints:
    found = read_json(path)
    try:
        return SentPoints.model_validate(found)
    except ValueError as error:
        raise RollstreamError(f"{path} is damaged; remove it to send all points of the job again") from error
