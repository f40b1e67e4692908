"""The life cycle of the jobs of one shared model group: a pure fold over what the log says of the group.

Statuses and their transitions are one table. The state does not depend on how records of different partitions are
mixed, nor on repeats: within a partition the first terminal event of a job decides, as for the learner.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Literal

from rollstream.eventlog import terms
from rollstream.eventlog.log import Received
from rollstream.eventlog.terms import Owner
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
    JobSkipped,
    JobStarted,
    JobSubmitted,
    JobSucceeded,
    LearnerClaimed,
    ModelSwitched,
    RunEnded,
    WeightsLoaded,
    WeightsPublished,
)
from rollstream.schemas.events.run_states import OUTCOMES, JobState, job_state
from rollstream.schemas.events.weights import JobEvent

JobStatus = Literal["pending", "running", "succeeded", "failed", "cancelled", "not_found"]
"""Statuses as documented by nip. `not_found`: the log has no job of that id."""

TRANSITIONS: Mapping[JobStatus, frozenset[JobStatus]] = MappingProxyType({
    "not_found": frozenset({"pending", "succeeded"}),
    "pending": frozenset({"running", "succeeded", "failed", "cancelled"}),
    "running": frozenset({"succeeded", "failed", "cancelled"}),
    "succeeded": frozenset(),
    "failed": frozenset(),
    "cancelled": frozenset(),
})  # fmt: skip
"""The statuses that may follow each status. A skipped job goes from `not_found` to `succeeded` at once; `failed` and
`cancelled` are left by a retry only, which is a further job."""
OVER: frozenset[JobStatus] = frozenset(status for status, following in TRANSITIONS.items() if not following)
FAILURES: frozenset[JobStatus] = frozenset({"failed", "cancelled", "not_found"})
"""The statuses for which `fine_tune_job_failed` is true."""


PART = 128
"""Entries of a dict that is copied for a further group."""
Batches = Mapping[int, Mapping[int, Mapping[int, Mapping[str, GroupClosed]]]]


@dataclass(frozen=True, slots=True)
class ClosedGroups:
    """Closed groups of a job's open batches. A further one copies the dicts on the way to it, whatever lies beside."""

    _batches: Batches = field(default_factory=lambda: MappingProxyType({}))
    """Groups by `epoch // PART`, epoch, `index // PART` and id."""

    def of(self, epoch: int) -> dict[str, GroupClosed]:
        """The groups of a batch by id."""
        parts = self._batches.get(epoch // PART, {}).get(epoch, {})
        return {group_id: group for part in parts.values() for group_id, group in part.items()}

    def having(self, group: GroupClosed) -> "ClosedGroups":
        """These and a further group; the first record of a group counts."""
        at, number = group.epoch // PART, group.index // PART
        batches = self._batches.get(at, {})
        parts = batches.get(group.epoch, {})
        groups = parts.get(number, {})
        if group.group_id in groups:
            return self
        parts = {**parts, number: {**groups, group.group_id: group}}
        return ClosedGroups({**self._batches, at: {**batches, group.epoch: parts}})

    def without(self, epoch: int) -> "ClosedGroups":
        """These without a batch."""
        at = epoch // PART
        if epoch not in (batches := self._batches.get(at, {})):
            return self
        left = {one: parts for one, parts in batches.items() if one != epoch}
        others = {one: found for one, found in self._batches.items() if one != at}
        return ClosedGroups({**others, at: left} if left else others)


@dataclass(frozen=True, slots=True)
class FineTuneJob:
    """One job of a model group."""

    job_id: str
    submitted: JobSubmitted | None = None
    submitted_offset: int = -1
    """Offset in `jobs`, which determines the order of the group's queue."""
    percent: float = 0.0
    """0 to 100."""
    has_progressed: bool = False
    num_planned: int = 0
    """Batches that curation has planned."""
    version: int = -1
    """Newest version that it has yielded; -1 before the first."""
    is_started: bool = False
    """Curation knows it."""
    epochs_started: frozenset[int] = frozenset()
    """Batches whose tasks are all on the log."""
    sealed: frozenset[int] = frozenset()
    """Epochs whose batches are planned."""
    outcome: JobEvent | None = None
    """The event that ended it."""
    outcome_offset: int = -1
    switched_to: int | None = None
    """The version that the group adopted from it."""
    switched_offset: int = -1
    closed: ClosedGroups = ClosedGroups()
    """Groups of its examples that are on the log; dropped once their batch is planned, or the job is over."""

    @property
    def state(self) -> JobState:
        """The job's state now, as commands and the view `jobs` show it."""
        outcome = None if self.outcome is None else OUTCOMES[type(self.outcome)]
        return job_state(outcome, is_started=self.is_started, has_progressed=self.has_progressed)

    @property
    def status(self) -> JobStatus:
        """The same in nip's terms, where a job is pending until a batch is planned, and a skipped one has succeeded."""
        state = self.state
        if state not in ("submitted", "running"):
            return "succeeded" if state == "skipped" else state
        if self.num_planned or self.percent > 0:
            return "running"
        return "not_found" if self.submitted is None else "pending"

    @property
    def is_over(self) -> bool:
        """Whether the status is final."""
        return self.status in OVER

    @property
    def progress(self) -> float:
        """0 to 100; 100 exactly for a job that succeeded."""
        return 100.0 if self.status == "succeeded" else min(self.percent, 100.0)

    @property
    def error(self) -> str:
        """The reason why the job failed, was cancelled or was skipped; empty otherwise."""
        match self.outcome:
            case JobFailed(error=error):
                return error
            case JobCancelled(cause=cause):
                return f"cancelled: {cause}" if cause else "cancelled"
            case JobSkipped() as skipped:
                return f"skipped: {skipped.reason}; the model stays at version {skipped.version}"
            case _:
                return ""

    @property
    def final_version(self) -> int | None:
        """The version that the group may switch to; None unless the job succeeded."""
        match self.outcome:
            case JobSucceeded(final_version=version) | JobSkipped(version=version):
                return version
            case _:
                return None

    def is_overdue(self, now_ms: int) -> bool:
        """Whether the job's deadline has passed and it is not over."""
        fine_tune = None if self.submitted is None else self.submitted.fine_tune
        if self.submitted is None or fine_tune is None or fine_tune.deadline_s is None or self.is_over:
            return False
        return now_ms > self.submitted.time_ms + fine_tune.deadline_s * 1000


@dataclass(frozen=True, slots=True)
class ModelGroupState:
    """All that the log says of one model group and of its run, as far as its jobs need it."""

    model_group: str
    jobs: Mapping[str, FineTuneJob] = field(default_factory=lambda: MappingProxyType({}))
    """Jobs by id, as their own records say; `job`, `queue` and `history` also know of the end of the run."""
    newest_version: int = -1
    """Newest published version of the weights; -1 before the base version."""
    owner: Owner | None = None
    loaded: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    """Newest version by engine."""
    run_ended: RunEnded | None = None

    @property
    def switched(self) -> FineTuneJob | None:
        """The job whose model the group adopted last; None while it speaks with the base model."""
        found = [job for job in self.jobs.values() if job.switched_to is not None]
        return max(found, key=lambda job: job.switched_offset, default=None)

    @property
    def version(self) -> int:
        """The version that the group speaks with; 0 is the base model."""
        switched = self.switched
        return 0 if switched is None else switched.switched_to or 0

    @property
    def queue(self) -> tuple[FineTuneJob, ...]:
        """Submitted jobs that are not over, in the order in which the learner takes them."""
        waiting = [job for job in map(self.job, self.jobs) if job.submitted is not None and not job.is_over]
        return tuple(sorted(waiting, key=lambda job: job.submitted_offset))

    @property
    def history(self) -> tuple[FineTuneJob, ...]:
        """Every job that was created, in the order of its first record in `jobs`."""
        known = (job for job in map(self.job, self.jobs) if job.status != "not_found")
        return tuple(sorted(known, key=lambda job: (_first_offset(job), job.job_id)))

    @property
    def next_base_version(self) -> int:
        """The version that a job submitted now begins with: what the jobs before it in the queue will yield.

        A job whose base version none of them yields will fail, because a job before it did, and yields nothing. `jobs`
        may be read ahead of `weights`, so a version that a job reports counts as published.
        """
        reported = (max(job.version, job.final_version or 0) for job in self.jobs.values())
        reached = max(0, self.newest_version, *reported)
        for job in self.queue:
            if (one := job.submitted) is not None and (one.base_version == reached or job.version > one.base_version):
                reached = max(reached, one.base_version + one.settings.num_versions)
        return reached

    def job(self, job_id: str) -> FineTuneJob:
        """The job of that id; of status `not_found` if the log has none.

        A job that is not over when its run ends is cancelled by the end, also if no learner is left to write that; its
        error has the message of the end.
        """
        job, ended = _job(self, job_id), self.run_ended
        is_by_end = isinstance(job.outcome, JobCancelled) and job.outcome.cause == JobCancelled.BY_END
        if ended is None or job.status == "not_found" or (job.is_over and not is_by_end):
            return job
        cancelled = JobCancelled(
            run_id=ended.run_id,
            time_ms=ended.time_ms,
            job_id=job_id,
            model_group=self.model_group,
            cause=f"{JobCancelled.BY_END}: {ended.message}" if ended.message else JobCancelled.BY_END,
        )
        return replace(job, outcome=cancelled, closed=ClosedGroups())


def initial(model_group: str) -> ModelGroupState:
    """The state before the first record."""
    return ModelGroupState(model_group)


def evolve(state: ModelGroupState, received: Received) -> ModelGroupState:
    """The state after one more record. Records of other groups and runs change nothing."""
    event, offset = received.event, received.position.offset
    if isinstance(event, RunEnded):
        is_ours = event.run_id == ids.run_of(state.model_group)
        return replace(state, run_ended=event) if is_ours and state.run_ended is None else state
    if isinstance(event, GroupClosed | EpochSealed | EpochStarted):
        is_ours = ids.is_fine_tune_of(state.model_group, event.job_id)
        return _with_job(state, _planned(_job(state, event.job_id), event)) if is_ours else state
    if getattr(event, "model_group", None) != state.model_group:
        return state
    match event:
        case BatchPlanned() | JobStarted():
            return _with_job(state, _planned(_job(state, event.job_id), event))
        case JobEvent():
            return _taken(state, event, offset)
        case LearnerClaimed():
            return replace(state, owner=terms.claimed(state.owner, event, offset))
        case WeightsPublished() if not terms.is_void(state.owner, event):
            state = replace(state, newest_version=max(state.newest_version, event.version))
            return (
                state
                if event.batch_id is None
                else _with_job(state, _yielded(_job(state, event.job_id), event.version))
            )
        case WeightsLoaded():
            newest = max(event.version, state.loaded.get(event.engine, -1))
            return replace(state, loaded=MappingProxyType({**state.loaded, event.engine: newest}))
        case _:
            return state


def _job(state: ModelGroupState, job_id: str) -> FineTuneJob:
    return state.jobs.get(job_id, FineTuneJob(job_id))


def _taken(state: ModelGroupState, event: JobEvent, offset: int) -> ModelGroupState:
    job = _job(state, event.job_id)
    match event:
        case JobSubmitted() if job.submitted is None or offset < job.submitted_offset:
            job = replace(job, submitted=event, submitted_offset=offset)
        case JobProgressed():
            job = replace(job, percent=max(job.percent, event.percent), has_progressed=True)
            job = _yielded(job, event.version)
        case ModelSwitched() if job.switched_to is None or offset < job.switched_offset:
            job = replace(job, switched_to=event.version, switched_offset=offset)
        case JobSucceeded() | JobFailed() | JobCancelled() | JobSkipped():
            if job.outcome is None or offset < job.outcome_offset:
                job = replace(job, outcome=event, outcome_offset=offset, closed=ClosedGroups())
        case _:
            pass
    return _with_job(state, job)


def _planned(job: FineTuneJob, event: Event) -> FineTuneJob:
    match event:
        case JobStarted():
            return replace(job, is_started=True)
        case EpochStarted():
            return replace(job, epochs_started=job.epochs_started | {event.epoch})
        case BatchPlanned():
            return replace(job, num_planned=max(job.num_planned, event.index + 1))
        case EpochSealed():
            return replace(job, sealed=job.sealed | {event.epoch}, closed=job.closed.without(event.epoch))
        case GroupClosed():
            is_needed = not job.is_over and event.epoch not in job.sealed
            return replace(job, closed=job.closed.having(event)) if is_needed else job
        case _:
            return job


def _yielded(job: FineTuneJob, version: int) -> FineTuneJob:
    """A version counts once it is published: its JobProgressed may be missing after a crash."""
    return replace(job, version=max(job.version, version))


def _with_job(state: ModelGroupState, job: FineTuneJob) -> ModelGroupState:
    if state.jobs.get(job.job_id) == job:
        return state
    return replace(state, jobs=MappingProxyType({**state.jobs, job.job_id: job}))


def _first_offset(job: FineTuneJob) -> int:
    return job.submitted_offset if job.submitted is not None else job.outcome_offset
