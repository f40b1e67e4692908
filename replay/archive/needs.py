"""Contents that the export of a run needs beside the run's own records, derived from its events.

These are artifacts, ranges of `steps`, and other runs' trajectories that its manifests name. A fold over the run's
records of the topics `groups`, `batches`, `jobs`, `weights` and `dlq`. Reads no artifact.
"""

from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

from rollstream.eventlog.codec import decode, kind_of
from rollstream.eventlog.dead_letters import REFERENCE, WHOLE, stored_at
from rollstream.eventlog.log import Record
from rollstream.eventlog.reading import unreadable_event
from rollstream.schemas import ids
from rollstream.schemas.base import Event, Locator
from rollstream.schemas.errors import DecodeError, LogError
from rollstream.schemas.events import (
    BatchPlanned,
    GroupClosed,
    JobStarted,
    JobSubmitted,
    RunStarted,
    WeightsCollected,
    WeightsPublished,
)
from rollstream.schemas.settings import ArtifactRef

NAMED = (
    "run_started",
    "job_started",
    "job_submitted",
    "weights_published",
    "weights_collected",
    "group_closed",
    "batch_planned",
)


class Need(NamedTuple):
    """An artifact to copy. `is_required`: without it the run cannot be trained again."""

    ref: ArtifactRef
    what: str
    is_required: bool
    is_weights: bool = True


@dataclass(slots=True)
class ArtifactNeeds:
    """Needs of those records of a run that were read so far."""

    started: RunStarted | None = None
    first_steps: dict[int, int] = field(default_factory=dict[int, int])
    """Offset of the oldest GroupStarted of a closed group, by partition of `steps`."""
    last_steps: dict[int, int] = field(default_factory=dict[int, int])
    """Offset of the newest record that closed a group, by partition of `steps`; it may be another run's, or a tick."""
    first_trajectory: dict[int, int] = field(default_factory=dict[int, int])
    """Offset of the oldest member of a closed group or a manifest, by partition of `trajectories`."""
    last_trajectory: dict[int, int] = field(default_factory=dict[int, int])
    """Offset of the newest one, by partition of `trajectories`."""
    borrowed: dict[int, set[int]] = field(default_factory=dict[int, set[int]])
    """Offsets of other runs' trajectories that manifests name, as in a what-if, by partition of `trajectories`."""
    bases: set[tuple[str, int]] = field(default_factory=set[tuple[str, int]])
    """(model group, version) that a job starts from."""
    weights: dict[tuple[str, int], ArtifactRef] = field(default_factory=dict[tuple[str, int], ArtifactRef])
    """Artifacts by model group and version; one that adopts another has that one's."""
    collected: dict[str, str] = field(default_factory=dict[str, str])
    """Collector and time of collection, by sha256 of collected weights."""
    letters: dict[str, ArtifactRef] = field(default_factory=dict[str, ArtifactRef])
    """Bytes of dead letters that were too large for the log, by sha256."""

    unreadable: str = ""
    """The first record that is an event of another version, see `unreadable_event`."""

    def take(self, record: Record) -> None:
        """Take in a record of the run. A record that is not an event needs nothing."""
        headers = dict(record.headers)
        if record.topic == "dlq":
            for name in (REFERENCE, WHOLE):
                if name in headers:
                    with suppress(LogError):  # some other program wrote it
                        ref = stored_at(headers[name])
                        self.letters[ref.sha256] = ref
        elif kind_of(record) in NAMED or (record.topic == "groups" and self.started is None):
            try:
                self._take(decode(record).event, record.timestamp_ms)
            except DecodeError:
                self.unreadable = self.unreadable or unreadable_event(record)

    def artifacts(self, *, with_weights: bool) -> list[Need]:
        """The artifacts to copy, each hash once: the required ones first."""
        found: list[Need] = []
        if self.started is not None:
            found.append(Need(self.started.dataset, "dataset", is_required=True, is_weights=False))
        weights = sorted(self.weights.items())
        named = [Need(ref, f"weights {group} v{n}", (group, n) in self.bases) for (group, n), ref in weights]
        found += [need for need in named if need.is_required]
        found += [need for need in named if with_weights and not need.is_required]
        found += [Need(ref, "dead letter", is_required=False, is_weights=False) for ref in self.letters.values()]
        return list({need.ref.sha256: need for need in reversed(found)}.values())[::-1]

    def _take(self, event: Event, recorded_ms: int) -> None:
        match event:
            case RunStarted():
                self.started = self.started or event
            case JobStarted() | JobSubmitted():
                self.bases.add((event.model_group, event.base_version))
            case WeightsPublished():
                self.weights.setdefault((event.model_group, event.version), event.artifact)
            case WeightsCollected():
                self.collected |= dict.fromkeys(event.weights_sha256, event.reason(recorded_ms))
            case GroupClosed():
                self._take_closed(event)
            case BatchPlanned():
                self._take_planned(event)
            case _:
                return

    def _take_closed(self, event: GroupClosed) -> None:
        if event.steps_at is not None:
            partition, first, last = event.steps_at.partition, event.steps_at.first_offset, event.steps_at.last_offset
            self.first_steps[partition] = min(first, self.first_steps.get(partition, first))
            self.last_steps[partition] = max(last, self.last_steps.get(partition, last))
        for locator in event.locators:
            self._take_trajectory(locator)

    def _take_planned(self, event: BatchPlanned) -> None:
        for member, locator in zip(event.members, event.locators, strict=False):
            if ids.run_of(member.group_id) != event.run_id:
                self.borrowed.setdefault(locator.partition, set()).add(locator.offset)
                self._take_trajectory(locator)

    def _take_trajectory(self, locator: Locator) -> None:
        first = self.first_trajectory.get(locator.partition, locator.offset)
        self.first_trajectory[locator.partition] = min(first, locator.offset)
        self.last_trajectory[locator.partition] = max(self.last_trajectory.get(locator.partition, -1), locator.offset)
