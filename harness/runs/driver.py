"""The events that a run's log still lacks, and whether the run is over. Starts and follows nothing.

`lacking` is pure: the same events for the same progress, so that a resumed run goes on where the log says.
"""

import asyncio
import contextlib
import logging
from collections.abc import Mapping, Sequence

from rollstream.eventlog.codec import content_digest
from rollstream.eventlog.log import EventLog, wall_ms
from rollstream.eventlog.run_offsets import ends_now
from rollstream.harness.runs.follower import records_of
from rollstream.harness.runs.outcome import reason_of, reason_of_job
from rollstream.harness.runs.progress import NOTHING_PUBLISHED, Progress
from rollstream.harness.runs.validation import Validation
from rollstream.schemas.base import Event
from rollstream.schemas.errors import LogError
from rollstream.schemas.events import EpochStarted, JobStarted, JobSubmitted, RunContinued, RunStarted
from rollstream.schemas.events.training import ForkPoint
from rollstream.schemas.settings import EXTERNAL, JobSpec

SIGNS_PER_TIMEOUT = 6
"""Signs of life of a conducted run within its idle time-out: several may come late before it counts as left."""

logger = logging.getLogger(__name__)


def lacking(progress: Progress, started: RunStarted, jobs: Sequence[JobSpec]) -> list[Event]:
    """The events that the log lacks for the run to continue. Times are those of the causing events."""
    if progress.ended is not None:
        return []
    stages = stages_of(jobs)
    if progress.run is None:
        return [started, *(_submitted(spec, started, 0, started.time_ms, _fork(spec, started)) for spec in stages[0])]
    base_versions: dict[str, int] = {}
    time_ms = progress.run.time_ms
    for stage in stages:
        missing = [
            _submitted(
                spec,
                progress.run,
                base_versions.get(spec.model_group, 0),
                time_ms,
                _fork(spec, progress.run) if stage is stages[0] else None,
            )
            for spec in stage
            if progress.job(spec.job_id).submitted is None
        ]
        known = [event for spec in stage if (event := progress.job(spec.job_id).submitted) is not None]
        if missing:
            return [*missing, *_started(stage, [*known, *missing], time_ms, progress)]
        outcomes = {progress.job(spec.job_id).outcome for spec in stage}
        if outcomes != {"succeeded"}:
            return _next_epoch(stage, progress) if outcomes <= {"succeeded", None} else []
        ended = [progress.job(spec.job_id) for spec in stage]
        base_versions |= {spec.model_group: job.final_version for spec, job in zip(stage, ended, strict=True)}
        time_ms = max(job.ended_at_ms for job in ended)
    return []


def stages_of(jobs: Sequence[JobSpec]) -> list[list[JobSpec]]:
    """Jobs that run beside each other; the last of a stage plans the tasks. Frozen groups' jobs are in the first."""
    stages: list[list[JobSpec]] = [[]]
    for spec in jobs:
        stages[-1].append(spec)
        if not (spec.is_frozen or spec.plan.tasks_of):
            stages.append([])
    return stages[:-1]


def _fork(spec: JobSpec, run: RunStarted) -> ForkPoint | None:
    """The version that a job of the first stage begins with, if it is of another run."""
    return spec.fork or (None if spec.is_frozen else run.parent)


async def located(log: EventLog, progress: Progress, events: Sequence[Event]) -> list[Event]:
    """Events that `lacking` names, ready to be sent: jobs say where the topics ended before their run began."""
    if not any(isinstance(event, JobSubmitted) for event in events):
        return list(events)
    if any(isinstance(event, RunStarted) for event in events):
        offsets: Mapping[str, int] | None = await ends_now(log)
    elif progress.jobs or progress.published:
        offsets = next((job.submitted.start_offsets for job in progress.jobs.values() if job.submitted), None)
    else:
        offsets = await _ends_of_begun(log, progress.run_id)
    return [
        event.model_copy(update={"start_offsets": offsets}) if isinstance(event, JobSubmitted) else event
        for event in events
    ]


async def _ends_of_begun(log: EventLog, run_id: str) -> dict[str, int] | None:
    """Start offsets of a run of which the log has only the beginning: a kill came before its first job.

    Nothing of the run is in the topics other than `groups`, since it follows from a job. None if the beginning is gone.
    """
    offsets = await ends_now(log)
    async with contextlib.aclosing(records_of(log, "groups", run_id, run_id)) as records:
        async for received in records:
            if isinstance(received.event, RunStarted):
                return {**offsets, "groups": received.position.offset}
    return None


def reason_to_stop(progress: Progress, jobs: Sequence[JobSpec]) -> str | None:
    """The reason why a run cannot go on, according to its log: it has ended, or a job of it cannot be done; None if it
    can.
    """
    if progress.ended is not None:
        reason = f": {reason_of(progress.ended)}".rstrip(": ")
        return f"run {progress.run_id} {progress.ended.cause}{reason}"
    for spec in jobs:
        job = progress.job(spec.job_id)
        if job.outcome in ("failed", "cancelled"):
            return reason_of_job(spec, job, jobs)
    return None


def is_over(progress: Progress, jobs: Sequence[JobSpec], validation: Validation | None = None) -> bool:
    """Whether there is nothing left to conduct: the run cannot go on, or all its jobs are done and validated."""
    if reason_to_stop(progress, jobs) is not None:
        return True
    is_done = all(progress.job(spec.job_id).outcome for spec in jobs)
    return is_done and (validation is None or validation.is_done(progress))


def _submitted(spec: JobSpec, run: RunStarted, base_version: int, time_ms: int, fork: ForkPoint | None) -> JobSubmitted:
    return JobSubmitted(
        run_id=run.run_id,
        time_ms=time_ms,
        job_id=spec.job_id,
        model_group=spec.model_group,
        base_version=base_version,
        settings=spec.job,
        run_sha256=content_digest(run),
        fork=fork,
    )


def _started(
    stage: Sequence[JobSpec], submitted: Sequence[JobSubmitted], time_ms: int, progress: Progress
) -> list[Event]:
    """The jobs of a stage and their first epoch, once the versions that they start from are there.

    The epochs of a job that is trained by submissions are begun by the submitter.
    """
    by_id = {event.job_id: event for event in submitted}
    if any(
        progress.version_of(event.model_group) < event.base_version and event.settings.kind != EXTERNAL
        for event in submitted
    ):
        return []
    run_id = progress.run_id
    events: list[Event] = [
        JobStarted(
            run_id=run_id,
            time_ms=time_ms,
            job_id=spec.job_id,
            model_group=spec.model_group,
            base_version=by_id[spec.job_id].base_version,
            plan=spec.plan,
            rollout=spec.rollout,
            job_sha256=content_digest(by_id[spec.job_id]),
        )
        for spec in stage
        if not spec.is_frozen and progress.job(spec.job_id).started is None
    ]
    if stage[-1].plan.planning == "submitted":
        return events
    return [*events, EpochStarted(run_id=run_id, time_ms=time_ms, job_id=stage[-1].job_id, epoch=0)]


def _next_epoch(stage: Sequence[JobSpec], progress: Progress) -> list[Event]:
    spec = stage[-1]
    job = progress.job(spec.job_id)
    if any(progress.job(one.job_id).started is None for one in stage if not one.is_frozen):
        submitted = [event for one in stage if (event := progress.job(one.job_id).submitted) is not None]
        time_ms = _begin_ms(submitted, progress)
        return [] if time_ms is None else _started(stage, submitted, time_ms, progress)
    if spec.plan.planning == "submitted" or job.outcome is not None or job.started is None:
        return []
    if job.sealed is None:
        epoch, time_ms, is_wanted = 0, job.started.time_ms, True
    else:
        epoch, time_ms, is_wanted = job.sealed.epoch + 1, job.sealed.time_ms, not job.sealed.is_last
    if not is_wanted or job.epoch_started >= epoch:
        return []
    return [EpochStarted(run_id=progress.run_id, time_ms=time_ms, job_id=spec.job_id, epoch=epoch)]


def _begin_ms(submitted: Sequence[JobSubmitted], progress: Progress) -> int | None:
    """The time of the events that a stage's start is caused by: its jobs, or the first versions, all of them there."""
    own = submitted[-1]
    if own.base_version or own.settings.kind == EXTERNAL:
        return own.time_ms
    newest = [progress.published.get(event.model_group, NOTHING_PUBLISHED).newest for event in submitted]
    times = [event.time_ms for event in newest if event is not None]
    return max(times) if len(times) == len(newest) else None


async def give_signs_of_life(log: EventLog, started: RunStarted, *, is_new: bool) -> None:
    """Write that the run is still conducted, until cancelled: a learner step or an epoch may last longer than the idle
    time-out. The first sign of a new run (`is_new`) comes after its beginning. What fails is tried again the next time.
    """
    while True:
        if is_new:
            await asyncio.sleep(started.idle_timeout_s / SIGNS_PER_TIMEOUT)
        is_new = True
        try:
            await log.send(RunContinued(run_id=started.run_id, time_ms=wall_ms()))
        except LogError as error:
            logger.warning("no sign of life of run_id=%s is written, it is tried again: %s", started.run_id, error)
