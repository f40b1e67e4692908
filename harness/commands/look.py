"""Commands `status`, `sql`, `plot` and `tiny-model`."""

import asyncio
import sys
from pathlib import Path

import click

from rollstream.harness.commands.serve import BOOTSTRAP_SERVERS, WORKSPACE
from rollstream.schemas.errors import QueryError


@click.command()
@BOOTSTRAP_SERVERS
@WORKSPACE
def status(bootstrap_servers: str | None, workspace: Path) -> None:
    """Show services, lag by topic and newest version by engine."""
    from rollstream.harness.status import read_status
    from rollstream.harness.workspace import Workspace, broker_of

    place = Workspace(workspace)
    with broker_of(place, bootstrap_servers) as address:
        click.echo(asyncio.run(read_status(place, address)))


@click.command()
@click.argument("query")
@click.option("--format", "form", type=click.Choice(["table", "json", "csv", "parquet"]), default="table")
@click.option("--output", type=click.Path(path_type=Path), help="Write to a file (needed for parquet).")
@WORKSPACE
def sql(query: str, form: str, output: Path | None, workspace: Path) -> None:
    """Ask the metrics by SQL (reading only), while a run is going or after it."""
    if form == "parquet" and output is None:
        raise QueryError("--format parquet needs --output FILE")
    from rollstream.metrics.client import query as ask
    from rollstream.metrics.formats import FORMATS

    result = ask(workspace, query)
    told = FORMATS[form](result)
    if result.is_cut:
        click.echo(f"cut after {len(result.rows)} rows: add LIMIT, or aggregate", err=True)
    if output is not None:
        output.write_bytes(told if isinstance(told, bytes) else told.encode())
        return
    sys.stdout.write(told if isinstance(told, str) else told.decode())


@click.command()
@click.argument("run")
@click.option("--output", "-o", type=click.Path(path_type=Path), help="PNG file (default: RUN.png).")
@WORKSPACE
def plot(run: str, output: Path | None, workspace: Path) -> None:
    """Draw a run's reward with its spread, and the curriculum's percentile."""
    from rollstream.metrics.plot import plot_run

    path = output or Path(f"{run}.png")
    plot_run(workspace, run, path)
    click.echo(str(path))


@click.command("tiny-model")
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--seed", type=int, default=0)
def tiny_model(folder: Path, seed: int) -> None:
    """Make a tiny model and tokenizer in place, for trying things out."""
    from rollstream.harness.tiny_model import make_tiny_model

    click.echo(str(make_tiny_model(folder, seed=seed)))
