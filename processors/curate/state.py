"""State of the curate fold: open runs, their jobs and epochs. Data and derived numbers only; `fold` changes it.

Its size depends on what is open: runs, their tasks, epochs, windows and examples. See docs/architecture.md for the
bounds.
"""

import itertools
from dataclasses import dataclass, field
from typing import NamedTuple

from rollstream.eventlog import codec
from rollstream.processors.curate.candidates import Candidate, Window
from rollstream.processors.curate.curriculum import CurriculumProgress, Permutation
from rollstream.processors.curate.known_groups import KnownGroups
from rollstream.processors.curate.ranges import Ranges
from rollstream.schemas import ids
from rollstream.schemas.events import JobStarted, RunStarted, SubmissionReceived
from rollstream.schemas.settings import PlanSettings

PAST_REMEMBERED = 4096
"""Maximum number of ended runs remembered by id."""


def is_single_batch(plan: PlanSettings) -> bool:
    """Whether an epoch is one batch."""
    return plan.max_staleness == 0 or plan.batches_per_epoch == 1


def groups_per_batch(plan: PlanSettings) -> int:
    """Groups that fill a manifest."""
    return -(-plan.tasks_per_epoch // (1 if is_single_batch(plan) else plan.batches_per_epoch))


def num_batches(plan: PlanSettings) -> int:
    """Manifests of all epochs if every group is trained on: one may be filled by groups of two epochs."""
    return plan.num_epochs * plan.tasks_per_epoch // groups_per_batch(plan)


@dataclass(slots=True)
class NotOffered:
    """Trajectories that a submission names as left out before the curriculum, from the records so far."""

    submission_id: str = ""
    parts: list[tuple[str, ...]] = field(default_factory=list[tuple[str, ...]])

    @property
    def names(self) -> frozenset[str]:
        """Names of all parts."""
        return frozenset(itertools.chain.from_iterable(self.parts))

    def take(self, event: SubmissionReceived) -> None:
        """Add a part. A restarted submitter writes every record again, perhaps with other names."""
        if event.submission_id != self.submission_id:
            self.submission_id, self.parts = event.submission_id, []
        self.parts[event.num_before :] = [event.not_offered or ()]


@dataclass(slots=True)
class Epoch:
    """An epoch that is not sealed."""

    number: int
    num_open: int = 0
    """Number of tasks requested by curation whose groups are not closed yet."""
    num_tasks: int = 0
    """Number of tasks that curation has requested so far."""
    num_refills: int = 0
    num_groups: int = 0
    means: list[float] = field(default_factory=list[float])
    """Mean reward of each viable group."""
    zero_variance_groups: int = 0
    gathered: list[Candidate] = field(default_factory=list[Candidate])
    """Groups that wait for the end of the epoch, or for a submission."""
    trained_means: list[float] = field(default_factory=list[float])
    num_batches: int = 0
    not_offered: NotOffered = field(default_factory=NotOffered)


class PlayedGroup(NamedTuple):
    """A closed group of a validation: its mean reward, and the versions that played it."""

    reward: float
    versions: frozenset[int]
    """Empty if no token was sampled."""


@dataclass(slots=True)
class PlayedValidation:
    """A validation under way of a job with an evaluation gate."""

    epoch: int
    groups: dict[str, PlayedGroup] = field(default_factory=dict[str, PlayedGroup])
    """Closed groups with a scored rollout, by id."""


@dataclass(slots=True)
class Job:
    """A job of an open run."""

    started: JobStarted
    progress: CurriculumProgress
    window: Window = field(default_factory=Window)
    next_index: int = 0
    """Index k of the next manifest."""
    previous_sha256: str = codec.EMPTY_SHA256
    ready: list[Candidate] = field(default_factory=list[Candidate])
    """Groups that wait for a manifest to fill, in record order; they outlive their epoch."""
    fresh: tuple[int, int, int] = field(default=(0, 0, 0), compare=False, repr=False)
    """Number of the first of them that are known not to be stale at a next version after an adoption, and these two."""
    epochs: dict[int, Epoch] = field(default_factory=dict[int, Epoch])
    sealed: Ranges = field(default_factory=Ranges)
    """Epochs."""
    last_epoch: int | None = None
    """The epoch that a submission made the last one, before the plan's end."""
    last_adoption: int = 0
    """Newest version that a rollback yields; rollouts of versions before it are not trained on."""
    num_adopted: int = 0
    """Rollbacks planned so far."""
    validations: dict[str, PlayedValidation] = field(default_factory=dict[str, PlayedValidation])
    """Validations under way by the beginning of their groups' ids, in the order in which their first groups closed."""
    good_version: int | None = None
    """The newest version that has passed the evaluation gate, or that has the weights of one."""
    best_reward: float | None = None
    """Best mean reward of the validations that were passed."""
    last_asked: dict[str, int] = field(default_factory=dict[str, int])
    """Epoch in which an example was last asked for."""
    permutation: Permutation | None = field(default=None, compare=False, repr=False)
    """Order of the dataset in the newest turn, which can be made again."""

    @property
    def short_name(self) -> str:
        """The job's id after the run's."""
        return ids.name_of(self.started.job_id)

    @property
    def next_version(self) -> int:
        """The version that the next manifest trains at."""
        return self.started.base_version + self.next_index

    @property
    def window_start(self) -> int:
        """Oldest version inside the window."""
        return self.next_version - self.started.plan.curriculum.window_versions + 1

    @property
    def is_single_batch(self) -> bool:
        """Whether an epoch is one batch."""
        return is_single_batch(self.started.plan)

    @property
    def max_refills(self) -> int:
        """Maximum number of refills of an epoch: 0 unless it is one batch, each group of which is judged by itself."""
        has_one_taker = not self.started.plan.tasks_of and self.started.plan.drop_zero_variance
        is_refilled = self.is_single_batch and not self.is_submitted and not self.filters_epochs
        return self.started.plan.max_refills if has_one_taker and is_refilled else 0

    @property
    def groups_per_batch(self) -> int:
        """Groups that fill a manifest."""
        return groups_per_batch(self.started.plan)

    @property
    def agents(self) -> frozenset[str] | None:
        """The agents whose trajectories are offered to the job; None if every agent's are."""
        of_agents = self.started.rollout.agents
        if set(of_agents.values()) <= {self.started.model_group}:
            return None
        return frozenset(agent for agent, group in of_agents.items() if group == self.started.model_group)

    @property
    def is_submitted(self) -> bool:
        """Whether the harness requests the tasks itself and submits the trajectories to train on."""
        return self.started.plan.planning == "submitted"

    @property
    def filters_epochs(self) -> bool:
        """Whether an epoch's groups are filtered by the epochwise curriculum once all are closed."""
        curriculum = self.started.plan.curriculum
        return curriculum.enabled and not curriculum.steer and self.started.rollout.policy == "model"

    def is_stale(self, group: Candidate) -> bool:
        """Whether a group is too old for the next manifest."""
        return group.is_stale(self.next_version, self.started.plan.max_staleness, self.last_adoption)

    def is_last(self, epoch: int) -> bool:
        """Whether the job ends with this epoch."""
        return epoch >= self.started.plan.num_epochs - 1 or epoch == self.last_epoch

    @property
    def is_over(self) -> bool:
        """Whether the last epoch is sealed: no manifest follows."""
        return bool(self.sealed) and self.is_last(self.sealed.newest) and not self.epochs

    def curriculum_sha256(self) -> str:
        """Digest of all inputs of the curriculum."""
        return codec.canonical_digest(
            {
                "percentile": self.progress.percentile,
                "last_expansion_epoch": self.progress.last_expansion_epoch,
                "window": self.window.content(self.window_start),
            }
        )


@dataclass(slots=True)
class Clock:
    """Idle time of a run by the clock of one steps partition."""

    newest_ms: int
    """Newest event time seen since the run's last sign of life."""
    total_ms: int = 0


@dataclass(slots=True)
class Idle:
    """Idle times of a run, derived from records of other runs."""

    clocks: dict[int, Clock] = field(default_factory=dict[int, Clock])
    """Clocks by steps partition that closed other runs' groups after this run's last record."""
    is_abandoned: bool = False
    """Whether its end was sent for that reason."""


@dataclass(slots=True)
class Run:
    """A run that has not ended."""

    started: RunStarted
    first_offset: int
    jobs: dict[str, Job] = field(default_factory=dict[str, Job])
    groups: KnownGroups = field(default_factory=KnownGroups)
    idle: Idle = field(default_factory=Idle)

    def beside(self, job: Job) -> list[Job]:
        """The jobs that train other model groups on the tasks of `job`."""
        return [other for other in self.jobs.values() if other.started.plan.tasks_of == job.started.job_id]


@dataclass(slots=True)
class EndedRun:
    """Retained state of an ended run whose groups may still close."""

    first_offset: int
    groups: KnownGroups
    accepts_external_groups: bool = False
    """Groups of tasks that nobody announced may close too: the harness wrote some."""
    idle: Idle = field(default_factory=Idle)


@dataclass(slots=True)
class CurateState:
    """All runs of one partition of `groups`. Mutable on purpose: only its fold writes it."""

    runs: dict[str, Run] = field(default_factory=dict[str, Run])
    ended: dict[str, EndedRun] = field(default_factory=dict[str, EndedRun])
    """Runs that are over, until their last group has closed or nobody waits for it any more."""
    refused: dict[str, int] = field(default_factory=dict[str, int])
    """Runs above whose dataset could not be read, with the offset of the first EpochStarted that was not answered."""
    past: dict[str, None] = field(default_factory=dict[str, None])
    """The newest other runs that are over: a repeated RunStarted does not begin one of them again."""

    @property
    def low_water(self) -> int | None:
        """Offset from which the partition must be folded again to rebuild the open runs; None without any.

        It is the RunStarted of the oldest run that is open or whose groups may still close.
        """
        offsets = [run.first_offset for run in self.runs.values()]
        offsets += [run.first_offset for run in self.ended.values()]
        return min(offsets, default=None)

    def is_refused(self, run_id: str, offset: int) -> bool:
        """Whether an EpochStarted at that offset got no tasks: the run's dataset could not be read, or an answer was
        above the limit of its topic."""
        return offset >= self.refused.get(run_id, offset + 1)

    def idle_runs(self) -> dict[str, Idle]:
        """Idle times by run, which depend on events of other runs."""
        return {run_id: run.idle for live in (self.runs, self.ended) for run_id, run in live.items()}

    def remember(self, run_id: str) -> None:
        """Reduce a run to the fact that it has ended, and forget the oldest such run beyond the limit."""
        self.ended.pop(run_id, None)
        self.refused.pop(run_id, None)
        self.past[run_id] = None
        if len(self.past) > PAST_REMEMBERED:
            del self.past[next(iter(self.past))]
