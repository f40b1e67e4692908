"""Conducts one run over the log: what is lacking is written, then the log is read on. Starts no process.

`lacking` is the pure core: the same events for the same progress, so that a resumed run goes on where the log says.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import NamedTuple

from rollstream.eventlog.log import EventLog
from rollstream.harness.config.settings import JobSpec
from rollstream.harness.follower import follow
from rollstream.harness.progress import JobProgress, Progress
from rollstream.harness.validation import Validation
from rollstream.schemas.base import Event
from rollstream.schemas.events import EpochStarted, JobStarted, JobSubmitted, RunStarted
from rollstream.schemas.events_training import ForkPoint

POLL_S = 0.5


class Watching(NamedTuple):
    """What the driver tells and asks while it conducts: all are called in the event loop and return at once."""

    on_progress: Callable[[Progress], None]
    """After every batch of records, and every POLL_S without any."""
    on_activity: Callable[[], None] = lambda: None
    """Groups were closed, or the run came further: restarts of services are forgiven."""
    may_go_on: Callable[[], bool] = lambda: True
    """Whether a next epoch may be started (there is room on the disk)."""


def lacking(progress: Progress, started: RunStarted, jobs: Sequence[JobSpec]) -> list[Event]:
    """What the log still needs for the run to go on. Times are those of the causing events."""
    if progress.ended is not None:
        return []
    if progress.run is None:
        return [started, _submitted(jobs[0], 0, started.time_ms, started.parent)]
    base_version, time_ms = 0, progress.run.time_ms
    for spec in jobs:
        job = progress.job(spec.job_id)
        if job.submitted is None:
            fork = progress.run.parent if spec is jobs[0] else None
            return [_submitted(spec, base_version, time_ms, fork), *_started(spec, base_version, time_ms, progress)]
        if job.outcome != "succeeded":
            return [] if job.outcome else _next_epoch(spec, job, progress)
        base_version, time_ms = job.final_version, job.ended_at_ms
    return []


def is_over(progress: Progress, jobs: Sequence[JobSpec], validation: Validation | None = None) -> bool:
    """Whether there is nothing left to conduct: the run ended, a job cannot be done, or all is done and validated."""
    outcomes = [progress.job(spec.job_id).outcome for spec in jobs]
    if progress.ended is not None or any(o in ("failed", "cancelled") for o in outcomes):
        return True
    return all(outcomes) and (validation is None or validation.is_done(progress))


def _submitted(spec: JobSpec, base_version: int, time_ms: int, fork: ForkPoint | None) -> JobSubmitted:
    return JobSubmitted(
        run_id=spec.job_id.split("/", 1)[0],
        time_ms=time_ms,
        job_id=spec.job_id,
        model_group=spec.model_group,
        base_version=base_version,
        settings=spec.job,
        fork=fork,
    )


def _started(spec: JobSpec, base_version: int, time_ms: int, progress: Progress) -> list[Event]:
    """Job and first epoch, once the version that the job starts from is there.

    The epochs of a job that is trained by submissions are begun by who submits.
    """
    if progress.version < base_version:
        return []
    run_id = progress.run_id
    started = JobStarted(
        run_id=run_id,
        time_ms=time_ms,
        job_id=spec.job_id,
        model_group=spec.model_group,
        base_version=base_version,
        plan=spec.plan,
        rollout=spec.rollout,
    )
    if spec.plan.planning == "submitted":
        return [started]
    return [started, EpochStarted(run_id=run_id, time_ms=time_ms, job_id=spec.job_id, epoch=0)]


def _next_epoch(spec: JobSpec, job: JobProgress, progress: Progress) -> list[Event]:
    assert job.submitted is not None
    if job.started is None:
        base = job.submitted.base_version
        cause = progress.weights if base == 0 else job.submitted
        return _started(spec, base, cause.time_ms, progress) if cause else []
    if spec.plan.planning == "submitted":
        return []
    if job.sealed is None:
        epoch, time_ms, is_wanted = 0, job.started.time_ms, True
    else:
        epoch, time_ms, is_wanted = job.sealed.epoch + 1, job.sealed.time_ms, not job.sealed.is_last
    if not is_wanted or job.epoch_started >= epoch:
        return []
    return [EpochStarted(run_id=progress.run_id, time_ms=time_ms, job_id=spec.job_id, epoch=epoch)]


async def conduct(
    log: EventLog,
    started: RunStarted,
    jobs: Sequence[JobSpec],
    watching: Watching,
    *,
    is_new: bool,
    validation: Validation | None = None,
) -> Progress:
    """Conduct a run until `is_over`; returns its progress then. `is_new`: the log holds nothing of it yet.

    A restart writes what is lacking again under the same ids; what was sent is not sent twice by one conductor.
    """
    follower = await follow(log, started.run_id, from_end=is_new)
    sent: set[str] = set()
    validated: set[int] = set()
    try:
        progress = await follower.catch_up()
        while True:
            watching.on_progress(progress)
            await _send(log, lacking(progress, started, jobs), sent, watching)
            await _validate(log, validation, progress, validated)
            if is_over(progress, jobs, validation):
                return progress
            before, closed = progress, follower.num_skipped
            progress = await follower.advance(POLL_S)
            if progress is not before or follower.num_skipped > closed:
                watching.on_activity()
    finally:
        await follower.close()


async def _validate(log: EventLog, validation: Validation | None, progress: Progress, asked: set[int]) -> None:
    """Ask for the validation that is due, once. Nothing waits for it but the end of the run."""
    epoch = validation.due_epoch(progress) if validation is not None and progress.ended is None else None
    if validation is not None and epoch is not None and epoch not in asked:
        await log.send_all(validation.due_tasks(epoch, progress))
        asked.add(epoch)


async def _send(log: EventLog, events: Sequence[Event], sent: set[str], watching: Watching) -> None:
    fresh = [event for event in events if event.event_id not in sent]
    if any(isinstance(event, EpochStarted) for event in fresh) and not watching.may_go_on():
        await asyncio.sleep(POLL_S)
        return
    if fresh:
        await log.send_all(fresh)
        sent.update(event.event_id for event in fresh)
