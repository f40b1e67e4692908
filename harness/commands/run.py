"""Commands `finetune`, `stop`, `runs` and `jobs`."""

import asyncio
import logging
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rollstream.harness.commands.serve import BOOTSTRAP_SERVERS, WORKSPACE
from rollstream.schemas.errors import ConfigError, RunFailedError

if TYPE_CHECKING:
    from rollstream.harness.finetune import Request
    from rollstream.harness.progress import Progress


@click.command()
@click.option(
    "--config_file", "--config-file", type=click.Path(path_type=Path), required=True, help="The run's YAML file."
)
@click.option("--dataset", type=click.Path(path_type=Path), help="Examples, in place of the file's dataset.")
@click.option(
    "--result_json_path",
    metavar="FILE|JSONPATH",
    help="Write the outcome to this file as JSON; what begins with $ says where an endpoint's answer stands.",
)
@click.option("--endpoint", metavar="URL", help="Base URL of a running workflow that plays the rollouts.")
@click.option("--endpoint_timeout", type=click.IntRange(min=1), help="Seconds that one answer of it may take (300).")
@click.option("--override", "-o", type=(str, str), multiple=True, metavar="KEY VALUE", help="Set a key by dotted path.")
@click.option("--resume", metavar="RUN", help="Go on with a run that has not ended.")
@click.option("--name", help="Beginning of the run's id (default: the file's name).")
@click.option("--run_id", "--run-id", help="The run's whole id, in place of a name and six digits; seeds depend on it.")
@click.option("--validation_dataset", type=click.Path(path_type=Path), help="Examples to validate by.")
@click.option("--validation_interval", type=click.IntRange(min=1), help="Epochs from one validation to the next (5).")
@click.option("--validation_config_file", type=click.Path(path_type=Path), help="A YAML file to validate by.")
@click.option("--fork", metavar="RUN@VERSION", help="Begin a new run from a version of another one.")
@WORKSPACE
def finetune(
    config_file: Path,
    result_json_path: str | None,
    override: tuple[tuple[str, str], ...],
    resume: str | None,
    name: str | None,
    run_id: str | None,
    fork: str | None,
    workspace: Path,
    **options: Path | str | int | None,
) -> None:
    """Train by a configuration file, or go on with a run."""
    from rollstream.harness.finetune import Request
    from rollstream.harness.fork import parse_fork

    is_json_path = result_json_path is not None and result_json_path.startswith("$")
    result = None if result_json_path is None or is_json_path else Path(result_json_path)
    told = {key: str(value) if isinstance(value, Path) else value for key, value in options.items()}
    told["result_json_path"] = result_json_path if is_json_path else None
    if fork is not None and resume is not None:
        raise ConfigError("--fork begins a new run and --resume goes on with one: give one of them")
    if run_id is not None and (resume is not None or name is not None):
        raise ConfigError("--run_id is the whole id of a new run: give it without --name and --resume")
    parent = None if fork is None else parse_fork(fork)
    train(Request(config_file, workspace, override, told, resume, name, result, parent, run_id))


def train(request: "Request") -> None:
    """Run what was asked for, with progress on the terminal. Raises RunFailedError if the run failed."""
    from rollstream.harness.display import Display
    from rollstream.harness.finetune import Interrupted
    from rollstream.harness.finetune import finetune as run_finetune

    _configure_logging(request.workspace)
    display = Display()
    try:
        outcome = run_finetune(request, display)
    except Interrupted as interrupted:
        display.say("interrupted; the run stays open: rollstream runs; rollstream finetune --resume RUN ... goes on")
        sys.exit(interrupted.exit_code)
    if outcome.exit_code:
        raise RunFailedError(f"run {outcome.run_id} {outcome.status}: {outcome.message}")


@click.command()
@click.argument("run")
@BOOTSTRAP_SERVERS
@WORKSPACE
def stop(run: str, bootstrap_servers: str | None, workspace: Path) -> None:
    """End a run in order; a finetune that conducts it saves its newest model and ends."""
    from rollstream.eventlog.kafka_log import KafkaLog
    from rollstream.harness.plan import look_up
    from rollstream.harness.workspace import Workspace, broker_of
    from rollstream.schemas.events import RunEnded

    async def write(address: str) -> str:
        log = KafkaLog(address, client_id="rollstream-stop")
        try:
            await log.start()
            progress = await look_up(log, run)
            if progress.ended is not None:
                return f"run {run} was over already ({progress.ended.cause})"
            await log.send(RunEnded(run_id=run, time_ms=time.time_ns() // 1_000_000, cause="stopped"))
            return f"run {run} stopped at version {progress.version}"
        finally:
            await log.close()

    with broker_of(Workspace(workspace), bootstrap_servers) as address:
        click.echo(asyncio.run(write(address)))


@click.command()
@BOOTSTRAP_SERVERS
@WORKSPACE
def runs(bootstrap_servers: str | None, workspace: Path) -> None:
    """List the runs of the log: state, jobs, versions, reward."""
    from rollstream.harness.tables import runs_table

    _tell_of_runs(workspace, bootstrap_servers, runs_table)


@click.command()
@click.argument("run", required=False)
@BOOTSTRAP_SERVERS
@WORKSPACE
def jobs(run: str | None, bootstrap_servers: str | None, workspace: Path) -> None:
    """List the training jobs of the log, or of one run: state, versions, what they began from."""
    from rollstream.harness.tables import jobs_table

    def told(found: "list[Progress]") -> str:
        chosen = [progress for progress in found if run in (None, progress.run_id)]
        if run is not None and not chosen:
            raise ConfigError(f"no run is called {run}; `rollstream runs` lists them")
        return jobs_table(chosen)

    _tell_of_runs(workspace, bootstrap_servers, told)


def _tell_of_runs(workspace: Path, bootstrap_servers: str | None, told: "Callable[[list[Progress]], str]") -> None:
    """Read the log and show what `told` makes of its runs, before others are waited for that use the broker."""
    from rollstream.eventlog.kafka_log import KafkaLog
    from rollstream.harness.runs import read_runs
    from rollstream.harness.workspace import Workspace, broker_of

    async def read(address: str) -> "list[Progress]":
        log = KafkaLog(address, client_id="rollstream-runs")
        try:
            await log.start()
            return await read_runs(log)
        finally:
            await log.close()

    with broker_of(Workspace(workspace), bootstrap_servers) as address:
        click.echo(told(asyncio.run(read(address))))


def _configure_logging(workspace: Path) -> None:
    """Everything into the workspace's log file, warnings on the terminal too."""
    from rollstream.harness.workspace import Workspace

    place = Workspace(workspace)
    place.create()
    to_file = logging.FileHandler(place.logs / "finetune.log", encoding="utf-8")
    to_file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    to_terminal = logging.StreamHandler(sys.stderr)
    to_terminal.setLevel(logging.WARNING)
    to_terminal.setFormatter(logging.Formatter("\r%(levelname)s: %(message)s"))
    to_terminal.addFilter(lambda record: record.name.startswith("rollstream"))  # what libraries say stands in the file
    logging.captureWarnings(True)
    logging.basicConfig(level=logging.INFO, handlers=[to_file, to_terminal], force=True)
    logging.getLogger("aiokafka").setLevel(logging.WARNING)
