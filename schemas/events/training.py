"""Events of the topics groups and batches: runs, jobs and epochs, closed groups, and planned batches."""

from typing import ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, JsonValue

from rollstream.schemas import ids
from rollstream.schemas.base import Event, Locator, added
from rollstream.schemas.events.rollouts import Policy, Purpose
from rollstream.schemas.settings import MAX_TASKS, ArtifactRef, ForkPoint, PlanSettings, RolloutSettings

RejectionCause = Literal[
    "stale",
    "zero_variance",
    "curriculum",
    "late",
    "left_over",
    "run_ended",
    "no_token_ids",
    "no_logprobs",
    "not_viable",
    "validation",
    "handed_over",
    "not_submitted",
    "frozen",
]
"""Reason why a complete trajectory is not trained on here; `handed_over`: another training backend has it;
`not_submitted`: a component left it out, and no curriculum; `frozen`: no job trains its agent's model group."""


class _Value(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


# ---- groups ----


class RunStarted(Event):
    """A run began: its configuration as written (`${ENV}` not expanded) and what it ran on."""

    TOPIC: ClassVar[str] = "groups"
    UNDIGESTED: ClassVar[frozenset[str]] = frozenset({"time_ms", "started_at", "is_what_if"})
    kind: Literal["run_started"] = "run_started"
    v: Literal[1] = 1
    name: str
    config: dict[str, JsonValue]
    seed: int
    dataset: ArtifactRef
    """JSON lines of {"example_id": ..., "inputs": {...}}."""
    num_examples: int = Field(ge=0)
    num_partitions: int = Field(ge=1)
    """Number of partitions of the scaled topics; part of the run's identity."""
    cluster_id: str = ""
    library_versions: dict[str, str] = Field(default_factory=dict)
    idle_timeout_s: FiniteFloat = Field(default=3600.0, gt=0)
    parent: ForkPoint | None = None
    is_what_if: bool = False
    """It trains on its parent's rollouts and has none of its own."""
    started_at: str = ""
    from_variables: dict[str, JsonValue] = added({})
    """Values of the jobs' settings that `${ENV}` of the configuration gave, by path (`JOB.plan.num_epochs`)."""

    @property
    def event_id(self) -> str:
        return ids.event_id(self.kind, self.run_id)


class JobStarted(Event):
    """A job of a run begins: how its epochs are planned and which version it starts from."""

    TOPIC: ClassVar[str] = "groups"
    kind: Literal["job_started"] = "job_started"
    v: Literal[1] = 1
    job_id: str
    model_group: str
    base_version: int = Field(ge=0)
    plan: PlanSettings
    rollout: RolloutSettings
    job_sha256: str = added("")
    """Content digest of the job's JobSubmitted; empty where it was not kept."""

    @property
    def event_id(self) -> str:
        return ids.event_id(self.kind, self.job_id)


class EpochStarted(Event):
    """An epoch of a job begins. Curate answers with task requests, unless the job is `planning: submitted`."""

    TOPIC: ClassVar[str] = "groups"
    kind: Literal["epoch_started"] = "epoch_started"
    v: Literal[1] = 1
    job_id: str
    epoch: int = Field(ge=0)
    num_tasks: int = added(0, ge=0, le=MAX_TASKS)
    """Tasks, by index from 0, that the harness itself asks for if submissions decide the training data."""

    @property
    def event_id(self) -> str:
        return ids.epoch_event(self.kind, self.job_id, self.epoch)


class MemberRef(_Value):
    """One trajectory of a group, by reference; its locator is at the same index of `locators`."""

    trajectory_id: str
    rollout_id: str
    agent: str
    member: int
    digest: str
    """Content digest of its TrajectoryAssembled."""
    reward: FiniteFloat
    num_tokens: int
    num_completion_tokens: int
    min_version: int
    """Oldest version of a completion token; 0 if there is none."""
    max_version: int
    has_logprobs: bool = True
    """Whether at least the completion tokens have log-probabilities. Without, losses that need them leave it out."""
    num_dead_tokens: int = added(0, ge=0)
    """Sampled tokens of the trajectory's dead branches, which are left out."""
    num_without_logprobs: int = added(0, ge=0)
    """Completion tokens without, if others have them: left out where they are needed."""


class AttemptOutcome(_Value):
    """Result of one attempt when its group closed."""

    rollout_id: str
    member: int
    attempt: int
    outcome: Literal["complete", "failed", "superseded", "rejected"]
    cause: str = ""
    num_tokens: int = 0
    stop_reason: str = added("")
    """Stop reason from the RolloutEnded of an attempt that ended. Empty if it was not kept."""


class MatchResult(_Value):
    """Players of the seats (agents) of one rollout, and their scores."""

    member: int
    players: dict[str, str]
    """Players by seat: `GROUP@VERSION` with the oldest version that the player sampled with, or `scripted:NAME`."""
    scores: dict[str, FiniteFloat]
    """Deciding rewards by seat; of two seats the one with the higher reward wins, equal rewards are a draw."""


class StepsRange(_Value):
    """Range of a group's events in `steps` (both ends included)."""

    partition: int
    first_offset: int
    last_offset: int


class GroupClosed(Event):
    """A group is settled. Every task ends in exactly one."""

    TOPIC: ClassVar[str] = "groups"
    UNDIGESTED: ClassVar[frozenset[str]] = frozenset({"time_ms", "locators", "steps_at"})
    kind: Literal["group_closed"] = "group_closed"
    v: Literal[1] = 1
    group_id: str
    example_id: str
    job_id: str
    epoch: int
    index: int
    purpose: Purpose = "train"
    policy: Policy = "model"
    reason: Literal["complete", "partial", "timeout", "failed", "void"]
    void_cause: str | None = None
    is_viable: bool
    """Whether at least `minimum` members are complete."""
    size: int
    members: tuple[MemberRef, ...]
    attempts: tuple[AttemptOutcome, ...] = ()
    locators: tuple[Locator, ...] = ()
    steps_at: StepsRange | None = None
    matches: tuple[MatchResult, ...] = added(())
    """Results of the complete members, by number; empty without a league."""

    @property
    def event_id(self) -> str:
        return ids.event_id(self.kind, self.group_id)


class SubmittedGroup(_Value):
    """Trajectories of one submitted group, by id, with the rewards to train with."""

    group_id: str
    trajectory_ids: tuple[str, ...]
    rewards: tuple[FiniteFloat, ...]


class SubmissionReceived(Event):
    """Submission of an epochwise run: train on exactly these groups, in this order.

    Where `not_offered` does not fit in one record, others under the same id precede the submission with parts of it.
    """

    TOPIC: ClassVar[str] = "groups"
    kind: Literal["submission_received"] = "submission_received"
    v: Literal[1] = 1
    job_id: str
    submission_id: str
    epoch: int
    groups: tuple[SubmittedGroup, ...]
    curriculum_percentile: FiniteFloat | None = added(None)
    """Share of examples that the submitter's curriculum admits; None: the submitter did not report one."""
    is_last: bool = added(False)
    """The job ends with this epoch, whatever its plan says."""
    not_offered: tuple[str, ...] | None = added(None)
    """Trajectories that a component left out before the curriculum chose, by id; none: nothing is said of that."""
    num_before: int = added(0, ge=0)
    """Records with parts of `not_offered` that were written before this one."""
    is_part: bool = added(False)
    """Only a part of `not_offered`: nothing is planned before the submission itself."""
    num_empty: dict[str, int] = added({})
    """Numbers of epochs that nothing is submitted for, by cause (`curriculum`, `no_trajectories`, `nothing_submitted`):
    in a submission without groups this epoch and, at the job's end, all that no submission has counted."""

    @property
    def event_id(self) -> str:
        part = f"/p{self.num_before}" if self.is_part else ""
        return ids.event_id(self.kind, f"{self.submission_id}{part}")


class RollbackRequested(Event):
    """Somebody wants an earlier version of a job's model group back: curation plans a manifest that adopts it."""

    TOPIC: ClassVar[str] = "groups"
    kind: Literal["rollback_requested"] = "rollback_requested"
    v: Literal[1] = 1
    job_id: str
    model_group: str
    version: int = Field(ge=0)
    """The version to adopt."""
    after_version: int = Field(ge=0)
    """The newest planned version when this was requested; a request from before the last adoption has no effect."""
    reason: str = ""

    @property
    def event_id(self) -> str:
        return ids.version_event(self.kind, self.job_id, self.version, f"after-v{self.after_version}")


class RunContinued(Event):
    """Sign of life from the process that conducts a run; an idle run without any is declared abandoned in the end."""

    TOPIC: ClassVar[str] = "groups"
    kind: Literal["run_continued"] = "run_continued"
    v: Literal[1] = 1

    @property
    def event_id(self) -> str:
        return ids.event_id(self.kind, f"{self.run_id}/{self.time_ms}")


class RunEnded(Event):
    """A run is over. The first one of a run counts."""

    TOPIC: ClassVar[str] = "groups"
    UNDIGESTED: ClassVar[frozenset[str]] = frozenset({"time_ms", "refused_at"})
    kind: Literal["run_ended"] = "run_ended"
    v: Literal[1] = 1
    cause: Literal["completed", "failed", "stopped", "abandoned"]
    message: str = ""
    refused_at: int | None = added(None, ge=0)
    """Offset in `groups` from which the run got no more tasks, because its dataset could not be read. None: it was not
    ended for that reason, or the offset was not kept."""

    @property
    def event_id(self) -> str:
        return ids.event_id(self.kind, self.run_id)


# ---- batches ----


class BatchMember(_Value):
    """One trajectory of a batch, by reference; its locator is at the same index of `locators`."""

    trajectory_id: str
    rollout_id: str
    group_id: str
    digest: str
    reward: FiniteFloat
    staleness: int = Field(ge=0)


class BatchPlanned(Event):
    """A batch manifest: which trajectories, in which order, yield which version. A few KB, no payload."""

    TOPIC: ClassVar[str] = "batches"
    UNDIGESTED: ClassVar[frozenset[str]] = frozenset({"time_ms", "locators"})
    kind: Literal["batch_planned"] = "batch_planned"
    v: Literal[1] = 1
    batch_id: str
    job_id: str
    model_group: str
    epoch: int
    index: int = Field(ge=0)
    """k of the job: the batch trains at `base_version + k` and yields one version more."""
    trains_at_version: int = Field(ge=0)
    yields_version: int = Field(ge=1)
    members: tuple[BatchMember, ...]
    seed: int
    curriculum_sha256: str
    previous_sha256: str
    """Content digest of manifest k - 1 of the job; 64 zeros for the first."""
    locators: tuple[Locator, ...] = ()
    adopts: int | None = added(None, ge=0)
    """Earlier version that a rollback, which has no members, returns to, with the optimizer's state."""
    num_adopted: int = added(0, ge=0)
    """Rollbacks among the manifests of the job before this one; 0 in plans that do not count them."""

    @property
    def num_trained(self) -> int:
        """Manifests of the job before this one that are trained, which rollbacks are not."""
        return self.index - self.num_adopted

    @property
    def event_id(self) -> str:
        return ids.event_id(self.kind, self.batch_id)


class TrajectoryRejected(Event):
    """The ledger: a complete trajectory that is not trained, and why."""

    TOPIC: ClassVar[str] = "batches"
    kind: Literal["trajectory_rejected"] = "trajectory_rejected"
    v: Literal[1] = 1
    job_id: str
    epoch: int
    group_id: str
    rollout_id: str
    trajectory_id: str
    cause: RejectionCause
    num_tokens: int

    @property
    def event_id(self) -> str:
        return ids.event_id(self.kind, self.trajectory_id)


class VersionJudged(Event):
    """The evaluation gate judged a version by a validation; until then it is a candidate."""

    TOPIC: ClassVar[str] = "batches"
    kind: Literal["version_judged"] = "version_judged"
    v: Literal[1] = 1
    job_id: str
    model_group: str
    epoch: int
    """The validation was before it."""
    version: int = Field(ge=0)
    reward: FiniteFloat
    """Mean over groups of the group's mean reward."""
    num_groups: int = Field(ge=1)
    """Groups with a scored rollout."""
    is_good: bool
    good_version: int | None
    """The newest version that is good by this judgement, which a failed version is replaced with; None: none has passed
    yet."""
    best_reward: FiniteFloat | None
    """Best mean reward of the validations passed so far."""

    @property
    def event_id(self) -> str:
        return ids.epoch_event("version_judged", self.job_id, self.epoch)


class EpochSealed(Event):
    """All groups of an epoch are closed and its batches are planned (or it is sealed empty)."""

    TOPIC: ClassVar[str] = "batches"
    kind: Literal["epoch_sealed"] = "epoch_sealed"
    v: Literal[1] = 1
    job_id: str
    epoch: int
    is_last: bool
    """The job ends with this epoch."""
    num_groups: int
    num_trained_groups: int
    num_batches: int
    next_batch_index: int
    """Manifests of the job so far."""
    avg_reward: FiniteFloat | None
    """Mean over groups of the group's mean reward; none if no group was viable."""
    filtered_avg_reward: FiniteFloat | None
    """The same over the groups that are trained."""
    zero_variance_groups: int
    curriculum_percentile: FiniteFloat
    curriculum_sha256: str

    @property
    def event_id(self) -> str:
        return ids.epoch_event(self.kind, self.job_id, self.epoch)
