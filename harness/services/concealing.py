"""Keeps secrets and control characters out of this process's logs and output.

A secret is written as the `${NAME}` that it came from, a control character as its escape `\\x1b`. What is a secret,
`schemas.variables.conceal` says.
"""

import logging
import sys
import traceback
from types import TracebackType
from typing import Any

from rollstream.metrics.sql.printable import printable
from rollstream.schemas.variables import conceal


def conceal_and_escape(text: str) -> str:
    """`text` for logging and printing: secrets concealed, control characters escaped except line feeds and tabs."""
    return printable(conceal(text))


class ConcealingRecord(logging.LogRecord):
    """A log record whose formatted text contains no secrets or control characters."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        if isinstance(self.exc_info, tuple):
            self.exc_text = conceal_and_escape(logging.Formatter().formatException(self.exc_info))
        if self.stack_info is not None:
            self.stack_info = conceal_and_escape(self.stack_info)

    def getMessage(self) -> str:
        """The message with secrets concealed."""
        return conceal_and_escape(super().getMessage())


def conceal_logs() -> None:
    """Apply `conceal_and_escape` to all log records of this process from now on, and to uncaught exceptions.

    Records are changed, not handlers, because other packages add and remove handlers.
    """
    logging.setLogRecordFactory(ConcealingRecord)
    sys.excepthook = _excepthook


def _excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    print(conceal_and_escape("".join(traceback.format_exception(kind, error, trace))), end="", file=sys.stderr)
