"""Output that several commands share: a training with its progress, the runs of a log, warnings."""

import logging
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import click

from rollstream.harness.services.concealing import conceal_logs
from rollstream.harness.services.live_line import clear_line, terminal_behind
from rollstream.harness.services.log_handlers import LogFileHandler, StreamHandler
from rollstream.schemas.errors import RunFailedError

if TYPE_CHECKING:
    from rollstream.eventlog.log import ReadableLog
    from rollstream.harness.finetune import Interrupted, Request

_OF_NEWER = "if a newer rollstream wrote them, use that version to see their runs and jobs"


def train(request: "Request") -> None:
    """Run the requested training, with progress on the terminal. Raises RunFailedError if the run failed."""
    from rollstream.harness.finetune import Interrupted
    from rollstream.harness.finetune import finetune as run_finetune
    from rollstream.harness.runs.display import Display

    _configure_logging(request.workspace)
    display = Display()
    try:
        outcome = run_finetune(request, display)
    except Interrupted as interrupted:
        display.print(interruption_line(interrupted, request.resume))
        sys.exit(interrupted.exit_code)
    finally:
        display.let_go()
    if outcome.exit_code:
        raise RunFailedError(f"run {outcome.run_id} {outcome.status}: {outcome.message}")


def interruption_line(interrupted: "Interrupted", resumed: str | None) -> str:
    """The report of a training that the user interrupted; `resumed`: the run that it was to resume."""
    run_id = interrupted.run_id
    if run_id is None:
        return "interrupted before a run was begun" if resumed is None else f"interrupted; run {resumed} is as it was"
    if not interrupted.has_begun:
        return f"interrupted before run {run_id} was begun; nothing was started"
    resumes = f"`rollstream finetune --config_file FILE --resume {run_id}`"
    if interrupted.is_open:
        return f"interrupted; run {run_id} stays open: {resumes} continues it"
    outcome = interrupted.outcome
    if outcome is None:
        return f"interrupted; run {run_id} has ended, and its model may not be saved: {resumes} saves it"
    saved = "no model was saved" if outcome.output_dir is None else f"its model is saved in {outcome.output_dir}"
    return f"interrupted; run {run_id} has ended ({outcome.status}); {saved}"


def print_runs(
    workspace: Path, bootstrap_servers: str | None, report: "Callable[[ReadableLog, Counter[str]], Awaitable[str]]"
) -> None:
    """Show the report about runs of the log, before others are waited for that use the broker.

    `report` counts records that it cannot read by topic. What the log has lost is written after it. Raises
    TruncatedError if it was longer before.
    """
    from rollstream.harness.services.lost_records import check_ends, removed
    from rollstream.harness.services.workspace import Workspace, on_log

    async def show(log: "ReadableLog") -> None:
        unreadable = Counter[str]()
        click.echo(await report(log, unreadable))
        for topic, number in unreadable.items():
            click.echo(f"{number} records of topic {topic} cannot be read: {_OF_NEWER}", err=True)
        for line in await removed(log):
            click.echo(f"{line}: runs that began earlier are missing or incomplete", err=True)
        await check_ends(log, workspace, lambda line: click.echo(line, err=True))

    on_log(Workspace(workspace), bootstrap_servers, "rollstream-runs", show)


class _TerminalHandler(StreamHandler):
    """Clears the live line before every log record; it is drawn again below."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._terminal = terminal_behind(stream)

    def emit(self, record: logging.LogRecord) -> None:
        if self._terminal is not None:
            clear_line(self._terminal)
        super().emit(record)


def _configure_logging(workspace: Path) -> None:
    """Log everything to the workspace's log file and warnings to the terminal too."""
    from rollstream.eventlog.broker.guard import MAX_LOG_BYTES
    from rollstream.harness.services.workspace import Workspace

    layout = Workspace(workspace)
    layout.create()
    to_file = LogFileHandler(layout.logs / "finetune.log", maxBytes=MAX_LOG_BYTES, backupCount=1, encoding="utf-8")
    to_file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    _log_to((to_file, _terminal_handler()), logging.INFO)
    logging.getLogger("aiokafka").setLevel(logging.WARNING)


def _terminal_handler() -> logging.Handler:
    """Warnings on the terminal; those of libraries are left out."""
    handler = _TerminalHandler(sys.stderr)
    handler.setLevel(logging.WARNING)
    handler.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
    handler.addFilter(lambda record: record.name.startswith("rollstream"))
    return handler


def log_to_terminal() -> None:
    """Log warnings to the terminal alone."""
    _log_to((_terminal_handler(),), logging.WARNING)


def _log_to(handlers: Iterable[logging.Handler], level: int) -> None:
    logging.captureWarnings(True)
    logging.basicConfig(level=level, handlers=handlers, force=True)
    conceal_logs()
