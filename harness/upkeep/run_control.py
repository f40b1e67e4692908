"""Runs and jobs that a command names: found, listed, stopped and cancelled."""

from collections import Counter

from rollstream.eventlog.log import EventLog, ReadableLog, wall_ms
from rollstream.eventlog.reading import decode_or_none, read_to_end, unreadable_event
from rollstream.eventlog.run_offsets import start_offsets_of
from rollstream.harness.runs.follower import progress_of, read_runs
from rollstream.harness.runs.outcome import is_trained
from rollstream.harness.runs.plan import look_up
from rollstream.harness.runs.progress import Progress
from rollstream.harness.upkeep.run_tables import OF_JOBS
from rollstream.learner.shared_model_group import FineTuneJob
from rollstream.learner.shared_model_group.fine_tune_job import cancel_events
from rollstream.learner.shared_model_group.group_view import view
from rollstream.schemas import ids
from rollstream.schemas.errors import ConfigError
from rollstream.schemas.events import RunEnded
from rollstream.schemas.events.weights import JobEvent

CAUSE = "cancelled by `rollstream jobs cancel`"


async def stop_run(log: EventLog, run: str) -> str:
    """Stop a run gracefully, and report it. Raises ConfigError if the run does not exist."""
    progress = await look_up(log, run)
    if progress.ended is not None:
        return f"run {run} had already ended ({progress.ended.cause})"
    await log.send(RunEnded(run_id=run, time_ms=wall_ms(), cause="stopped"))
    return stopped_line(progress)


def stopped_line(progress: Progress) -> str:
    """The report of `stop` about a run that it has stopped."""
    run = progress.run_id
    at = f"at version {progress.version}" if progress.version >= 0 else "before its first version"
    if not is_trained(progress):
        return f"run {run} stopped {at}: nothing was trained"
    if progress.is_of_shared_model_group:
        return f"run {run} stopped {at}; its open jobs are cancelled, and its shared model group takes no further ones"
    saves = f"`rollstream finetune --config_file FILE --resume {run}`"
    saver = "the finetune process that conducts it saves the model"
    return f"run {run} stopped {at}; {saver}; if none is running, use {saves}"


async def find_job(log: ReadableLog, job_id: str) -> FineTuneJob:
    """A job as the log says it. Raises ConfigError for an id that the log does not have."""
    unreadable = ""
    starts = await start_offsets_of(log, ids.run_of(job_id))
    async for record in read_to_end(log, "jobs", {0: starts["jobs"]} if starts else None):
        if not ids.is_key_of_run(record.key or b"", ids.run_of(job_id)):
            continue
        received = decode_or_none(record)
        event = None if received is None else received.event
        unreadable = unreadable or ("" if received is not None else unreadable_event(record))
        if isinstance(event, JobEvent) and event.job_id == job_id:
            group = await view(log, event.model_group, starts)
            await group.close()
            return group.state.job(job_id)
    if unreadable:
        raise ConfigError(
            f"job {job_id} is not among the records that this version of rollstream can read; a newer version may have "
            f"written {unreadable}: use the version that wrote it"
        )
    raise ConfigError(f"job {job_id} does not exist; `rollstream jobs` lists all jobs")


async def cancel_job(log: EventLog, job_id: str) -> None:
    """Cancel a job. Raises ConfigError for one that does not exist or is over."""
    job = await find_job(log, job_id)
    if job.is_over:
        raise ConfigError(f"job {job_id} is over ({job.state}); only an open job can be cancelled")
    await log.send_all(cancel_events(job, CAUSE, wall_ms()))


async def chosen_runs(log: ReadableLog, chosen: str | None, unreadable: Counter[str] | None = None) -> list[Progress]:
    """The runs whose jobs are listed: all, or the one that is chosen, of which alone the records are read.

    `unreadable`: see `read_runs`. Raises ConfigError for a run or a model group that does not exist.
    """
    if chosen is None:
        return await read_runs(log, unreadable, needed=OF_JOBS)
    run = await progress_of(log, ids.run_of(chosen), unreadable)
    group = model_group_of(chosen)
    named = [job.submitted or job.skipped for job in run.jobs.values()]
    groups = {job.model_group for job in named if job is not None}
    if group is not None and group not in groups:
        known = ", ".join(sorted(groups)) or "none"
        raise ConfigError(f"model group {group} has no jobs; groups of the run with jobs: {known}")
    return [run]


def model_group_of(chosen: str | None) -> str | None:
    """The model group of a `RUN/NAME`; None for a RUN."""
    return chosen if chosen is not None and "/" in chosen else None
