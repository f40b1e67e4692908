"""Weights that may be removed: a pure fold over the log's events about weights and the runs that need them. Removes
nothing.

Only artifacts of WeightsPublished are ever named, and by hash: an artifact of any kept version stays. Where the log
leaves a doubt (a model group without a job, a record that cannot be read), every version stays. `due` is for the
learner that owns the model group of an open run, `removable` for all files in a store, of which open runs keep
everything.

The state holds the versions that were published and not collected: it grows with the files in the store, not with the
log.
"""

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from rollstream.eventlog import terms
from rollstream.eventlog.log import Received
from rollstream.eventlog.terms import Owner
from rollstream.schemas import ids
from rollstream.schemas.events import (
    JobStarted,
    JobSubmitted,
    LearnerClaimed,
    RunEnded,
    RunStarted,
    WeightsCollected,
    WeightsLoaded,
    WeightsPublished,
)
from rollstream.schemas.league import OpponentVersions
from rollstream.schemas.settings import ArtifactRef, JobSettings


class Stored(NamedTuple):
    """An artifact with weights, and the version that was first published with it."""

    model_group: str
    version: int
    ref: ArtifactRef

    @property
    def run_id(self) -> str:
        """The run that published it."""
        return ids.run_of(self.model_group)


@dataclass(slots=True)
class GroupNeeds:
    """The versions of a model group, and which of them are needed."""

    hashes: dict[int, set[str]] = field(default_factory=dict[int, set[str]])
    """Hashes of artifacts by version, including those of void terms."""
    published: set[int] = field(default_factory=set[int])
    """Versions without those of void terms."""
    settings: list[JobSettings] = field(default_factory=list[JobSettings])
    """Settings of its jobs."""
    begun_from: set[int] = field(default_factory=set[int])
    """Versions that jobs (whose reference they are too) or forks began from, or that are named as frozen opponents."""
    loaded: dict[str, int] = field(default_factory=dict[str, int])
    """Newest version by engine. It loads no older one: a restarted engine takes the newest published version."""
    collected: WeightsCollected | None = None
    """The last one, whose files may still be there: a kill may have come before they were removed."""

    def kept(self, at_checkpoints: Collection[int]) -> set[int]:
        """Versions to keep: all if there is no job that says how many."""
        if not self.settings:
            return set(self.hashes)
        newest = sorted(self.published)[-max(one.keep_last for one in self.settings) :]
        every = {v for v in self.hashes if any(v % one.keep_every == 0 for one in self.settings)}
        opponents = [v for one in self.settings if one.opponents for v in self._newest_of(one.opponents)]
        return {*newest, *every, *opponents, *self.begun_from, *self.loaded.values(), *at_checkpoints}

    def trained_again(self, at_checkpoints: Collection[int]) -> set[int]:
        """Versions that a restart trains again, maybe to other bits, and then reads: all from the newest checkpoint on.

        None where every job is deterministic: those versions are trained to the same bits.
        """
        if all(one.model.deterministic for one in self.settings):
            return set()
        newest = max(at_checkpoints, default=0)
        return {version for version in self.hashes if version >= newest}

    def _newest_of(self, opponents: OpponentVersions) -> list[int]:
        """Versions that a league may draw."""
        candidates = [version for version in sorted(self.published) if version % opponents.every == 0]
        return candidates[-opponents.last :] if opponents.last else []


@dataclass(slots=True)
class WeightNeeds:
    """The weights on the log, and the runs and jobs that need them."""

    stored: dict[str, Stored] = field(default_factory=dict[str, Stored])
    """Stored artifacts by URI."""
    refs: dict[str, dict[str, ArtifactRef]] = field(default_factory=dict[str, dict[str, ArtifactRef]])
    """The same by hash and URI, so that a model group's are found without a look at those of all others."""
    listed: Counter[str] = field(default_factory=Counter[str])
    """Versions of all model groups that have it, by hash."""
    groups: dict[str, GroupNeeds] = field(default_factory=dict[str, GroupNeeds])
    started: dict[str, None] = field(default_factory=dict[str, None])
    """Runs, in the order of the log."""
    ended: dict[str, int] = field(default_factory=dict[str, int])
    """Time of the end by run, in ms."""
    doubtful: set[str] = field(default_factory=set[str])
    """Runs with a record that cannot be read."""
    datasets: set[str] = field(default_factory=set[str])
    owners: dict[str, Owner] = field(default_factory=dict[str, Owner])

    @property
    def open_runs(self) -> list[str]:
        """Runs that have not ended."""
        return [run_id for run_id in self.started if run_id not in self.ended]

    def group(self, model_group: str) -> GroupNeeds:
        """State of a model group."""
        return self.groups.setdefault(model_group, GroupNeeds())


def evolve(needs: WeightNeeds, received: Received) -> None:
    """Take in one event of groups, jobs or weights; others ask for nothing."""
    match received.event:
        case RunStarted() as event:
            needs.started.setdefault(event.run_id)
            needs.datasets.add(event.dataset.sha256)
            if event.parent is not None:
                needs.group(ids.model_group(event.parent.run_id, ids.MODEL_GROUP)).begun_from.add(event.parent.version)
        case RunEnded() as event:
            needs.ended.setdefault(event.run_id, event.time_ms)
        case JobStarted() as event:
            needs.group(event.model_group).begun_from.add(event.base_version)
        case JobSubmitted() as event:
            _submitted(needs, event)
        case LearnerClaimed() as event:
            owner = needs.owners.get(event.model_group)
            needs.owners[event.model_group] = terms.claimed(owner, event, received.position.offset)
        case WeightsPublished() as event:
            _published(needs, event)
        case WeightsLoaded() as event:
            loaded = needs.group(event.model_group).loaded
            loaded[event.engine] = max(event.version, loaded.get(event.engine, 0))
        case WeightsCollected() as event:
            _collected(needs, event)
        case _:
            return


def due(needs: WeightNeeds, model_group: str, at_checkpoints: Collection[int]) -> list[Stored]:
    """Artifacts of a model group whose run goes on that nothing needs any more, by rising version.

    What another model group has too stays: it may keep other versions.
    """
    if ids.run_of(model_group) in needs.doubtful:
        return []
    group = needs.group(model_group)
    versions = group.kept(at_checkpoints) | group.trained_again(at_checkpoints)
    own = Counter(sha256 for hashes in group.hashes.values() for sha256 in hashes)
    kept: set[str] = set().union(*(group.hashes.get(version, ()) for version in versions))
    going = {
        sha256
        for sha256, count in own.items()
        if sha256 not in kept and sha256 not in needs.datasets and needs.listed[sha256] == count
    }
    return _versions_of(needs, model_group, going)


def versions_of(needs: WeightNeeds, hashes: Collection[str]) -> dict[str, list[Stored]]:
    """Every version that has one of these hashes, by model group."""
    found = {name: _versions_of(needs, name, hashes) for name in needs.groups}
    return {name: versions for name, versions in found.items() if versions}


def _versions_of(needs: WeightNeeds, model_group: str, hashes: Collection[str]) -> list[Stored]:
    """Every version of a model group that has one of these hashes: what others have stored is not looked at."""
    return [
        Stored(model_group, version, next(reversed(needs.refs[sha256].values())))
        for version, there in sorted(needs.group(model_group).hashes.items())
        for sha256 in sorted(there)
        if sha256 in hashes and sha256 in needs.refs
    ]


def unfinished(needs: WeightNeeds, model_group: str, at_checkpoints: Collection[int]) -> list[Stored]:
    """The versions of a model group's last WeightsCollected that nothing needs since."""
    group = needs.group(model_group)
    if group.collected is None:
        return []
    needed = {*group.begun_from, *at_checkpoints}
    pairs = zip(group.collected.versions, group.collected.artifacts, strict=True)
    return [
        Stored(model_group, version, ref)
        for version, ref in pairs
        if version not in needed and not needs.listed[ref.sha256] and ref.sha256 not in needs.datasets
    ]


def removable(needs: WeightNeeds, checkpoints: Mapping[str, Collection[int]]) -> list[Stored]:
    """Artifacts that nothing needs, in the order of the log. `checkpoints`: versions that they hold, by model group."""
    kept = set(needs.datasets)
    for name, group in needs.groups.items():
        run_id = ids.run_of(name)
        is_settled = run_id in needs.ended and run_id not in needs.doubtful
        versions = group.kept(checkpoints.get(name, ())) if is_settled else set(group.hashes)
        kept.update(*(group.hashes.get(version, ()) for version in versions))
    left = [one for name in needs.groups for one in unfinished(needs, name, checkpoints.get(name, ()))]
    return [*left, *(stored for stored in needs.stored.values() if stored.ref.sha256 not in kept)]


def _submitted(needs: WeightNeeds, event: JobSubmitted) -> None:
    group = needs.group(event.model_group)
    group.settings.append(event.settings)
    group.begun_from.add(event.base_version)
    if event.fork is not None:
        parent = event.fork.parent_of(event.model_group)
        needs.group(parent).begun_from.add(event.fork.version)
    for player in event.settings.opponents.frozen if event.settings.opponents else ():
        named = ids.version_of(player)
        if named is not None:
            needs.group(named[0]).begun_from.add(named[1])


def _published(needs: WeightNeeds, event: WeightsPublished) -> None:
    if event.artifact.uri not in needs.stored:
        needs.stored[event.artifact.uri] = Stored(event.model_group, event.version, event.artifact)
        needs.refs.setdefault(event.artifact.sha256, {})[event.artifact.uri] = event.artifact
    group = needs.group(event.model_group)
    hashes = group.hashes.setdefault(event.version, set())
    if event.artifact.sha256 not in hashes:
        hashes.add(event.artifact.sha256)
        needs.listed[event.artifact.sha256] += 1
    if not terms.is_void(needs.owners.get(event.model_group), event):
        group.published.add(event.version)


def _collected(needs: WeightNeeds, event: WeightsCollected) -> None:
    group = needs.group(event.model_group)
    group.collected = event
    for version, ref in zip(event.versions, event.artifacts, strict=True):
        hashes = group.hashes.get(version, set())
        if ref.sha256 in hashes:
            hashes.remove(ref.sha256)
            needs.listed[ref.sha256] -= 1
        if not hashes:
            group.hashes.pop(version, None)
            group.published.discard(version)
        if not needs.listed[ref.sha256]:
            del needs.listed[ref.sha256]
            _forget_file(needs, ref.uri)


def _forget_file(needs: WeightNeeds, uri: str) -> None:
    stored = needs.stored.pop(uri, None)
    if stored is not None:
        refs = needs.refs[stored.ref.sha256]
        del refs[uri]
        if not refs:
            del needs.refs[stored.ref.sha256]
