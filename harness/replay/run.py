"""Replay of one run from its topics or an export: what is asked for, one after the other, in one report."""

from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rollstream.eventlog.artifacts import ArtifactStore
from rollstream.harness.replay.report import Report, compare_log
from rollstream.harness.replay.source import RunEvents, Source, of_type, read_run
from rollstream.harness.replay.verify import verify
from rollstream.harness.topic_identity import check_topics
from rollstream.harness.workspace import Workspace
from rollstream.schemas.errors import ConfigError
from rollstream.schemas.events import BatchPlanned

if TYPE_CHECKING:
    from rollstream.harness.replay.what_if import Outcome


@dataclass(frozen=True, slots=True)
class Request:
    """What to replay. `first`, `last`: versions to train again, both included."""

    run_id: str
    verify: bool
    train: bool
    epoch: int | None = None
    first: int | None = None
    last: int | None = None
    workers: int = 1
    any_libraries: bool = False


async def replay_run(source: Source, place: Workspace, request: Request, tell: Callable[[str], None]) -> Report:
    """Replay a run. Raises ConfigError, LogError (TruncatedError names what is gone), ArtifactError, ModelError."""
    report = Report()
    checkpoints = place.folder / "checkpoints"
    async with source.open() as (log, artifacts):
        tell(f"reading run {request.run_id}")
        events = await read_run(log, request.run_id)
        artifacts = artifacts or ArtifactStore(str(place.folder / "artifacts"))
        compare_log(events, report)
        if request.verify:
            verified = await verify(
                log,
                events,
                artifacts,
                epoch=request.epoch,
                checkpoints=checkpoints if source.export is None else None,
                source=source,
                workers=request.workers,
                tell=tell,
            )
            report.add(verified)
        if request.train:
            from rollstream.harness.replay.train import check_libraries, train

            if not request.any_libraries:
                check_libraries(events.started)
            first, last = request.first, request.last
            if request.epoch is not None and first is None and last is None:
                first, last = versions_of_epoch(events, request.epoch)
            trained = await train(log, events, artifacts, checkpoints=checkpoints, first=first, last=last, tell=tell)
            report.add(trained)
    return report


async def what_if_run(
    bootstrap_servers: str,
    place: Workspace,
    run_id: str,
    file: Path,
    tell: Callable[[str], None],
    *,
    export: Path | None = None,
) -> "Outcome":
    """Plan and train a what-if of a run, see `what_if`. `export`: where it is read, if not from the topics."""
    from rollstream.harness.replay.what_if import what_if
    from rollstream.harness.replay.what_if_import import Exported
    from rollstream.metrics.export_log import open_export
    from rollstream.metrics.export_manifest import read_manifest

    store = ArtifactStore(str(place.folder / "artifacts"))
    async with AsyncExitStack() as stack:
        if export is not None:
            num_partitions = len(read_manifest(export).topics["trajectories"].partitions)
            await _ensure_topics(bootstrap_servers, place, num_partitions)
        log, _ = await stack.enter_async_context(Source(bootstrap_servers).open())
        exported: Exported | None = None
        if export is not None:
            tell(f"checking {export}")
            exported = Exported(*await stack.enter_async_context(open_export(export)))
        tell(f"reading run {run_id}")
        events = await read_run(exported.log if exported else log, run_id)
        checkpoints = place.folder / "checkpoints"
        return await what_if(log, events, store, file, checkpoints=checkpoints, tell=tell, exported=exported)


async def _ensure_topics(bootstrap_servers: str, place: Workspace, num_partitions: int) -> None:
    """Make the topics of a log that has none yet; `num_partitions` counts only then. Raises TopicError."""
    from rollstream.eventlog.kafka_log import KafkaLog

    log = KafkaLog(bootstrap_servers, client_id="rollstream-replay")
    try:
        await log.start()
        if "trajectories" in await log.topic_ids():
            num_partitions = await log.num_partitions("trajectories")
        await log.ensure_topics(num_partitions=num_partitions)
        check_topics(place.folder, await log.cluster_id(), await log.topic_ids())
    finally:
        await log.close()


async def project(bootstrap_servers: str, place: Workspace) -> None:
    """Bring a workspace's metrics up to the log, where no service does. Raises LogError, MetricsFileError."""
    from rollstream.metrics.database import metrics_file
    from rollstream.metrics.projector import project_to_end

    async with Source(bootstrap_servers).open() as (log, _):
        await project_to_end(log, metrics_file(place.folder))


def versions_of_epoch(events: RunEvents, epoch: int) -> tuple[int, int]:
    """First and last version that an epoch of the run's last job yielded. Raises ConfigError if it has none."""
    batches = [event for event, _ in of_type(events.by_topic.get("batches", ()), BatchPlanned)]
    last_job = batches[-1].job_id if batches else ""
    found = [event.yields_version for event in batches if event.epoch == epoch and event.job_id == last_job]
    if not found:
        raise ConfigError(f"run {events.run_id} trained nothing in epoch {epoch}")
    return min(found), max(found)
