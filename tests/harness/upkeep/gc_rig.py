"""Logs with runs whose versions and checkpoints can be deleted."""

import asyncio
from pathlib import Path
from typing import Any

from rollstream.eventlog import codec
from rollstream.eventlog.artifacts import ArtifactStore
from rollstream.eventlog.memory.log import MemoryLog
from rollstream.harness.upkeep.collecting import find
from rollstream.schemas.algorithms import GrpoSettings
from rollstream.schemas.base import Event
from rollstream.schemas.events import (
    JobSubmitted,
    RunEnded,
    RunStarted,
    WeightsPublished,
)
from rollstream.schemas.settings import (
    ArtifactRef,
    JobSettings,
    ModelSettings,
)


def hash_of(text: str) -> str:
    return codec.content_digest(started(text))


def started(run_id: str, **reported: Any) -> RunStarted:
    ref = reported.pop("dataset", None) or ArtifactRef(uri="/s/d.jsonl", sha256="d" * 64, size_bytes=0)
    reported |= {"name": "run", "config": {}, "seed": 0, "dataset": ref, "num_examples": 1, "num_partitions": 1}
    return RunStarted(run_id=run_id, time_ms=1, **reported)


def ended(run_id: str) -> RunEnded:
    return RunEnded(run_id=run_id, time_ms=9, cause="completed")


def published(run_id: str, *versions: int, term: int = 1, name: str = "policy", like: str = "") -> list[Event]:
    """Versions whose weights are their own, or those of `like`."""
    found: list[Event] = []
    for version in versions:
        sha256 = hash_of(like or f"{run_id}/{name}@{version}/{term}")
        ref = ArtifactRef(uri=f"/s/{sha256[:2]}/{sha256}.safetensors", sha256=sha256, size_bytes=1)
        reported = {"model_group": f"{run_id}/{name}", "job_id": f"{run_id}/rl", "batch_id": None, "parent": None}
        reported |= {"weights_sha256": sha256, "weights_format": "full", "base_model": "m", "artifact": ref}
        found.append(WeightsPublished(run_id=run_id, time_ms=2, version=version, term=term, **reported))
    return found


def job(
    run_id: str, base: int = 0, *, last: int = 2, every: int = 100, name: str = "policy", **reported: Any
) -> JobSubmitted:
    model, algorithm = ModelSettings(path="m"), reported.pop("algorithm", GrpoSettings())
    kind = "dpo" if algorithm.name == "dpo" else "rl"
    settings = JobSettings(kind=kind, model=model, algorithm=algorithm, keep_last=last, keep_every=every)
    group, job_id = f"{run_id}/{name}", f"{run_id}/{name}-{base}"
    reported |= {"job_id": job_id, "model_group": group, "base_version": base, "settings": settings}
    return JobSubmitted(run_id=run_id, time_ms=1, **reported)


def run(run_id: str, *submitted: Event, versions: int = 6) -> list[Event]:
    """An ended run with versions from 0."""
    return [started(run_id), ended(run_id), *(submitted or [job(run_id)]), *published(run_id, *range(versions))]


async def log_of(store: ArtifactStore, events: list[Event]) -> MemoryLog:
    """A log of these events, whose weights lie in the store."""
    log = MemoryLog(num_partitions=1)
    for event in events:
        if isinstance(event, WeightsPublished):
            event = event.model_copy(update={"artifact": store.put_bytes(event.event_id.encode(), ".safetensors")})
        await log.send(event)
    return log


def found_in(store: ArtifactStore, log: MemoryLog, folder: Path) -> Any:
    return asyncio.run(find(log, store, folder / "checkpoints"))
