"""OpenAI's chat completions as values: what a request may say, and what answers, streams and errors look like. Pure.

Beside OpenAI's keys `choices[i].logprobs` holds `prompt_token_ids`, `token_ids`, `model_group` and `version`, so that
whoever keeps the answer keeps what a learner needs. `logprobs.content` has one entry for each of `token_ids`.
"""

from collections.abc import Mapping
from typing import Any, Literal

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from rollstream.producers.openai_answers import Answer
from rollstream.schemas.errors import RollstreamError
from rollstream.schemas.settings import Sampling

MAX_CHOICES = 128
WITHOUT_EFFECT = frozenset(
    {"user", "metadata", "store", "service_tier", "parallel_tool_calls", "prompt_cache_key", "safety_identifier"}
)
"""Keys that change nothing of an answer here and are passed over."""
ONLY_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "tool_choice": ("auto", "none"),
}
"""Keys that would change an answer and cannot here; accepted only with a value that asks for nothing."""


class Refusal(RollstreamError):
    """A request that gets an error in OpenAI's shape."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code

    def body(self) -> dict[str, Any]:
        """As OpenAI words it."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


class ChatMessage(BaseModel):
    """One message, its content as text; what a client adds of an earlier answer is passed over."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str = ""
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None

    @field_validator("content", mode="before")
    @classmethod
    def _as_text(cls, value: Any) -> Any:
        """Text parts are joined by line ends."""
        if value is None:
            return ""
        if not isinstance(value, list):
            return value
        texts: list[str] = []
        for number, part in enumerate(value):
            if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                raise ValueError(f"part {number} is no text; only parts of type text are read")
            texts.append(part["text"])
        return "\n".join(texts)

    def for_template(self) -> dict[str, Any]:
        """As chat templates expect it: roles that they know, arguments of tool calls as objects."""
        message = self.model_dump(exclude_none=True)
        message["role"] = "system" if self.role == "developer" else self.role
        if self.tool_calls is not None:
            message["tool_calls"] = [_with_object_arguments(call) for call in self.tool_calls]
        return message


class StreamOptions(BaseModel):
    """How a stream ends."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    include_usage: bool = False


class ChatRequest(BaseModel):
    """A request; null means the default. Unknown keys are refused, so that no option is lost in silence."""

    model_config = ConfigDict(frozen=True, extra="allow")

    model: str
    messages: list[ChatMessage] = Field(min_length=1)
    temperature: float = Field(default=1.0, ge=0, le=2)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0)
    """Not OpenAI's; 0 means no limit."""
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    n: int = Field(default=1, ge=1, le=MAX_CHOICES)
    stop: tuple[str, ...] = ()
    seed: int | None = None
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    logprobs: bool = False
    top_logprobs: int = Field(default=0, ge=0, le=1)
    """Only the sampled token's is known."""
    tools: list[dict[str, Any]] = Field(default_factory=list)
    min_version: int | None = Field(default=None, ge=0)
    """Not OpenAI's: the answer waits for this weight version."""

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        return {key: item for key, item in value.items() if item is not None} if isinstance(value, dict) else value

    @field_validator("stop", mode="before")
    @classmethod
    def _as_tuple(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @field_validator("stop")
    @classmethod
    def _say_something(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if not all(value):
            raise ValueError("an empty text stops nothing")
        return value

    def sampling(self, default_max_new_tokens: int) -> Sampling:
        """How its tokens are drawn."""
        limit = self.max_completion_tokens or self.max_tokens or default_max_new_tokens
        return Sampling(temperature=self.temperature, top_p=self.top_p, top_k=self.top_k, max_new_tokens=limit)

    def tools_for_template(self) -> list[dict[str, Any]] | None:
        """The tools that the model is told of; None if it is told of none."""
        is_off = (self.model_extra or {}).get("tool_choice") == "none"
        return self.tools if self.tools and not is_off else None


def parse_request(body: bytes) -> ChatRequest:
    """The request in a body. Raises Refusal (400) that names the first wrong key."""
    try:
        request = ChatRequest.model_validate(orjson.loads(body))
    except orjson.JSONDecodeError as error:
        raise Refusal(400, f"the body is not JSON: {error}") from error
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        param = ".".join(str(part) for part in first["loc"])
        message = first["msg"].removeprefix("Value error, ")
        raise Refusal(400, f"{param or 'the body'}: {message}", param=param or None) from error
    for key, value in (request.model_extra or {}).items():
        if key in ONLY_NEUTRAL:
            if value not in ONLY_NEUTRAL[key]:
                raise Refusal(400, f"{key}: {value!r} is not supported here", param=key, code="unsupported_value")
        elif key not in WITHOUT_EFFECT:
            raise Refusal(400, f"{key}: unknown parameter", param=key, code="unknown_parameter")
    return request


def completion(head: Mapping[str, Any], answers: list[Answer]) -> dict[str, Any]:
    """The whole answer; `head` has `id`, `created`, `model` and `system_fingerprint`."""
    return {
        **head,
        "object": "chat.completion",
        "choices": [
            {
                "index": index,
                "message": _message(answer),
                "finish_reason": answer.finish_reason,
                "logprobs": logprobs_of(answer),
            }
            for index, answer in enumerate(answers)
        ],
        "usage": usage_of(answers),
    }


def chunks(head: Mapping[str, Any], answers: list[Answer], *, include_usage: bool) -> list[dict[str, Any]]:
    """The same as a stream: each choice's message in one piece, with its log-probabilities, then its end."""
    found: list[dict[str, Any]] = []
    for index, answer in enumerate(answers):
        delta = _message(answer)
        if answer.tool_calls:
            delta["tool_calls"] = [{"index": number, **call} for number, call in enumerate(answer.tool_calls)]
        found.append({"index": index, "delta": delta, "finish_reason": None, "logprobs": logprobs_of(answer)})
        found.append({"index": index, "delta": {}, "finish_reason": answer.finish_reason, "logprobs": None})
    whole = {**head, "object": "chat.completion.chunk"}
    stream = [{**whole, "choices": [choice]} for choice in found]
    return [*stream, {**whole, "choices": [], "usage": usage_of(answers)}] if include_usage else stream


def logprobs_of(answer: Answer) -> dict[str, Any]:
    """OpenAI's entries, and the exact token ids beside them."""
    return {
        "content": [_token(text, logprob) for text, logprob in zip(answer.token_texts, answer.logprobs, strict=True)],
        "refusal": None,
        "prompt_token_ids": list(answer.prompt_ids),
        "token_ids": list(answer.token_ids),
        "model_group": answer.model_group,
        "version": answer.version,
    }


def usage_of(answers: list[Answer]) -> dict[str, int]:
    """Token counts; the prompt counts once."""
    num_prompt = len(answers[0].prompt_ids)
    num_completion = sum(len(answer.token_ids) for answer in answers)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_completion,
        "total_tokens": num_prompt + num_completion,
    }


def _message(answer: Answer) -> dict[str, Any]:
    if not answer.tool_calls:
        return {"role": "assistant", "content": answer.text}
    return {"role": "assistant", "content": answer.text or None, "tool_calls": list(answer.tool_calls)}


def _token(text: str, logprob: float) -> dict[str, Any]:
    # A token that ends within a character has no bytes that its text would tell.
    spelt = None if "\ufffd" in text else list(text.encode())
    return {"token": text, "logprob": logprob, "bytes": spelt, "top_logprobs": []}


def _with_object_arguments(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = orjson.loads(function["arguments"])
    except orjson.JSONDecodeError:
        return call
    return {**call, "function": {**function, "arguments": arguments}}
