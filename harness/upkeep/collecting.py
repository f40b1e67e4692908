"""Finds unused weights of a workspace from the log, the checkpoints and the store's files, and removes them file by
file. WeightsCollected is written first and its files are removed before a model group's next one, so after a crash the
next collection removes the files that are named in the last one and still exist.
"""

import asyncio
import shutil
import time
from collections import Counter
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote

from rollstream.eventlog.artifacts import ArtifactStore
from rollstream.eventlog.log import EventLog
from rollstream.eventlog.reading import read_to_end
from rollstream.learner.checkpoints.checkpoint_files import checkpoints_in, leftovers_in
from rollstream.learner.collection import MAX_VERSIONS, collected, take
from rollstream.learner.retention import Stored, WeightNeeds, removable, versions_of
from rollstream.schemas import ids
from rollstream.schemas.errors import ConfigError
from rollstream.schemas.settings import ArtifactRef

TOPICS = ("groups", "jobs", "weights")
LEFTOVER_S = 86400.0
"""Age at which a temporary file no longer has a writer."""


class Leftover(NamedTuple):
    """A temporary file that was never renamed, or a hidden folder of a checkpoint's shards."""

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
    """Write WeightsCollected and remove the files, in this order:

    1. remove what earlier events name: a kill left it, and the next collection looks only at a model group's last event
    2. write the event of up to MAX_VERSIONS versions of one model group, acknowledged by all replicas
    3. remove the files that it names and no later one will, for versions may share a file; go on with 2
    4. remove temporary files

    A kill leaves what the last event of each model group names, or what no event names yet; the next collection finds
    both. Raises ConfigError if a run may have started since, ArtifactError if a file cannot be removed.
    """
    if (await log.end_offsets("groups"))[0] != unneeded.read_to:
        raise ConfigError("a run started or continued while the log was read; nothing was removed, run gc again later")
    num_left = Counter(stored.ref.sha256 for found in unneeded.versions.values() for stored in found)
    files: dict[str, list[ArtifactRef]] = {}
    for stored, _ in unneeded.weights.values():
        files.setdefault(stored.ref.sha256, []).append(stored.ref)

    def remove_all(hashes: Collection[str]) -> None:
        for ref in (ref for sha256 in hashes for ref in files.pop(sha256, ())):
            store.remove(ref)

    remove_all(files.keys() - num_left.keys())  # named by an earlier event
    for group, found in unneeded.versions.items():
        time_ms = unneeded.ended.get(ids.run_of(group), 0)
        for first in range(0, len(found), MAX_VERSIONS):
            some = found[first : first + MAX_VERSIONS]
            await log.send(collected(some, group, time_ms=time_ms, by="gc"))
            num_left.subtract(stored.ref.sha256 for stored in some)
            remove_all([stored.ref.sha256 for stored in some if not num_left[stored.ref.sha256]])
    for leftover in unneeded.leftovers:
        if leftover.path.is_dir():
            shutil.rmtree(leftover.path, ignore_errors=True)
        else:
            leftover.path.unlink(missing_ok=True)


def check_store(store: ArtifactStore, own: Path) -> None:
    """Raises ConfigError if a store's folder does not exist, unless it is the workspace's own, which a run creates."""
    if store.folder and not store.folder.is_dir() and store.folder != own.absolute():
        raise ConfigError(f"artifact store {store.uri} does not exist; correct --artifact_uri, or mount it")


def check_no_open_run(unneeded: UnneededFiles, address: str) -> None:
    """Raises ConfigError if a learner that another command started may be about to publish."""
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
    hidden = [path for group in folder.glob("*") for path in leftovers_in(group)]
    for path in sorted([*folder.glob("*/*.aside"), *hidden]):
        try:
            parts = [one.stat() for one in (path, *(path.iterdir() if path.is_dir() else ()))]
        except FileNotFoundError:
            continue
        if time.time() - max(part.st_mtime for part in parts) > LEFTOVER_S:
            found.append(Leftover(path, sum(part.st_size for part in parts)))
    return found
