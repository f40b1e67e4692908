"""One line of progress on a stream: replaced in place on a terminal, elsewhere a new line at intervals.

Texts are concealed and escaped, and rich does not interpret markup in them. A stream that refuses them, such as a file
on a full disk or a closed pipe, does not end the command: that is logged, and the command continues.
"""

import logging
import os
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, TextIO

from rollstream.harness.services.concealing import conceal_and_escape
from rollstream.metrics.sql.printable import terminal_of

if TYPE_CHECKING:
    from rich.console import Console

LIVE_INTERVAL_S = 0.2
PLAIN_INTERVAL_S = 10.0

logger = logging.getLogger(__name__)


class LiveLine:
    """A line of progress. On a terminal, the last text stays visible until it is replaced or cleared."""

    def __init__(
        self, stream: TextIO, clock: Callable[[], float] = time.monotonic, *, is_live_only: bool = False
    ) -> None:
        """`is_live_only`: show no progress if the stream is not a terminal."""
        self._stream = stream
        self._clock = clock
        self._console = terminal_behind(stream)
        self._is_silent = is_live_only and self._console is None
        self._next_at = clock()
        self._shown = ""
        self._is_refused = False
        """Whether the stream refused the last output."""

    @property
    def interval_s(self) -> float:
        """Seconds between progress lines."""
        return PLAIN_INTERVAL_S if self._console is None else LIVE_INTERVAL_S

    def wait(self) -> None:
        """Suppress progress for one interval."""
        self._next_at = self._clock() + self.interval_s

    def is_due(self) -> bool:
        """Whether progress is due; true once per interval."""
        if self._clock() < self._next_at:
            return False
        self.wait()
        return True

    def show_when_due(self, text: str) -> None:
        """Show progress if it is due."""
        if self.is_due():
            self.show(text)

    def show(self, text: str) -> None:
        """Show progress now, replacing the previous text."""
        if self._is_silent:
            return
        with self._unless_refused():
            if self._console is not None:
                self._clear()
                self._write_live(self._console, text)
            elif text != self._shown:
                self._stream.write(f"{conceal_and_escape(text)}\n")
            self._shown = text
            self._stream.flush()

    def print(self, text: str) -> None:
        """Write a permanent line; progress continues below it. What the stream refuses is logged."""
        with self._unless_refused():
            self._clear()
            self._stream.write(f"{conceal_and_escape(text)}\n")
            self._stream.flush()
        if self._is_refused:
            logger.info("not shown: %s", text)

    def clear(self) -> None:
        """Clear the progress text."""
        if self._console is not None and self._shown:
            with self._unless_refused():
                self._clear()

    def finish(self) -> None:
        """Keep the shown text; later output starts on a new line."""
        if self._console is not None and self._shown:
            with self._unless_refused():
                self._stream.write("\n")
                self._stream.flush()
            self._shown = ""

    def let_go(self) -> None:
        """Discard what the stream refused, which would otherwise change the exit status of the process."""
        if self._is_refused:
            discard_output(self._stream)

    @contextmanager
    def _unless_refused(self) -> Generator[None]:
        """Continue when the stream refuses output, which is logged once."""
        was_refused, self._is_refused = self._is_refused, False
        try:
            yield
        except OSError as error:
            self._is_refused = True
            if not was_refused:
                logger.warning("the output cannot be written (%s); the command continues without it", error)

    def _clear(self) -> None:
        if self._console is not None and self._shown:
            clear_line(self._console)
            self._shown = ""

    def _write_live(self, console: "Console", text: str) -> None:
        """Write the part that fits into one row, because only the last row of a wrapped line could be cleared."""
        from rich.text import Text

        line = Text(conceal_and_escape(text).replace("\n", " ").replace("\t", " "))
        line.truncate(console.width - 1, overflow="ellipsis")
        console.print(line, end="", soft_wrap=True)


def discard_output(stream: TextIO) -> None:
    """Discard what a stream has buffered and all that follows: Python ends with another status if it is refused."""
    with suppress(OSError), open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), stream.fileno())


def clear_line(console: "Console") -> None:
    """Clear the cursor's line."""
    from rich.control import Control
    from rich.segment import ControlType

    console.control(Control(ControlType.CARRIAGE_RETURN, (ControlType.ERASE_IN_LINE, 2)))


def terminal_behind(stream: TextIO) -> "Console | None":
    """The terminal of a stream; None if it is not a terminal or cannot move the cursor."""
    if not stream.isatty():
        return None
    from rich.console import Console

    console = Console(
        file=terminal_of(stream), force_terminal=True, color_system=None, markup=False, highlight=False, emoji=False
    )
    return None if console.is_dumb_terminal else console
