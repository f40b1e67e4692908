"""An answer that a server sends while it samples, and the tokens of it that the caller was given before its end."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rollstream.eventlog.http.http_json import EVENT_STREAM, HttpAnswer, HttpServer, excerpt
from rollstream.schemas.errors import ModelError

EVENT_BYTES = 1024
"""Room for one event beside the likeliest ids of its tokens."""


def streams(operations: Mapping[str, Any] | None) -> bool:
    """Whether a path of an OpenAPI document can answer a POST with events."""
    answers: Mapping[str, Any] = ((operations or {}).get("post") or {}).get("responses") or {}
    return EVENT_STREAM in ((answers.get("200") or {}).get("content") or {})


class GivenTokens:
    """The tokens of one request that its caller has, whichever server sampled them.

    A server that fails takes the rest of its answer along. Another one's answer is as good only if it begins with what
    the caller has: with the same seed and version it does, except for rounding.
    """

    def __init__(self, on_tokens: Callable[[Sequence[int]], None]) -> None:
        self._on_tokens = on_tokens
        self._ids: list[int] = []

    def add(self, start: int, ids: Sequence[int]) -> None:
        """Ids from the index `start` on of an answer: the caller gets those that it has not.

        Raises ModelError if it has others there.
        """
        had = self._ids[start : start + len(ids)]
        self._check(had, ids[: len(had)], start)
        if new := ids[len(had) :]:
            self._ids += new
            self._on_tokens(new)

    def check(self, ids: Sequence[int]) -> None:
        """Raises ModelError if a whole answer does not begin with the caller's tokens, or has no token after them."""
        self._check(self._ids, ids[:-1][: len(self._ids)], 0)

    def _check(self, had: Sequence[int], ids: Sequence[int], start: int) -> None:
        if list(had) != list(ids):
            at = next((index for index, pair in enumerate(zip(had, ids, strict=False)) if pair[0] != pair[1]), len(ids))
            raise ModelError(
                f"a vLLM server failed after {len(self._ids)} tokens of its answer were handed on, and the answer of "
                f"the next try differs at token {start + at}; make the call again"
            )


class StreamedAnswer:
    """The events of one try of a request. All tokens but the newest are given on at once: only the end of the answer
    says whether that one is the last.
    """

    def __init__(self, http: HttpServer, given: GivenTokens) -> None:
        self._http = http
        self._given = given
        self._line = bytearray()
        """The beginning of a line whose end has not come."""
        self._num_given = 0
        self.has_begun = False
        self.choice: dict[str, Any] = {
            "token_ids": [],
            "logprobs": {"content": []},
            "weight_versions": None,
            "finish_reason": None,
        }
        """Choice in the form of an answer that comes whole."""
        self.failure: HttpAnswer | None = None
        """Answer that the server sent instead of further tokens."""

    def feed(self, part: bytes) -> None:
        """Bytes as they come. Raises ModelError for data that is not an event, and if the caller has other tokens."""
        self._line += part
        *lines, rest = self._line.split(b"\n")
        self._line = rest
        for line in lines:
            kind, _, text = line.partition(b":")
            if kind == b"data" and (text := text.strip()) != b"[DONE]":
                self._take(bytes(text))

    def _take(self, text: bytes) -> None:
        event = self._http.parsed(text)
        try:
            if "error" in event:
                self.failure = HttpAnswer(int(event["error"].get("code") or 500), {}, text)
                return
            for choice in event["choices"]:
                self._add(choice)
                self.has_begun = True
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise self._http.error(
                f"sent an event without token ids or log-probabilities: {excerpt(text)}; look into its log"
            ) from error

    def _add(self, choice: Mapping[str, Any]) -> None:
        ids: list[int] = self.choice["token_ids"]
        if choice["token_ids"]:
            ids += choice["token_ids"]
            self.choice["logprobs"]["content"] += choice["logprobs"]["content"]
        for name in ("weight_versions", "finish_reason"):
            if choice.get(name) is not None:
                self.choice[name] = choice[name]
        if new := ids[self._num_given : -1]:
            self._given.add(self._num_given, new)
            self._num_given += len(new)
