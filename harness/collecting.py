"""Garbage of a workspace: found by the log, the checkpoints and the store's own files, and removed file by file.

A removal is one file, so a collection that is killed leaves less to remove and nothing else.
"""

import asyncio
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote

from rollstream.eventlog.artifacts import ArtifactStore
from rollstream.eventlog.codec import decode
from rollstream.eventlog.log import EventLog
from rollstream.eventlog.reading import read_to_end
from rollstream.harness.garbage import Stored, WeightNeeds, evolve, removable
from rollstream.schemas import ids
from rollstream.schemas.errors import ConfigError, DecodeError

TOPICS = ("groups", "jobs", "weights")
READ_KINDS = tuple(
    f"rollstream.{kind}.".encode()
    for kind in (
        "run_started",
        "run_ended",
        "job_started",
        "job_submitted",
        "learner_claimed",
        "weights_published",
        "weights_loaded",
    )
)
"""All others are passed over undecoded."""
LEFTOVER_S = 86400.0
"""A file that was written aside so long ago has no writer any more."""


class Leftover(NamedTuple):
    """A file that was written aside and never moved into place."""

    path: Path
    size_bytes: int


class Garbage(NamedTuple):
    """What may go."""

    weights: Mapping[str, tuple[Stored, int]]
    """With their size in bytes, by name in the store."""
    leftovers: list[Leftover]
    num_elsewhere: int
    """Artifacts that nothing needs and that lie outside of the store."""
    open_runs: list[str]
    read_to: int
    """End of the topic groups when it was read."""


async def find(log: EventLog, store: ArtifactStore, checkpoints: Path) -> Garbage:
    """What nothing needs. Raises LogError if the log cannot be read, ArtifactError if the store cannot be listed."""
    read_to = (await log.end_offsets("groups"))[0]
    needs = await _read(log)
    files = await asyncio.to_thread(store.listing)
    weights: dict[str, tuple[Stored, int]] = {}
    num_elsewhere = 0
    for stored in removable(needs, _at_checkpoints(checkpoints)):
        name = store.name_of(stored.ref)
        if name is None:
            num_elsewhere += 1
        elif name in files:
            weights.setdefault(name, (stored, files[name]))
    leftovers = [one for folder in (store.folder, checkpoints) if folder for one in _leftovers(folder)]
    return Garbage(weights, leftovers, num_elsewhere, needs.open_runs, read_to)


async def remove(log: EventLog, store: ArtifactStore, garbage: Garbage) -> None:
    """Remove what was found. Raises ConfigError if a run may have begun since, ArtifactError if a file has to stay."""
    if (await log.end_offsets("groups"))[0] != garbage.read_to:
        raise ConfigError("a run began, or went on, while its log was read: nothing is removed; run gc again later")
    for stored, _ in garbage.weights.values():
        store.remove(stored.ref)
    for leftover in garbage.leftovers:
        leftover.path.unlink(missing_ok=True)


def check_no_open_run(garbage: Garbage, address: str) -> None:
    """Raises ConfigError if a learner that this workspace does not know may be about to publish."""
    if garbage.open_runs:
        raise ConfigError(
            f"run {garbage.open_runs[0]} is open on {address} and its learner may be about to publish: wait, or end it "
            f"(rollstream stop {garbage.open_runs[0]}); --dry-run says what could go"
        )


async def _read(log: EventLog) -> WeightNeeds:
    needs = WeightNeeds()
    for topic in TOPICS:
        async for record in read_to_end(log, topic):
            if not dict(record.headers).get("ce_type", READ_KINDS[0]).startswith(READ_KINDS):
                continue
            try:
                evolve(needs, decode(record))
            except DecodeError:
                needs.doubtful.add(ids.run_of((record.key or b"").decode(errors="replace")))
    return needs


def _at_checkpoints(folder: Path) -> dict[str, Collection[int]]:
    """Versions that checkpoint files stand at, by model group."""
    found: dict[str, set[int]] = {}
    for path in folder.glob("*/v*.safetensors"):
        number = path.name[1:].split(".", 1)[0]
        if number.isdigit():
            found.setdefault(unquote(path.parent.name), set()).add(int(number))
    return {name: frozenset(versions) for name, versions in found.items()}


def _leftovers(folder: Path) -> list[Leftover]:
    found: list[Leftover] = []
    for path in sorted(folder.glob("*/*.aside")):
        try:
            status = path.stat()
        except FileNotFoundError:
            continue
        if time.time() - status.st_mtime > LEFTOVER_S:
            found.append(Leftover(path, status.st_size))
    return found
