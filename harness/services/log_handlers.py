"""Handlers of this process's logs. One that cannot write, because its disk is full for example, reports that once and
drops lines until it can; the standard library's handlers print a traceback for every line. Equal warnings and
errors of other packages, which a broker's outage has them log hundreds of times a second, are written once in a while.
"""

import copy
import logging
import sys
from contextlib import nullcontext
from logging.handlers import RotatingFileHandler
from typing import TextIO

logger = logging.getLogger(__name__)


REPEATED_S = 10.0
"""Seconds in which one of equal lines of another package is written."""
MAX_REMEMBERED = 256
"""Lines of other packages that a handler compares with, the newest ones."""


class Repeats:
    """Lines of other packages that were written lately, and how often each came again since."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], tuple[float, int]] = {}
        """When a line was written, in seconds, and how many equal ones were left out since."""

    def thinned(self, record: logging.LogRecord) -> logging.LogRecord | None:
        """The record to write, with the number of those left out before it; None if it is one of these."""
        if record.levelno < logging.WARNING or record.name.partition(".")[0] == "rollstream":
            return record
        try:
            text = record.getMessage()
            key = record.name, f"{text} {record.exc_info[1]!r}" if record.exc_info else text
        except Exception:  # noqa: BLE001 -- `emit` reports a record that cannot be formatted
            return record
        written_at, num_left_out = self._known.get(key, (-REPEATED_S, 0))
        if 0 <= record.created - written_at < REPEATED_S:
            self._known[key] = written_at, num_left_out + 1
            return None
        self._known.pop(key, None)
        self._known[key] = record.created, 0
        while len(self._known) > MAX_REMEMBERED:
            del self._known[next(iter(self._known))]
        if not num_left_out:
            return record
        changed = copy.copy(record)
        seconds = record.created - written_at
        changed.msg, changed.args = f"{text} (and {num_left_out} equal lines in the last {seconds:.0f} s)", ()
        return changed


class _Dropping(logging.Handler):
    """A handler that drops lines which it cannot write, and other packages' repeated ones."""

    _has_reported = False
    _repeats: Repeats | None = None

    def handle(self, record: logging.LogRecord) -> bool:
        """Write a record unless an equal one of another package was written lately."""
        with self.lock or nullcontext():
            self._repeats = self._repeats or Repeats()
            thinned = self._repeats.thinned(record)
        return thinned is not None and bool(super().handle(thinned))

    def handleError(self, record: logging.LogRecord) -> None:
        """Report the first failed write to the other handlers; other errors are printed with their tracebacks."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self._has_reported:
            self._has_reported = True  # before the report, which comes here too
            logger.warning("cannot write %s: %s; its lines are dropped until it can be written", self.target, error)

    @property
    def target(self) -> str:
        """The written file, for a message."""
        return "the log"


class StreamHandler(_Dropping, logging.StreamHandler[TextIO]):
    """Writes to a stream: standard error, which may be a file."""


class LogFileHandler(_Dropping, RotatingFileHandler):
    """Writes to a log file of limited size."""

    @property
    def target(self) -> str:
        """Its path."""
        return self.baseFilename

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line; the file is opened again if a rotation could close but not replace it."""
        if self.stream is not None and self.stream.closed:
            self.stream = None
        super().emit(record)
