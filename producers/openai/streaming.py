"""The text of an answer while it is sampled: ids in, pieces of text out that no later token changes. Pure."""

from collections.abc import Callable, Sequence

from rollstream.producers.engines.base import Tokenizer
from rollstream.producers.openai.protocol import REPLACEMENT
from rollstream.producers.rollout.reply import CALL_BEGINS, Parse

OnText = Callable[[int, str], None]
"""Given the index of a choice and a piece of its text."""
MAX_CHARACTER_IDS = 4
"""Maximum ids of one character, each of at least one of its bytes."""
MAX_UNREAD_IDS = 4 * MAX_CHARACTER_IDS
"""Ids without the end of a character after which they cannot be one: the model writes bytes that are not text."""


class TextStream:
    """The pieces of one answer. Put together they are how its text begins."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = (), *, has_tools: bool = False) -> None:
        """`stop`: texts that end the answer and are not part of it. `has_tools`: it may hold tool calls."""
        self._tokenizer = tokenizer
        self._stop = stop
        self._has_tools = has_tools
        self._ids: list[int] = []
        self._before = self._read = 0
        """Ids from `_before` on are decoded together; those before `_read` are read."""
        self._unsent = ""
        self._has_sent = self._is_over = False

    def add(self, ids: Sequence[int]) -> str:
        """The next piece after these ids; empty if what they say may still change."""
        if self._is_over:
            return ""
        self._ids += ids
        known = self._decoded(self._before, self._read)
        text = self._decoded(self._before, len(self._ids))
        if len(text) > len(known):
            read = len(self._ids) if not text.endswith(REPLACEMENT) else self._end_of_undecodable(text)
            if read > self._read:
                part = text if read == len(self._ids) else self._decoded(self._before, read)
                self._unsent += part[len(known) :]
                self._before, self._read = self._read, read
        end = self._end()
        piece, self._unsent = self._unsent[:end], self._unsent[end:]
        self._has_sent = self._has_sent or bool(piece)
        return piece

    def _end_of_undecodable(self, text: str) -> int:
        """Ids of an unfinished text that are certain nevertheless, so that they are not decoded again with each id."""
        end = len(self._ids) - MAX_CHARACTER_IDS
        if end - self._read < MAX_UNREAD_IDS:
            return self._read
        ends = range(end, end - MAX_CHARACTER_IDS, -1)
        return next((one for one in ends if self._is_certain(one, text)), self._read)

    def _is_certain(self, end: int, text: str) -> bool:
        """Whether the ids up to `end` and those after it decode apart as they do together."""
        rest = self._decoded(end, len(self._ids))
        return bool(rest) and self._decoded(self._before, end) + rest == text

    def _decoded(self, begin: int, end: int) -> str:
        ids = self._ids[begin:end]
        return self._tokenizer.decode(ids, skip_special_tokens=False) if ids else ""

    def _end(self) -> int:
        """Characters of `_unsent` that are certain to be in the answer's text. What a word may begin with is not sent,
        so that no word begins before.
        """
        text = self._unsent
        if self._has_tools and not self._has_sent and text[:1].isspace():
            self._is_over = True  # of an answer with calls the text is stripped
            return 0
        end = found = len(text) + 1
        for word in (*self._stop, CALL_BEGINS) if self._has_tools else self._stop:
            at = text.find(word)
            found = at if 0 <= at < found else found
            end = min(end, at if at >= 0 else _without_beginning(text, word))
        self._is_over = end == found <= len(text)
        return len(text[:end].rstrip()) if self._has_tools else min(end, len(text))


class ParsedStream:
    """The pieces of an answer whose reasoning and tool calls a renderer tells apart: those of its content.

    Parsed is not at each token but when a 32nd more has come, so that all of it costs little more than a few parses.
    """

    def __init__(self, parse: Parse, stop: Sequence[str] = ()) -> None:
        self._parse = parse
        self._stop = stop
        self._ids: list[int] = []
        self._num_parsed = self._num_sent = 0

    def add(self, ids: Sequence[int]) -> str:
        """The next piece after these ids; empty if what they say may still change."""
        self._ids += ids
        if len(self._ids) - self._num_parsed <= len(self._ids) // 32:
            return ""
        self._num_parsed = len(self._ids)
        text = self._parse(self._ids).settled.rstrip(REPLACEMENT).rstrip()
        if not text[:1].isalnum():  # it may become reasoning or a call, or its white space be dropped
            return ""
        ends = [text.find(word) if word in text else _without_beginning(text, word) for word in self._stop]
        piece = text[self._num_sent : min(ends, default=len(text))].rstrip()
        self._num_sent += len(piece)
        return piece


def _without_beginning(text: str, word: str) -> int:
    """Length of the text without an end that a word may begin with."""
    at = max(0, len(text) - len(word) + 1)
    while (at := text.find(word[0], at)) >= 0 and not word.startswith(text[at:]):
        at += 1
    return at if at >= 0 else len(text)


def on_tokens_of(streams: Sequence[TextStream | ParsedStream], on_text: OnText) -> Callable[[int, Sequence[int]], None]:
    """Turns the new ids of each choice into pieces of text."""

    def on_tokens(index: int, ids: Sequence[int]) -> None:
        piece = streams[index].add(ids)
        if piece:
            on_text(index, piece)

    return on_tokens
