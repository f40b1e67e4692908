"""Exports of runs and metrics files made again, once nothing that they need is missing; without `--partial`, lost
records are errors.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from rollstream.eventlog.artifacts import ArtifactStore
from rollstream.eventlog.kafka.log import KafkaLog
from rollstream.eventlog.kafka.topic_ids import clusters_of
from rollstream.eventlog.log import ReadableLog
from rollstream.harness.services.lost_records import check_ends
from rollstream.metrics.projection.connection import MetricsFileError, metrics_file
from rollstream.metrics.rebuild import check_replaceable
from rollstream.metrics.rebuild import rebuild as make_again
from rollstream.replay.archive.export import export_run
from rollstream.replay.archive.log import ExportLog, rebuild_exported
from rollstream.replay.archive.manifest import ExportManifest, read_manifest
from rollstream.replay.completeness import check_whole, unended
from rollstream.replay.source import RunEvents, read_run
from rollstream.replay.whole import check_runs
from rollstream.schemas.errors import TruncatedError

Warn = Callable[[str], None]


async def export_archive(
    log: ReadableLog,
    run: str,
    folder: Path,
    *,
    workspace: Path,
    artifacts: ArtifactStore,
    with_weights: bool,
    is_partial: bool,
    warn: Warn,
    report: Callable[[str, int, int], None],
) -> ExportManifest:
    """Export a run; see `export_run`. Unless the export is partial: raises TruncatedError if records are missing."""
    if not is_partial:
        with _partial_proposed():
            await check_ends(log, workspace, warn)
    events = await read_run(log, run, for_checks=True)
    if not is_partial:
        _check_whole(events, warn)
    del events  # those of a long run take more memory than the export itself
    with nullcontext() if is_partial else _partial_proposed():
        return await export_run(
            log, run, folder, artifacts=artifacts, with_weights=with_weights, is_partial=is_partial, report=report
        )


async def rebuild_metrics(
    log: KafkaLog, path: Path, *, workspace: Path, is_partial: bool, warn: Warn, report: Callable[[int], None]
) -> None:
    """Make a metrics file again from the topics. Unless it is partial: raises TruncatedError if records are missing."""
    async with log:
        if not is_partial:
            await check_ends(log, workspace, warn)
        try:
            if not is_partial:
                for not_ended in await check_runs(log):
                    warn(not_ended)
            await make_again(log, path, is_partial=is_partial, report=report)
        except TruncatedError as error:
            if is_partial:  # where --partial changes nothing
                raise
            raise TruncatedError(f"{error}; --partial projects what is left") from error


async def rebuild_exported_metrics(log: ExportLog, path: Path, *, report: Callable[[int], None]) -> None:
    """Make a metrics file again from an export: the rows of its run."""
    async with log:
        await rebuild_exported(log, path, report=report)


def own_metrics_file(source: Path | None, workspace: Path) -> Path:
    """The metrics file of a workspace, to be made again from an export or its own log.

    Raises MetricsFileError if the file is in use, or the file or the log is of another cluster than the export, for
    then the next run would have no metrics. A damaged file is replaced.
    """
    path = metrics_file(workspace)
    if source is None:
        return path
    cluster_id, used = read_manifest(source).cluster_id, clusters_of(workspace)
    if used and cluster_id not in used:
        raise MetricsFileError(
            f"{path} is for the log of this workspace, which is of cluster {', '.join(sorted(used))}, and the export "
            f"{source} is of {cluster_id}; give another file with --output, or another --workspace"
        )
    try:
        check_replaceable(path, cluster_id)
    except MetricsFileError as error:
        raise MetricsFileError(f"{error}, or give another file with --output") from error
    return path


def _check_whole(events: RunEvents, warn: Warn) -> None:
    """Say whether the run has not ended. Raises TruncatedError if its events are incomplete."""
    if reason := unended(events):
        warn(reason)
    with _partial_proposed():
        check_whole(events)


@contextmanager
def _partial_proposed() -> Iterator[None]:
    """Add to a TruncatedError that --partial goes on without what is missing."""
    try:
        yield
    except TruncatedError as error:
        raise TruncatedError(f"{error}; --partial exports what is left") from error
