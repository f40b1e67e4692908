"""Commands `finetune`, `validate`, `stop` and `runs`."""

from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rollstream.harness.cli.shared_options import BOOTSTRAP_SERVERS, OVERRIDE, RUN, TRUST, WORKSPACE
from rollstream.harness.cli.terminal import log_to_terminal, print_runs, train
from rollstream.schemas.errors import ConfigError

if TYPE_CHECKING:
    from pydantic import JsonValue

    from rollstream.eventlog.log import EventLog, ReadableLog


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

    log_to_terminal()
    result, shown = _result_and_options(result_json_path, options)
    found = check(config_file, workspace, override, shown, result)
    click.echo(f"{config_file} is valid")
    for heading, value in found.items():
        click.echo(f"{heading:<12} {value}")


@click.command()
@RUN
@BOOTSTRAP_SERVERS
@WORKSPACE
def stop(run: str, bootstrap_servers: str | None, workspace: Path) -> None:
    """Stop a run gracefully.

    The finetune process that conducts it saves the newest model and exits. A run that a shared model group began has no
    such process: its open jobs are cancelled, and its versions stay.
    """
    from rollstream.harness.services.workspace import Workspace, on_log
    from rollstream.harness.upkeep.run_control import stop_run

    async def write(log: "EventLog") -> None:
        click.echo(await stop_run(log, run))

    on_log(Workspace(workspace), bootstrap_servers, "rollstream-stop", write)


@click.command()
@BOOTSTRAP_SERVERS
@WORKSPACE
def runs(bootstrap_servers: str | None, workspace: Path) -> None:
    """List runs: state, jobs, versions, mean reward of the last epoch."""
    from rollstream.harness.runs.follower import read_runs
    from rollstream.harness.upkeep.run_tables import OF_RUNS, runs_table

    async def table(log: "ReadableLog", unreadable: Counter[str]) -> str:
        return runs_table(await read_runs(log, unreadable, needed=OF_RUNS))

    print_runs(workspace, bootstrap_servers, table)
