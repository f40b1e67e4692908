"""Commands `export` and `rebuild`."""

import asyncio
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from rollstream.harness.cli.shared_options import BOOTSTRAP_SERVERS, RUN, WORKSPACE
from rollstream.harness.services.live_line import LiveLine


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
    from rollstream.eventlog.log import ReadableLog
    from rollstream.harness.datasets.training_rows import RowOptions, Tally
    from rollstream.harness.datasets.writing import FORMATS, check_new_file, write_rows
    from rollstream.harness.services.workspace import Workspace, on_log
    from rollstream.replay.source import Source, check_export

    line, source = _progress_line(), options["source"]
    check_new_file(path)
    choice = RowOptions(options["min_reward"], options["best"])

    async def write(log: ReadableLog) -> Tally:
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
    from rollstream.eventlog.log import ReadableLog
    from rollstream.harness.services.workspace import Workspace, on_log
    from rollstream.harness.upkeep.exporting import export_archive
    from rollstream.replay.archive.export import check_new
    from rollstream.replay.archive.manifest import ExportManifest

    layout, line = Workspace(workspace), _progress_line()
    check_new(folder)

    async def write(log: ReadableLog) -> ExportManifest:
        try:
            return await export_archive(
                log,
                run,
                folder,
                workspace=workspace,
                artifacts=ArtifactStore(layout.artifact_uri()),
                with_weights=weights,
                is_partial=partial,
                warn=_warn,
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
    from rollstream.harness.services.workspace import Workspace, broker_of
    from rollstream.harness.upkeep.exporting import own_metrics_file, rebuild_exported_metrics, rebuild_metrics
    from rollstream.metrics.rebuild import held
    from rollstream.replay.archive.log import ExportLog

    layout, line = Workspace(workspace), _progress_line()
    path = own_metrics_file(source, layout.folder) if output is None else output
    with held(path):
        pass  # report this before a broker is started

    def show(rows: int) -> None:
        line.show_when_due(f"{rows} rows")

    try:
        if source is not None:
            asyncio.run(rebuild_exported_metrics(ExportLog(source), path, report=show))
        else:
            with broker_of(layout, bootstrap_servers) as kafka:
                log = KafkaLog(kafka, client_id="rollstream-rebuild")
                asyncio.run(
                    rebuild_metrics(log, path, workspace=workspace, is_partial=partial, warn=_warn, report=show)
                )
    finally:
        line.clear()
    click.echo(str(path))


def _progress_line() -> LiveLine:
    """Progress on stderr, starting after the first interval, so that short commands print none."""
    line = LiveLine(sys.stderr)
    line.wait()
    return line


def _warn(text: str) -> None:
    click.echo(text, err=True)
