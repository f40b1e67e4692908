"""Gives a tracker every point of a run once, also over crashes of this process and outages of the tracker.

A file of the workspace says what a tracker has of each job. Before points are sent, they are noted in it; a process
that finds such a note sends the same points again under the same numbers, whatever the metrics have by then.
"""

import fcntl
import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from pydantic import BaseModel, ConfigDict, Field

from rollstream.eventlog.files import move, read_json, remove_whole, write_whole
from rollstream.metrics.trackers.points import (
    ENDED_STATES,
    MAX_POINTS,
    Ask,
    Key,
    Point,
    Sent,
    Series,
    TrackedJob,
    TrackerError,
    file_name,
    jobs_of,
    new_keys,
    points_of,
)
from rollstream.metrics.trackers.table import JobTracker, OpenTracker
from rollstream.schemas.trackers import TrackerSettings

OPEN, ENDED = "open", "ended"
"""Folders of the runs that have not ended, and of those of which the tracker has everything."""
LOCKS = "locks"
"""Folder of the files that are locked by whoever sends a run."""
QUIET_POLLS = 30
"""Polls without anything new after which a job that has ended is no longer asked for."""
MAX_OPEN = 8
"""Jobs whose trackers are open at a time: a run may have many that follow one another."""


class SentPoints(BaseModel):
    """Points of a job that its tracker has."""

    model_config = ConfigDict(ser_json_inf_nan="strings")

    series: dict[Series, Sent] = Field(default_factory=dict)
    num_points: int = 0
    sending: list[Point] = Field(default_factory=list)
    """Points that are being sent, with the numbers from `num_points` on."""
    kept: dict[str, Any] = Field(default_factory=dict)
    """Result of the tracker's last `log`, for when it is opened again."""
    is_settled: bool = False
    """Whether the job has ended, and nothing more of it is expected before the run's end."""
    state: str = ""
    """State at the job's end that the tracker was given."""

    def after_sending(self, kept: Mapping[str, Any]) -> "SentPoints":
        """The same once the points are sent."""
        steps: dict[Series, list[int]] = {}
        for point in self.sending:
            steps.setdefault(point.series, []).append(point.step)
        series = dict(self.series)
        for name, new in steps.items():
            series[name] = series.get(name, Sent()).plus(name, new)
        return SentPoints(series=series, num_points=self.num_points + len(self.sending), kept=dict(kept))


class TrackedRun:
    """A run and a tracker. One thread at a time uses it."""

    def __init__(self, run_id: str, settings: TrackerSettings, open_tracker: OpenTracker, workspace: Path) -> None:
        self._run_id = run_id
        self._open = open_tracker
        self._folders = {name: folder_of(workspace, settings) / name / file_name(run_id) for name in (OPEN, ENDED)}
        self._lock_path = folder_of(workspace, settings) / LOCKS / file_name(run_id)
        self._lock: int | None = None
        self._sent: dict[str, SentPoints] = {}
        self._trackers: dict[str, JobTracker] = {}
        self._num_quiet: dict[str, int] = {}
        """Polls in a row without anything new of a job that has ended."""
        self._is_finished = False
        self.num_points = 0
        """Points that this process has sent."""

    def send_new(self, ask: Ask, ask_fresh: Ask) -> bool:
        """Send new points; return whether more than fit into one turn were found.

        `ask_fresh` waits for all that is in the log. Raises QueryError if the metrics cannot be asked, TrackerError if
        another process sends the same, and whatever the tracker raises; the next call continues.
        """
        jobs = jobs_of(ask, self._run_id)
        is_over = bool(jobs) and all(job.is_over for job in jobs)
        is_at_the_end = ask is ask_fresh
        if not jobs or (is_over and self._is_finished and not is_at_the_end):
            return False
        self._is_finished = False
        self._take()
        for job in jobs:
            if self._sent_of(job.job_id).sending:
                self._deliver(job)
        asked = [job for job in jobs if is_over or not self._is_settled(job)]
        keys = self._new_keys(ask, asked)
        if len(keys) < MAX_POINTS:
            self._leave_out(asked, keys)
        if not keys and not is_over:
            return False
        jobs = jobs_of(ask_fresh, self._run_id)
        found = points_of(ask_fresh, self._run_id, keys)
        for job in jobs:
            if points := found.get(job.job_id):
                self._write(job.job_id, self._sent_of(job.job_id).model_copy(update={"sending": points}))
                self._deliver(job)
        if all(job.is_over for job in jobs) and not keys and not self._new_keys(ask_fresh, jobs):
            self._finish(jobs)
        return len(keys) >= MAX_POINTS

    def _new_keys(self, ask: Ask, jobs: list[TrackedJob]) -> list[Key]:
        return new_keys(ask, self._run_id, {job.job_id: self._sent_of(job.job_id).series for job in jobs})

    def _is_settled(self, job: TrackedJob) -> bool:
        return job.state in ENDED_STATES and self._sent_of(job.job_id).is_settled

    def _leave_out(self, jobs: list[TrackedJob], keys: list[Key]) -> None:
        """Leave out jobs that have ended and had nothing new for a while, so that a run of many jobs, as of a shared
        model group, is asked for a few of them. All are asked for once more at the run's end.
        """
        with_new = {key.job_id for key in keys}
        for job in jobs:
            is_quiet = job.state in ENDED_STATES and job.job_id not in with_new
            num_quiet = self._num_quiet.pop(job.job_id, 0) + 1 if is_quiet else 0
            if num_quiet >= QUIET_POLLS:
                self._write(job.job_id, self._sent_of(job.job_id).model_copy(update={"is_settled": True}))
            elif num_quiet:
                self._num_quiet[job.job_id] = num_quiet

    def forget(self) -> None:
        """Forget what the tracker has, so that everything is sent again. Raises TrackerError as `send_new` does."""
        self._take()
        for path in self._folders[OPEN].glob("*.json"):
            path.unlink()
        self._sent.clear()

    def close(self) -> None:
        """Close the trackers and let other processes send. Raises whatever a tracker raises."""
        try:
            self._close_trackers()
        finally:
            if self._lock is not None:
                os.close(self._lock)
                self._lock = None

    def _close_trackers(self) -> None:
        with ExitStack() as closing:
            while self._trackers:
                closing.callback(self._trackers.popitem()[1].close, None)

    def _take(self) -> None:
        """Lock the run, whose folder becomes an open one. Raises TrackerError if another process has it.

        The lock is beside the folders, because a process that ends the run moves them.
        """
        if self._lock is not None:
            return
        self._lock_path.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            raise TrackerError(
                f"run {self._run_id}: another process sends it to this tracker ({self._lock_path} is locked); stop "
                "that one, or leave it to it"
            ) from None
        try:
            self._open_folder()
        except BaseException:
            os.close(lock)
            raise
        self._lock = lock
        self._sent.clear()  # another process may have sent since

    def _open_folder(self) -> None:
        folder = self._folders[OPEN]
        folder.parent.mkdir(parents=True, exist_ok=True)
        if not folder.exists() and self._folders[ENDED].exists():  # the run was resumed, or is sent once more
            move(self._folders[ENDED], folder)
        folder.mkdir(exist_ok=True)

    def _deliver(self, job: TrackedJob) -> None:
        """Send the points that are noted. A tracker that fails is opened again for the next try."""
        sent = self._sent_of(job.job_id)
        try:
            after = sent.after_sending(_json_values(self._tracker(job).log(sent.sending, sent.num_points)))
            self._write(job.job_id, after)
        except BaseException:
            failed = self._trackers.pop(job.job_id, None)
            with suppress(Exception):
                if failed is not None:
                    failed.close(None)
            raise
        self.num_points += len(sent.sending)

    def _finish(self, jobs: list[TrackedJob]) -> None:
        """Give the trackers the states of their jobs at the end, then put the run aside.

        Raises the first error of a `close` once all have ended, and at once that of a tracker that cannot be opened.
        """
        errors: list[Exception] = []
        for job in jobs:
            sent = self._sent_of(job.job_id)
            if not sent.num_points or sent.state == job.state:
                continue
            tracker = self._tracker(job)
            del self._trackers[job.job_id]
            try:
                tracker.close(job.state)
            except Exception as error:  # noqa: BLE001 -- raised below
                errors.append(error)
            self._write(job.job_id, sent.model_copy(update={"state": job.state}))
        self._put_aside()
        if errors:
            raise errors[0]

    def _put_aside(self) -> None:
        """Move the run to those that have ended."""
        self._close_trackers()
        self._folders[ENDED].parent.mkdir(parents=True, exist_ok=True)
        if self._folders[ENDED].exists():  # an earlier release left both folders of a run
            remove_whole(self._folders[ENDED])
        move(self._folders[OPEN], self._folders[ENDED])
        self._is_finished = True
        self.close()

    def _tracker(self, job: TrackedJob) -> JobTracker:
        """The tracker of a job, which becomes the newest of those that are open."""
        found = self._trackers.pop(job.job_id, None)
        if found is None:
            if len(self._trackers) >= MAX_OPEN:
                self._trackers.pop(next(iter(self._trackers))).close(None)
            found = self._open(job, self._sent_of(job.job_id).kept)
        self._trackers[job.job_id] = found
        return found

    def _sent_of(self, job_id: str) -> SentPoints:
        if job_id not in self._sent:
            self._sent[job_id] = _read(self._file(job_id))
        return self._sent[job_id]

    def _write(self, job_id: str, sent: SentPoints) -> None:
        write_whole(self._file(job_id), sent.model_dump_json())
        self._sent[job_id] = sent

    def _file(self, job_id: str) -> Path:
        return self._folders[OPEN] / f"{file_name(job_id)}.json"


def _json_values(result: Any) -> dict[str, Any]:
    """The result of a `log`. Raises TrackerError if it cannot be kept."""
    try:
        return {} if result is None else json.loads(json.dumps(dict(result)))
    except (TypeError, ValueError) as error:
        raise TrackerError(f"its log returned {result!r}; return a mapping of JSON values, or nothing") from error


def folder_of(workspace: Path, settings: TrackerSettings) -> Path:
    """Folder for the points that a tracker has. The polling interval does not make it another tracker."""
    target = hashlib.sha256(settings.target().encode()).hexdigest()[:8]
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
        raise TrackerError(
            f"{path} is damaged; `rollstream track` with the tracker's kind and keys and --again sends all points again"
        ) from error
