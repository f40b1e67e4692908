"""OpenAI's responses as values: a request as the chat that it asks for, its answer and its stream. Pure.

Beside OpenAI's keys an answer holds `rollstream`: the exact token ids, log-probabilities, model group and version.
"""

import functools
import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from rollstream.producers.openai import offered_tools, options
from rollstream.producers.openai.offered_tools import CUSTOM_CALL, FUNCTION_CALL, INPUT, OUTPUTS, NamedTool, OfferedTool
from rollstream.producers.openai.protocol import Answer, exact_of
from rollstream.producers.openai.requests import ChatRequest, NumLogprobs, Refusal, Role, checked_request, validated
from rollstream.producers.openai.stream_words import Answered, StreamWords

PREFIX, TEXT_PREFIX = "resp_", "msg_"
"""Prefixes of the ids of a response and of its text."""
REFERENCE = "item_reference"
"""Type of the item that names an earlier item by its id: Vercel's AI SDK sends it in place of texts."""
ADDITIONAL = "additional_tools"
"""Type of the item that adds tools."""
_ROLES = get_args(Role)
_TEXTS = ("input_text", "output_text", "text")


class RespondedRequest(ChatRequest):
    """The chat that a response is made for."""

    PROMPT_KEY: ClassVar[str] = "input"
    previous_response_id: str | None = None
    """The response whose input and output come before the messages, after the instructions."""
    has_instructions: bool = False
    """The first message is theirs: it is not part of the conversation that a later response continues."""
    own_id: str
    """Id of the response, without prefix, if it is streamed."""
    references: dict[int, str] = Field(default_factory=dict)
    """Ids of texts of earlier responses, each by the index of the message whose content it is."""


class _Given(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class AdditionalTools(BaseModel):
    """An item whose tools are offered beside those of the request. Codex sends all of its own so, for some models."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    tools: list[OfferedTool]


class TextOptions(_Given):
    """Format of the text."""

    format: dict[str, Any] = Field(default_factory=lambda: {"type": "text"})
    verbosity: str | None = None


class ResponsesRequest(_Given):
    """A request for one response; null means the default. Unknown keys are refused: no option is lost in silence."""

    model: str
    input: str | list[dict[str, Any]]
    instructions: str = ""
    previous_response_id: str | None = None
    max_output_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    tools: list[OfferedTool] = Field(default_factory=list)
    tool_choice: str | dict[str, Any] = "auto"
    stream: bool = False
    stream_options: dict[str, Any] = Field(default_factory=dict)
    include: list[str] = Field(default_factory=list)
    """Log-probabilities are always there; no answer here has items of reasoning or of a provider's tools."""
    text: TextOptions = TextOptions()
    truncation: Literal["disabled", "auto"] = "disabled"
    background: Literal[False] = False
    reasoning: dict[str, Any] | None = None
    context_management: list[dict[str, Any]] | None = None
    parallel_tool_calls: bool = True
    max_tool_calls: int | None = None
    """Maximum calls of a provider's own tools."""
    top_logprobs: NumLogprobs = 0

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {key: item for key, item in value.items() if item is not None and key not in options.IGNORED}

    @field_validator("input")
    @classmethod
    def _not_empty(cls, value: str | list[dict[str, Any]]) -> str | list[dict[str, Any]]:
        if not value:
            raise ValueError("must not be empty; give a text or a list of items")
        return value

    def chat(self) -> RespondedRequest:
        """The same in the words of chat completions. Raises Refusal (400) for an item that is not supported."""
        messages = [{"role": "system", "content": self.instructions}] if self.instructions else []
        references: dict[int, str] = {}
        if isinstance(self.input, str):
            messages.append({"role": "user", "content": self.input})
        else:
            for number, item in enumerate(self.input):
                if item.get("type") == REFERENCE:
                    references[len(messages)] = _referred(item, f"input.{number}")
                    messages.append({"role": "assistant", "content": ""})
                else:
                    _append(messages, item, f"input.{number}")
        asked = {
            "model": self.model,
            "messages": messages,
            "tools": [tool.as_function() for tool in self.offered.values()],
            "tool_choice": offered_tools.choice_of(self.tool_choice),
            "parallel_tool_calls": self.parallel_tool_calls,
            "response_format": self.text.format,
            "verbosity": self.text.verbosity,
            "reasoning": self.reasoning,
            "context_management": self.context_management,
            "truncation": self.truncation,
            "max_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "previous_response_id": self.previous_response_id,
            "has_instructions": bool(self.instructions),
            "own_id": secrets.token_hex(12),
            "references": references,
        }
        if not messages:
            raise Refusal(400, "input: none of its items is a message, a call or an output; add one", param="input")
        return checked_request(RespondedRequest, asked)

    @functools.cached_property
    def offered(self) -> dict[tuple[bool, str], NamedTool]:
        """Tools of the request, then those of its items. Raises Refusal (400) for an item that is not a tool."""
        items = [] if isinstance(self.input, str) else self.input
        added = [tool for number, item in enumerate(items) for tool in _additional(item, f"input.{number}")]
        return offered_tools.named([*self.tools, *added])


def parse(value: Any) -> ResponsesRequest:
    """Raises Refusal (400) that names the first wrong key."""
    return validated(ResponsesRequest, value)


def _append(messages: list[dict[str, Any]], item: Mapping[str, Any], at: str) -> None:
    """One item; calls of functions belong to the turn of the assistant before them, as chat templates have it."""
    kind = item.get("type", "message" if "role" in item else None)
    if kind == "message":
        if (role := item.get("role")) not in _ROLES:
            raise Refusal(
                400, f"{at}.role: {role!r:.100} is unknown; use one of {', '.join(_ROLES)}", param=f"{at}.role"
            )
        messages.append({"role": role, "content": _text(item.get("content"), f"{at}.content")})
    elif kind in (FUNCTION_CALL, CUSTOM_CALL):
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": ""})
        messages[-1].setdefault("tool_calls", []).append(_call(item, at))
    elif kind in OUTPUTS:
        output = _text(item.get("output"), f"{at}.output")
        messages.append({"role": "tool", "tool_call_id": str(item.get("call_id", "")), "content": output})
    elif kind not in (ADDITIONAL, "reasoning"):  # of another model, encrypted: no template renders it
        known = ", ".join(("message", FUNCTION_CALL, CUSTOM_CALL, *OUTPUTS, ADDITIONAL))
        remedy = "agents send other types for models that they know: name the model policy"
        raise Refusal(400, f"{at}: item of type {kind!r}; supported: {known}; {remedy}", param=at)


def _referred(item: Mapping[str, Any], at: str) -> str:
    """Id of a text; the ids of other items name nothing that is kept. Raises Refusal (400)."""
    name = item.get("id")
    if not isinstance(name, str) or not name.startswith(TEXT_PREFIX):
        raise unknown_item(name, at)
    return name


def unknown_item(name: Any, at: str = "input") -> Refusal:
    """The error for a reference to an item that is not kept."""
    return Refusal(
        400,
        f"{at}: no text of an answer of this rollout has the id {name!r:.100}; send items whole (store: false)",
        param=at,
        code="item_not_found",
    )


def _additional(item: Mapping[str, Any], at: str) -> list[OfferedTool]:
    if item.get("type") != ADDITIONAL:
        return []
    try:
        return validated(AdditionalTools, item).tools
    except Refusal as error:
        raise Refusal(400, f"{at}.{error}", param=f"{at}.{error.param}") from error


def _call(item: Mapping[str, Any], at: str) -> dict[str, Any]:
    try:
        return offered_tools.call_of(item)
    except ValueError as error:
        raise Refusal(400, f"{at}: {error}", param=at) from error


def _text(content: Any, at: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise Refusal(400, f"{at}: neither a text nor a list of parts; send one of these", param=at)
    texts: list[str] = []
    for number, part in enumerate(content):
        is_text = isinstance(part, dict) and part.get("type") in _TEXTS and isinstance(part.get("text"), str)
        if not is_text:
            raise Refusal(
                400, f"{at}.{number}: only parts of text are supported; leave others out", param=f"{at}.{number}"
            )
        texts.append(part["text"])
    return "\n".join(texts)


def response(given: ResponsesRequest, answered: Answered) -> dict[str, Any]:
    """The whole answer."""
    (answer,) = answered.answers
    is_cut = answer.finish_reason == "length"
    usage = {
        "input_tokens": len(answer.prompt_ids),
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": len(answer.token_ids),
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": len(answer.prompt_ids) + len(answer.token_ids),
    }
    return _head(given, answered.call_id, answered.created_s) | {
        "status": "incomplete" if is_cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "output": _items(answer, answered.call_id, given.offered),
        "usage": usage,
        "rollstream": exact_of(answer),
    }


def _head(given: ResponsesRequest, call_id: str, created_s: int) -> dict[str, Any]:
    tools = [tool.model_dump() | {"strict": False} for tool in given.tools if tool.type == "function"]
    return {
        "id": PREFIX + call_id,
        "object": "response",
        "created_at": created_s,
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "instructions": given.instructions or None,
        "max_output_tokens": given.max_output_tokens,
        "model": given.model,
        "output": [],
        "parallel_tool_calls": given.parallel_tool_calls,
        "previous_response_id": given.previous_response_id,
        "temperature": given.temperature,
        "text": given.text.model_dump(exclude_none=True),
        "tool_choice": given.tool_choice,
        "tools": tools,
        "top_p": given.top_p,
        "truncation": given.truncation,
        "usage": None,
        "metadata": {},
    }


def _message(call_id: str, text: str | None) -> dict[str, Any]:
    """The item of a text; `text`: None while it is sampled."""
    content = [] if text is None else [_part(text)]
    status = "in_progress" if text is None else "completed"
    return {"id": TEXT_PREFIX + call_id, "type": "message", "role": "assistant", "status": status, "content": content}


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _items(answer: Answer, call_id: str, offered: Mapping[tuple[bool, str], NamedTool]) -> list[dict[str, Any]]:
    message_items = [_message(call_id, answer.text)] if answer.text or not answer.tool_calls else []
    return [*message_items, *(offered_tools.item_of(call, offered) for call in answer.tool_calls)]


class ResponseWords(StreamWords):
    """A stream of OpenAI's responses: each event is named by its `type` and numbered."""

    def __init__(self, given: ResponsesRequest, asked: RespondedRequest) -> None:
        super().__init__(asked.own_id)
        self._given = given
        self._number = 0

    def event(self, body: Mapping[str, Any]) -> bytes:
        """One event with its name; an error's body gets the type that a stream's has."""
        body = body if "type" in body else {**body["error"], "type": "error"}
        numbered = {**body, "sequence_number": self._number}
        self._number += 1
        return f"event: {numbered['type']}\n".encode() + super().event(numbered)

    def _piece(self, index: int, text: str, *, is_first: bool) -> Sequence[dict[str, Any]]:
        opened = [*self._start(self._call_id, self._created_s), *_opened(self._call_id)] if is_first else []
        return [*opened, _event("output_text.delta", self._call_id) | {"delta": text, "logprobs": []}]

    def _rest(self, answered: Answered) -> Sequence[dict[str, Any]]:
        (answer,) = answered.answers
        whole, name = response(self._given, answered), answered.call_id
        found = [] if self._sent else self._start(name, answered.created_s)
        for output_index, item in enumerate(whole["output"]):
            if item["type"] == "message":
                found += [] if self._sent else _opened(name)
                found += _closed(name, answer.text, self._sent.get(0, 0))
            else:
                found += _called(item, output_index)
        return [*found, {"type": f"response.{whole['status']}", "response": whole}]

    def _start(self, call_id: str, created_s: int) -> list[dict[str, Any]]:
        head = _head(self._given, call_id, created_s)
        return [{"type": f"response.{kind}", "response": head} for kind in ("created", "in_progress")]


def _event(kind: str, call_id: str) -> dict[str, Any]:
    """An event of the message's text, which is the first item."""
    return {"type": f"response.{kind}", "item_id": TEXT_PREFIX + call_id, "output_index": 0, "content_index": 0}


def _opened(call_id: str) -> list[dict[str, Any]]:
    added = {"type": "response.output_item.added", "output_index": 0, "item": _message(call_id, None)}
    return [added, _event("content_part.added", call_id) | {"part": _part("")}]


def _closed(call_id: str, text: str, num_sent: int) -> Iterator[dict[str, Any]]:
    if text[num_sent:]:
        yield _event("output_text.delta", call_id) | {"delta": text[num_sent:], "logprobs": []}
    yield _event("output_text.done", call_id) | {"text": text, "logprobs": []}
    yield _event("content_part.done", call_id) | {"part": _part(text)}
    yield {"type": "response.output_item.done", "output_index": 0, "item": _message(call_id, text)}


def _called(item: Mapping[str, Any], output_index: int) -> Iterator[dict[str, Any]]:
    key, events = ("arguments", "function_call_arguments")
    if item["type"] == CUSTOM_CALL:
        key, events = (INPUT, "custom_tool_call_input")
    where = {"item_id": item["id"], "output_index": output_index}
    begun = {**item, key: "", "status": "in_progress"}
    yield {"type": "response.output_item.added", "output_index": output_index, "item": begun}
    yield {"type": f"response.{events}.delta", **where, "delta": item[key]}
    yield {"type": f"response.{events}.done", **where, "name": item["name"], key: item[key]}
    yield {"type": "response.output_item.done", "output_index": output_index, "item": item}
