"""Events of the topics groups, batches, jobs and weights: what was planned, trained, published and loaded."""

from typing import ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, JsonValue

from rollstream.schemas.base import Event, Locator
from rollstream.schemas.events_rollouts import Policy, Purpose
from rollstream.schemas.settings import ArtifactRef, JobSettings, PlanSettings, RolloutSettings


class _Value(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


# ---- groups ----


class ForkPoint(_Value):
    """The run and version that a run branched from."""

    run_id: str
    version: int = Field(ge=0)


class RunStarted(Event):
    """A run began: its configuration as written (`${ENV}` not expanded) and what it ran on."""

    TOPIC: ClassVar[str] = "groups"
    UNDIGESTED: ClassVar[frozenset[str]] = frozenset({"time_ms", "started_at"})
    kind: Literal["run_started"] = "run_started"
    v: Literal[1] = 1
    name: str
    config: dict[str, JsonValue]
    seed: int
    dataset: ArtifactRef
    """JSON lines of {"example_id": ..., "inputs": {...}}."""
    num_examples: int = Field(ge=0)
    num_partitions: int = Field(ge=1)
    """Of the scaled topics; part of the run's identity."""
    cluster_id: str = ""
    library_versions: dict[str, str] = Field(default_factory=dict)
    idle_timeout_s: float = Field(default=3600.0, gt=0)
    parent: ForkPoint | None = None
    started_at: str = ""

    @property
    def event_id(self) -> str:
        return f"run_started:{self.run_id}"


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

    @property
    def event_id(self) -> str:
        return f"job_started:{self.job_id}"


class EpochStarted(Event):
    """An epoch of a job begins; curate answers with task requests. A validation epoch is never trained on."""

    TOPIC: ClassVar[str] = "groups"
    kind: Literal["epoch_started"] = "epoch_started"
    v: Literal[1] = 1
    job_id: str
    epoch: int = Field(ge=0)

    @property
    def event_id(self) -> str:
        return f"epoch_started:{self.job_id}/e{self.epoch}"


class MemberRef(_Value):
    """One trajectory of a group, by reference; its locator stands at the same index of `locators`."""

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


class AttemptOutcome(_Value):
    """What became of one attempt when its group closed."""

    rollout_id: str
    member: int
    attempt: int
    outcome: Literal["complete", "failed", "superseded", "rejected"]
    cause: str = ""
    num_tokens: int = 0


class StepsRange(_Value):
    """Where a group's events lie in `steps` (both ends included)."""

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
    """At least `minimum` members are complete."""
    size: int
    members: tuple[MemberRef, ...]
    attempts: tuple[AttemptOutcome, ...] = ()
    locators: tuple[Locator, ...] = ()
    steps_at: StepsRange | None = None

    @property
    def event_id(self) -> str:
        return f"group_closed:{self.group_id}"


class SubmittedGroup(_Value):
    """Trajectories of one submitted group, by id, with the rewards to train with."""

    group_id: str
    trajectory_ids: tuple[str, ...]
    rewards: tuple[FiniteFloat, ...]


class SubmissionReceived(Event):
    """The harness's classic way: train on just these groups, in this order."""

    TOPIC: ClassVar[str] = "groups"
    kind: Literal["submission_received"] = "submission_received"
    v: Literal[1] = 1
    job_id: str
    submission_id: str
    epoch: int
    groups: tuple[SubmittedGroup, ...]

    @property
    def event_id(self) -> str:
        return f"submission_received:{self.submission_id}"


class RunEnded(Event):
    """A run is over. The first one of a run counts."""

    TOPIC: ClassVar[str] = "groups"
    kind: Literal["run_ended"] = "run_ended"
    v: Literal[1] = 1
    cause: Literal["completed", "failed", "stopped", "abandoned"]
    message: str = ""

    @property
    def event_id(self) -> str:
        return f"run_ended:{self.run_id}"


# ---- batches ----


class BatchMember(_Value):
    """One trajectory of a batch, by reference; its locator stands at the same index of `locators`."""

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

    @property
    def event_id(self) -> str:
        return f"batch_planned:{self.batch_id}"


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
    cause: Literal[
        "stale",
        "zero_variance",
        "curriculum",
        "late",
        "left_over",
        "run_ended",
        "no_token_ids",
        "not_viable",
        "validation",
    ]
    num_tokens: int

    @property
    def event_id(self) -> str:
        return f"trajectory_rejected:{self.trajectory_id}"


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
    curriculum_percentile: float
    curriculum_sha256: str

    @property
    def event_id(self) -> str:
        return f"epoch_sealed:{self.job_id}/e{self.epoch}"


# ---- jobs ----


class JobEvent(Event):
    """An event of one job; its key is the model group."""

    job_id: str
    model_group: str

    @property
    def key(self) -> str:
        return self.model_group


class JobSubmitted(JobEvent):
    """A job waits for a learner."""

    TOPIC: ClassVar[str] = "jobs"
    kind: Literal["job_submitted"] = "job_submitted"
    v: Literal[1] = 1
    base_version: int = Field(ge=0)
    settings: JobSettings
    fork: ForkPoint | None = None

    @property
    def event_id(self) -> str:
        return f"job_submitted:{self.job_id}"


class JobProgressed(JobEvent):
    """A learner has come so far with a job."""

    TOPIC: ClassVar[str] = "jobs"
    kind: Literal["job_progressed"] = "job_progressed"
    v: Literal[1] = 1
    version: int
    percent: float = Field(ge=0, le=100)

    @property
    def event_id(self) -> str:
        return f"job_progressed:{self.job_id}/v{self.version}"


class JobSucceeded(JobEvent):
    """A job is done; its last version is published."""

    TOPIC: ClassVar[str] = "jobs"
    kind: Literal["job_succeeded"] = "job_succeeded"
    v: Literal[1] = 1
    final_version: int

    @property
    def event_id(self) -> str:
        return f"job_succeeded:{self.job_id}"


class JobFailed(JobEvent):
    """A job cannot be done."""

    TOPIC: ClassVar[str] = "jobs"
    kind: Literal["job_failed"] = "job_failed"
    v: Literal[1] = 1
    error: str

    @property
    def event_id(self) -> str:
        return f"job_failed:{self.job_id}"


class JobCancelled(JobEvent):
    """A job is no longer wanted."""

    TOPIC: ClassVar[str] = "jobs"
    kind: Literal["job_cancelled"] = "job_cancelled"
    v: Literal[1] = 1
    cause: str = ""

    @property
    def event_id(self) -> str:
        return f"job_cancelled:{self.job_id}"


# ---- weights ----


class WeightEvent(Event):
    """An event of one model group; its key is the model group."""

    model_group: str

    @property
    def key(self) -> str:
        return self.model_group


class LearnerClaimed(WeightEvent):
    """A learner took a model group; lower terms are void from here on."""

    TOPIC: ClassVar[str] = "weights"
    kind: Literal["learner_claimed"] = "learner_claimed"
    v: Literal[1] = 1
    term: int = Field(ge=1)
    learner: str

    @property
    def event_id(self) -> str:
        return f"learner_claimed:{self.model_group}/{self.term}/{self.learner}"


class StepTrained(WeightEvent):
    """A batch was trained: its metrics, and the digest of the weights that came of it."""

    TOPIC: ClassVar[str] = "weights"
    UNDIGESTED: ClassVar[frozenset[str]] = frozenset({"time_ms", "term", "seconds", "tokens_per_s"})
    kind: Literal["step_trained"] = "step_trained"
    v: Literal[1] = 1
    job_id: str
    batch_id: str
    epoch: int
    version: int
    """The version that the batch yielded."""
    term: int
    weights_sha256: str
    num_optimizer_steps: int
    metrics: dict[str, FiniteFloat]
    """Named area/name: loss/total, reward/mean, policy/entropy, policy/kl, clip/low, ..."""
    seconds: dict[str, float] = Field(default_factory=dict)
    """By phase: wait, fetch, collate, forward_backward, optimizer, checkpoint, publish."""
    tokens_per_s: float = 0.0

    @property
    def event_id(self) -> str:
        return f"step_trained:{self.model_group}/v{self.version}/{self.term}"


class WeightsPublished(WeightEvent):
    """A weight version exists as an immutable artifact."""

    TOPIC: ClassVar[str] = "weights"
    UNDIGESTED: ClassVar[frozenset[str]] = frozenset({"time_ms", "term", "artifact"})
    kind: Literal["weights_published"] = "weights_published"
    v: Literal[1] = 1
    job_id: str
    batch_id: str | None
    """None for the base version."""
    version: int = Field(ge=0)
    parent: int | None
    term: int
    weights_sha256: str
    """Of the artifact's bytes, and of its content: a safetensors file with sorted names."""
    weights_format: Literal["full", "lora"]
    base_model: str
    """Folder or hub name with configuration and tokenizer (for lora: the weights below the adapter)."""
    lora: dict[str, JsonValue] | None = None
    """peft's adapter configuration, for lora."""
    artifact: ArtifactRef

    @property
    def event_id(self) -> str:
        return f"weights_published:{self.model_group}/v{self.version}/{self.term}"


class WeightsLoaded(WeightEvent):
    """An engine generates with a version from now on."""

    TOPIC: ClassVar[str] = "weights"
    UNDIGESTED: ClassVar[frozenset[str]] = frozenset({"time_ms", "seconds"})
    kind: Literal["weights_loaded"] = "weights_loaded"
    v: Literal[1] = 1
    version: int
    engine: str
    num_skipped: int = 0
    """Versions published since the last load that this engine never had."""
    seconds: float = 0.0

    @property
    def event_id(self) -> str:
        return f"weights_loaded:{self.model_group}/v{self.version}/{self.engine}"
