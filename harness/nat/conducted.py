"""A run that NAT conducts ends on the log as NAT's command ends: failed with its error, or completed, or stopped.

NAT's own command ends with status 0 whatever became of the jobs, and knows nothing of a model: what is raised here
makes it end with an error, and the model is exported before.
"""

import asyncio
import contextlib
import logging
import traceback
from collections.abc import Coroutine, Iterator
from typing import Any

from rollstream.harness.components import run_completion
from rollstream.harness.runs.run_handle import RunHandle
from rollstream.harness.services.concealing import conceal_and_escape
from rollstream.schemas.errors import OF_LOG_AND_STORE, RollstreamError, RunFailedError, describe, is_asked_to_end
from rollstream.schemas.variables import conceal, one_line

MAX_TOLD = 2
"""Distinct errors and warnings of other packages that a failure names."""
MAX_CHARS = 300
NOT_THEIRS = ("rollstream", "aiokafka", "asyncio", "py")

logger = logging.getLogger(__name__)


class _Overheard(logging.Handler):
    """Warnings of other packages while their trainer runs: builders drop rollouts with nothing but a log message."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._found: dict[bool, list[str]] = {}
        """The first few, by whether they are errors."""

    def emit(self, record: logging.LogRecord) -> None:
        """Remember the record, if it is one of the first."""
        found = self._found.setdefault(record.levelno >= logging.ERROR, [])
        if len(found) >= MAX_TOLD or record.name.partition(".")[0] in NOT_THEIRS:
            return
        try:
            text = _formatted(record)
        except (TypeError, ValueError):  # arguments that do not fit the message
            self.handleError(record)
        else:
            found += [text] if text not in found else []

    @property
    def text(self) -> str:
        """The errors, or the warnings if there are none."""
        return "; ".join(self._found.get(True) or self._found.get(False) or ())


def _formatted(record: logging.LogRecord) -> str:
    """A record as a part of a line, without secrets."""
    error = record.exc_info[1] if record.exc_info else None
    parts = [record.getMessage()]
    if error is not None and str(error) not in parts[0]:
        parts.append(f"{type(error).__name__}: {error}")
    return one_line(": ".join(parts), MAX_CHARS)


@contextlib.contextmanager
def _overheard() -> Iterator[_Overheard]:
    handler = _Overheard()
    logging.getLogger().addHandler(handler)
    try:
        yield handler
    finally:
        logging.getLogger().removeHandler(handler)


async def conducted(handle: RunHandle, running: Coroutine[Any, Any, list[Any]]) -> list[Any]:
    """The result of a trainer's `run`, after the run has ended on the log accordingly; its model is exported by then.

    One that is cancelled (Ctrl-C) leaves the run open, and so does a service, a log or an artifact store that fails.
    Raises RunFailedError if the run failed or one of these did, from the exception of `running` if there is one.
    """
    statuses: list[Any] = []
    logged = ""
    failure: str | None = None
    try:
        with _overheard() as overheard:
            statuses, failure = await run_completion.trained(handle, running)
        logged = overheard.text
    except (Exception, asyncio.CancelledError) as error:
        if isinstance(error, asyncio.CancelledError) and is_asked_to_end(asyncio.current_task()):
            raise
        if not handle.is_over:
            how = await failed(handle, error)
            raise RunFailedError(conceal_and_escape(f"run {handle.run.started.run_id} {how}")) from error
        logger.info("the trainer ended with an error once its run was over", exc_info=error)
    outcome = await run_completion.finish(handle, is_completed=failure is None, message=failure or "", logged=logged)
    if outcome.exit_code:
        raise RunFailedError(conceal_and_escape(f"run {outcome.run_id} {outcome.status}: {outcome.message}"))
    for line in outcome.summary().splitlines():
        logger.info("%s", line)
    return [_canceled(one) for one in statuses] if outcome.status == "stopped" else statuses


def _canceled(status: Any) -> Any:
    """Report `canceled`, as on the log, for jobs that a trainer calls failed because its run was stopped."""
    kinds = type(status.status)
    return status if status.status != kinds.FAILED else status.model_copy(update={"status": kinds.CANCELED})


async def failed(handle: RunHandle, error: BaseException) -> str:
    """Write that the run failed, and why, which is returned. If a service, the log or the artifact store has failed,
    the run stays open, so that it can be resumed, which is returned with that reason.
    """
    logger.info("%s", conceal("".join(traceback.format_exception(error)).rstrip()))
    reason = _reason(error)
    if isinstance(error, OF_LOG_AND_STORE):
        handle.is_finished = True
        return _stays_open(handle, reason)
    try:
        await run_completion.finish(handle, is_completed=False, message=reason)
    except RollstreamError as other:
        cause = _reason(other)
        if cause != reason:
            logger.warning("the run stays open on the log: %s", cause)
        return _stays_open(handle, cause)
    return f"failed: {reason}"


def _stays_open(handle: RunHandle, cause: str) -> str:
    run_id = handle.run.started.run_id
    return f"stays open: {cause}; `rollstream finetune --resume {run_id}` continues it once that is corrected"


def _reason(error: BaseException) -> str:
    return conceal(str(error) if isinstance(error, RollstreamError) else describe(error))
