"""Keeps secrets and control characters out of this process's logs and output.

A secret is written as the `${NAME}` that it came from, a control character as its escape `\\x1b`.

Concealed are the values of variables that the configuration names, and of those whose names mark them as secrets.
"""

import logging
import os
import sys
import traceback
from collections.abc import Iterable
from types import TracebackType
from typing import Any

from rollstream.metrics.sql.printable import printable
from rollstream.schemas.variables import conceal, is_secret_name

FOLDER = "PWD"
"""Variables of shells for the current folder, whose names resemble that of a password."""
_names: set[str] = set()
"""Of variables; as many as configurations that this process has read name."""


def conceal_variables(names: Iterable[str]) -> None:
    """Also conceal the values of these variables from now on."""
    _names.update(names)


def concealed(text: str) -> str:
    """`text` without the values of concealed variables."""
    secret = {name for name in os.environ if is_secret_name(name)} - {FOLDER}
    return conceal(text, [f"${{{name}}}" for name in sorted(_names | secret)], os.environ)


def shown(text: str) -> str:
    """`text` for logging and printing: secrets concealed, control characters escaped except line feeds and tabs."""
    return printable(concealed(text))


class ConcealingRecord(logging.LogRecord):
    """A log record whose formatted text contains no secrets or control characters."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        if isinstance(self.exc_info, tuple):
            self.exc_text = shown(logging.Formatter().formatException(self.exc_info))
        if self.stack_info is not None:
            self.stack_info = shown(self.stack_info)

    def getMessage(self) -> str:
        """The message with secrets concealed."""
        return shown(super().getMessage())


def conceal_logs() -> None:
    """Apply `shown` to all log records of this process from now on, and to uncaught exceptions.

    Records are changed, not handlers, because other packages add and remove handlers.
    """
    logging.setLogRecordFactory(ConcealingRecord)
    sys.excepthook = _excepthook


def _excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    print(shown("".join(traceback.format_exception(kind, error, trace))), end="", file=sys.stderr)
