"""Commands `export` and `rebuild`."""

import asyncio
import sys
import time
from pathlib import Path

import click

from rollstream.harness.commands.serve import BOOTSTRAP_SERVERS, WORKSPACE

LIVE_INTERVAL_S = 0.2
PLAIN_INTERVAL_S = 10.0
CLEAR = "\r\x1b[2K"


@click.command()
@click.argument("run")
@click.option(
    "--output",
    "-o",
    type=click.Path(path_type=Path),
    help="A folder that does not exist (default: RUN-export).",
)
@click.option("--weights", is_flag=True, help="Keep every published weight version, not only where jobs start from.")
@BOOTSTRAP_SERVERS
@WORKSPACE
def export(run: str, output: Path | None, weights: bool, bootstrap_servers: str | None, workspace: Path) -> None:
    """Keep a run as Parquet files (zstd), its artifacts and a manifest of hashes; `replay --export` reads it."""
    from rollstream.eventlog.artifacts import ArtifactStore
    from rollstream.eventlog.kafka_log import KafkaLog
    from rollstream.harness.workspace import Workspace, broker_of
    from rollstream.metrics.export import check_new, export_run
    from rollstream.metrics.export_manifest import Manifest

    place, line = Workspace(workspace), _Line()
    folder = output or Path(f"{run}-export")
    check_new(folder)

    async def write(address: str) -> Manifest:
        log = KafkaLog(address, client_id="rollstream-export")
        try:
            await log.start()
            return await export_run(
                log,
                run,
                folder,
                artifacts=ArtifactStore(str(place.folder / "artifacts")),
                with_weights=weights,
                report=lambda what, done, total: line.show(f"{what}: {done} of {total}"),
            )
        finally:
            await log.close()
            line.end()

    with broker_of(place, bootstrap_servers) as address:
        manifest = asyncio.run(write(address))
    num_records = sum(topic.num_records for topic in manifest.topics.values())
    gone = [artifact.what for artifact in manifest.artifacts if artifact.file is None]
    kept = len(manifest.artifacts) - len(gone)
    click.echo(f"run {run}: {num_records} records and {kept} artifacts in {folder}")
    if gone:
        click.echo(f"{len(gone)} artifacts were gone already: {gone[0]}{' ...' if len(gone) > 1 else ''}", err=True)


@click.command()
@click.option(
    "--from", "source", type=click.Path(path_type=Path, file_okay=False), help="An export to read, not the topics."
)
@click.option("--output", "-o", type=click.Path(path_type=Path), help="File to make (default: the workspace's own).")
@BOOTSTRAP_SERVERS
@WORKSPACE
def rebuild(source: Path | None, output: Path | None, bootstrap_servers: str | None, workspace: Path) -> None:
    """Make the metrics file again from the topics, or from an export with the rows of its run."""
    from rollstream.eventlog.kafka_log import KafkaLog
    from rollstream.eventlog.log import EventLog
    from rollstream.harness.workspace import Workspace, broker_of
    from rollstream.metrics.database import metrics_file
    from rollstream.metrics.export_log import ExportLog
    from rollstream.metrics.rebuild import held
    from rollstream.metrics.rebuild import rebuild as make_again

    place, line = Workspace(workspace), _Line()
    path = output or metrics_file(place.folder)
    with held(path):
        pass  # said before a broker is started for it

    async def make(log: EventLog) -> None:
        try:
            await log.start()
            await make_again(log, path, report=lambda rows: line.show(f"{rows} rows"))
        finally:
            await log.close()
            line.end()

    if source is not None:
        asyncio.run(make(ExportLog(source)))
    else:
        with broker_of(place, bootstrap_servers) as address:
            asyncio.run(make(KafkaLog(address, client_id="rollstream-rebuild")))
    click.echo(str(path))


class _Line:
    """Progress on stderr: one live line on a terminal, a plain line every ten seconds elsewhere."""

    def __init__(self) -> None:
        self._is_live = sys.stderr.isatty()
        self._interval_s = LIVE_INTERVAL_S if self._is_live else PLAIN_INTERVAL_S
        self._next_at = time.monotonic() + self._interval_s
        self._is_open = False

    def show(self, text: str) -> None:
        """Show how far it is, if it is time to."""
        if time.monotonic() < self._next_at:
            return
        self._next_at = time.monotonic() + self._interval_s
        self._is_open = self._is_live
        click.echo(f"{CLEAR if self._is_live else ''}{text}", err=True, nl=not self._is_live)

    def end(self) -> None:
        """Take the live line away."""
        if self._is_open:
            click.echo(CLEAR, err=True, nl=False)
