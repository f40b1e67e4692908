"""Rollouts that exist already: what a run is given to train on instead of, or beside, what its own engine samples.

Values only. Written by `rollstream.harness.recorded.tasks` into a task, played by the environment `recorded`.
"""

from collections.abc import Iterable, Mapping

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, JsonValue, model_validator

from rollstream.schemas import tokens
from rollstream.schemas.base import added
from rollstream.schemas.events.rollouts import FunctionAncestry, VersionSpan
from rollstream.schemas.settings import ArtifactRef, PlanSettings

RECORDED = "recorded"
"""Name of the environment that plays them."""
MADE_ELSEWHERE = (RECORDED, "remote_workflow")
"""Environments whose rollouts another engine has sampled."""
INPUT = "recorded"
"""Key of a task's inputs that holds its members' recorded rollouts, as `RecordedMember`s by member number."""


def group_size(plan: PlanSettings, inputs: Mapping[str, JsonValue]) -> dict[str, int]:
    """`num_rollouts` and `oversampling` of a task: the plan's, or fewer if its example has fewer recorded rollouts."""
    recorded = inputs.get(INPUT)
    if not plan.has_recorded_sizes or not isinstance(recorded, list) or not recorded:
        return {"num_rollouts": plan.num_generations, "oversampling": plan.oversampling}
    size = min(plan.num_generations, len(recorded))
    return {"num_rollouts": size, "oversampling": min(plan.oversampling, len(recorded) - size)}


class _Value(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class RecordedTokens(_Value):
    """Exact tokens of one LLM call; `of` makes them from plain numbers."""

    prompt_ids: str
    """The whole prompt as the model saw it (base64 int32)."""
    completion_ids: str
    """Sampled ids (base64 int32)."""
    logprobs: str | None = None
    """One a completion token, under the distribution that it was sampled from (base64 float32)."""
    spans: tuple[VersionSpan, ...] = ()
    """Weight versions of the completion tokens; none: not known."""
    is_retokenised: bool = False
    """Made from text afterwards: the model may have sampled other tokens for the same text."""
    finish_reason: str = "stop"
    kept_ids: str | None = added(None)
    """The token ids that top_p and top_k left for each completion token (`tokens.encode_kept`), where known."""

    @model_validator(mode="after")
    def _numbers_agree(self) -> "RecordedTokens":
        sampled = tokens.decode_ids(self.completion_ids)
        num_completion = len(sampled)
        num_prompt = len(tokens.decode_ids(self.prompt_ids))
        if not num_completion or not num_prompt:
            raise ValueError("prompt_ids and completion_ids must not be empty; give the token ids of both")
        if self.logprobs is not None and len(tokens.decode_floats(self.logprobs)) != num_completion:
            raise ValueError(f"logprobs must be {num_completion}, one per completion token")
        if self.spans and sum(span.length for span in self.spans) != num_completion:
            raise ValueError(f"spans must add up to {num_completion} completion tokens")
        if self.kept_ids is not None:
            tokens.check_kept(sampled, tokens.decode_kept(self.kept_ids, num_completion))
        return self

    @classmethod
    def of(
        cls,
        prompt_ids: Iterable[int],
        completion_ids: Iterable[int],
        logprobs: Iterable[float] | None = None,
        *,
        spans: tuple[VersionSpan, ...] = (),
        is_retokenised: bool = False,
        finish_reason: str = "stop",
        kept_ids: str | None = None,
    ) -> "RecordedTokens":
        """Build from ids (P,), (C,) and log-probabilities (C,). Raises ValueError if their lengths do not agree, or if
        a token is not among its kept ids.
        """
        return cls(
            prompt_ids=tokens.encode_ids(prompt_ids),
            completion_ids=tokens.encode_ids(completion_ids),
            logprobs=None if logprobs is None else tokens.encode_floats(logprobs),
            spans=spans,
            is_retokenised=is_retokenised,
            finish_reason=finish_reason,
            kept_ids=kept_ids,
        )


class RecordedChat(_Value):
    """An LLM call as text, in OpenAI's message form: what it can be re-tokenised from."""

    messages: tuple[dict[str, JsonValue], ...]
    """Messages as they were sent."""
    answer: dict[str, JsonValue]
    """The assistant's message: `content`, and `tool_calls` if it made some."""
    tools: tuple[JsonValue, ...] = ()
    """Schemas of the tools that the model was offered."""
    logprobs: tuple[FiniteFloat, ...] | None = None
    """One a sampled token, where the ids are not known."""


class RecordedStep(_Value):
    """One step: NAT's fields, and for an LLM call its tokens or its text.

    Of an LLM call whose `untrained` is none the completion is trained on; everything else is record only.
    """

    agent: str = ""
    """None named: the run's first."""
    event_type: str = "LLM_END"
    uuid: str | None = None
    parent_id: str = "root"
    function_ancestry: FunctionAncestry | None = None
    framework: str | None = None
    name: str | None = None
    tags: tuple[str, ...] | None = None
    metadata: dict[str, JsonValue] | None = None
    data: dict[str, JsonValue] | None = None
    usage_info: dict[str, JsonValue] | None = None
    event_timestamp: float | None = None
    span_event_timestamp: float | None = None
    tokens: RecordedTokens | None = None
    chat: RecordedChat | None = None
    untrained: str | None = None
    """Reason why the completion is not to be trained on, e.g. `not_targeted`."""


class RecordedReward(_Value):
    """A reward that came with the record: final, or of the step at index `step`."""

    value: FiniteFloat
    name: str = "reward"
    step: int | None = Field(default=None, ge=0)
    agent: str | None = None
    is_score: bool = False
    """It only compares its step with other answers to the same prompt, and is not part of a sum."""


class RecordedRollout(_Value):
    """One rollout, from its first step to its end."""

    source_id: str = ""
    """Id of the rollout in its source."""
    steps: tuple[RecordedStep, ...] = ()
    rewards: tuple[RecordedReward, ...] = ()
    stop_reason: str = "done"
    error: str | None = None
    """It is known to be broken, and why: its only attempt fails with this message."""
    missing_score: str | None = added(None)
    """Reason for which its evaluator gave no score: a missing score, as that of a reward function is."""

    @model_validator(mode="after")
    def _rewards_have_steps(self) -> "RecordedRollout":
        for reward in self.rewards:
            if reward.step is not None and reward.step >= len(self.steps):
                raise ValueError(
                    f"reward {reward.name} is for step {reward.step} of {len(self.steps)}; give one of its steps"
                )
            if reward.is_score and reward.step is None:
                raise ValueError(f"score {reward.name} has no step; give the step that it is for")
        return self


class RecordedMember(_Value):
    """One member of a group: the rollout itself, or a reference to its JSON if it is large."""

    rollout: RecordedRollout | None = None
    artifact: ArtifactRef | None = None

    @model_validator(mode="after")
    def _is_one(self) -> "RecordedMember":
        if (self.rollout is None) == (self.artifact is None):
            raise ValueError("neither or both of rollout and artifact are given; give one of them")
        return self


class RecordedGroup(_Value):
    """The recorded rollouts of one example; they are compared with each other."""

    example_id: str
    inputs: dict[str, JsonValue] = Field(default_factory=dict)
    """Inputs of the example, for reward functions and evaluators: question, answer, ..."""
    members: tuple[RecordedMember, ...]

    @classmethod
    def of(
        cls, example_id: str, rollouts: Iterable[RecordedRollout], inputs: dict[str, JsonValue] | None = None
    ) -> "RecordedGroup":
        """A group of rollouts inside the task itself."""
        members = tuple(RecordedMember(rollout=rollout) for rollout in rollouts)
        return cls(example_id=example_id, inputs=inputs or {}, members=members)
