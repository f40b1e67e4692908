"""Which weights may go: a pure fold over what the log says of weights and of who needs them. Removes nothing.

Only artifacts of WeightsPublished are ever named, and by hash: what any kept version has stays. Where the log leaves a
doubt (a run that has not ended, a model group without a job, a record that cannot be read), every version stays.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from rollstream.eventlog.log import Received
from rollstream.harness.config.settings import MODEL_GROUP
from rollstream.learner import terms
from rollstream.learner.terms import Owner
from rollstream.schemas import ids
from rollstream.schemas.events import (
    JobStarted,
    JobSubmitted,
    LearnerClaimed,
    RunEnded,
    RunStarted,
    WeightsLoaded,
    WeightsPublished,
)
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
    """What a model group has, and what is needed of it."""

    hashes: dict[int, set[str]] = field(default_factory=dict[int, set[str]])
    """Of artifacts by version, those of void terms too."""
    published: set[int] = field(default_factory=set[int])
    """Versions without those of void terms."""
    settings: list[JobSettings] = field(default_factory=list[JobSettings])
    """Of its jobs."""
    begun_from: set[int] = field(default_factory=set[int])
    """By jobs (whose reference they are too) and by forks."""
    loaded: dict[str, int] = field(default_factory=dict[str, int])
    """Newest version by engine."""

    def kept(self, at_checkpoints: Collection[int]) -> set[int]:
        """Versions to keep of an ended run: all if it has no job that says how many."""
        if not self.settings:
            return set(self.hashes)
        newest = sorted(self.published)[-max(one.keep_last for one in self.settings) :]
        every = {v for v in self.hashes if any(v % one.keep_every == 0 for one in self.settings)}
        return {*newest, *every, *self.begun_from, *self.loaded.values(), *at_checkpoints}


@dataclass(slots=True)
class WeightNeeds:
    """What the log says of weights and of who needs them."""

    stored: dict[str, Stored] = field(default_factory=dict[str, Stored])
    """By URI."""
    groups: dict[str, GroupNeeds] = field(default_factory=dict[str, GroupNeeds])
    started: dict[str, None] = field(default_factory=dict[str, None])
    """Runs, in the order of the log."""
    ended: set[str] = field(default_factory=set[str])
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
                needs.group(ids.model_group(event.parent.run_id, MODEL_GROUP)).begun_from.add(event.parent.version)
        case RunEnded() as event:
            needs.ended.add(event.run_id)
        case JobStarted() as event:
            needs.group(event.model_group).begun_from.add(event.base_version)
        case JobSubmitted() as event:
            _submitted(needs, event)
        case LearnerClaimed() as event:
            needs.owners = terms.claim(needs.owners, event, received.position.offset)
        case WeightsPublished() as event:
            _published(needs, event)
        case WeightsLoaded() as event:
            loaded = needs.group(event.model_group).loaded
            loaded[event.engine] = max(event.version, loaded.get(event.engine, 0))
        case _:
            return


def removable(needs: WeightNeeds, checkpoints: Mapping[str, Collection[int]]) -> list[Stored]:
    """Artifacts that nothing needs, in the order of the log. `checkpoints`: versions they stand at, by model group."""
    kept = set(needs.datasets)
    for name, group in needs.groups.items():
        run_id = ids.run_of(name)
        is_settled = run_id in needs.ended and run_id not in needs.doubtful
        versions = group.kept(checkpoints.get(name, ())) if is_settled else set(group.hashes)
        kept.update(*(group.hashes.get(version, ()) for version in versions))
    return [stored for stored in needs.stored.values() if stored.ref.sha256 not in kept]


def _submitted(needs: WeightNeeds, event: JobSubmitted) -> None:
    group = needs.group(event.model_group)
    group.settings.append(event.settings)
    group.begun_from.add(event.base_version)
    if event.fork is not None:
        parent = ids.model_group(event.fork.run_id, event.model_group.split("/", 1)[-1])
        needs.group(parent).begun_from.add(event.fork.version)


def _published(needs: WeightNeeds, event: WeightsPublished) -> None:
    needs.stored.setdefault(event.artifact.uri, Stored(event.model_group, event.version, event.artifact))
    group = needs.group(event.model_group)
    group.hashes.setdefault(event.version, set()).add(event.artifact.sha256)
    if not terms.is_void(needs.owners, event.model_group, event.term):
        group.published.add(event.version)
