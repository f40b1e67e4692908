"""Events of the topics jobs and weights: what a learner is to do, what it trained, published, and what was loaded."""

from typing import ClassVar, Literal

from pydantic import Field, FiniteFloat, JsonValue

from rollstream.schemas.base import Event
from rollstream.schemas.events_training import ForkPoint
from rollstream.schemas.settings import ArtifactRef, JobSettings

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
    UNDIGESTED: ClassVar[frozenset[str]] = frozenset({"time_ms", "term", "threads", "seconds", "tokens_per_s"})
    kind: Literal["step_trained"] = "step_trained"
    v: Literal[1] = 1
    job_id: str
    batch_id: str
    epoch: int
    version: int
    """The version that the batch yielded."""
    term: int
    threads: int = 0
    """CPU threads that it was trained with: a replay needs as many. 0: not told."""
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
