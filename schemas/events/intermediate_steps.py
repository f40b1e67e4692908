"""NVIDIA NeMo Agent Toolkit's IntermediateStep (1.9) as JSON: by the same names, fields and rules.

Models only. What is missing stays empty: the same JSON read twice is the same step.
"""

from enum import StrEnum
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Framework = Literal["langchain", "llama_index", "crewai", "semantic_kernel", "agno", "adk", "strands", "autogen"]


class IntermediateStepCategory(StrEnum):
    """Category of a step."""

    LLM = "LLM"
    TOOL = "TOOL"
    WORKFLOW = "WORKFLOW"
    TASK = "TASK"
    FUNCTION = "FUNCTION"
    CUSTOM = "CUSTOM"
    SPAN = "SPAN"
    TTC = "TTC"


class IntermediateStepState(StrEnum):
    """Position of a step in its span."""

    START = "START"
    CHUNK = "CHUNK"
    END = "END"


class IntermediateStepType(StrEnum):
    """Category and state in one; the steps of a span share their UUID."""

    LLM_START = "LLM_START"
    LLM_END = "LLM_END"
    LLM_NEW_TOKEN = "LLM_NEW_TOKEN"
    TOOL_START = "TOOL_START"
    TOOL_END = "TOOL_END"
    WORKFLOW_START = "WORKFLOW_START"
    WORKFLOW_END = "WORKFLOW_END"
    TASK_START = "TASK_START"
    TASK_END = "TASK_END"
    TTC_START = "TTC_START"
    TTC_END = "TTC_END"
    FUNCTION_START = "FUNCTION_START"
    FUNCTION_END = "FUNCTION_END"
    CUSTOM_START = "CUSTOM_START"
    CUSTOM_END = "CUSTOM_END"
    SPAN_START = "SPAN_START"
    SPAN_CHUNK = "SPAN_CHUNK"
    SPAN_END = "SPAN_END"


class InvocationNode(BaseModel):
    """The function that a step ran in, and the one that called it."""

    function_id: str
    function_name: str
    parent_id: str | None = None
    parent_name: str | None = None


class StreamEventData(BaseModel):
    """Input and output of a step. A TTC step also has `turn_id`, `turn_index`, `candidate_index` and `score`."""

    model_config = ConfigDict(extra="allow")

    input: Any | None = None
    output: Any | None = None
    chunk: Any | None = None
    payload: Any | None = None
    """The framework's own object."""


class TokenUsage(BaseModel):
    """Tokens of a call."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    total_tokens: int = 0


class UsageInfo(BaseModel):
    """Cost of a call."""

    token_usage: TokenUsage = Field(default_factory=TokenUsage)
    num_llm_calls: int = 0
    seconds_between_calls: int = 0


class IntermediateStepPayload(BaseModel):
    """The step itself."""

    model_config = ConfigDict(extra="allow")

    event_type: IntermediateStepType
    event_timestamp: float = 0.0
    """Seconds since 1970."""
    span_event_timestamp: float | None = None
    """Time at which the span began; present only on a step that ends one."""
    framework: Framework | None = None
    name: str | None = None
    """Name of the model, tool, function or workflow."""
    tags: list[str] | None = None
    metadata: dict[str, Any] | None = None
    """NAT's TraceMetadata, or what its user put there."""
    data: StreamEventData | None = None
    usage_info: UsageInfo | None = None
    UUID: str = ""

    @property
    def event_category(self) -> IntermediateStepCategory:
        """Category of the step."""
        return IntermediateStepCategory(self.event_type.value.split("_", 1)[0])

    @property
    def event_state(self) -> IntermediateStepState:
        """Position of the step in its span."""
        state = self.event_type.value.split("_", 1)[1]
        return IntermediateStepState.CHUNK if state == "NEW_TOKEN" else IntermediateStepState(state)

    @model_validator(mode="after")
    def _only_an_end_has_a_span(self) -> "IntermediateStepPayload":
        if self.event_state != IntermediateStepState.END and self.span_event_timestamp is not None:
            raise ValueError("span_event_timestamp can only be provided for events with an END state; leave it out")
        return self


class IntermediateStep(BaseModel):
    """One step of a workflow."""

    model_config = ConfigDict(extra="forbid")

    parent_id: str
    """UUID of the span around it; `root` at the top."""
    function_ancestry: InvocationNode
    payload: IntermediateStepPayload
