"""Text of models and records as it may be shown: without characters that a terminal obeys."""

import re
import sys
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, TextIO, cast

from rollstream.eventlog.disk_space import writing

_OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""C0 and C1 controls but tab and line feed, marks that change the direction or end a line of text, and surrogates."""


def printable(text: str) -> str:
    """`text` with every character that a terminal obeys written as `\\x1b`, `\\u202e`; line feeds and tabs stay."""
    return _OBEYED.sub(_escaped, text)


def json_escaped(text: str) -> str:
    """A JSON text with such characters as `\\u001b`, ...: the same values. Its own line feeds and tabs stay."""
    return _OBEYED.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def _escaped(match: re.Match[str]) -> str:
    number = ord(match[0])
    return f"\\x{number:02x}" if number < 0x100 else f"\\u{number:04x}"


class PrintableStream:
    """A stream whose output never controls the terminal. Has no `buffer`, which would bypass it."""

    def __init__(self, stream: TextIO, name: str = "the output") -> None:
        """`name`: of the stream, in the OSError of a full disk."""
        self.stream = stream
        """The stream itself, for control sequences of the program's own, such as clearing a line."""
        self._name = name

    def write(self, text: str) -> int:
        """Write the text as it may be shown."""
        with writing(self._name):
            self.stream.write(printable(text))
        return len(text)

    def flush(self) -> None:
        """Write what is buffered."""
        with writing(self._name):
            self.stream.flush()

    def writelines(self, lines: Any) -> None:
        """Write each of them."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        if name == "buffer":
            raise AttributeError(name)
        return getattr(self.stream, name)


@contextmanager
def printable_output() -> Generator[None]:
    """Have standard output and standard error be such streams meanwhile."""
    before = sys.stdout, sys.stderr
    names = "standard output", "standard error"
    sys.stdout, sys.stderr = (cast("TextIO", PrintableStream(*one)) for one in zip(before, names, strict=True))
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def terminal_of(stream: TextIO) -> TextIO:
    """The stream for control sequences of our own."""
    return stream.stream if isinstance(stream, PrintableStream) else stream
