"""OpenAI's chat completions as values: what a request may say, and what answers, streams and errors look like. Pure.

Beside OpenAI's keys `choices[i].logprobs` holds `prompt_token_ids`, `token_ids`, `model_group` and `version`, so that
whoever keeps the answer keeps what a learner needs. `logprobs.content` has one entry for each of `token_ids`.

From a generation to one answer: stop texts, the text without its end token, the model's tool calls. Pure.
"""

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from rollstream.producers.engines.base import Generation, Tokenizer
from rollstream.schemas.errors import RollstreamError, first_invalid
from rollstream.schemas.settings import Sampling

CALL_BEGINS, CALL_ENDS = "<tool_call>", "</tool_call>"
"""How models of the Qwen and Hermes families write a call: between them a JSON object with `name` and `arguments`."""
_MARKER = re.compile(r"</?tool_call>")
_BRACE = re.compile(r"\s*+\{")


@dataclass(frozen=True, slots=True)
class Answer:
    """One choice. `token_ids`, `token_texts` and `logprobs` have equal length (T,)."""

    text: str
    """Without the end token, the stop text and what follows it, and the tool calls."""
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    """As sampled, up to the end token or the token that completes a stop text."""
    token_texts: tuple[str, ...]
    logprobs: tuple[float, ...]
    """Under the distribution that the tokens were sampled from."""
    finish_reason: str
    """`stop`, `length` or `tool_calls`."""
    tool_calls: tuple[dict[str, Any], ...]
    model_group: str
    version: int
    """Of the weights; the oldest, if there were several."""


def answer_of(
    generation: Generation,
    tokenizer: Tokenizer,
    *,
    prompt_ids: Sequence[int],
    stop: Sequence[str] = (),
    has_tools: bool = False,
) -> Answer:
    """The answer in what was sampled. Tool calls are parsed only if the request has tools."""
    ids, reason = generation.token_ids, generation.finish_reason
    spoken = ids[:-1] if reason == "stop" else ids
    text = _text(tokenizer, spoken)
    at = _first_stop(text, stop)
    if at is not None:
        ids = ids[: _tokens_until_stop(tokenizer, spoken, stop)]
        text, reason = text[:at], "stop"
    calls = tool_calls_in(text, len(prompt_ids)) if has_tools else ()
    if calls:
        text, reason = _without_calls(text), "tool_calls" if reason == "stop" else reason
    return Answer(
        text=text,
        prompt_ids=tuple(prompt_ids),
        token_ids=ids,
        token_texts=tuple(_text(tokenizer, (number,)) for number in ids),
        logprobs=generation.logprobs[: len(ids)],
        finish_reason=reason,
        tool_calls=calls,
        model_group=generation.spans[0].model_group,
        version=min(span.version for span in generation.spans),
    )


def tool_calls_in(text: str, salt: int = 0) -> tuple[dict[str, Any], ...]:
    """Calls in OpenAI's shape; none if one of them cannot be read. `salt` keeps ids of equal calls apart."""
    calls: list[dict[str, Any]] = []
    for number, (begin, end) in enumerate(call_spans(text)):
        body = text[begin + len(CALL_BEGINS) : end - len(CALL_ENDS)].strip()
        try:
            call = orjson.loads(body)
        except orjson.JSONDecodeError:
            return ()
        if not isinstance(call.get("name"), str) or not isinstance(call.get("arguments", {}), dict):
            return ()
        arguments = orjson.dumps(call.get("arguments", {})).decode()
        digest = hashlib.sha256(f"{salt}\x1f{number}\x1f{body}".encode()).hexdigest()
        function = {"name": call["name"], "arguments": arguments}
        calls.append({"id": f"call_{digest[:24]}", "type": "function", "function": function})
    return tuple(calls)


def _without_calls(text: str) -> str:
    parts: list[str] = []
    at = 0
    for begin, end in call_spans(text):
        parts.append(text[at:begin])
        at = end
    return "".join([*parts, text[at:]]).strip()


def call_spans(text: str) -> list[tuple[int, int]]:
    """Where calls begin and end, markers included, in one pass over the text.

    A call begins at a marker before a brace and ends at the first end marker behind one, for a text within the JSON may
    hold a marker too. Each run of white space is passed once forwards and once backwards.
    """
    found: list[tuple[int, int]] = []
    begin: int | None = None
    for marker in _MARKER.finditer(text):
        if marker[0] == CALL_BEGINS:
            if begin is None and _BRACE.match(text, marker.end()):
                begin = marker.start()
        elif begin is not None and _is_behind_brace(text, marker.start()):
            found.append((begin, marker.end()))
            begin = None
    return found


def _is_behind_brace(text: str, at: int) -> bool:
    while at > 0 and text[at - 1].isspace():
        at -= 1
    return text[at - 1 : at] == "}"


def _first_stop(text: str, stop: Sequence[str]) -> int | None:
    found = [at for at in (text.find(word) for word in stop) if at >= 0]
    return min(found, default=None)


def _tokens_until_stop(tokenizer: Tokenizer, ids: Sequence[int], stop: Sequence[str]) -> int:
    """How many of the ids, at least, say one of the stop texts."""
    low, high = 1, len(ids)
    while low < high:
        middle = (low + high) // 2
        has_stop = _first_stop(_text(tokenizer, ids[:middle]), stop) is not None
        low, high = (low, middle) if has_stop else (middle + 1, high)
    return low


def _text(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    # Special tokens stay in the text: an answer that holds one is rendered back word for word.
    return tokenizer.decode(list(ids), skip_special_tokens=False) if ids else ""


MAX_CHOICES = 128
MAX_STOPS = 64
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
                raise ValueError(f"part {number} is not text; only parts of type text are supported")
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
    temperature: float | None = Field(default=None, ge=0, le=2)
    """None: as the trained model is sampled, else 1."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0)
    """Not OpenAI's; 0 means no limit."""
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    n: int = Field(default=1, ge=1, le=MAX_CHOICES)
    stop: tuple[str, ...] = Field(default=(), max_length=MAX_STOPS)
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
    def _not_empty(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if not all(value):
            raise ValueError("a stop sequence must not be empty")
        return value

    def sampling(self, default_max_new_tokens: int, trained_at: float | None = None) -> Sampling:
        """How its tokens are drawn. `trained_at`: the only temperature that is taken.

        Raises Refusal (400) for another one.
        """
        temperature = 1.0 if self.temperature is None else self.temperature
        if trained_at is not None:
            if self.temperature is not None and not math.isclose(temperature, trained_at, rel_tol=1e-6):
                raise Refusal(
                    400,
                    f"temperature: {temperature:g} differs from {trained_at:g}, the temperature that the loss "
                    f"assumes for answers of model {self.model!r}, so its ratios would be wrong; remove temperature, "
                    f"or "
                    f"train with algorithm.temperature: {temperature:g}",
                    param="temperature",
                    code="unsupported_value",
                )
            temperature = trained_at
        limit = self.max_completion_tokens or self.max_tokens or default_max_new_tokens
        return Sampling(temperature=temperature, top_p=self.top_p, top_k=self.top_k, max_new_tokens=limit)

    def tools_for_template(self) -> list[dict[str, Any]] | None:
        """The tools in the model's prompt; None if there are none."""
        is_off = (self.model_extra or {}).get("tool_choice") == "none"
        return self.tools if self.tools and not is_off else None


def parse_request(body: bytes) -> ChatRequest:
    """The request in a body. Raises Refusal (400) that names the first wrong key."""
    try:
        request = ChatRequest.model_validate(orjson.loads(body))
    except orjson.JSONDecodeError as error:
        raise Refusal(400, f"the body is not JSON: {error}") from error
    except ValidationError as error:
        param, message = first_invalid(error)
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
