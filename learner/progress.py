"""The state of jobs by the log: a fold over jobs, batches, weights and the ends of runs. Changes only its own state.

`forget` drops what a checkpoint has made unnecessary, `anchors` names the records that still count.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from rollstream.eventlog import terms
from rollstream.eventlog.log import Position, Received
from rollstream.eventlog.recent_set import RecentSet
from rollstream.eventlog.terms import Owner
from rollstream.learner.scoring.index import ScoreIndex
from rollstream.schemas.events import (
    BatchPlanned,
    EpochSealed,
    JobCancelled,
    JobFailed,
    JobProgressed,
    JobSubmitted,
    JobSucceeded,
    LearnerClaimed,
    ReferenceScored,
    RunEnded,
    StepTrained,
    WeightsPublished,
)
from rollstream.schemas.revisions import RETRIES_GO_ON_SINCE

MAX_CLOSED = 10_000
"""Jobs, and ended runs, that are remembered when they are over: so many later ones before a repeat counts as new."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """A planned batch and the digest that the next one names."""

    planned: BatchPlanned
    digest: str
    offset: int


@dataclass(slots=True)
class LearnerJobState:
    """A job of a run that goes on."""

    manifests: dict[int, Manifest] = field(default_factory=dict[int, Manifest])
    """Manifests by index; the first one of an index counts."""
    first_index: int = 0
    """Manifests before it are trained, in a checkpoint, and forgotten."""
    last_seal: EpochSealed | None = None
    seal_offset: int = -1
    submitted: JobSubmitted | None = None
    submitted_offset: int = -1

    @property
    def digests(self) -> dict[int, str]:
        """Digests of the manifests by index."""
        return {index: one.digest for index, one in self.manifests.items()}


class TrainedStep(NamedTuple):
    """The content of a StepTrained that a learner compares with."""

    job_id: str
    weights_sha256: str
    micro_batch_tokens: tuple[int, ...]
    threads: int
    """0: unknown."""
    ranks: int
    """0: unknown, of a rollback that was recorded before these had it."""


@dataclass(slots=True)
class GroupState:
    """A model group.

    A version may have steps of several jobs: a job may be closed after its last StepTrained and before the version is
    published, and the next job trains a version of the same number.
    """

    published: dict[int, WeightsPublished] = field(default_factory=dict[int, WeightsPublished])
    """Published weights by version; the first event that is not void counts."""
    steps: dict[int, dict[str, TrainedStep]] = field(default_factory=dict[int, dict[str, TrainedStep]])
    """Trained steps by version and job, in the order of the log; the first one of a job that is not void counts."""
    progressed: dict[int, dict[str, int]] = field(default_factory=dict[int, dict[str, int]])
    """Offset of JobProgressed by version and job."""
    offsets: dict[int, list[int]] = field(default_factory=dict[int, list[int]])
    """Offsets in `weights` of the events in `published` and `steps`, by version."""
    scores: ScoreIndex = field(default_factory=ScoreIndex)
    is_whole: bool = True
    """Nothing was forgotten."""

    def step(self, version: int, job_id: str) -> TrainedStep | None:
        """The step with which a job trained a version."""
        return self.steps.get(version, {}).get(job_id)

    def publisher(self, version: int) -> str | None:
        """The job that published a version."""
        return self.published[version].job_id if version in self.published else None

    def step_of(self, version: int) -> TrainedStep | None:
        """The step of a version: that of the job that published it; if there is none, that of the last job.

        The SQL view `training_steps` implements the same rule.
        """
        steps, published = self.steps.get(version, {}), self.published.get(version)
        own = steps.get(published.job_id) if published is not None else None
        return own or next(reversed(steps.values()), None)

    def counts(self, event: StepTrained) -> bool:
        """Whether an event is the step of its version."""
        step = self.step_of(event.version)
        return step is not None and (step.job_id, step.weights_sha256) == (event.job_id, event.weights_sha256)

    @property
    def newest_version(self) -> int:
        """Highest version published; -1 if there is none."""
        return max(self.published, default=-1)


@dataclass(slots=True)
class LogState:
    """All that a learner knows from the log."""

    jobs: dict[str, LearnerJobState] = field(default_factory=dict[str, LearnerJobState])
    """Jobs that are not over, in the order of their first event."""
    queues: dict[str, list[JobSubmitted]] = field(default_factory=dict[str, list[JobSubmitted]])
    """Open jobs by model group, in the order they were submitted."""
    closed: RecentSet = field(default_factory=lambda: RecentSet(MAX_CLOSED))
    ended_runs: RecentSet = field(default_factory=lambda: RecentSet(MAX_CLOSED))
    ends: dict[str, int] = field(default_factory=dict[str, int])
    """Offset of RunEnded by run that has an open job."""
    groups: dict[str, GroupState] = field(default_factory=dict[str, GroupState])
    owners: dict[str, Owner] = field(default_factory=dict[str, Owner])

    def job(self, job_id: str) -> LearnerJobState:
        """State of a job that is not over."""
        return self.jobs.setdefault(job_id, LearnerJobState())

    def group(self, model_group: str) -> GroupState:
        """State of a model group."""
        return self.groups.setdefault(model_group, GroupState())

    def to_cancel(self) -> list[JobSubmitted]:
        """Open jobs of runs that are over."""
        return [job for queue in self.queues.values() for job in queue if job.run_id in self.ended_runs]


def evolve(state: LogState, received: Received) -> None:
    """Take in one event; events that say nothing about jobs are passed over."""
    offset = received.position.offset
    match received.event:
        case JobSubmitted() as event:
            _submit(state, event, offset)
        case JobSucceeded() | JobFailed() | JobCancelled() as event:
            _close(state, event.job_id, event.model_group)
        case JobProgressed() as event:
            state.group(event.model_group).progressed.setdefault(event.version, {}).setdefault(event.job_id, offset)
        case BatchPlanned() as event if event.job_id not in state.closed:
            _plan(state.job(event.job_id), event, received)
        case EpochSealed() as event if event.is_last and event.job_id not in state.closed:
            _seal(state.job(event.job_id), event, offset)
        case RunEnded() as event:
            _end(state, event, offset)
        case LearnerClaimed() as event:
            state.owners[event.model_group] = terms.claimed(state.owners.get(event.model_group), event, offset)
        case ReferenceScored() | StepTrained() | WeightsPublished() as event:
            if not terms.is_void(state.owners.get(event.model_group), event):
                _take_version(state.group(event.model_group), event, offset)
        case _:
            pass


def forget(state: LogState, job: JobSubmitted, *, next_index: int, version: int) -> None:
    """Drop the state before a checkpoint of a job at `version`, which continues with manifest `next_index`.

    The base version stays, since a loss may compare with it.
    """
    of_job, group = state.job(job.job_id), state.group(job.model_group)
    of_job.manifests = {index: one for index, one in of_job.manifests.items() if index >= next_index}
    of_job.first_index = max(of_job.first_index, next_index)
    group.scores.forget(version)
    kept = {one.base_version for one in state.queues.get(job.model_group, ())}
    for known in (group.published, group.steps, group.progressed, group.offsets):
        for old in [one for one in known if one < version and one not in kept]:
            del known[old]
            group.is_whole = False


def let_go(state: LogState, model_group: str) -> None:
    """Drop a model group."""
    state.groups.pop(model_group, None)
    state.owners.pop(model_group, None)


def replace(state: LogState, read: LogState, job: JobSubmitted) -> None:
    """Take a job and its model group from a state that was read for them."""
    state.jobs[job.job_id] = read.job(job.job_id)
    let_go(state, job.model_group)
    state.groups[job.model_group] = read.group(job.model_group)
    if (owner := read.owners.get(job.model_group)) is not None:
        state.owners[job.model_group] = owner


def anchors(state: LogState) -> set[Position]:
    """Positions of the records that the state was made of, if they still matter."""
    return set(_anchors(state))


def _anchors(state: LogState) -> Iterator[Position]:
    for job in state.jobs.values():
        if job.submitted is not None:
            yield Position("jobs", 0, job.submitted_offset)
        if job.last_seal is not None:
            yield Position("batches", 0, job.seal_offset)
        yield from (Position("batches", 0, one.offset) for one in job.manifests.values())
    for group in state.groups.values():
        yield from (Position("jobs", 0, offset) for found in group.progressed.values() for offset in found.values())
        yield from (Position("weights", 0, offset) for offsets in group.offsets.values() for offset in offsets)
        yield from (Position("weights", 0, offset) for offset in group.scores.anchors())
    yield from (Position("weights", 0, owner.offset) for owner in state.owners.values())
    yield from (Position("groups", 0, offset) for offset in state.ends.values())


def _submit(state: LogState, event: JobSubmitted, offset: int) -> None:
    job = state.jobs.get(event.job_id)
    if event.job_id in state.closed or (job is not None and job.submitted is not None):
        return
    job = state.job(event.job_id)
    job.submitted, job.submitted_offset = event, offset
    state.queues.setdefault(event.model_group, []).append(event)


def _plan(job: LearnerJobState, event: BatchPlanned, received: Received) -> None:
    if event.index >= job.first_index:
        job.manifests.setdefault(event.index, Manifest(event, received.digest, received.position.offset))


def _seal(job: LearnerJobState, event: EpochSealed, offset: int) -> None:
    if job.last_seal is None:
        job.last_seal, job.seal_offset = event, offset


def _take_version(group: GroupState, event: ReferenceScored | StepTrained | WeightsPublished, offset: int) -> None:
    match event:
        case ReferenceScored():
            group.scores.take(event, offset)
        case StepTrained():
            _train(group, event, offset)
        case WeightsPublished():
            _publish(group, event, offset)


def _train(group: GroupState, event: StepTrained, offset: int) -> None:
    steps = group.steps.setdefault(event.version, {})
    if event.job_id not in steps:
        ranks = 0 if event.adopts is not None and not event.device else event.ranks
        steps[event.job_id] = TrainedStep(
            event.job_id, event.weights_sha256, event.micro_batch_tokens, event.threads, ranks
        )
        group.offsets.setdefault(event.version, []).append(offset)


def _publish(group: GroupState, event: WeightsPublished, offset: int) -> None:
    if event.version not in group.published:
        group.published[event.version] = event
        group.offsets.setdefault(event.version, []).append(offset)


def _end(state: LogState, event: RunEnded, offset: int) -> None:
    state.ended_runs.add(event.run_id)
    if any(job.run_id == event.run_id for queue in state.queues.values() for job in queue):
        state.ends.setdefault(event.run_id, offset)


def _close(state: LogState, job_id: str, model_group: str) -> None:
    state.closed.add(job_id)
    state.jobs.pop(job_id, None)
    queue = [job for job in state.queues.get(model_group, ()) if job.job_id != job_id]
    if queue:
        state.queues[model_group] = queue
    else:
        state.queues.pop(model_group, None)
    open_runs = {job.run_id for jobs in state.queues.values() for job in jobs}
    state.ends = {run_id: offset for run_id, offset in state.ends.items() if run_id in open_runs}


def schedule_of(job: JobSubmitted) -> tuple[int, int]:
    """Batches of a job that earlier attempts have trained, and those at which its learning-rate schedule ends."""
    goes_on = job.fine_tune is not None and job.settings.revision >= RETRIES_GO_ON_SINCE
    first = job.fine_tune.first_batch if job.fine_tune is not None and goes_on else 0
    return first, first + job.settings.num_versions


def manifest_metrics(planned: BatchPlanned) -> dict[str, float]:
    """Rewards (mean, population standard deviation) and staleness of a manifest's members."""
    rewards = [member.reward for member in planned.members]
    staleness = [member.staleness for member in planned.members]
    if not rewards:
        return {}
    mean = math.fsum(rewards) / len(rewards)
    variance = math.fsum((reward - mean) ** 2 for reward in rewards) / len(rewards)
    return {
        "reward/mean": mean,
        "reward/std": math.sqrt(variance),
        "staleness/min": float(min(staleness)),
        "staleness/mean": sum(staleness) / len(staleness),
        "staleness/max": float(max(staleness)),
        "batch/trajectories": float(len(rewards)),
        "batch/groups": float(len({member.group_id for member in planned.members})),
    }
