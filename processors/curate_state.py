"""State of the curate fold: open runs, their jobs and epochs. Data and derived numbers only; `curate` changes it."""

from dataclasses import dataclass, field

from rollstream.eventlog import codec
from rollstream.processors.candidates import Candidate
from rollstream.processors.curriculum import Progress
from rollstream.processors.window import Window
from rollstream.schemas.events import JobStarted, RunStarted


@dataclass(slots=True)
class Epoch:
    """An epoch that is not sealed."""

    number: int
    num_open: int = 0
    """Tasks, asked for by curation, whose groups are not closed yet."""
    num_groups: int = 0
    means: list[float] = field(default_factory=list[float])
    """Mean reward of each viable group."""
    zero_variance_groups: int = 0
    gathered: list[Candidate] = field(default_factory=list[Candidate])
    """Groups that wait for the end of the epoch, or for a submission."""
    trained_means: list[float] = field(default_factory=list[float])
    num_batches: int = 0


@dataclass(slots=True)
class Job:
    """A job of an open run."""

    started: JobStarted
    progress: Progress
    window: Window = field(default_factory=Window)
    next_index: int = 0
    """Index k of the next manifest."""
    previous_sha256: str = codec.EMPTY_SHA256
    ready: list[Candidate] = field(default_factory=list[Candidate])
    """Groups that wait for a manifest to fill, in record order; they outlive their epoch."""
    epochs: dict[int, Epoch] = field(default_factory=dict[int, Epoch])
    sealed: set[int] = field(default_factory=set[int])
    last_epoch: int | None = None
    """The epoch that a submission made the last one, before the plan's end."""
    last_asked: dict[str, int] = field(default_factory=dict[str, int])
    """Epoch in which an example was last asked for."""

    @property
    def short_name(self) -> str:
        """The job's id after the run's."""
        return self.started.job_id.removeprefix(f"{self.started.run_id}/")

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
        plan = self.started.plan
        return plan.max_staleness == 0 or plan.batches_per_epoch == 1

    @property
    def groups_per_batch(self) -> int:
        """Groups that fill a manifest."""
        plan = self.started.plan
        batches = 1 if self.is_single_batch else plan.batches_per_epoch
        return -(-plan.tasks_per_epoch // batches)

    @property
    def is_submitted(self) -> bool:
        """Whether the harness asks for the tasks itself and submits what is trained."""
        return self.started.plan.planning == "submitted"

    @property
    def filters_epochs(self) -> bool:
        """Whether an epoch's groups are filtered by the classic curriculum once they are all there."""
        curriculum = self.started.plan.curriculum
        return curriculum.enabled and not curriculum.steer and self.started.rollout.policy == "model"

    def is_last(self, epoch: int) -> bool:
        """Whether the job ends with this epoch."""
        return epoch >= self.started.plan.num_epochs - 1 or epoch == self.last_epoch

    def curriculum_sha256(self) -> str:
        """Digest of all that the curriculum decides from."""
        return codec.canonical_digest(
            {
                "percentile": self.progress.percentile,
                "last_expansion_epoch": self.progress.last_expansion_epoch,
                "window": self.window.content(self.window_start),
            }
        )


@dataclass(frozen=True, slots=True)
class Task:
    """A task that was asked for and whose group is not closed."""

    job_id: str
    epoch: int


@dataclass(slots=True)
class Run:
    """A run that has not ended."""

    started: RunStarted
    first_offset: int
    jobs: dict[str, Job] = field(default_factory=dict[str, Job])
    tasks: dict[str, Task] = field(default_factory=dict[str, Task])
    """Open tasks by group id, in the order they were asked for."""
    seen: set[str] = field(default_factory=set[str])
    """Ids of the run's events so far: the first occurrence wins."""
    idle_since_ms: dict[str, int] = field(default_factory=dict[str, int])
    """By clock: its time when it first told of another run's progress after this run's last."""
    is_abandoned: bool = False


@dataclass(slots=True)
class EndedRun:
    """What is kept of a run that is over: the groups that are still to close."""

    first_offset: int
    open_groups: set[str]
    takes_others: bool = False
    """Groups of tasks that nobody announced may close too: the harness wrote some."""
    seen: set[str] = field(default_factory=set[str])
    """Ids of the run's events, kept where others' groups may close."""


@dataclass(slots=True)
class CurateState:
    """All runs of one partition of `groups`. Mutable on purpose: its fold is its only writer."""

    runs: dict[str, Run] = field(default_factory=dict[str, Run])
    ended: dict[str, EndedRun] = field(default_factory=dict[str, EndedRun])

    @property
    def low_water(self) -> int | None:
        """Offset from which the partition must be folded again to rebuild what is open; None if nothing is.

        It is the RunStarted of the oldest run that is open or has groups that are still to close, or may have: nobody
        knows which tasks a harness that submits has still written.
        """
        offsets = [run.first_offset for run in self.runs.values()]
        offsets += [run.first_offset for run in self.ended.values() if run.open_groups or run.takes_others]
        return min(offsets, default=None)
