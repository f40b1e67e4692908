"""The stream of a remote workflow, line by line: its steps, its answer, its errors; and a body, up to a limit.

NAT's server sends `data: {"value": ...}` for the answer, `intermediate_data: {...}` for a step, whose `payload` is a
JSON text, and after a failure one bare JSON object with `code` and `message`. It sends no function ancestry.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from pydantic import ValidationError

from rollstream.producers.traces.spans import RemoteSpan, remote_ancestry
from rollstream.schemas.errors import EnvironmentRunError, first_invalid
from rollstream.schemas.events.intermediate_steps import (
    IntermediateStep,
    IntermediateStepCategory,
    IntermediateStepPayload,
    IntermediateStepState,
    IntermediateStepType,
)
from rollstream.schemas.variables import one_line

MAX_LINE_BYTES = 8 * 1024 * 1024
MAX_STREAM_BYTES = 256 * 1024 * 1024
"""Maximum bytes of all lines of one rollout together."""
SHOWN_CHARS = 500
_DATA, _STEP = "data:", "intermediate_data:"
_PASSED_OVER = (":", "event:", "id:", "retry:", "observability_trace:")


@dataclass(slots=True)
class Lines:
    """Bytes as they come, as whole lines."""

    _line: bytearray = field(default_factory=bytearray)
    """The beginning of the line that is not complete yet; grows in place, whatever the size of the pieces."""
    _stream_bytes: int = 0

    @property
    def rest(self) -> bytes:
        """The bytes after the last whole line."""
        return bytes(self._line)

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        """Lines that are whole now. Raises EnvironmentRunError for a line or a stream that is too long."""
        self._stream_bytes += len(chunk)
        if self._stream_bytes > MAX_STREAM_BYTES:
            raise EnvironmentRunError(
                f"its stream is longer than {MAX_STREAM_BYTES} bytes; let the workflow take fewer or shorter steps"
            )
        first, *others = chunk.split(b"\n")
        self._add(first)
        for piece in others:
            line = self.rest
            self._line.clear()
            self._add(piece)
            yield line

    def _add(self, piece: bytes) -> None:
        self._line += piece
        if len(self._line) > MAX_LINE_BYTES:
            raise EnvironmentRunError(
                f"a line of its stream is longer than {MAX_LINE_BYTES} bytes; let the workflow's steps say less"
            )


@dataclass(slots=True)
class RemoteStream:
    """The content of a stream so far."""

    values: list[str] = field(default_factory=list[str])
    """Pieces of the answer."""
    spans: dict[str, RemoteSpan] = field(default_factory=dict[str, RemoteSpan])
    num_lines: int = 0
    preview: Any = None
    """The first pieces of the answer before NAT made text of them, from the end of the workflow."""

    def read(self, line: bytes) -> IntermediateStep | None:
        """The step of a line; None if it has none. Raises EnvironmentRunError for one that is broken."""
        self.num_lines += 1
        try:
            text = line.decode("utf-8").strip()
        except UnicodeDecodeError as error:
            raise self._broken("is not UTF-8") from error
        if not text or text.startswith(_PASSED_OVER):
            return None
        if text.startswith(_STEP):
            return self._step(self._object(text.removeprefix(_STEP)))
        if text.startswith(_DATA):
            self._take_value(text.removeprefix(_DATA).strip())
            return None
        found = self._object(text)
        raise _failed(found.get("message") or found.get("detail") or text)

    @property
    def answer(self) -> Any:
        """The whole answer as text, JSON if the workflow returned a value that is neither text nor a model; None for
        null. Raises EnvironmentRunError if there was none.
        """
        if not self.values:
            raise EnvironmentRunError(
                f"its stream ended after {self.num_lines} lines without an answer; see the workflow server's log"
            )
        match self.preview, self.values:
            case [value], [text] if _is_notation(text, value):
                return None if value is None else json.dumps(value, ensure_ascii=False)
            case _:
                return "".join(self.values)

    def _take_value(self, text: str) -> None:
        if text == "[DONE]":
            return
        found = self._object(text)
        if "value" not in found and ("error" in found or "code" in found):
            raise _failed(found.get("message") or found.get("error"))
        value = found.get("value")
        if value is not None:
            self.values.append(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))

    def _step(self, found: dict[str, Any]) -> IntermediateStep:
        try:
            payload = IntermediateStepPayload.model_validate_json(found["payload"])
        except (KeyError, TypeError, ValidationError) as error:
            raise self._broken(f"does not contain a step: {_first_line(error)}") from error
        parent_id = found.get("parent_id")
        parent_id = parent_id if isinstance(parent_id, str) else None
        if payload.event_type == IntermediateStepType.WORKFLOW_END and parent_id in (None, "root") and payload.data:
            self.preview = payload.data.output
        if payload.event_state == IntermediateStepState.START:
            is_function = payload.event_category == IntermediateStepCategory.FUNCTION
            self.spans[payload.UUID] = RemoteSpan(parent_id, (payload.name or "") if is_function else None)
        span_id = payload.UUID if payload.UUID in self.spans else parent_id or ""
        return IntermediateStep(
            parent_id=parent_id or "root", function_ancestry=remote_ancestry(self.spans, span_id), payload=payload
        )

    def _object(self, text: str) -> dict[str, Any]:
        try:
            found = json.loads(text)
        except ValueError as error:
            raise self._broken(f"is not JSON: {one_line(text, 100)!r}") from error
        if not isinstance(found, dict):
            raise self._broken(f"is not a JSON object: {one_line(text, 100)!r}")
        return found

    def _broken(self, why: str) -> EnvironmentRunError:
        return EnvironmentRunError(
            f"line {self.num_lines} of its stream {why}; check that the endpoint is a NAT server"
        )


def _is_notation(text: str, value: Any) -> bool:
    """Whether an answer is Python's notation of a value: not JSON, and not a text of the value, such as the content of
    a chat's response.
    """
    if isinstance(value, str) or (value is None and text != "None"):  # null is also in the place of NaN
        return False
    try:
        json.loads(text)
    except ValueError:
        return text != "" and not _contains(value, text)
    return False


def _contains(value: Any, text: str) -> bool:
    if isinstance(value, dict | list):
        nested = value.values() if isinstance(value, dict) else value
        return any(_contains(one, text) for one in nested)
    return value == text


def _failed(text: object) -> EnvironmentRunError:
    return EnvironmentRunError(f"it failed: {_shown(text)}; see the workflow server's log")


def _shown(text: object) -> str:
    """The server's words about a failure, in one line of bounded length."""
    return one_line(text, SHOWN_CHARS)


def _first_line(error: Exception) -> str:
    if isinstance(error, ValidationError):
        return str(first_invalid(error, "payload"))
    return f"{type(error).__name__}: {error}"


async def read_up_to(response: aiohttp.ClientResponse, limit: int) -> bytes:
    """A body, cut off behind `limit` bytes."""
    parts: list[bytes] = []
    size = 0
    async for part in response.content.iter_any():
        parts.append(part)
        size += len(part)
        if size > limit:
            break
    return b"".join(parts)[:limit]
