"""What the log says about jobs: a fold over jobs, batches, weights and the ends of runs. Changes only its own state."""

from dataclasses import dataclass, field

from rollstream.eventlog.log import Received
from rollstream.learner import terms
from rollstream.learner.terms import Owner
from rollstream.schemas.events import (
    BatchPlanned,
    EpochSealed,
    JobCancelled,
    JobFailed,
    JobProgressed,
    JobSubmitted,
    JobSucceeded,
    LearnerClaimed,
    RunEnded,
    StepTrained,
    WeightsPublished,
)


@dataclass(frozen=True, slots=True)
class Manifest:
    """A planned batch and the digest that the next one names."""

    planned: BatchPlanned
    digest: str


@dataclass(slots=True)
class JobState:
    """A job of a run that goes on."""

    manifests: dict[int, Manifest] = field(default_factory=dict[int, Manifest])
    """By index; the first one of an index counts."""
    last_seal: EpochSealed | None = None
    submitted: JobSubmitted | None = None


@dataclass(slots=True)
class GroupState:
    """A model group."""

    published: dict[int, WeightsPublished] = field(default_factory=dict[int, WeightsPublished])
    """By version; the first one that is not void counts."""
    trained: dict[int, str] = field(default_factory=dict[int, str])
    """Hash of the weights by version, as StepTrained says."""
    progressed: set[int] = field(default_factory=set[int])

    @property
    def newest_version(self) -> int:
        """Highest version published; -1 if there is none."""
        return max(self.published, default=-1)


@dataclass(slots=True)
class LogState:
    """All that a learner knows from the log."""

    jobs: dict[str, JobState] = field(default_factory=dict[str, JobState])
    """Jobs that are not over, in the order of their first event."""
    queues: dict[str, list[JobSubmitted]] = field(default_factory=dict[str, list[JobSubmitted]])
    """Open jobs by model group, in the order they were submitted."""
    closed: set[str] = field(default_factory=set[str])
    ended_runs: set[str] = field(default_factory=set[str])
    groups: dict[str, GroupState] = field(default_factory=dict[str, GroupState])
    owners: dict[str, Owner] = field(default_factory=dict[str, Owner])

    def job(self, job_id: str) -> JobState:
        """State of a job that is not over."""
        return self.jobs.setdefault(job_id, JobState())

    def group(self, model_group: str) -> GroupState:
        """State of a model group."""
        return self.groups.setdefault(model_group, GroupState())

    def to_cancel(self) -> list[JobSubmitted]:
        """Open jobs of runs that are over."""
        return [job for queue in self.queues.values() for job in queue if job.run_id in self.ended_runs]


def evolve(state: LogState, received: Received) -> None:
    """Take in one event; events that say nothing about jobs are passed over."""
    match received.event:
        case JobSubmitted() as event:
            _submit(state, event)
        case JobSucceeded() | JobFailed() | JobCancelled() as event:
            _close(state, event.job_id, event.model_group)
        case JobProgressed() as event:
            state.group(event.model_group).progressed.add(event.version)
        case BatchPlanned() as event if event.job_id not in state.closed:
            state.job(event.job_id).manifests.setdefault(event.index, Manifest(event, received.digest))
        case EpochSealed() as event if event.is_last and event.job_id not in state.closed:
            job = state.job(event.job_id)
            job.last_seal = job.last_seal or event
        case RunEnded() as event:
            state.ended_runs.add(event.run_id)
        case LearnerClaimed() as event:
            state.owners = terms.claim(state.owners, event, received.position.offset)
        case StepTrained() as event if not terms.is_void(state.owners, event.model_group, event.term):
            state.group(event.model_group).trained.setdefault(event.version, event.weights_sha256)
        case WeightsPublished() as event if not terms.is_void(state.owners, event.model_group, event.term):
            state.group(event.model_group).published.setdefault(event.version, event)
        case _:
            pass


def _submit(state: LogState, event: JobSubmitted) -> None:
    if event.job_id in state.closed or state.job(event.job_id).submitted:
        return
    state.job(event.job_id).submitted = event
    state.queues.setdefault(event.model_group, []).append(event)


def _close(state: LogState, job_id: str, model_group: str) -> None:
    state.closed.add(job_id)
    state.jobs.pop(job_id, None)
    queue = [job for job in state.queues.get(model_group, ()) if job.job_id != job_id]
    if queue:
        state.queues[model_group] = queue
    else:
        state.queues.pop(model_group, None)
