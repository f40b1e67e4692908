"""Commands `finetune`, `validate`, `stop` and `runs`."""

import logging
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import click

from rollstream.harness.cli.shared_options import BOOTSTRAP_SERVERS, OVERRIDE, RUN, TRUST, WORKSPACE
from rollstream.harness.services.concealing import conceal_logs
from rollstream.harness.services.live_line import clear_line, terminal_behind
from rollstream.harness.services.log_handlers import LogFileHandler, StreamHandler
from rollstream.schemas.errors import ConfigError, RunFailedError

if TYPE_CHECKING:
    from pydantic import JsonValue

    from rollstream.eventlog.log import EventLog
    from rollstream.harness.finetune import Interrupted, Request
    from rollstream.harness.runs.progress import Progress


CONFIGURATION = (
    click.option(
        "--config_file", "--config-file", type=click.Path(path_type=Path), required=True, help="The run's YAML file."
    ),
    click.option(
        "--dataset", type=click.Path(path_type=Path), help="Dataset file, instead of the one in the configuration."
    ),
    click.option(
        "--result_json_path",
        metavar="FILE|JSONPATH",
        help="Write the outcome to this file as JSON; a value that starts with $ is the JSON path of an endpoint's "
        "answer.",
    ),
    click.option("--endpoint", metavar="URL", help="Base URL of a running workflow that runs the rollouts."),
    click.option(
        "--endpoint_timeout",
        type=click.IntRange(min=1),
        help="Timeout of one request to the endpoint in seconds (300).",
    ),
    OVERRIDE,
    click.option("--validation_dataset", type=click.Path(path_type=Path), help="Validation dataset."),
    click.option("--validation_interval", type=click.IntRange(min=1), help="Number of epochs between validations (5)."),
    click.option(
        "--validation_config_file", type=click.Path(path_type=Path), help="Configuration file of the validation."
    ),
)
"""Options that choose or change the configuration of a run."""


def _configured(command: Callable[..., None]) -> Callable[..., None]:
    for option in reversed(CONFIGURATION):
        command = option(command)
    return command


@click.command()
@_configured
@click.option("--resume", metavar="RUN", help="Resume a run; for a run that has ended, save the final model again.")
@click.option("--name", help="Prefix of the run's id (default: the file's name).")
@click.option(
    "--run_id", "--run-id", help="The run's full id, instead of a prefix and six hex digits; seeds depend on it."
)
@click.option("--fork", metavar="RUN@VERSION", help="Start a new run from a weight version of another one.")
@TRUST
@WORKSPACE
def finetune(
    config_file: Path,
    result_json_path: str | None,
    override: tuple[tuple[str, str], ...],
    resume: str | None,
    name: str | None,
    run_id: str | None,
    fork: str | None,
    trust: bool,
    workspace: Path,
    **options: Path | str | int | None,
) -> None:
    """Train from a configuration file, or resume a run."""
    from rollstream.harness.finetune import Request
    from rollstream.replay.fork import parse_fork

    result, shown = _result_and_options(result_json_path, options)
    if fork is not None and resume is not None:
        raise ConfigError("--fork starts a new run and --resume continues one; give only one of them")
    if run_id is not None and (resume is not None or name is not None):
        raise ConfigError("--run_id is the full id of a new run; remove --name and --resume")
    parent = None if fork is None else parse_fork(fork)
    train(Request(config_file, workspace, override, shown, resume, name, result, parent, run_id, trust))


def _result_and_options(
    result_json_path: str | None, options: Mapping[str, Path | str | int | None]
) -> "tuple[Path | None, dict[str, JsonValue]]":
    """The file of the result, and the options that override `finetuning.run_configuration`."""
    is_json_path = result_json_path is not None and result_json_path.startswith("$")
    result = None if result_json_path is None or is_json_path else Path(result_json_path)
    found: dict[str, JsonValue] = {
        key: str(value) if isinstance(value, Path) else value for key, value in options.items()
    }
    return result, {**found, "result_json_path": result_json_path if is_json_path else None}


@click.command()
@_configured
@WORKSPACE
def validate(
    config_file: Path,
    result_json_path: str | None,
    override: tuple[tuple[str, str], ...],
    workspace: Path,
    **options: Path | str | int | None,
) -> None:
    """Check a configuration file as finetune does, without training.

    Starts no broker and no service, and writes nothing. Weight versions of other runs, which only the log has, are not
    checked.
    """
    from rollstream.harness.validate import validate as check

    _log_to((_terminal_handler(),), logging.WARNING)
    result, shown = _result_and_options(result_json_path, options)
    found = check(config_file, workspace, override, shown, result)
    click.echo(f"{config_file} is valid")
    for heading, value in found.items():
        click.echo(f"{heading:<12} {value}")


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
        display.print(_interruption(interrupted, request.resume))
        sys.exit(interrupted.exit_code)
    finally:
        display.let_go()
    if outcome.exit_code:
        raise RunFailedError(f"run {outcome.run_id} {outcome.status}: {outcome.message}")


def _interruption(interrupted: "Interrupted", resumed: str | None) -> str:
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


@click.command()
@RUN
@BOOTSTRAP_SERVERS
@WORKSPACE
def stop(run: str, bootstrap_servers: str | None, workspace: Path) -> None:
    """Stop a run gracefully.

    The finetune process that conducts it saves the newest model and exits. A run that a shared model group began has no
    such process: its open jobs are cancelled, and its versions stay.
    """
    from rollstream.eventlog.log import wall_ms
    from rollstream.harness.runs.plan import look_up
    from rollstream.harness.services.workspace import Workspace, on_log
    from rollstream.schemas.events import RunEnded

    async def stopped(log: "EventLog") -> str:
        progress = await look_up(log, run)
        if progress.ended is not None:
            return f"run {run} had already ended ({progress.ended.cause})"
        await log.send(RunEnded(run_id=run, time_ms=wall_ms(), cause="stopped"))
        return stopped_line(progress)

    async def write(log: "EventLog") -> None:
        click.echo(await stopped(log))

    on_log(Workspace(workspace), bootstrap_servers, "rollstream-stop", write)


def stopped_line(progress: "Progress") -> str:
    """The report of `stop` about a run that it has stopped."""
    from rollstream.harness.runs.outcome import is_trained

    run = progress.run_id
    at = f"at version {progress.version}" if progress.version >= 0 else "before its first version"
    if not is_trained(progress):
        return f"run {run} stopped {at}: nothing was trained"
    if progress.is_of_shared_model_group:
        return f"run {run} stopped {at}; its open jobs are cancelled, and its shared model group takes no further ones"
    saves = f"`rollstream finetune --config_file FILE --resume {run}`"
    saver = "the finetune process that conducts it saves the model"
    return f"run {run} stopped {at}; {saver}; if none is running, use {saves}"


@click.command()
@BOOTSTRAP_SERVERS
@WORKSPACE
def runs(bootstrap_servers: str | None, workspace: Path) -> None:
    """List runs: state, jobs, versions, mean reward of the last epoch."""
    from rollstream.harness.runs.follower import read_runs
    from rollstream.harness.upkeep.run_tables import runs_table

    async def table(log: "EventLog", unreadable: Counter[str]) -> str:
        return runs_table(await read_runs(log, unreadable, skipped=("batch_planned",)))

    print_runs(workspace, bootstrap_servers, table)


_OF_NEWER = "if a newer rollstream wrote them, use that version to see their runs and jobs"


def print_runs(
    workspace: Path, bootstrap_servers: str | None, report: "Callable[[EventLog, Counter[str]], Awaitable[str]]"
) -> None:
    """Show the report about runs of the log, before others are waited for that use the broker.

    `report` counts records that it cannot read by topic. What the log has lost is written after it. Raises
    TruncatedError if it was longer before.
    """
    from rollstream.harness.services.lost_records import check_ends, removed
    from rollstream.harness.services.workspace import Workspace, on_log

    async def show(log: "EventLog") -> None:
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


def _log_to(handlers: Iterable[logging.Handler], level: int) -> None:
    logging.captureWarnings(True)
    logging.basicConfig(level=level, handlers=handlers, force=True)
    conceal_logs()
