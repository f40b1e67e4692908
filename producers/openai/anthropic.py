"""Anthropic's messages as values: a request as the chat that it asks for, its answer, stream and errors. Pure.

Beside Anthropic's keys an answer holds `rollstream`: the exact token ids, log-probabilities, model group and version.
"""

from collections.abc import Mapping
from typing import Any, Literal, Self

import orjson
from pydantic import BaseModel, ConfigDict, Field, model_validator

from rollstream.producers.openai.protocol import Answer, exact_of
from rollstream.producers.openai.requests import ChatRequest, Refusal, WithoutNulls, checked_request, validated
from rollstream.producers.rollout import call_arguments

STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use", "stop": "end_turn"}
"""Anthropic's stop reason by OpenAI's finish reason."""
ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
}
CUSTOM = "custom"
"""Type of a tool that the client describes and runs."""
EXACT = "messages"
"""Key of a request whose numbers are arguments of calls."""
_BLOCKS = ("text", "tool_use", "tool_result")
_THOUGHTS = ("thinking", "redacted_thinking")
"""Blocks that another model has signed: none is made here, and no template renders them."""


class _Given(WithoutNulls):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Tool(WithoutNulls):
    """A tool. What it says beside these (`cache_control`) changes no answer."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    type: str = CUSTOM
    """Another one than the client's own: a tool of the provider, whose schema only the provider's models know."""
    name: str
    description: str = ""
    input_schema: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _has_a_schema(self) -> Self:
        if self.type == CUSTOM and self.input_schema is None:
            raise ValueError("input_schema is missing; describe the tool's input")
        return self

    def as_function(self) -> dict[str, Any]:
        """The tool in OpenAI's form, as chat templates expect it; a provider's tool has its type and name alone."""
        if self.type != CUSTOM:
            return {"type": self.type, "name": self.name}
        function = {"name": self.name, "description": self.description, "parameters": self.input_schema}
        return {"type": "function", "function": function}


class ToolChoice(WithoutNulls):
    """Whether tools may or must be called."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    type: Literal["auto", "none", "any", "tool"] = "auto"
    name: str | None = None
    disable_parallel_tool_use: bool = False

    def as_openai(self) -> dict[str, Any]:
        """The options that ask for the same."""
        forced = {"type": "function", "function": {"name": self.name}}
        choice = {"any": "required", "tool": forced}.get(self.type, self.type)
        return {"tool_choice": choice, "parallel_tool_calls": not self.disable_parallel_tool_use}


class OutputConfig(BaseModel):
    """Form of the answer: `format` constrains it, the rest concerns effort."""

    model_config = ConfigDict(frozen=True, extra="allow")

    format: dict[str, Any] | None = None


class Message(_Given):
    """One turn, or what the system says between two: text, or blocks."""

    role: Literal["user", "assistant", "system"]
    content: str | list[dict[str, Any]]


class CountRequest(_Given):
    """The parts of a request that determine the length of a prompt. Unknown keys are refused, so that no option is lost
    in silence.
    """

    model: str
    messages: list[Message] = Field(min_length=1)
    system: str | list[dict[str, Any]] = ""
    tools: list[Tool] = Field(default_factory=list)
    tool_choice: ToolChoice = ToolChoice()
    thinking: dict[str, Any] | None = None
    output_config: OutputConfig = OutputConfig()
    context_management: dict[str, Any] | None = None
    cache_control: dict[str, Any] | None = None

    def chat(self) -> ChatRequest:
        """The same chat in OpenAI's words. Raises Refusal (400) for a block that is not supported."""
        return checked_request(ChatRequest, self._as_openai())

    def _as_openai(self) -> dict[str, Any]:
        messages: list[dict[str, Any]] = []
        system = _texts(self.system, "system")
        if system:
            messages.append({"role": "system", "content": system})
        for number, message in enumerate(self.messages):
            messages += _as_openai(message, f"messages.{number}.content")
        tools = [] if self.tool_choice.type == "none" else [tool.as_function() for tool in self.tools]
        asked = {"thinking": self.thinking, "context_management": self.context_management}
        asked |= {"output_config": self.output_config.model_extra, "response_format": self.output_config.format}
        return {"model": self.model, "messages": messages, "tools": tools} | self.tool_choice.as_openai() | asked


class MessagesRequest(CountRequest):
    """A request for one message."""

    max_tokens: int = Field(ge=1)
    temperature: float | None = Field(default=None, ge=0, le=1)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=0)
    stop_sequences: list[str] = Field(default_factory=list)
    stream: bool = False
    metadata: dict[str, Any] = Field(default_factory=dict)
    service_tier: str | None = None
    speed: str | None = None
    inference_geo: str | None = None

    def _as_openai(self) -> dict[str, Any]:
        if self.messages[-1].role == "assistant":
            raise Refusal(
                400,
                "messages: the last turn is the assistant's, and no answer can continue it (prefill is not supported); "
                "end with a turn of the user",
                param="messages",
            )
        sampling = {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k}
        limits = {"max_tokens": self.max_tokens, "stop": self.stop_sequences}
        return super()._as_openai() | sampling | limits


def parse_messages(value: Any) -> MessagesRequest:
    """Raises Refusal (400) that names the first wrong key."""
    return validated(MessagesRequest, value)


def parse_count(value: Any) -> CountRequest:
    """A request that only asks how long its prompt is; what else a request for a message says is passed over.

    Raises Refusal (400).
    """
    if isinstance(value, dict):
        passed_over = MessagesRequest.model_fields.keys() - CountRequest.model_fields.keys()
        value = {key: one for key, one in value.items() if key not in passed_over}
    return validated(CountRequest, value)


def _as_openai(message: Message, where: str) -> list[dict[str, Any]]:
    """A turn as messages: the results of tools come first, as they have to, then its text and calls."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    results: list[dict[str, Any]] = []
    texts: list[str] = []
    calls: list[dict[str, Any]] = []
    for number, block in enumerate(message.content):
        at = f"{where}.{number}"
        kind = block.get("type")
        if kind in _THOUGHTS and message.role == "assistant":
            continue
        if kind == "text":
            texts.append(_text(block, at))
        elif kind == "tool_use" and message.role == "assistant":
            calls.append(_call(block, at))
        elif kind == "tool_result" and message.role == "user":
            result = _texts(block.get("content") or "", f"{at}.content")
            results.append({"role": "tool", "tool_call_id": str(block.get("tool_use_id", "")), "content": result})
        else:
            known = ", ".join(_BLOCKS)
            raise Refusal(
                400, f"{at}: block of type {kind!r} in a turn of {message.role}; supported: {known}", param=at
            )
    if calls:
        return [{"role": "assistant", "content": "\n".join(texts), "tool_calls": calls}]
    text_messages = [{"role": message.role, "content": "\n".join(texts)}] if texts else []
    return [*results, *text_messages]


def _call(block: Mapping[str, Any], at: str) -> dict[str, Any]:
    name, given = block.get("name"), block.get("input", {})
    if not isinstance(name, str) or not isinstance(given, dict):
        raise Refusal(400, f"{at}: a tool_use block has a name and an object as input", param=at)
    function = {"name": name, "arguments": call_arguments.dumps(given)}
    return {"id": str(block.get("id", "")), "type": "function", "function": function}


def _texts(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        raise Refusal(400, f"{where}: neither a text nor a list of blocks; send one of these", param=where)
    return "\n".join(_text(block, f"{where}.{number}") for number, block in enumerate(content))


def _text(block: Mapping[str, Any], at: str) -> str:
    if block.get("type") != "text" or not isinstance(block.get("text"), str):
        raise Refusal(400, f"{at}: only blocks of type text are supported here; leave others out", param=at)
    return block["text"]


def message(name: str, model: str, answer: Answer) -> dict[str, Any]:
    """The whole answer; `name`: its id."""
    blocks = _blocks(answer)
    content = [block | {"input": orjson.Fragment(block["input"])} if "input" in block else block for block in blocks]
    return _head(name, model, answer) | {"content": content, **_end(answer), "usage": _usage(answer)}


def start(name: str, model: str, num_prompt_tokens: int) -> dict[str, Any]:
    """The first event of a stream."""
    message = {"id": name, "type": "message", "role": "assistant", "model": model, "content": []}
    message |= {"stop_reason": None, "stop_sequence": None}
    usage = {"input_tokens": num_prompt_tokens, "output_tokens": 0}
    return {"type": "message_start", "message": message | {"usage": usage}}


def text_events(text: str, *, is_first: bool) -> list[dict[str, Any]]:
    """A piece of the text, which is the first block."""
    opened = {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
    piece = {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": text}}
    return [opened, piece] if is_first else [piece]


def rest(answer: Answer, num_sent: int | None) -> list[dict[str, Any]]:
    """The events after the first one: of the text `num_sent` characters are sent, or nothing is (None)."""
    found: list[dict[str, Any]] = []
    for index, block in enumerate(_blocks(answer)):
        if block["type"] == "text":
            found += text_events(block["text"][num_sent or 0 :], is_first=num_sent is None)
        else:
            delta = {"type": "input_json_delta", "partial_json": block["input"]}
            found += [
                {"type": "content_block_start", "index": index, "content_block": block | {"input": {}}},
                {"type": "content_block_delta", "index": index, "delta": delta},
            ]
        found.append({"type": "content_block_stop", "index": index})
    end = {"type": "message_delta", "delta": _end(answer), "usage": _usage(answer), "rollstream": exact_of(answer)}
    return [*found, end, {"type": "message_stop"}]


def error_body(refused: Refusal) -> dict[str, Any]:
    """A refusal as Anthropic words it."""
    fallback = "api_error" if refused.status >= 500 else "invalid_request_error"
    return {"type": "error", "error": {"type": ERROR_TYPES.get(refused.status, fallback), "message": str(refused)}}


def _head(name: str, model: str, answer: Answer) -> dict[str, Any]:
    return {"id": name, "type": "message", "role": "assistant", "model": model, "rollstream": exact_of(answer)}


def _blocks(answer: Answer) -> list[dict[str, Any]]:
    """Text and calls, whose input is the JSON text that the model wrote."""
    texts = [{"type": "text", "text": answer.text}] if answer.text or not answer.tool_calls else []
    calls = [
        {
            "type": "tool_use",
            "id": call["id"],
            "name": call["function"]["name"],
            "input": call["function"]["arguments"],
        }
        for call in answer.tool_calls
    ]
    return [*texts, *calls]


def _end(answer: Answer) -> dict[str, Any]:
    is_stopped = answer.stop_text is not None and answer.finish_reason == "stop"
    reason = "stop_sequence" if is_stopped else STOP_REASONS[answer.finish_reason]
    return {"stop_reason": reason, "stop_sequence": answer.stop_text if is_stopped else None}


def _usage(answer: Answer) -> dict[str, int]:
    return {"input_tokens": len(answer.prompt_ids), "output_tokens": len(answer.token_ids)}
