"""Finds unused weights of a workspace from the log, the checkpoints and the store's files, and removes them file by
file. WeightsCollected is written first and each removal is one file, so after a crash the next collection removes the
files that are named in the log and still exist.
"""

import asyncio
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote

from rollstream.eventlog.artifacts import ArtifactStore
from rollstream.eventlog.log import EventLog
from rollstream.eventlog.reading import read_to_end
from rollstream.learner.checkpoint_files import checkpoints_in
from rollstream.learner.collection import MAX_VERSIONS, collected, take
from rollstream.learner.retention import Stored, WeightNeeds, removable, versions_of
from rollstream.schemas import ids
from rollstream.schemas.errors import ConfigError

TOPICS = ("groups", "jobs", "weights")
LEFTOVER_S = 86400.0
"""Age at which a temporary file no longer has a writer."""


class Leftover(NamedTuple):
    """A temporary file that was never renamed."""

    path: Path
    size_bytes: int


class UnneededFiles(NamedTuple):
    """Files that can be removed."""

    weights: Mapping[str, tuple[Stored, int]]
    """Weights with their size in bytes, by name in the store."""
    leftovers: list[Leftover]
    num_elsewhere: int
    """Unneeded artifacts outside of the store."""
    open_runs: list[str]
    read_to: int
    """End of the topic groups when it was read."""
    versions: Mapping[str, list[Stored]]
    """The versions with these weights, by model group, which are recorded as collected."""
    ended: Mapping[str, int]
    """Time of the end by run, in ms."""


async def find(log: EventLog, store: ArtifactStore, checkpoints: Path) -> UnneededFiles:
    """Find unused weights and leftovers.

    Raises LogError if the log cannot be read, ArtifactError if the store cannot be listed.
    """
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
    versions = versions_of(needs, {stored.ref.sha256 for stored, _ in weights.values()})
    return UnneededFiles(weights, leftovers, num_elsewhere, needs.open_runs, read_to, versions, needs.ended)


async def remove(log: EventLog, store: ArtifactStore, unneeded: UnneededFiles) -> None:
    """Write WeightsCollected, then remove the files.

    Raises ConfigError if a run may have started since, ArtifactError if a file cannot be removed.
    """
    if (await log.end_offsets("groups"))[0] != unneeded.read_to:
        raise ConfigError("a run started or continued while the log was read; nothing was removed, run gc again later")
    for group, found in unneeded.versions.items():
        time_ms = unneeded.ended.get(ids.run_of(group), 0)
        for first in range(0, len(found), MAX_VERSIONS):
            some = found[first : first + MAX_VERSIONS]
            await log.send(collected(some, group, time_ms=time_ms, by="gc"))
    for stored, _ in unneeded.weights.values():
        store.remove(stored.ref)
    for leftover in unneeded.leftovers:
        leftover.path.unlink(missing_ok=True)


def check_no_open_run(unneeded: UnneededFiles, address: str) -> None:
    """Raises ConfigError if a learner outside this workspace may be about to publish."""
    if unneeded.open_runs:
        raise ConfigError(
            f"run {unneeded.open_runs[0]} is open on {address} and its learner may be about to publish; wait, or stop "
            f"it (rollstream stop {unneeded.open_runs[0]}), or list the files with --dry-run"
        )


async def _read(log: EventLog) -> WeightNeeds:
    needs = WeightNeeds()
    for topic in TOPICS:
        async for record in read_to_end(log, topic):
            take(needs, record)
    return needs


def _at_checkpoints(folder: Path) -> dict[str, Collection[int]]:
    """Versions of checkpoints, by model group."""
    groups = [path for path in folder.glob("*") if path.is_dir()]
    found = {unquote(group.name): frozenset(version for version, _ in checkpoints_in(group)) for group in groups}
    return {name: versions for name, versions in found.items() if versions}


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
