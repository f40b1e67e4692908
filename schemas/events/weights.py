"""Events of the topics jobs and weights: the work of a learner, trained and published versions, and loaded ones."""

import hashlib
from datetime import UTC, datetime
from typing import ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, JsonValue, PositiveInt, model_validator

from rollstream.schemas import ids
from rollstream.schemas.base import Event, added
from rollstream.schemas.events.training import ForkPoint
from rollstream.schemas.settings import ArtifactRef, JobSettings

# ---- jobs ----


class JobEvent(Event):
    """An event of one job: its key is the model group, its id that of the job unless there are several of a kind."""

    job_id: str
    model_group: str

    @property
    def key(self) -> str:
        return self.model_group

    @property
    def event_id(self) -> str:
        return self._id_of(self.job_id)


class FineTune(BaseModel):
    """Training data of a job of a shared model group, and its provenance."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    data_sha256: str
    """Sha256 of the examples, in order."""
    data: ArtifactRef
    """The examples: JSON lines of `RecordedGroup`s."""
    num_examples: int = Field(ge=1)
    config_sha256: str
    agents: tuple[str, ...] = Field(min_length=1)
    """Those that share the model."""
    parent_version: int = Field(ge=0)
    """The version that the group spoke with when the job was created."""
    num_batches: int = Field(ge=1)
    """Batches of all passes over the data, each of which yields a version."""
    batch_size: int = Field(ge=1)
    """Examples of a batch; the last one of a pass may have fewer."""
    max_staleness: int = Field(default=0, ge=0)
    """Number of versions that the rollouts of an RL job may be behind."""
    first_batch: int = Field(default=0, ge=0)
    """Batches before it were trained by earlier attempts."""
    attempt: int = Field(default=0, ge=0)
    name: str = ""
    """Name that the caller gave the job."""
    deadline_s: FiniteFloat | None = Field(default=None, gt=0)
    """Seconds after the submission at which a job that is not over is cancelled."""


class JobSubmitted(JobEvent):
    """A job waits for a learner."""

    TOPIC: ClassVar[str] = "jobs"
    UNDIGESTED: ClassVar[frozenset[str]] = frozenset({"time_ms", "start_offsets"})
    kind: Literal["job_submitted"] = "job_submitted"
    v: Literal[1] = 1
    base_version: int = Field(ge=0)
    settings: JobSettings
    run_sha256: str = added("")
    """Content digest of the run's RunStarted; empty where it was not kept."""
    fork: ForkPoint | None = None
    start_offsets: dict[str, int] | None = added(None)
    """End offsets of `groups`, `batches`, `jobs`, `weights`, `dlq` and partitions of `tasks` (`tasks/0`) before the run
    wrote its first event: readers of the run begin there. Of what is not named they begin at the oldest record."""
    is_what_if: bool = added(False)
    """Whether the job is of a what-if, which has a learner of its own: one that serves every job leaves it alone."""
    fine_tune: FineTune | None = added(None)
    """Description of a job that a shared model group created from given rollouts; None for all others."""


class JobProgressed(JobEvent):
    """A learner has come so far with a job."""

    TOPIC: ClassVar[str] = "jobs"
    kind: Literal["job_progressed"] = "job_progressed"
    v: Literal[1] = 1
    version: int
    percent: float = Field(ge=0, le=100)

    @property
    def event_id(self) -> str:
        return ids.version_event(self.kind, self.job_id, self.version)


class JobSucceeded(JobEvent):
    """A job is done; its last version is published."""

    TOPIC: ClassVar[str] = "jobs"
    UNDIGESTED: ClassVar[frozenset[str]] = frozenset({"time_ms", "finish_s"})
    kind: Literal["job_succeeded"] = "job_succeeded"
    v: Literal[1] = 1
    final_version: int
    finish_s: float = added(0.0, ge=0)
    """Phase `finish` of the last version, as StepTrained has it of the versions before; 0: not measured, for a learner
    that began again after the version ended the job."""


class JobFailed(JobEvent):
    """A job cannot be done."""

    TOPIC: ClassVar[str] = "jobs"
    kind: Literal["job_failed"] = "job_failed"
    v: Literal[1] = 1
    error: str


class JobCancelled(JobEvent):
    """A job is no longer wanted."""

    TOPIC: ClassVar[str] = "jobs"
    BY_END: ClassVar[str] = "the run ended"
    """Cause of a job that a learner cancels because its run is over."""
    kind: Literal["job_cancelled"] = "job_cancelled"
    v: Literal[1] = 1
    cause: str = ""

    @property
    def is_asked_for(self) -> bool:
        """Whether somebody cancelled the job of a run that goes on."""
        return self.cause not in ("", self.BY_END)


class JobSkipped(JobEvent):
    """A job was not submitted because there was too little to train on: it is over, and the model stays as it was."""

    TOPIC: ClassVar[str] = "jobs"
    kind: Literal["job_skipped"] = "job_skipped"
    v: Literal[1] = 1
    job_kind: Literal["rl", "sft", "dpo"]
    cause: Literal["too_few_examples"] = "too_few_examples"
    num_examples: int = Field(ge=1)
    min_examples: int = Field(ge=1)
    version: int = Field(ge=0)
    """The version that the group goes on with."""
    name: str = ""

    @property
    def reason(self) -> str:
        """Number of examples that there are and that it needs, in the words of the view `jobs`."""
        return f"{self.num_examples} examples, at least {self.min_examples} are needed"


class ModelSwitched(JobEvent):
    """A shared model group speaks with the version that a finished job yielded from now on."""

    TOPIC: ClassVar[str] = "jobs"
    kind: Literal["model_switched"] = "model_switched"
    v: Literal[1] = 1
    version: int = Field(ge=0)


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
        return ids.claim_event(self.model_group, self.term, self.learner)


class StepTrained(WeightEvent):
    """A batch was trained: its metrics, and the digest of the weights that came of it."""

    TOPIC: ClassVar[str] = "weights"
    UNDIGESTED: ClassVar[frozenset[str]] = frozenset(
        {"time_ms", "term", "threads", "ranks", "device", "micro_batch_tokens", "seconds", "tokens_per_s"}
    )
    kind: Literal["step_trained"] = "step_trained"
    v: Literal[1] = 1
    job_id: str
    batch_id: str
    epoch: int
    version: int
    """The version that the batch yielded."""
    term: int
    threads: int = 0
    """CPU threads that it was trained with: a replay needs as many. 0: unknown."""
    ranks: int = added(1, ge=1)
    """Processes that trained together. Hashes are equal only where they are as many."""
    device: str = added("")
    """The GPU's name, or cpu. Hashes are equal only on an equal one. Empty: unknown."""
    micro_batch_tokens: tuple[PositiveInt, ...] = added(())
    """Tokens of a micro-batch in each pass, if memory ran out: first the pass for the proximal policy, if the algorithm
    needs one, then the mini-batches. A replay divides its passes in the same way. Empty: as set in the job."""
    weights_sha256: str
    manifest_sha256: str = added("")
    """Content digest of the batch's manifest; empty where it was not kept."""
    scores_sha256: str = added("")
    """Digest of the ReferenceScored that it was trained with: sha256 over their content digests, in the manifest's
    order. Empty if there were none."""
    num_optimizer_steps: int
    metrics: dict[str, FiniteFloat]
    """Named area/name: loss/total, reward/mean, policy/entropy, policy/kl, clip/low, ..."""
    seconds: dict[str, float] = Field(default_factory=dict)
    """Seconds by phase: finish (of the version before: its events, pruning, collection), wait, fetch, score (by a
    reference or teacher), collate, forward_backward, hold (until the version before, written meanwhile, is on disk),
    optimizer, hash, checkpoint, publish (these and finish unless the next batch was trained meanwhile); or restore."""
    tokens_per_s: float = 0.0
    adopts: int | None = added(None, ge=0)
    """Earlier version to whose state the learner returned, for a rollback, which takes no optimizer step."""
    num_adopted: int = added(0, ge=0)
    """As the manifest has it."""

    @property
    def event_id(self) -> str:
        return ids.version_event(self.kind, self.model_group, self.version, self.term)


class Scorer(BaseModel):
    """Source of the log-probabilities in a ReferenceScored. Equal ones give equal values, while `model` is the same."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    role: Literal["reference", "teacher"]
    """Role of the log-probabilities in the loss."""
    model: str = ""
    """The model's folder or hub name as written; empty: the job's own."""
    weights_sha256: str = ""
    """Sha256 of published weights; empty: the weights of `model`."""
    temperature: FiniteFloat = Field(default=1.0, gt=0)
    over_kept: bool = False
    """Normalised over the ids that truncated sampling left, where it did."""
    context: str = ""
    """Privileged text that only the scorer sees before each sequence, with `{KEY}` of the task's inputs."""
    dtype: str = added("")
    """Data type of the weights and the computation, if the job sets one (`model.reference_dtype`)."""

    @property
    def sha256(self) -> str:
        """Names the scorer."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()


class ReferenceScored(WeightEvent):
    """A reference model or a teacher has scored a trajectory's completion tokens: log-probabilities to train with.

    It precedes the first StepTrained that uses it, so that whoever trains again needs no such model. One of the same
    trajectory and scorer is used again by later steps.
    """

    TOPIC: ClassVar[str] = "weights"
    UNDIGESTED: ClassVar[frozenset[str]] = frozenset({"time_ms", "term"})
    kind: Literal["reference_scored"] = "reference_scored"
    v: Literal[1] = 1
    job_id: str
    batch_id: str
    """The manifest that it was computed for."""
    version: int = Field(ge=0)
    """The version that the manifest yields."""
    term: int
    trajectory_id: str
    trajectory_sha256: str
    """Content digest of the TrajectoryAssembled."""
    scorer: Scorer
    part: int = Field(default=0, ge=0)
    """Index among `num_parts` events, if one record cannot hold all tokens."""
    num_parts: int = Field(default=1, ge=1)
    logprobs: str
    """float32 in base64: one a completion token, in the order of sequences and completions; 0 for a token that nothing
    precedes."""

    @property
    def event_id(self) -> str:
        scored = f"{self.trajectory_sha256[:16]}-{self.scorer.sha256[:16]}-{self.part}"
        return ids.version_event(self.kind, self.model_group, self.version, f"{self.term}/{scored}")


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
    """Sha256 of the artifact's bytes, and thereby of its content: a safetensors file with sorted names."""
    weights_format: Literal["full", "lora"]
    base_model: str
    """Folder or hub name with configuration and tokenizer (for lora: the weights below the adapter)."""
    lora: dict[str, JsonValue] | None = None
    """peft's adapter configuration, for lora."""
    artifact: ArtifactRef
    adopts: int | None = added(None, ge=0)
    """Earlier version with the same weights, for a rollback."""
    tokenizer_sha256: str = added("")
    """Sha256 of the tokenizer's files in the learner's `base_model`; empty for a hub name, or if it has none."""
    quantization: Literal["nf4"] | None = added(None)
    """Quantization of the base model below the adapter during training; see `ModelSettings`."""
    base_sha256: str = added("")
    """`eventlog.files.base_sha256` of `base_model`; empty for full weights, or where not kept."""

    @property
    def event_id(self) -> str:
        return ids.version_event(self.kind, self.model_group, self.version, self.term)

    def is_above(self, sha256: str, path: str) -> bool:
        """Whether its adapter is of the base model with this hash; of this path where a hash is missing."""
        is_known = "" not in (self.base_sha256, sha256)
        return self.base_sha256 == sha256 if is_known else self.base_model == path


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
        return ids.version_event(self.kind, self.model_group, self.version, self.engine)


class WeightsCollected(WeightEvent):
    """Versions that nothing needs any more: their artifacts are removed once this is written, and may be gone."""

    TOPIC: ClassVar[str] = "weights"
    UNDIGESTED: ClassVar[frozenset[str]] = frozenset({"time_ms", "artifacts", "by"})
    kind: Literal["weights_collected"] = "weights_collected"
    v: Literal[1] = 1
    versions: tuple[int, ...] = Field(min_length=1)
    """Ascending. A version published under several terms is listed once for each of its artifacts."""
    weights_sha256: tuple[str, ...]
    """Sha256 of the artifacts, in the order of `versions`."""
    artifacts: tuple[ArtifactRef, ...]
    """Artifacts in the order of `versions`."""
    by: str
    """The learner that owns the model group, or `gc`."""

    @model_validator(mode="after")
    def _as_many_of_each(self) -> "WeightsCollected":
        if not len(self.versions) == len(self.weights_sha256) == len(self.artifacts):
            raise ValueError("versions, weights_sha256 and artifacts must have equal lengths")
        return self

    def reason(self, recorded_ms: int) -> str:
        """The reason why an artifact is gone: who collected it, and when by the record's clock (event time may lag)."""
        at = datetime.fromtimestamp(recorded_ms / 1000, UTC)
        return f"collected by {self.by} at {at:%Y-%m-%d %H:%M:%S} UTC, because keep_last and keep_every do not cover it"

    @property
    def event_id(self) -> str:
        return ids.versions_event(self.kind, self.model_group, self.versions[0], self.versions[-1])
