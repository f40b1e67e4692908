"""The progress of a run: a pure fold over its events in groups, batches, jobs and weights.

Used by the driver, by resume and by live progress. Repeated events change nothing, and the order of records from
different topics does not matter (the log keeps the order within a partition).
"""

import itertools
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import NamedTuple

from rollstream.eventlog import terms
from rollstream.eventlog.terms import Owner
from rollstream.learner.shared_model_group.job_queue import GROUP_KEY
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
    RunEnded,
    RunStarted,
    StepTrained,
    WeightsLoaded,
    WeightsPublished,
)
from rollstream.schemas.events.run_states import OUTCOMES, JobOutcome
from rollstream.schemas.events.weights import JobEvent


@dataclass(frozen=True, slots=True, eq=False)
class ValidatedGroups(Set[str]):
    """Ids of groups, in sets of which each has more than the next: one more id copies few of them on average.

    Operators such as `|` are not for it: `with_group` adds an id.
    """

    parts: tuple[frozenset[str], ...] = ()

    def with_group(self, group_id: str) -> "ValidatedGroups":
        """These, and one that is not among them."""
        parts, newest = self.parts, frozenset((group_id,))
        while parts and len(parts[-1]) <= len(newest):
            parts, newest = parts[:-1], parts[-1] | newest
        return ValidatedGroups((*parts, newest))

    def __contains__(self, group_id: object) -> bool:
        return any(group_id in part for part in self.parts)

    def __iter__(self) -> Iterator[str]:
        return itertools.chain.from_iterable(self.parts)

    def __len__(self) -> int:
        return sum(map(len, self.parts))


NOTHING_VALIDATED = ValidatedGroups()


@dataclass(frozen=True, slots=True)
class JobProgress:
    """Progress of one job. Epochs and versions are -1 before the first."""

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
    num_adopted: int = 0
    """Those of the planned versions that adopt an earlier one; its settings do not count them."""
    trained: StepTrained | None = None
    """The newest trained step."""
    percent: float = 0.0
    has_progressed: bool = False
    validated: Mapping[int, ValidatedGroups] = field(default_factory=lambda: MappingProxyType({}))
    """Groups of the newest validation that are closed, by its epoch."""
    skipped: JobSkipped | None = None
    """Instead of `submitted`, of a job that had too little to train on."""
    outcome: JobOutcome | None = None
    final_version: int = -1
    error: str = ""
    ended_at_ms: int = 0


class Published(NamedTuple):
    """The versions of a model group."""

    first: WeightsPublished | None = None
    newest: WeightsPublished | None = None


NOTHING_PUBLISHED = Published()


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of one run."""

    run_id: str
    run: RunStarted | None = None
    ended: RunEnded | None = None
    jobs: Mapping[str, JobProgress] = field(default_factory=lambda: MappingProxyType({}))
    published: Mapping[str, Published] = field(default_factory=lambda: MappingProxyType({}))
    """Published versions by model group."""
    owners: Mapping[str, Owner] = field(default_factory=lambda: MappingProxyType({}))
    """Learner by model group."""
    engines: Mapping[tuple[str, str], int] = field(default_factory=lambda: MappingProxyType({}))
    """Newest version by model group and engine."""

    @property
    def is_of_shared_model_group(self) -> bool:
        """Whether a shared model group began the run: it has no configuration file, and no process conducts it."""
        return self.run is not None and GROUP_KEY in self.run.config

    @property
    def model_group(self) -> str:
        """The model group of the job that plans the run's tasks; other jobs may train further ones on its log.

        In a run that a shared model group began, that of its first job.
        """
        own = (self.job(ids.job_id(self.run_id, name)) for name in (ids.TRAINING, ids.WARM_START))
        for job in (*own, *(self.jobs.values() if self.is_of_shared_model_group else ())):
            if (event := job.submitted or job.started or job.skipped) is not None:
                return event.model_group
        return ids.model_group(self.run_id, ids.MODEL_GROUP)

    @property
    def weights(self) -> WeightsPublished | None:
        """The newest version of that model group; of equal versions the first."""
        return self.published.get(self.model_group, NOTHING_PUBLISHED).newest

    @property
    def loaded(self) -> Mapping[str, int]:
        """Its newest version by engine."""
        return {engine: version for (group, engine), version in self.engines.items() if group == self.model_group}

    @property
    def version(self) -> int:
        """Its newest published version, -1 before the first."""
        return self.version_of(self.model_group)

    def version_of(self, model_group: str) -> int:
        """Newest published version of a model group, -1 before the first."""
        newest = self.published.get(model_group, NOTHING_PUBLISHED).newest
        return -1 if newest is None else newest.version

    @property
    def num_versions(self) -> int:
        """Number of its published versions: a what-if and a fork may begin with another one than 0."""
        first, newest = self.published.get(self.model_group, NOTHING_PUBLISHED)
        return newest.version - first.version + 1 if first and newest else 0

    def job(self, job_id: str) -> JobProgress:
        """Progress of a job; initial if it has no events yet."""
        return self.jobs.get(job_id, JobProgress())


def rewards_of(progress: Progress, job_id: str) -> dict[str, list[float]]:
    """Mean rewards of the epochs of a job, and of the jobs beside it that train on its tasks, by model group."""
    found: dict[str, list[float]] = {}
    for name, job in sorted(progress.jobs.items(), key=lambda item: item[0] != job_id):
        is_beside = job.started is not None and job.started.plan.tasks_of == job_id
        known = job.submitted or job.started
        if known is not None and job.rewards and (name == job_id or is_beside):
            found[ids.name_of(known.model_group)] = [reward for _, reward in job.rewards]
    return found


def by_group(texts: Mapping[str, str]) -> str:
    """A text for each model group, with its name if there are several."""
    named = len(texts) > 1
    return ", ".join(f"{group} {text}" if named else text for group, text in texts.items())


def evolve(progress: Progress, event: Event) -> Progress:
    """The progress after one more event. Events of other runs and of other kinds change nothing."""
    if event.run_id != progress.run_id:
        return progress
    match event:
        case RunStarted():
            return progress if progress.run else replace(progress, run=event)
        case RunEnded():
            return progress if progress.ended else replace(progress, ended=event)
        case LearnerClaimed():
            owner = terms.claimed(progress.owners.get(event.model_group), event)
            return replace(progress, owners=MappingProxyType({**progress.owners, event.model_group: owner}))
        case StepTrained() | WeightsPublished() if terms.is_void(progress.owners.get(event.model_group), event):
            return progress
        case WeightsPublished():
            return _published(progress, event)
        case WeightsLoaded():
            key = (event.model_group, event.engine)
            newest = max(event.version, progress.engines.get(key, -1))
            return replace(progress, engines=MappingProxyType({**progress.engines, key: newest}))
        case _:
            job_id = getattr(event, "job_id", None)
            return progress if job_id is None else _with_job(progress, job_id, event)


def _published(progress: Progress, event: WeightsPublished) -> Progress:
    known = progress.published.get(event.model_group, NOTHING_PUBLISHED)
    first = event if known.first is None or event.version < known.first.version else known.first
    newest = event if known.newest is None or event.version > known.newest.version else known.newest
    published = {**progress.published, event.model_group: Published(first, newest)}
    return replace(progress, published=MappingProxyType(published))


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
            return _planned(job, event)
        case StepTrained():
            return _trained(job, event)
        case JobProgressed():
            return replace(job, percent=max(job.percent, event.percent), has_progressed=True)
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


def _planned(job: JobProgress, event: BatchPlanned) -> JobProgress:
    if event.index < job.num_planned:
        return job
    return replace(job, num_planned=event.index + 1, num_adopted=job.num_adopted + (event.adopts is not None))


def _validated(job: JobProgress, event: GroupClosed) -> JobProgress:
    """Training groups are not counted: an epoch's seal summarizes them."""
    known = job.validated.get(event.epoch, NOTHING_VALIDATED)
    is_newest = event.epoch >= max(job.validated, default=-1)
    if event.purpose != "validation" or event.group_id in known or not is_newest:
        return job
    return replace(job, validated=MappingProxyType({event.epoch: known.with_group(event.group_id)}))


def _trained(job: JobProgress, event: StepTrained) -> JobProgress:
    newest = job.trained
    if newest is not None and event.version <= newest.version:
        return job
    return replace(job, trained=event)


def _ended(job: JobProgress, event: Event) -> JobProgress:
    if job.outcome is not None or not isinstance(event, JobEvent) or type(event) not in OUTCOMES:
        return job
    job = replace(job, outcome=OUTCOMES[type(event)], ended_at_ms=event.time_ms)
    match event:
        case JobSucceeded():
            return replace(job, final_version=event.final_version)
        case JobFailed():
            return replace(job, error=event.error)
        case JobCancelled():
            return replace(job, error=event.cause)
        case JobSkipped():
            return replace(job, skipped=event, error=event.reason)
        case _:
            return job
