"""Where a run is: a pure fold over its events on groups, batches, jobs and weights.

Used by the driver, by resume and by live progress. Repeats change nothing, and the order in which records of different
topics come in does not matter (order within a topic's partition is kept by the log).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Literal

from rollstream.harness.config.settings import MODEL_GROUP
from rollstream.schemas import ids
from rollstream.schemas.base import Event
from rollstream.schemas.events import (
    BatchPlanned,
    EpochSealed,
    EpochStarted,
    GroupClosed,
    JobCancelled,
    JobFailed,
    JobProgressed,
    JobStarted,
    JobSubmitted,
    JobSucceeded,
    RunEnded,
    RunStarted,
    StepTrained,
    WeightsLoaded,
    WeightsPublished,
)


@dataclass(frozen=True, slots=True)
class JobProgress:
    """Where one job is. Epochs and versions are -1 before the first."""

    submitted: JobSubmitted | None = None
    started: JobStarted | None = None
    epoch_started: int = -1
    sealed: EpochSealed | None = None
    """The newest seal."""
    rewards: tuple[tuple[int, float], ...] = ()
    """(epoch, mean reward) of sealed epochs that had a viable group, by epoch."""
    num_groups: int = 0
    num_trained_groups: int = 0
    num_planned: int = 0
    trained: StepTrained | None = None
    """The newest trained step."""
    percent: float = 0.0
    validated: Mapping[int, frozenset[str]] = field(default_factory=lambda: MappingProxyType({}))
    """By epoch: groups of its validation that are closed."""
    outcome: Literal["succeeded", "failed", "cancelled"] | None = None
    final_version: int = -1
    error: str = ""
    ended_at_ms: int = 0


@dataclass(frozen=True, slots=True)
class Progress:
    """Where one run is."""

    run_id: str
    run: RunStarted | None = None
    ended: RunEnded | None = None
    jobs: Mapping[str, JobProgress] = field(default_factory=lambda: MappingProxyType({}))
    weights: WeightsPublished | None = None
    """The newest version (of equal versions, that of the highest term)."""
    first_weights: WeightsPublished | None = None
    """The base version."""
    loaded: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    """Newest version by engine."""

    @property
    def model_group(self) -> str:
        """The model group that the run's own jobs train; others' jobs may train more of them on its log."""
        return ids.model_group(self.run_id, MODEL_GROUP)

    @property
    def version(self) -> int:
        """Newest published version, -1 before the first."""
        return -1 if self.weights is None else self.weights.version

    def job(self, job_id: str) -> JobProgress:
        """Where a job is; a job without events is at its beginning."""
        return self.jobs.get(job_id, JobProgress())


def evolve(progress: Progress, event: Event) -> Progress:
    """The progress after one more event. Events of other runs and of other kinds change nothing."""
    if event.run_id != progress.run_id:
        return progress
    match event:
        case RunStarted():
            return progress if progress.run else replace(progress, run=event)
        case RunEnded():
            return progress if progress.ended else replace(progress, ended=event)
        case WeightsPublished() if event.model_group == progress.model_group:
            return _published(progress, event)
        case WeightsLoaded() if event.model_group == progress.model_group:
            newest = max(event.version, progress.loaded.get(event.engine, -1))
            return replace(progress, loaded=MappingProxyType({**progress.loaded, event.engine: newest}))
        case _:
            job_id = getattr(event, "job_id", None)
            return progress if job_id is None else _with_job(progress, job_id, event)


def _published(progress: Progress, event: WeightsPublished) -> Progress:
    newest = progress.weights
    if newest is None or (event.version, event.term) > (newest.version, newest.term):
        progress = replace(progress, weights=event)
    oldest = progress.first_weights
    if oldest is None or (event.version, -event.term) < (oldest.version, -oldest.term):
        progress = replace(progress, first_weights=event)
    return progress


def _with_job(progress: Progress, job_id: str, event: Event) -> Progress:
    before = progress.job(job_id)
    after = _evolve_job(before, event)
    if after == before:
        return progress
    return replace(progress, jobs=MappingProxyType({**progress.jobs, job_id: after}))


def _evolve_job(job: JobProgress, event: Event) -> JobProgress:
    match event:
        case JobSubmitted():
            return job if job.submitted else replace(job, submitted=event)
        case JobStarted():
            return job if job.started else replace(job, started=event)
        case EpochStarted():
            return replace(job, epoch_started=max(job.epoch_started, event.epoch))
        case EpochSealed():
            return _sealed(job, event)
        case BatchPlanned():
            return replace(job, num_planned=max(job.num_planned, event.index + 1))
        case StepTrained():
            return _trained(job, event)
        case JobProgressed():
            return replace(job, percent=max(job.percent, event.percent))
        case GroupClosed():
            return _validated(job, event)
        case _:
            return _ended(job, event)


def _sealed(job: JobProgress, event: EpochSealed) -> JobProgress:
    if job.sealed is not None and event.epoch <= job.sealed.epoch:
        return job
    rewards = job.rewards if event.avg_reward is None else (*job.rewards, (event.epoch, event.avg_reward))
    return replace(
        job,
        sealed=event,
        rewards=rewards,
        num_groups=job.num_groups + event.num_groups,
        num_trained_groups=job.num_trained_groups + event.num_trained_groups,
    )


def _validated(job: JobProgress, event: GroupClosed) -> JobProgress:
    """Groups that are trained on are many and say nothing here that an epoch's seal does not sum up."""
    known = job.validated.get(event.epoch, frozenset[str]())
    if event.purpose != "validation" or event.group_id in known:
        return job
    return replace(job, validated=MappingProxyType({**job.validated, event.epoch: known | {event.group_id}}))


def _trained(job: JobProgress, event: StepTrained) -> JobProgress:
    newest = job.trained
    if newest is not None and (event.version, event.term) <= (newest.version, newest.term):
        return job
    return replace(job, trained=event)


def _ended(job: JobProgress, event: Event) -> JobProgress:
    if job.outcome is not None:
        return job
    match event:
        case JobSucceeded():
            return replace(job, outcome="succeeded", final_version=event.final_version, ended_at_ms=event.time_ms)
        case JobFailed():
            return replace(job, outcome="failed", error=event.error, ended_at_ms=event.time_ms)
        case JobCancelled():
            return replace(job, outcome="cancelled", error=event.cause, ended_at_ms=event.time_ms)
        case _:
            return job
