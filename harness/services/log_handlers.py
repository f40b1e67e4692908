"""Handlers of this process's logs. One that cannot write, because its disk is full for example, reports that once and
drops lines until it can; the standard library's handlers print a traceback for every line.
"""

import logging
import sys
from logging.handlers import RotatingFileHandler
from typing import TextIO

logger = logging.getLogger(__name__)


class _Dropping(logging.Handler):
    """A handler that drops lines which it cannot write."""

    _has_reported = False

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
