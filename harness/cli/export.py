"""Commands `export` and `rebuild`."""

import asyncio
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rollstream.harness.cli.shared_options import BOOTSTRAP_SERVERS, RUN, WORKSPACE
from rollstream.harness.services.live_line import LiveLine
from rollstream.schemas.errors import TruncatedError

if TYPE_CHECKING:
    from rollstream.replay.source import RunEvents


def _not_nan(_context: click.Context, _parameter: click.Parameter, value: float | None) -> float | None:
    if value is not None and math.isnan(value):
        raise click.BadParameter("no reward can be compared with nan; give a number")
    return value


@click.command()
@RUN
@click.option(
    "--output",
    "-o",
    type=click.Path(path_type=Path),
    help="A folder, or with --format a file, that does not exist (default: RUN-export, RUN-FORMAT.jsonl).",
)
@click.option(
    "--weights", is_flag=True, help="Keep every published weight version, not only those that jobs start from."
)
@click.option("--partial", is_flag=True, help="Export what is left of a run whose records were partly removed.")
@click.option(
    "--format",
    "format",
    type=click.Choice(["trl-sft", "trl-dpo", "trl-kto", "openai-chat", "atif"]),
    help="Write the rollouts as JSON Lines for other programs instead.",
)
@click.option(
    "--from",
    "source",
    type=click.Path(path_type=Path, file_okay=False),
    help="Read an export instead of the topics (with --format).",
)
@click.option(
    "--min_reward",
    type=float,
    callback=_not_nan,
    help="Smallest reward of what is to be learned (with --format).",
)
@click.option("--best", is_flag=True, help="Take only the best rollout of each group (trl-sft, openai-chat, atif).")
@click.option("--agent", help="Take only this agent's trajectories (with --format).")
@click.option("--validation", is_flag=True, help="Take rollouts of validations instead of training (with --format).")
@BOOTSTRAP_SERVERS
@WORKSPACE
def export(run: str, output: Path | None, bootstrap_servers: str | None, workspace: Path, **options: Any) -> None:
    """Export a run as Parquet files with a manifest of hashes.

    Its artifacts are kept beside them; `replay --export` reads it. With --format: training data for other programs.
    """
    if options["format"] is None:
        _check_unused(options, ("source", "min_reward", "best", "agent", "validation"), "needs --format")
        _export_archive(run, output or Path(f"{run}-export"), bootstrap_servers, workspace, **options)
    else:
        _check_unused(options, ("weights", "partial"), "is for exports without --format")
        if options["format"] in ("trl-dpo", "trl-kto"):
            _check_unused(options, ("best",), "is for trl-sft, openai-chat and atif")
        path = output or Path(f"{run}-{options['format']}.jsonl")
        _export_rows(run, path, bootstrap_servers, workspace, **options)


def _check_unused(options: Mapping[str, Any], names: Sequence[str], reason: str) -> None:
    for name in names:
        if options[name] is not None and options[name] is not False:
            raise click.UsageError(f"--{'from' if name == 'source' else name} {reason}")


def _export_rows(run: str, path: Path, bootstrap_servers: str | None, workspace: Path, **options: Any) -> None:
    from rollstream.eventlog.log import EventLog
    from rollstream.harness.datasets.training_rows import RowOptions, Tally
    from rollstream.harness.datasets.writing import FORMATS, check_new_file, write_rows
    from rollstream.harness.services.workspace import Workspace, on_log
    from rollstream.replay.source import Source, check_export

    line, source = _progress_line(), options["source"]
    check_new_file(path)
    choice = RowOptions(options["min_reward"], options["best"])

    async def write(log: EventLog) -> Tally:
        try:
            return await write_rows(
                log,
                run,
                path,
                FORMATS[options["format"]],
                choice,
                purpose="validation" if options["validation"] else "train",
                agent=options["agent"],
                report=lambda done, total: line.show_when_due(f"groups: {done} of {total}"),
            )
        finally:
            line.clear()

    async def write_exported() -> Tally:
        async with Source(export=source).open() as (log, _):
            return await write(log)

    if source is None:
        tally = on_log(Workspace(workspace), bootstrap_servers, "rollstream-export", write)
    else:
        check_export(source, run)
        tally = asyncio.run(write_exported())
    click.echo(f"run {run}: {tally.num_rows} rows in {path}")
    for what, count in sorted(tally.left_out.items()):
        if count:
            click.echo(f"left out: {count} {what}", err=True)


def _export_archive(
    run: str, folder: Path, bootstrap_servers: str | None, workspace: Path, *, weights: bool, partial: bool, **_: Any
) -> None:
    from rollstream.eventlog.artifacts import ArtifactStore
    from rollstream.eventlog.log import EventLog
    from rollstream.harness.services.lost_records import check_ends
    from rollstream.harness.services.workspace import Workspace, on_log
    from rollstream.replay.archive.export import check_new, export_run
    from rollstream.replay.archive.manifest import ExportManifest
    from rollstream.replay.source import read_run

    layout, line = Workspace(workspace), _progress_line()
    check_new(folder)

    async def write(log: EventLog) -> ExportManifest:
        try:
            if not partial:
                with _partial_proposed():
                    await check_ends(log, workspace, lambda line: click.echo(line, err=True))
            events = await read_run(log, run, for_checks=True)
            if not partial:
                _check_whole(events)
            del events  # those of a long run take more memory than the export itself
            with nullcontext() if partial else _partial_proposed():
                return await export_run(
                    log,
                    run,
                    folder,
                    artifacts=ArtifactStore(layout.artifact_uri()),
                    with_weights=weights,
                    is_partial=partial,
                    report=lambda what, done, total: line.show_when_due(f"{what}: {done} of {total}"),
                )
        finally:
            line.clear()

    manifest = on_log(layout, bootstrap_servers, "rollstream-export", write)
    num_records = sum(topic.num_records for topic in manifest.topics.values())
    missing = [artifact for artifact in manifest.artifacts if artifact.file is None]
    gone = [f"{one.what} ({one.missing})" if one.missing else one.what for one in missing]
    kept = len(manifest.artifacts) - len(gone)
    click.echo(f"run {run}: {num_records} records and {kept} artifacts in {folder}")
    if gone:
        click.echo(
            f"{len(gone)} artifacts had already been removed: {gone[0]}{' ...' if len(gone) > 1 else ''}", err=True
        )


@click.command()
@click.option(
    "--from", "source", type=click.Path(path_type=Path, file_okay=False), help="Read an export instead of the topics."
)
@click.option("--output", "-o", type=click.Path(path_type=Path), help="File to write (default: the workspace's own).")
@click.option("--partial", is_flag=True, help="Project what is left of a log whose records were partly removed.")
@BOOTSTRAP_SERVERS
@WORKSPACE
def rebuild(
    source: Path | None, output: Path | None, partial: bool, bootstrap_servers: str | None, workspace: Path
) -> None:
    """Rebuild the metrics file from the topics or an export.

    From an export, only the rows of its run are rebuilt.
    """
    from rollstream.eventlog.kafka.log import KafkaLog
    from rollstream.harness.services.lost_records import check_ends
    from rollstream.harness.services.workspace import Workspace, broker_of
    from rollstream.metrics.rebuild import held
    from rollstream.metrics.rebuild import rebuild as make_again
    from rollstream.replay.archive.log import ExportLog, rebuild_exported
    from rollstream.replay.whole import check_runs

    layout, line = Workspace(workspace), _progress_line()
    path = _own_file(source, layout.folder) if output is None else output
    with held(path):
        pass  # report this before a broker is started

    def show(rows: int) -> None:
        line.show_when_due(f"{rows} rows")

    async def make(log: KafkaLog | ExportLog) -> None:
        async with log:
            if source is None and not partial:
                await check_ends(log, workspace, lambda line: click.echo(line, err=True))
            try:
                if source is None and not partial:
                    for not_ended in await check_runs(log):
                        click.echo(not_ended, err=True)
                if isinstance(log, ExportLog):
                    await rebuild_exported(log, path, report=show)
                else:
                    await make_again(log, path, is_partial=partial, report=show)
            except TruncatedError as error:
                if source is not None or partial:  # where --partial changes nothing
                    raise
                raise TruncatedError(f"{error}; --partial projects what is left") from error

    try:
        if source is not None:
            asyncio.run(make(ExportLog(source)))
        else:
            with broker_of(layout, bootstrap_servers) as kafka:
                asyncio.run(make(KafkaLog(kafka, client_id="rollstream-rebuild")))
    finally:
        line.clear()
    click.echo(str(path))


def _own_file(source: Path | None, workspace: Path) -> Path:
    """The metrics file of a workspace, to be made again from an export or its own log.

    Raises MetricsFileError if the file or the log is of another cluster than the export, for then the next run would
    have no metrics.
    """
    from rollstream.eventlog.kafka.topic_ids import clusters_of
    from rollstream.metrics.projection.database import MetricsFileError, metrics_file
    from rollstream.metrics.rebuild import check_file
    from rollstream.replay.archive.manifest import read_manifest

    path = metrics_file(workspace)
    if source is None:
        return path
    cluster_id, used = read_manifest(source).cluster_id, clusters_of(workspace)
    if used and cluster_id not in used:
        raise MetricsFileError(
            f"{path} is for the log of this workspace, which is of cluster {', '.join(sorted(used))}, and the export "
            f"{source} is of {cluster_id}; give another file with --output, or another --workspace"
        )
    if path.exists():
        try:
            check_file(path, cluster_id)
        except MetricsFileError as error:
            raise MetricsFileError(f"{error}, or give another file with --output") from error
    return path


def _check_whole(events: "RunEvents") -> None:
    """Say whether the run has not ended. Raises TruncatedError if its events are incomplete."""
    from rollstream.replay.completeness import check_whole, unended

    if reason := unended(events):
        click.echo(reason, err=True)
    with _partial_proposed():
        check_whole(events)


@contextmanager
def _partial_proposed() -> Iterator[None]:
    """Add to a TruncatedError that --partial goes on without what is missing."""
    try:
        yield
    except TruncatedError as error:
        raise TruncatedError(f"{error}; --partial exports what is left") from error


def _progress_line() -> LiveLine:
    """Progress on stderr, starting after the first interval, so that short commands print none."""
    line = LiveLine(sys.stderr)
    line.wait()
    return line
