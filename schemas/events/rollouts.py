"""Events of the topics tasks, steps and trajectories: what was asked for, what happened, what came of it."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, JsonValue, NonNegativeInt

from rollstream.schemas import ids
from rollstream.schemas.base import MAX_TIME_MS, DigestOf, Event, added
from rollstream.schemas.settings import MAX_MEMBERS, OTHERS, RolloutSettings

Purpose = Literal["train", "validation"]
Policy = Literal["model", "demonstration", "external"]
JsonObject = dict[str, Any]
"""JSON values by name. Neither copied nor looked at, since what is read was parsed from JSON, and what is written is
refused by the codec if JSON cannot hold it: pydantic's JsonValue costs more than all other fields of a step together.
"""


class _Value(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class GroupEvent(Event):
    """An event of one group; its key is the group."""

    group_id: str

    @property
    def key(self) -> str:
        return self.group_id

    @property
    def event_id(self) -> str:
        return self._id_of(self.group_id)


# ---- tasks ----


class TaskRequested(GroupEvent):
    """One example is to be rolled out `num_rollouts` times."""

    TOPIC: ClassVar[str] = "tasks"
    kind: Literal["task_requested"] = "task_requested"
    v: Literal[1] = 1
    example_id: str
    job_id: str
    epoch: int = Field(ge=0)
    index: int = Field(ge=0)
    """Task index in its epoch."""
    purpose: Purpose = "train"
    inputs: dict[str, JsonValue]
    num_rollouts: int = Field(ge=1, le=MAX_MEMBERS)
    minimum: int = Field(ge=1)
    """Fewest complete members of a viable group."""
    seed: int
    min_version: int = Field(ge=0)
    """Producers hold the task until their engine is there."""
    settings: RolloutSettings
    min_versions: dict[str, NonNegativeInt] = added({})
    """Minimum versions by model group, where they differ from `min_version`."""
    enough: int = added(0, ge=0)
    """Complete members with which the group closes early; 0: it waits for all `num_rollouts`."""

    @classmethod
    def of_run(
        cls, run_seed: int, *, group_id: str, num_rollouts: int, minimum: int, oversampling: int = 0, **fields: Any
    ) -> Self:
        """A task of a run: its seed is derived from the run's and its place, its `minimum` at most `num_rollouts`.

        `oversampling`: rollouts beyond `num_rollouts`, which are then enough.
        """
        return cls(
            group_id=group_id,
            num_rollouts=num_rollouts + oversampling,
            enough=num_rollouts if oversampling else 0,
            minimum=min(minimum, num_rollouts),
            seed=ids.derive_seed(run_seed, group_id),
            **fields,
        )

    def wanted_version(self, model_group: str) -> int:
        """The version of a model group that the task waits for."""
        return self.min_versions.get(model_group, self.min_version)


class TaskCancelled(GroupEvent):
    """A task is no longer wanted; its group closes as cancelled."""

    TOPIC: ClassVar[str] = "tasks"
    kind: Literal["task_cancelled"] = "task_cancelled"
    v: Literal[1] = 1
    cause: str


# ---- steps ----


class GroupStarted(GroupEvent):
    """First record of a group in its steps partition; only it opens a group.

    `size` 0 with a `void_cause` opens and closes a group that can never run (cancelled, undecodable).
    """

    TOPIC: ClassVar[str] = "steps"
    UNDIGESTED: ClassVar[frozenset[str]] = frozenset({"time_ms", "owner"})
    kind: Literal["group_started"] = "group_started"
    v: Literal[1] = 1
    example_id: str
    job_id: str
    epoch: int = Field(ge=0)
    index: int = Field(ge=0)
    purpose: Purpose = "train"
    policy: Policy = "model"
    size: int = Field(ge=0, le=MAX_MEMBERS)
    minimum: int = Field(ge=0)
    timeout_ms: int = Field(gt=0, lt=MAX_TIME_MS)
    """After so much event time of the partition the group closes with what it has; GroupExtended moves it on."""
    seed: int
    reward_weights: dict[str, FiniteFloat] = Field(default_factory=dict)
    agents: dict[str, str] = Field(default_factory=dict)
    void_cause: str | None = None
    owner: str = ""
    revision: Literal[1, 2, 3] = added(1)
    """Rules by which the group is assembled (`GROUP_REVISIONS`); a recorded group keeps its own."""
    opponents: dict[str, str] = added({})
    """Players by seat, for the seats (agents) that are not in `agents` and are not trained."""
    outcome: str = added("")
    """Name of the reward that decides the group's matches; empty: it has none."""
    enough: int = added(0, ge=0)
    """The group closes at the record that completes so many of its members; 0: when all are settled."""
    drop_dead_branches: bool = added(False)
    """Trajectories leave out the answers that nothing goes on from (`processors.assemble.sequences.dead_branches`)."""


class GroupExtended(GroupEvent):
    """The deadline of an open group moved on, because one of its members waited for a slot or for weights."""

    TOPIC: ClassVar[str] = "steps"
    UNDIGESTED: ClassVar[frozenset[str]] = frozenset({"time_ms", "deadline_ms", "owner"})
    kind: Literal["group_extended"] = "group_extended"
    v: Literal[1] = 1
    deadline_ms: int = Field(ge=0, lt=MAX_TIME_MS)
    """Event time of the partition at which the group closes with what it has; an earlier one changes nothing."""
    owner: str = ""

    @property
    def event_id(self) -> str:
        return ids.event_id(self.kind, f"{self.group_id}/{self.deadline_ms}")


class RolloutEvent(GroupEvent):
    """An event of one attempt."""

    rollout_id: str

    @property
    def event_id(self) -> str:
        return self._id_of(self.rollout_id)


class RolloutStarted(RolloutEvent):
    """One attempt at one member of a group began."""

    TOPIC: ClassVar[str] = "steps"
    kind: Literal["rollout_started"] = "rollout_started"
    v: Literal[1] = 1
    member: int = Field(ge=0, lt=MAX_MEMBERS)
    attempt: int = Field(ge=0)
    seed: int


class Prefix(_Value):
    """The part of a prompt that an earlier call of the same agent had: its prompt and completion, cut to `length`."""

    step_index: int = Field(ge=0)
    length: int = Field(ge=0)
    sha256: str
    """Sha256 of the prefix's ids as little-endian int32."""


class VersionSpan(_Value):
    """A number of consecutive completion tokens sampled under one weight version."""

    model_group: str
    version: int = Field(ge=0)
    length: int = Field(ge=0)


class LLMCall(_Value):
    """Token-exact record of one LLM call."""

    prefix: Prefix | None = None
    prompt_ids: str
    """New prompt ids after the prefix (base64 int32)."""
    completion_ids: str
    """Sampled ids (base64 int32)."""
    logprobs: str | None = None
    """One log-probability a completion token, under the distribution it was sampled from (base64 float32)."""
    spans: tuple[VersionSpan, ...] = ()
    finish_reason: str = "stop"
    kept_ids: str | None = added(None)
    """The token ids that top_p and top_k left for each completion token (`tokens.encode_kept`), where recorded."""
    uses: tuple[NonNegativeInt, ...] = added(())
    """Earlier calls of the agent, by step, whose answers this prompt holds as text and not by their ids."""
    request: NonNegativeInt | None = added(None)
    """Step of the first answer to the request, of which this is one of several (`n`); none: it is the only one."""


class FunctionAncestry(_Value):
    """NAT's ancestry of the function that a step ran in."""

    function_id: str
    function_name: str
    parent_id: str | None = None
    parent_name: str | None = None


class StepRecorded(RolloutEvent):
    """One intermediate step: NAT's IntermediateStep fields, and for an LLM call its exact tokens."""

    TOPIC: ClassVar[str] = "steps"
    UNDIGESTED: ClassVar[frozenset[str]] = frozenset({"time_ms", "event_timestamp", "span_event_timestamp"})
    DIGEST_OF: ClassVar[DigestOf] = "record"
    kind: Literal["step_recorded"] = "step_recorded"
    v: Literal[1] = 1
    step_index: int = Field(ge=0)
    agent: str
    event_type: str
    """NAT's event type: LLM_END, TOOL_END, ..."""
    uuid: str
    parent_id: str = "root"
    function_ancestry: FunctionAncestry | None = None
    framework: str | None = None
    name: str | None = None
    tags: tuple[str, ...] | None = None
    metadata: JsonObject | None = None
    data: JsonObject | None = None
    """input, output, chunk, payload and what NAT allows beside them."""
    usage_info: JsonObject | None = None
    llm: LLMCall | None = None
    event_timestamp: float | None = None
    span_event_timestamp: float | None = None

    @property
    def event_id(self) -> str:
        return ids.event_id(self.kind, ids.step_id(self.rollout_id, self.step_index))


class RewardRecorded(RolloutEvent):
    """One reward of a rollout, for a step or for the whole, for one agent or for all."""

    TOPIC: ClassVar[str] = "steps"
    DIGEST_OF: ClassVar[DigestOf] = "record"
    kind: Literal["reward_recorded"] = "reward_recorded"
    v: Literal[1] = 1
    reward_index: int = Field(ge=0)
    name: str
    value: FiniteFloat
    step_index: int | None = None
    agent: str | None = None
    is_score: bool = added(False)
    """It compares its step with other answers to the same prompt, and is not part of the rollout's reward."""

    @property
    def event_id(self) -> str:
        return ids.event_id(self.kind, ids.reward_id(self.rollout_id, self.reward_index))

    def weight_in(self, weights: Mapping[str, float]) -> float:
        """Its weight by a run's `reward_weights`, of which `*` (`OTHERS`) does not apply to scores."""
        return weights.get(self.name, 1.0 if self.is_score else weights.get(OTHERS, 1.0))


class RolloutEnded(RolloutEvent):
    """An attempt came to its end; it is complete when all it counts is there and the digest agrees."""

    TOPIC: ClassVar[str] = "steps"
    kind: Literal["rollout_ended"] = "rollout_ended"
    v: Literal[1] = 1
    num_steps: int = Field(ge=0)
    num_rewards: int = Field(ge=0)
    digest: str
    """Chained over the content digests of the steps by index, then of the rewards by index."""
    stop_reason: str = "done"
    missing_scores: dict[str, str] = added({})
    """Reasons for missing scores, by reward name. With any, the attempt is rejected as `no_score` and not repeated."""


class RolloutFailed(RolloutEvent):
    """An attempt failed. `is_final`: its member is not tried again."""

    TOPIC: ClassVar[str] = "steps"
    kind: Literal["rollout_failed"] = "rollout_failed"
    v: Literal[1] = 1
    cause: str
    """environment_error, reward_error, engine_error, timeout, producer_lost, cancelled, not_allowed or oversampled."""
    message: str = ""
    is_final: bool = False


class Tick(Event):
    """Event time of a steps partition passes, by its owner's monotonic clock. `run_id` is empty."""

    TOPIC: ClassVar[str] = "steps"
    UNDIGESTED: ClassVar[frozenset[str]] = frozenset({"owner"})
    kind: Literal["tick"] = "tick"
    v: Literal[1] = 1
    partition: int = Field(ge=0)
    owner: str = ""

    @property
    def event_id(self) -> str:
        return ids.event_id(self.kind, f"{self.partition}/{self.time_ms}")


# ---- trajectories ----


class Completion(_Value):
    """Range of sampled tokens in a sequence, and the step and versions that they come from."""

    start: int = Field(ge=0)
    length: int = Field(ge=0)
    step_index: int = Field(ge=0)
    spans: tuple[VersionSpan, ...] = ()
    finish_reason: str = added("stop")
    """Finish reason of the LLM call: `length` if it was cut off at its token limit. Also `stop` if it was not kept."""
    kept_ids: str | None = added(None)
    """Kept ids of the LLM call."""


class TokenSequence(_Value):
    """One training sequence: LLM calls joined by their shared prefix.

    Token ids (T,) and, for completion tokens only and in order, log-probabilities (sum of lengths,).
    """

    token_ids: str
    logprobs: str | None = None
    completions: tuple[Completion, ...]


class TrajectoryAssembled(RolloutEvent):
    """Everything that one agent did in one rollout, token-exact, with its reward: the heavy payload, written once."""

    TOPIC: ClassVar[str] = "trajectories"
    DIGEST_OF: ClassVar[DigestOf] = "sorted record"
    kind: Literal["trajectory_assembled"] = "trajectory_assembled"
    v: Literal[1] = 1
    trajectory_id: str
    agent: str
    model_group: str
    member: int
    attempt: int
    example_id: str
    job_id: str
    epoch: int
    purpose: Purpose = "train"
    policy: Policy = "model"
    reward: FiniteFloat
    """Weighted sum of the recorded rewards of this agent."""
    rewards: dict[str, FiniteFloat] = Field(default_factory=dict)
    step_rewards: dict[str, FiniteFloat] = Field(default_factory=dict)
    """Weighted sum of the rewards recorded for a step, by step index."""
    step_scores: dict[str, FiniteFloat] = added({})
    """Weighted sum of the scores that compare a step with other answers to the same prompt, by step index."""
    sequences: tuple[TokenSequence, ...]
    num_steps: int
    """Steps of the rollout, those of other agents included."""
    steps_digest: str
    """The chained digest of RolloutEnded: names every step that this was made from."""
    num_dead_tokens: int = added(0, ge=0)
    """Sampled tokens of dead branches, which `sequences` leave out."""

    @property
    def event_id(self) -> str:
        return ids.event_id(self.kind, self.trajectory_id)
