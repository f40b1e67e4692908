"""Answers and failures of a session: values of an attempt that environments and their runner share.

Also the parts of an answer: its tool calls, in OpenAI's form, apart from its text.
"""

import hashlib
import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import orjson

from rollstream.producers.engines.base import Generation
from rollstream.producers.rollout import call_arguments
from rollstream.producers.rollout.rendering import ParsedAnswer
from rollstream.schemas.errors import EnvironmentRunError
from rollstream.schemas.variables import one_line

Message = dict[str, Any]
"""A chat message: `role`, `content` and other keys that a chat template knows."""
CALL_BEGINS, CALL_ENDS = "<tool_call>", "</tool_call>"
"""Markers of a call in models of the Qwen and Hermes families: between them a JSON object with `name` and `arguments`.
"""
Parse = Callable[[Sequence[int]], ParsedAnswer]
"""A renderer's, of the ids of an answer."""
_MARKER = re.compile(r"</?tool_call>")
_BRACE = re.compile(r"\s*+\{")


MAX_TURNS = "max_turns"
"""Stop reason of a rollout that `TurnsExhausted` ended."""


class FinalError(EnvironmentRunError):
    """A further attempt would fail in the same way, so none is made."""


class TurnsExhausted(EnvironmentRunError):
    """An agent asked for more than `max_turns` answers.

    Unless caught, it ends the rollout, which is not a failure: what was rewarded until then counts, 0 if nothing was.
    """


def is_exhaustion(error: BaseException | None) -> bool:
    """Whether an exception is TurnsExhausted, or a group of tasks has raised nothing else."""
    return is_only(error, TurnsExhausted)


def is_only(error: BaseException | None, kind: type[Exception]) -> bool:
    """Whether an exception is of a kind, or a group of tasks has raised nothing else."""
    if isinstance(error, ExceptionGroup):
        return error.split(kind)[1] is None
    return isinstance(error, kind)


class AnswerParts(NamedTuple):
    """Parts of an answer: its text, and what is not part of the text."""

    content: str
    reasoning: str | None = None
    """Reasoning that a renderer separated from the content."""
    tool_calls: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class Failure:
    """Failure of an attempt."""

    cause: str
    """Cause as in RolloutFailed."""
    message: str
    error: BaseException | None = None
    """The exception, for its traceback."""

    @property
    def is_final(self) -> bool:
        """Whether a further attempt would fail in the same way."""
        return isinstance(self.error, FinalError)


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer of the model."""

    text: str
    """Without the end token."""
    step_index: int
    """Index of the step, for its rewards."""
    finish_reason: str
    """`stop` or `length`."""
    prompt: Sequence[int] = field(default=(), repr=False, hash=False)
    """Ids of `prompt_ids`, which all answers of a long conversation share with it; not to be changed."""
    generation: Generation | None = None
    """The generation as sampled and recorded."""
    began_ms: int = 0
    """Event time at which it was asked for."""
    parts: AnswerParts | None = None
    """Parts of `text`, for a chat with tools."""

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        """All that the model saw before it; empty for a scripted opponent's."""
        return tuple(self.prompt)

    @property
    def tool_calls(self) -> tuple[dict[str, Any], ...]:
        """Tool calls in OpenAI's form, for a chat with tools; `text` holds them as the model wrote them."""
        return () if self.parts is None else self.parts.tool_calls

    @property
    def message(self) -> Message:
        """The message to append to the conversation: the model's text, its tool calls apart. It goes back token for
        token.
        """
        content = self.text if self.parts is None else self.parts.content
        return {"role": "assistant", "content": content} | (
            {"tool_calls": [*self.tool_calls]} if self.tool_calls else {}
        )


def plain(value: Any, what: str) -> Any:
    """A copy of a JSON value, as the log will hold it. Raises EnvironmentRunError for another value."""
    try:
        return orjson.loads(orjson.dumps(value))
    except (orjson.JSONEncodeError, orjson.JSONDecodeError) as error:
        raise EnvironmentRunError(
            f"{what}: not a JSON value: {error}; give text, numbers, true, false, lists or mappings"
        ) from error


def text_of(value: Any) -> str:
    """A JSON value as it is written into a prompt or compared with an answer: a text as it is, else JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def content_text(content: Any) -> str | None:
    """The content of a message as one text; None if it, or a part of it, is not text."""
    if not isinstance(content, list):
        return content if isinstance(content, str) else None
    parts = [part.get("text") if isinstance(part, dict) else part for part in content]
    texts = [part for part in parts if isinstance(part, str)]
    return "".join(texts) if len(texts) == len(parts) else None


def is_list(messages: Any) -> bool:
    """Whether a chat's messages may be a list of messages; a list itself needs no look at an abstract class."""
    return isinstance(messages, list) or not isinstance(messages, str | Mapping)


def plain_messages(messages: Sequence[Any], *, for_model: bool = True) -> list[Message]:
    """A copy of a chat's messages, as the log will hold them. Raises EnvironmentRunError if they are invalid.

    `for_model`: chat templates need the content of each; only an answer with tool calls may have none.
    """
    found = plain([*messages], "messages") if is_list(messages) else None
    if found is None or not all(isinstance(one, dict) and "role" in one for one in found):
        raise EnvironmentRunError(
            'messages: expected a list of messages such as [{"role": "user", "content": "..."}], not '
            f"{one_line(repr(messages), 100)}"
        )
    for index, one in enumerate(found if for_model else ()):
        if "content" not in one and not (one["role"] == "assistant" and one.get("tool_calls")):
            raise EnvironmentRunError(f"messages[{index}]: {one_line(repr(one), 100)} has no content; give a text")
    return found


def parts_of(text: str, ids: Sequence[int], salt: int | str, parse: Parse | None) -> AnswerParts:
    """Split an answer to a request with tools. `text`: of `ids`, without the end token; `salt`: tells the answer from
    others, such as the index of its step.

    `parse`: a renderer's parser, in place of <tool_call> alone.
    """
    if parse is not None:
        parsed = parse(ids)
        return AnswerParts(parsed.content, parsed.reasoning, _calls_of(parsed, salt))
    calls = tool_calls_in(text, salt)
    return AnswerParts(_without_calls(text) if calls else text, None, calls)


def tool_calls_in(text: str, salt: int | str = 0) -> tuple[dict[str, Any], ...]:
    """Calls in OpenAI's shape; none if one of them cannot be read. `salt` keeps ids of equal calls apart."""
    calls: list[dict[str, Any]] = []
    for number, (begin, end) in enumerate(call_spans(text)):
        body = text[begin + len(CALL_BEGINS) : end - len(CALL_ENDS)].strip()
        try:
            call, arguments = call_arguments.loads(body), call_arguments.member(body, "arguments")
        except ValueError:
            return ()
        if not isinstance(call.get("name"), str) or not isinstance(call.get("arguments", {}), dict):
            return ()
        calls.append(_call(_call_id(salt, number, body), call["name"], arguments or "{}"))
    return tuple(calls)


def _calls_of(parsed: ParsedAnswer, salt: int | str) -> tuple[dict[str, Any], ...]:
    """An id that the model wrote itself stays: the family's template writes it again."""
    return tuple(
        _call(own_id or _call_id(salt, number, f"{name}\x1f{arguments}"), name, arguments)
        for number, (name, arguments, own_id) in enumerate(parsed.calls)
    )


def _call_id(salt: int | str, number: int, body: str) -> str:
    digest = hashlib.sha256(f"{salt}\x1f{number}\x1f{body}".encode()).hexdigest()
    return f"call_{digest[:24]}"


def _call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _without_calls(text: str) -> str:
    parts: list[str] = []
    at = 0
    for begin, end in call_spans(text):
        parts.append(text[at:begin])
        at = end
    return "".join([*parts, text[at:]]).strip()


def call_spans(text: str) -> list[tuple[int, int]]:
    """Positions where calls begin and end, markers included, in one pass over the text.

    A call begins at a marker before a brace and ends at the first end marker after one, because a text within the JSON
    may hold a marker too. Each run of white space is passed once forwards and once backwards.
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


class Demonstrator(Protocol):
    """The part of an environment that answers in the model's place, for a warm start."""

    def demonstrate(self, session: Any, messages: Sequence[Message], agent: str) -> Any:
        """Text of the answer, or an awaitable of it."""
        ...


async def demonstrated(demonstrator: Demonstrator, session: Any, messages: Sequence[Message], agent: str) -> str:
    """The demonstrator's answer. Raises what it raises, and EnvironmentRunError for anything but text."""
    return await text_given("demonstrate()", demonstrator.demonstrate(session, messages, agent))


async def text_given(method: str, given: Any) -> str:
    """The text that an environment's method returned, or an awaitable of it. Raises EnvironmentRunError for no text."""
    text = await given if inspect.isawaitable(given) else given
    if not isinstance(text, str):
        raise EnvironmentRunError(f"{method} returned a {type(text).__name__}; expected text")
    return text
