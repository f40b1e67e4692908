"""Replay of one run from its topics or an export: runs the requested comparisons and reports them together."""

import asyncio
import os
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rollstream.eventlog.artifacts import ArtifactStore
from rollstream.eventlog.kafka.topic_ids import check_topics
from rollstream.eventlog.log import ReadableLog
from rollstream.harness.runs.outcome import let_metrics_catch_up
from rollstream.harness.runs.stored_config import TRUST
from rollstream.harness.services.lost_records import check_ends
from rollstream.harness.services.workspace import Workspace
from rollstream.replay.assembly import prepare_processes
from rollstream.replay.completeness import compare_named
from rollstream.replay.report import Report, compare_log
from rollstream.replay.source import RunEvents, Source, of_type, read_run
from rollstream.replay.verify import verify
from rollstream.schemas.errors import NotAllowedError, RollstreamError
from rollstream.schemas.events import JobSubmitted
from rollstream.schemas.kafka import KafkaSettings
from rollstream.schemas.permissions import (
    ALLOW_VARIABLE,
    CODE,
    Permissions,
    entries_in,
    named_by_algorithm,
    names_of,
    quoted,
)

if TYPE_CHECKING:
    from rollstream.harness.replays.what_if import WhatIfOutcome
    from rollstream.learner.model.ranks import Ranks


@dataclass(frozen=True, slots=True)
class ReplayRequest:
    """The parts of a run to replay. `first`, `last`: versions to train again, both included."""

    run_id: str
    verify: bool
    train: bool
    epoch: int | None = None
    first: int | None = None
    last: int | None = None
    workers: int = 1
    any_libraries: bool = False
    trust: bool = False
    """Expand the variables that the recorded settings name."""
    ranks: "Ranks | None" = None
    """The processes that train together, of which this one is the first; None: it is alone."""


async def replay_run(
    source: Source,
    layout: Workspace,
    request: ReplayRequest,
    on_progress: Callable[[str], None],
    warn: Callable[[str], None],
    before_training: Callable[[], None] = lambda: None,
) -> Report:
    """Replay a run.

    `on_progress` receives progress messages, `warn` skipped checks. `before_training`: called in a thread before the
    learner is imported; it waits for another thread that imports it, for two at once may find modules half imported.
    Raises ConfigError, LogError (TruncatedError names removed records), ArtifactError, ModelError; those of a training
    after a verification are the report's `error`.
    """
    report = Report()
    checkpoints = layout.folder / "checkpoints"
    if request.verify and request.workers > 1:
        prepare_processes(source)  # while the run is read
    async with source.open() as (log, artifacts):
        on_progress(f"reading run {request.run_id}")
        if source.export is None:
            await check_ends(log, layout.folder, warn)
        events = await read_run(log, request.run_id)
        artifacts = artifacts or ArtifactStore(layout.artifact_uri())
        compare_log(events, report)
        compare_named(events, report)
        if request.verify:
            verified = await verify(
                log,
                events,
                artifacts,
                epoch=request.epoch,
                checkpoints=checkpoints if source.export is None else None,
                has_checkpoints=layout.has_trained(request.run_id),
                source=source,
                workers=request.workers,
                on_progress=on_progress,
            )
            report.add(verified)
        if request.train:
            await asyncio.to_thread(before_training)
            try:
                report.add(await _trained(log, events, artifacts, checkpoints, request, on_progress))
            except RollstreamError as error:
                if not request.verify:
                    raise
                report.error = error  # raised once the verification is reported
    return report


async def _trained(
    log: ReadableLog,
    events: RunEvents,
    artifacts: ArtifactStore,
    checkpoints: Path,
    request: ReplayRequest,
    on_progress: Callable[[str], None],
) -> Report:
    from rollstream.replay.training import check_libraries, train

    if not request.any_libraries:
        check_libraries(events.started)
    are_given = (request.first, request.last) != (None, None)
    return await train(
        log,
        events,
        artifacts,
        checkpoints=checkpoints,
        first=request.first,
        last=request.last,
        epoch=None if are_given else request.epoch,
        on_progress=on_progress,
        permissions=_permissions(events, trust=request.trust),
        ranks=request.ranks,
    )


def _permissions(events: RunEvents, *, trust: bool) -> Permissions:
    """Names that recorded settings may use: those allowed on this machine, or all if they are trusted.

    Raises NotAllowedError naming the variable or the algorithm that is not allowed.
    """
    jobs = [job.settings for job, _ in of_type(events.by_topic.get("jobs", ()), JobSubmitted)]
    named = {name: ("model.path", "expanded") for job in jobs for name in names_of(job.model.path)}
    named |= {name: ("algorithm", "imported") for job in jobs for name in named_by_algorithm(job.algorithm.name)}
    allowed = {*entries_in(os.environ.get(ALLOW_VARIABLE, ""))}
    for name in () if trust else sorted(named.keys() - allowed):
        location, what = named[name]
        shown_as = quoted(name) if name.startswith(CODE) else name
        raise NotAllowedError(
            f"the recorded {location} of run {events.run_id} names {shown_as}, which would be {what} here; set "
            f"{ALLOW_VARIABLE}='{name}', or give {TRUST} if you trust the author of the run"
        )
    return Permissions.of(named.keys() | allowed, os.environ)


async def what_if_run(
    kafka: KafkaSettings,
    layout: Workspace,
    run_id: str,
    file: Path,
    on_progress: Callable[[str], None],
    warn: Callable[[str], None],
    *,
    export: Path | None = None,
    trust: bool = False,
) -> "WhatIfOutcome":
    """Plan and train a what-if of a run, see `what_if`. `export`: the export to read instead of the topics."""
    from rollstream.eventlog.kafka.log import KafkaLog
    from rollstream.harness.replays.what_if import what_if
    from rollstream.replay.archive.log import open_export
    from rollstream.replay.archive.manifest import read_manifest
    from rollstream.replay.what_if.imports import OpenedExport

    store = ArtifactStore(layout.artifact_uri())
    async with AsyncExitStack() as stack:
        if export is not None:
            num_partitions = len(read_manifest(export).topics["trajectories"].partitions)
            await _ensure_topics(kafka, layout, num_partitions)
        log = await stack.enter_async_context(KafkaLog(kafka, client_id="rollstream-replay"))
        exported: OpenedExport | None = None
        if export is not None:
            on_progress(f"checking {export}")
            exported = OpenedExport(*await stack.enter_async_context(open_export(export)))
        on_progress(f"reading run {run_id}")
        events = await read_run(exported.log if exported else log, run_id)
        checkpoints = layout.folder / "checkpoints"
        return await what_if(
            log,
            events,
            store,
            file,
            checkpoints=checkpoints,
            on_progress=on_progress,
            exported=exported,
            trust=trust,
            warn=warn,
        )


async def _ensure_topics(kafka: KafkaSettings, layout: Workspace, num_partitions: int) -> None:
    """Create the topics of a new log; `num_partitions` is used only then. Raises TopicError."""
    from rollstream.eventlog.kafka.log import KafkaLog

    async with KafkaLog(kafka, client_id="rollstream-replay") as log:
        if "trajectories" in (await log.topic_ids() or {}):
            num_partitions = await log.num_partitions("trajectories")
        await log.ensure_topics(num_partitions=num_partitions)
        check_topics(layout.folder, await log.cluster_id(), await log.topic_ids())


async def project(source: Source, layout: Workspace) -> None:
    """Project the log into a workspace's metrics file, or wait until the service that has the file has done so.

    Raises LogError, MetricsFileError.
    """
    from rollstream.metrics.projection.connection import FileInUseError, metrics_file
    from rollstream.metrics.projection.projector import project_to_end

    async with source.open() as (log, _):
        try:
            await project_to_end(log, metrics_file(layout.folder))
        except FileInUseError:
            if not await let_metrics_catch_up(layout.folder):  # whoever had the file did not project it
                await project_to_end(log, metrics_file(layout.folder))
