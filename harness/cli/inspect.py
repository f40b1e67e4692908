"""Commands `status`, `sql`, `plot`, `track`, `schema` and `tiny-model`."""

import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rollstream.eventlog.disk_space import writing
from rollstream.harness.cli.shared_options import BOOTSTRAP_SERVERS, RUN, WORKSPACE
from rollstream.harness.services.outputs import write_output
from rollstream.schemas.errors import ConfigError, QueryError
from rollstream.schemas.topics import PREFIX

if TYPE_CHECKING:
    from rollstream.schemas.trackers import TrackerSettings


@click.command()
@BOOTSTRAP_SERVERS
@WORKSPACE
def status(bootstrap_servers: str | None, workspace: Path) -> None:
    """Show services, lag by topic and newest version by engine."""
    from rollstream.harness.services.workspace import Workspace, broker_of
    from rollstream.harness.upkeep.status import read_status

    layout = Workspace(workspace)
    with broker_of(layout, bootstrap_servers) as kafka:
        click.echo(asyncio.run(read_status(layout, kafka)))


NO_WAIT = click.option(
    "--no-wait",
    is_flag=True,
    help="Use what the metrics have, even if they have not read the whole log yet or the broker does not answer.",
)


@click.command()
@click.argument("query")
@click.option(
    "--format",
    "form",
    type=click.Choice(["table", "json", "csv", "parquet"]),
    default="table",
    show_default=True,
    help="Format of the result.",
)
@click.option("--output", type=click.Path(path_type=Path), help="Write to a file (needed for parquet).")
@click.option(
    "--limit", type=click.IntRange(1, 1_000_000), default=10_000, show_default=True, help="Maximum number of rows."
)
@NO_WAIT
@WORKSPACE
def sql(query: str, form: str, output: Path | None, limit: int, no_wait: bool, workspace: Path) -> None:
    """Query the metrics with read-only SQL, during or after a run."""
    if form == "parquet" and output is None:
        raise QueryError("--format parquet needs --output FILE")
    from rollstream.metrics.sql.client import query as ask
    from rollstream.metrics.sql.formats import FORMATS

    result = ask(workspace, query, fresh=not no_wait, limit=limit)
    text = FORMATS[form](result)
    if result.is_cut:
        click.echo(f"result truncated to {len(result.rows)} rows; raise --limit, or aggregate", err=True)
    if output is not None:
        with writing(output):
            write_output(output, text)
        return
    sys.stdout.write(text if isinstance(text, str) else text.decode())


@click.command()
@RUN
@click.option(
    "--output", "-o", type=click.Path(path_type=Path), help="Image file, such as x.png or x.pdf (default: RUN.png)."
)
@NO_WAIT
@WORKSPACE
def plot(run: str, output: Path | None, no_wait: bool, workspace: Path) -> None:
    """Plot a run's reward and the curriculum's percentile."""
    from rollstream.metrics.plot import plot_run

    path = output or Path(f"{run}.png")
    with writing(path):
        plot_run(workspace, run, path, fresh=not no_wait)
    click.echo(str(path))


@click.command()
@RUN
@click.option("--to", "kind", required=True, help="tensorboard, wandb, or python:module.Name.")
@click.option(
    "-o",
    "options",
    type=(str, str),
    multiple=True,
    metavar="KEY VALUE",
    help="A key of the tracker's block in a run's file: `-o log_dir boards`, `-o project agents`. Repeatable.",
)
@click.option("--again", is_flag=True, help="Send all points of the run, whatever the tracker has.")
@WORKSPACE
def track(run: str, kind: str, options: tuple[tuple[str, str], ...], again: bool, workspace: Path) -> None:
    """Send a run's metrics to an experiment tracker.

    Sends what the tracker does not have yet and exits; during a run, the trackers in its file do this continuously.
    The same kind and keys are the same tracker, so that nothing is sent twice.
    """
    from rollstream.metrics.sql.client import check_run
    from rollstream.metrics.trackers.service import Tracking

    settings = _tracker_settings(kind, options)
    check_run(workspace, run)
    tracking = Tracking(settings, workspace, (run,))
    try:
        if again:
            tracking.forget()
        tracking.catch_up(to_the_end=True)
    finally:
        tracking.close()
    click.echo(f"{tracking.num_points} points of {run} sent to {kind}")


def _tracker_settings(kind: str, options: tuple[tuple[str, str], ...]) -> "TrackerSettings":
    """The tracker's settings. Raises ConfigError for an unknown kind or key."""
    from pydantic import ValidationError

    from rollstream.harness.config.yaml import apply_overrides
    from rollstream.schemas.base import check_no_truth_values
    from rollstream.schemas.errors import first_invalid
    from rollstream.schemas.trackers import UNKNOWN, settings_class

    found = settings_class(kind)
    if found is None:
        raise ConfigError(f"track --to {kind}: {UNKNOWN}")
    written: dict[str, Any] = {"kind": kind}
    apply_overrides(written, options)
    try:
        settings = found.model_validate(written)
        check_no_truth_values(written, settings)
    except ConfigError as error:
        raise ConfigError(f"track -o {error}") from error
    except ValidationError as error:
        key, message = first_invalid(error, model=found)
        raise ConfigError(f"track -o {key}: {message[:1].lower()}{message[1:]}") from error
    return settings


@click.command()
@click.option(
    "--topic_prefix",
    envvar="ROLLSTREAM_KAFKA_TOPIC_PREFIX",
    default=PREFIX,
    show_default=True,
    show_envvar=True,
    help="Beginning of the topics' names.",
)
def schema(topic_prefix: str) -> None:
    """Print the topics and the JSON schema of every event as an AsyncAPI document."""
    import orjson

    from rollstream.eventlog.kafka.asyncapi import asyncapi_document

    click.echo(orjson.dumps(asyncapi_document(topic_prefix), option=orjson.OPT_INDENT_2).decode())


@click.command("tiny-model")
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the weights.")
@click.option(
    "--hidden-size",
    type=click.IntRange(min=8),
    default=64,
    show_default=True,
    help="A multiple of 8; there are four heads, and vLLM on the CPU needs heads of 32 dimensions (128).",
)
@click.option(
    "--untied",
    is_flag=True,
    help="Give the head weights of its own; vLLM on the CPU needs them to serve new versions of all weights.",
)
def tiny_model(folder: Path, seed: int, hidden_size: int, untied: bool) -> None:
    """Create a tiny model and tokenizer for trying things out."""
    from rollstream.learner.tiny_model import make_tiny_model

    if hidden_size % 8:
        raise ConfigError(f"tiny-model --hidden-size: {hidden_size} is not a multiple of 8; take 64, or 128 for vLLM")
    with writing(folder):
        made = make_tiny_model(folder, seed=seed, hidden_size=hidden_size, is_tied=not untied)
    click.echo(str(made))
