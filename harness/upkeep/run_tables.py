"""Tables of runs and jobs, and one job in full, as commands print them."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from rollstream.harness.runs.progress import JobProgress, Progress, by_group, rewards_of
from rollstream.learner.shared_model_group import FineTuneJob
from rollstream.metrics.sql.table import table
from rollstream.schemas import ids
from rollstream.schemas.events import (
    BatchPlanned,
    EpochSealed,
    JobProgressed,
    JobStarted,
    JobSubmitted,
    LearnerClaimed,
    RunEnded,
    RunStarted,
    StepTrained,
    WeightsPublished,
)
from rollstream.schemas.events.run_states import OUTCOMES, JobState, job_state, run_state
from rollstream.schemas.settings import ForkPoint

JOBS_COLUMNS = (
    *("run", "job", "kind", "state", "model_group", "algorithm"),
    *("trained", "planned", "at_most", "base", "fork_of"),
)

_OF_STATES = (RunStarted, RunEnded, JobStarted, JobSubmitted, JobProgressed, *OUTCOMES)
OF_RUNS = (*_OF_STATES, EpochSealed, LearnerClaimed, WeightsPublished)
"""Events that `runs_table` is made of."""
OF_JOBS = (*_OF_STATES, BatchPlanned, LearnerClaimed, StepTrained)
"""Events that `jobs_table` is made of."""


def as_table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table of values; columns with a number in them are aligned to the right."""
    is_right = [any(isinstance(row[index], int | float) for row in rows) for index in range(len(columns))]
    return table(columns, [[str(value) for value in row] for row in rows], is_right)


def runs_table(runs: Sequence[Progress]) -> str:
    """One row per run."""
    if not runs:
        return "no runs yet"
    rows = [
        (
            progress.run_id,
            run_state(progress.ended),
            progress.run.started_at if progress.run else "",
            _jobs(progress),
            progress.num_versions,
            _reward(progress),
            _fork(progress.run.parent if progress.run else None),
        )
        for progress in runs
    ]
    return as_table(("run", "state", "started_at", "jobs", "versions", "last_epoch_reward", "parent"), rows)


def _jobs(progress: Progress) -> str:
    """The state of each job of a run's own; of those that shared model groups have submitted, how many have which."""
    shown, counts = list[str](), Counter[JobState]()
    for name, job in progress.jobs.items():
        if job.skipped is not None or (job.submitted is not None and job.submitted.fine_tune is not None):
            counts[state_of_job(progress, job)] += 1
        else:
            shown.append(f"{ids.name_of(name)} {state_of_job(progress, job)}")
    if total := counts.total():
        states = ", ".join(f"{count} {state}" for state, count in counts.items())
        shown.append(f"{total} fine-tuning job{'s' if total != 1 else ''} ({states})")
    return ", ".join(shown)


def jobs_table(runs: Sequence[Progress], model_group: str | None = None) -> str:
    """One row per job, of one model group if it is given: versions trained, of those planned so far, of the maximum.

    Versions of rollbacks, which adopt an earlier one, count in all three.
    """
    rows = [
        _job_row(progress, job_id, job)
        for progress in runs
        for job_id, job in progress.jobs.items()
        if (named := job.submitted or job.skipped) and model_group in (None, named.model_group)
    ]
    return as_table(JOBS_COLUMNS, rows) if rows else "no jobs yet"


def job_lines(job: FineTuneJob) -> list[str]:
    """A job in full, a field a line."""
    submitted, fields = job.submitted, dict[str, Any]()
    fields |= {"job": job.job_id, "state": job.state, "progress": f"{job.progress:g} %"}
    if submitted is not None:
        settings = submitted.settings
        fields |= {"model_group": submitted.model_group, "kind": settings.kind, "algorithm": settings.algorithm.name}
        fields |= {"base_version": submitted.base_version, "versions": settings.num_versions}
    fields["final_version"] = job.final_version
    fields["adopted"] = None if job.switched_to is None else f"version {job.switched_to}"
    fine_tune = None if submitted is None else submitted.fine_tune
    if fine_tune is not None:
        fields |= {
            "name": fine_tune.name or None,
            "agents": ", ".join(fine_tune.agents),
            "examples": fine_tune.num_examples,
            "batches": f"{fine_tune.first_batch} to {fine_tune.num_batches}"
            if fine_tune.attempt
            else fine_tune.num_batches,
            "attempt": fine_tune.attempt,
            "parent_version": fine_tune.parent_version,
            "deadline_s": fine_tune.deadline_s,
            "data": fine_tune.data.uri,
        }
    fields["error"] = job.error or None
    return [f"{name:<15} {value}" for name, value in fields.items() if value is not None]


def state_of_job(progress: Progress, job: JobProgress) -> JobState:
    """The state of one of the jobs of a run."""
    return job_state(
        job.outcome,
        is_started=job.started is not None,
        has_progressed=job.has_progressed,
        has_run_ended=progress.ended is not None,
    )


def _job_row(progress: Progress, job_id: str, job: JobProgress) -> tuple[object, ...]:
    submitted, skipped = job.submitted, job.skipped
    if submitted is None:
        assert skipped is not None
        names = progress.run_id, ids.name_of(job_id), skipped.job_kind, state_of_job(progress, job), skipped.model_group
        return *names, "", 0, 0, 0, skipped.version, ""
    return (
        progress.run_id,
        ids.name_of(job_id),
        submitted.settings.kind,
        state_of_job(progress, job),
        submitted.model_group,
        submitted.settings.algorithm.name,
        job.trained.version - submitted.base_version if job.trained else 0,
        job.num_planned,
        submitted.settings.num_versions + job.num_adopted,
        submitted.base_version,
        _fork(submitted.fork),
    )


def _fork(point: ForkPoint | None) -> str:
    return "" if point is None else ids.version_name(point.run_id, point.version, point.model_group)


def _reward(progress: Progress) -> str:
    """Mean of the newest epoch of the newest job that has one, and of those beside it."""
    planning = [job_id for job_id, job in progress.jobs.items() if not (job.started and job.started.plan.tasks_of)]
    found = [rewards for job_id in planning if (rewards := rewards_of(progress, job_id))]
    return by_group({group: f"{rewards[-1]:.3f}" for group, rewards in found[-1].items()}) if found else ""
