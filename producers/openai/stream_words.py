"""Streams in the words of each API: server-sent events of the pieces of an answer, of its rest and of its end. Pure."""

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from rollstream.producers.openai import anthropic, completions, protocol
from rollstream.producers.openai.completions import CompletionRequest
from rollstream.producers.openai.protocol import Answer
from rollstream.producers.openai.requests import ChatRequest, SampledRequest
from rollstream.schemas import ids


@dataclass(frozen=True, slots=True)
class Answered:
    """The answers to one request, at least one."""

    answers: list[Answer]
    call_id: str
    """Id of this call, from which the ids in the answer are derived."""
    created_s: int
    """Unix time."""


def head_of(kind: str, asked: SampledRequest, answered: Answered) -> dict[str, Any]:
    """Beginning of an answer in OpenAI's form."""
    first = answered.answers[0]
    return {
        "id": f"{kind}-{answered.call_id}",
        "created": answered.created_s,
        "model": asked.model,
        "system_fingerprint": ids.player(first.model_group, first.version),
    }


class StreamWords(ABC):
    """One stream. An answer that comes whole keeps its own id; one that comes in pieces has had to be given one."""

    def __init__(self, call_id: str | None = None) -> None:
        """`call_id`: its own id, if it has one already."""
        self._call_id = call_id or secrets.token_hex(12)
        self._created_s = int(time.time())
        self._sent: dict[int, int] = {}
        """Characters that are sent of each choice's text."""

    def piece(self, index: int, text: str) -> bytes:
        """The next piece of a choice's text."""
        begun = () if self._sent else self._begin()
        is_first = index not in self._sent
        self._sent[index] = self._sent.get(index, 0) + len(text)
        return b"".join(map(self.event, (*begun, *self._piece(index, text, is_first=is_first))))

    def end(self, answered: Answered) -> bytes:
        """All that is left, and the end."""
        if self._sent:
            answered = Answered(answered.answers, self._call_id, self._created_s)
        return b"".join(map(self.event, self._rest(answered)))

    def event(self, body: Mapping[str, Any]) -> bytes:
        """One event."""
        return b"data: " + orjson.dumps(body) + b"\n\n"

    def _begin(self) -> Sequence[dict[str, Any]]:
        """The events before the first piece."""
        return ()

    @abstractmethod
    def _piece(self, index: int, text: str, *, is_first: bool) -> Sequence[dict[str, Any]]: ...

    @abstractmethod
    def _rest(self, answered: Answered) -> Sequence[dict[str, Any]]: ...


class _OpenAIWords(StreamWords):
    KIND = ""

    def __init__(self, asked: SampledRequest) -> None:
        super().__init__()
        self._asked = asked

    def end(self, answered: Answered) -> bytes:
        """End the stream; OpenAI's streams end with `[DONE]`."""
        return super().end(answered) + b"data: [DONE]\n\n"

    @property
    def _head(self) -> dict[str, Any]:
        """Head of a chunk: the weights that answer are known only at the end."""
        return {"id": f"{self.KIND}-{self._call_id}", "created": self._created_s, "model": self._asked.model}

    @property
    def _options(self) -> dict[str, Any]:
        return {"include_usage": self._asked.stream_options.include_usage, "sent": self._sent}


class ChatWords(_OpenAIWords):
    """Stream of OpenAI's chat completions."""

    KIND = "chatcmpl"

    def __init__(self, asked: ChatRequest) -> None:
        super().__init__(asked)

    def _piece(self, index: int, text: str, *, is_first: bool) -> Sequence[dict[str, Any]]:
        return [protocol.chunk(self._head, index, text)]

    def _begin(self) -> Sequence[dict[str, Any]]:
        """Begin all choices in their order: openai-python's stream helper keeps them in a list."""
        self._sent = dict.fromkeys(range(self._asked.n), 0)
        return [protocol.begin_chunk(self._head, index) for index in self._sent]

    def _rest(self, answered: Answered) -> Sequence[dict[str, Any]]:
        return protocol.chunks(head_of(self.KIND, self._asked, answered), answered.answers, **self._options)


class CompletionWords(_OpenAIWords):
    """Stream of OpenAI's completions."""

    KIND = "cmpl"

    def __init__(self, asked: CompletionRequest) -> None:
        super().__init__(asked)

    def _piece(self, index: int, text: str, *, is_first: bool) -> Sequence[dict[str, Any]]:
        return [completions.chunk(self._head, index, text)]

    def _rest(self, answered: Answered) -> Sequence[dict[str, Any]]:
        return completions.chunks(head_of(self.KIND, self._asked, answered), answered.answers, **self._options)


class MessageWords(StreamWords):
    """Stream of Anthropic's messages: each event is named by its `type`."""

    def __init__(self, asked: ChatRequest, num_prompt_tokens: int) -> None:
        super().__init__()
        self._model = asked.model
        self._num_prompt_tokens = num_prompt_tokens

    def event(self, body: Mapping[str, Any]) -> bytes:
        """One event with its name."""
        return f"event: {body['type']}\n".encode() + super().event(body)

    def _piece(self, index: int, text: str, *, is_first: bool) -> Sequence[dict[str, Any]]:
        pieces = anthropic.text_events(text, is_first=is_first)
        return [self._start(self._call_id), *pieces] if is_first else pieces

    def _rest(self, answered: Answered) -> Sequence[dict[str, Any]]:
        (answer,) = answered.answers
        rest = anthropic.rest(answer, self._sent.get(0))
        return rest if self._sent else [self._start(answered.call_id), *rest]

    def _start(self, call_id: str) -> dict[str, Any]:
        return anthropic.start(f"msg_{call_id}", self._model, self._num_prompt_tokens)
