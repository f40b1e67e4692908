"""Replay of one run from its topics or an export: what is asked for, one after the other, in one report."""

from collections.abc import Callable
from dataclasses import dataclass

from rollstream.eventlog.artifacts import ArtifactStore
from rollstream.harness import replay_verify
from rollstream.harness.replay_report import Report
from rollstream.harness.replay_source import RunEvents, Source, of_type, read_run
from rollstream.harness.workspace import Workspace
from rollstream.schemas.errors import ConfigError
from rollstream.schemas.events import BatchPlanned


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
        if request.verify:
            report = await replay_verify.verify(
                log,
                events,
                artifacts,
                epoch=request.epoch,
                checkpoints=checkpoints if source.export is None else None,
                source=source,
                workers=request.workers,
                tell=tell,
            )
        if request.train:
            from rollstream.harness.replay_train import check_libraries, train

            if not request.any_libraries:
                check_libraries(events.started)
            first, last = request.first, request.last
            if request.epoch is not None and first is None and last is None:
                first, last = versions_of_epoch(events, request.epoch)
            trained = await train(log, events, artifacts, checkpoints=checkpoints, first=first, last=last, tell=tell)
            report.counts |= trained.counts
            report.differences += trained.differences
    return report


def versions_of_epoch(events: RunEvents, epoch: int) -> tuple[int, int]:
    """First and last version that an epoch's manifests yielded. Raises ConfigError if it has none."""
    batches = of_type(events.by_topic.get("batches", ()), BatchPlanned)
    found = [event.yields_version for event, _ in batches if event.epoch == epoch]
    if not found:
        raise ConfigError(f"run {events.run_id} trained nothing in epoch {epoch}")
    return min(found), max(found)
