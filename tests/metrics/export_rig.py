"""Logs to export, and the records of an export."""

import asyncio
from pathlib import Path
from typing import Any

from rollstream.eventlog.artifacts import ArtifactStore
from rollstream.eventlog.log import ReadableLog, Record, TopicPartition
from rollstream.eventlog.memory.log import MemoryLog
from rollstream.replay.archive.export import export_run
from rollstream.replay.archive.manifest import ExportManifest
from rollstream.schemas import events
from rollstream.schemas.settings import ArtifactRef


def log_of(*runs: Any) -> MemoryLog:
    """Several runs of events in one log, one after the other."""
    log = MemoryLog(num_partitions=2)
    for run in runs:
        asyncio.run(log.send_all(list(run.all_events())))
    return log


def export(log: ReadableLog, run_id: str, folder: Path, store: ArtifactStore, **more: Any) -> ExportManifest:
    return asyncio.run(export_run(log, run_id, folder, artifacts=store, **more))


async def records_of(log: ReadableLog, topic: str) -> list[Record]:
    """All records of a topic, by partition and offset."""
    ends = await log.end_offsets(topic)
    reader = await log.reader({TopicPartition(topic, n): -1 for n in ends})
    found: list[Record] = []
    while any(reader.position(TopicPartition(topic, n)) < end for n, end in ends.items()):
        found += await reader.poll(timeout_s=0.1, max_records=50)
    await reader.close()
    return sorted(found, key=lambda record: record.position)


def weights_ref(run: Any, version: int) -> ArtifactRef:
    """The artifact of a version that a run of the conftest publishes."""
    return next(
        event.artifact
        for event in run.all_events()
        if isinstance(event, events.WeightsPublished) and event.version == version
    )
