"""Command `track`."""

from pathlib import Path
from typing import Any

import click

from rollstream.harness.cli.serve import WORKSPACE
from rollstream.schemas.errors import ConfigError


@click.command()
@click.argument("run")
@click.option("--to", "kind", required=True, help="tensorboard, wandb, or python:module.Name.")
@click.option(
    "-o",
    "options",
    type=(str, str),
    multiple=True,
    metavar="KEY VALUE",
    help="A key of the tracker's block in a run's file: `-o log_dir boards`, `-o project agents`. Repeatable.",
)
@WORKSPACE
def track(run: str, kind: str, options: tuple[tuple[str, str], ...], workspace: Path) -> None:
    """Send a run's metrics to an experiment tracker.

    Sends what the tracker does not have yet and exits; during the run, the `trackers` of its file do so all the time.
    The same kind and keys are the same tracker, so that nothing is sent twice.
    """
    from rollstream.metrics.sql.client import check_run
    from rollstream.metrics.trackers.service import Following

    settings = _settings(kind, options)
    check_run(workspace, run)
    following = Following(settings, workspace, (run,))
    try:
        following.catch_up(fresh=True)
    finally:
        following.close()
    click.echo(f"{following.num_points} points of {run} sent to {kind}")


def _settings(kind: str, options: tuple[tuple[str, str], ...]) -> Any:
    """The tracker's settings. Raises ConfigError for an unknown kind or key."""
    from pydantic import TypeAdapter, ValidationError

    from rollstream.harness.config.yaml import apply_overrides
    from rollstream.schemas.errors import first_invalid
    from rollstream.schemas.trackers import Tracker

    written: dict[str, Any] = {"kind": kind}
    apply_overrides(written, options)
    try:
        return TypeAdapter[Any](Tracker).validate_python(written)
    except ValidationError as error:
        key, message = first_invalid(error)
        raise ConfigError(f"track: {key or 'kind'}: {message[:1].lower()}{message[1:]}") from error
