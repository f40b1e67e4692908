"""Brings into a log what a what-if needs there: scores, and of an exported run its artifacts and trajectories.

Trajectories keep their ids and digests; manifests name them by their new positions, so that the what-if can be replayed
from the log alone. What closed groups or manifests of the log name already is used where it lies.

Order: 1. artifacts are stored, 2. trajectories are sent and acknowledged, 3. the caller writes the run that names
them. What a crash before 3 leaves is named by nobody.
"""

from collections.abc import AsyncIterator, Sequence
from typing import NamedTuple

from rollstream.eventlog import codec
from rollstream.eventlog.artifacts import ArtifactStore
from rollstream.eventlog.log import EventLog, Position, ReadableLog, Record
from rollstream.eventlog.reading import read_to_end
from rollstream.eventlog.terms import BEFORE_LEARNERS
from rollstream.learner.reading.members import check_members, fetch_records
from rollstream.replay.source import RunEvents, of_type
from rollstream.replay.weights import log_state
from rollstream.schemas.base import Event, Locator
from rollstream.schemas.errors import DecodeError
from rollstream.schemas.events import BatchPlanned, GroupClosed, ReferenceScored
from rollstream.schemas.settings import ArtifactRef

NAMING = ("group_closed", "batch_planned")
"""Kinds of events with locators of trajectories."""
FETCHED = 50
"""Trajectories that are held in memory at a time while their records are read."""


class OpenedExport(NamedTuple):
    """Log and artifacts of an exported run."""

    log: ReadableLog
    artifacts: ArtifactStore


def bring_artifact(exported: OpenedExport, artifacts: ArtifactStore, ref: ArtifactRef) -> ArtifactRef:
    """The artifact in the store, where it is put unless it is there. Raises ArtifactError if the export lacks it."""
    source = exported.artifacts.fetch(ref)
    try:
        return artifacts.put_file(source)
    finally:
        exported.artifacts.drop_copy(ref)


async def bring_trajectories(exported: OpenedExport, log: EventLog, planned: Sequence[Event]) -> list[Event]:
    """The planned events, with manifests whose locators are those of `log`.

    Raises DecodeError if a trajectory is not what it was, TruncatedError if the export lacks one.
    """
    wanted = {member.digest for event in planned if isinstance(event, BatchPlanned) for member in event.members}
    found_at = await _locators(log, wanted)
    moved: list[Event] = []
    for event in planned:
        if isinstance(event, BatchPlanned):
            lacking = _without(event, found_at)
            trajectories = check_members(lacking, await fetch_records(exported.log, lacking))
            sent = await log.send_all(trajectories)
            for member, at in zip(lacking.members, sent, strict=True):
                found_at[member.digest] = Locator(partition=at.partition, offset=at.offset)
            locators = tuple(found_at[member.digest] for member in event.members)
            moved.append(event.model_copy(update={"locators": locators}))
        else:
            moved.append(event)
    return moved


async def moved_scores(log: ReadableLog, events: RunEvents, planned: Sequence[Event]) -> AsyncIterator[list[Event]]:
    """ReferenceScored of the new run for one manifest after the other, each trajectory's and scorer's once.

    `log`: where `events`, of the recorded run, were read. Raises TruncatedError if one is gone.
    """
    state = log_state(events)
    offsets: dict[str, dict[str, tuple[int, ...]]] = {}
    for scored, _ in of_type(events.by_topic.get("weights", ()), ReferenceScored):
        found = state.group(scored.model_group).scores.first(scored.trajectory_sha256, scored.scorer.sha256)
        if found:
            offsets.setdefault(scored.trajectory_sha256, {}).setdefault(scored.scorer.sha256, found)
    for manifest in planned:
        if isinstance(manifest, BatchPlanned):
            mine = [offsets.pop(member.digest, {}) for member in manifest.members]
            wanted = [Position("weights", 0, offset) for one in mine for found in one.values() for offset in found]
            records = await log.fetch(wanted) if wanted else []
            yield [_moved_score(codec.decode(record).event, manifest) for record in records]


def _moved_score(event: Event, manifest: BatchPlanned) -> Event:
    """The same said for a manifest of the new run, before any learner has claimed its model group."""
    return event.model_copy(
        update={
            "run_id": manifest.run_id,
            "time_ms": manifest.time_ms,
            "model_group": manifest.model_group,
            "job_id": manifest.job_id,
            "batch_id": manifest.batch_id,
            "version": manifest.yields_version,
            "term": BEFORE_LEARNERS,
        }
    )


def _without(planned: BatchPlanned, found_at: dict[str, Locator]) -> BatchPlanned:
    """A manifest of those members alone whose locator is not known."""
    lacking = [
        (member, locator)
        for member, locator in zip(planned.members, planned.locators, strict=True)
        if member.digest not in found_at
    ]
    update = {"members": tuple(member for member, _ in lacking), "locators": tuple(locator for _, locator in lacking)}
    return planned.model_copy(update=update)


async def _locators(log: ReadableLog, wanted: set[str]) -> dict[str, Locator]:
    """Locators of wanted trajectories by digest, if the log names them and still holds them."""
    named: dict[str, Locator] = {}
    for topic in ("groups", "batches"):
        async for record in read_to_end(log, topic):
            if codec.kind_of(record) not in NAMING:
                continue
            try:
                event = codec.decode(record).event
            except DecodeError:
                continue
            if isinstance(event, (GroupClosed, BatchPlanned)):
                pairs = zip(event.members, event.locators, strict=False)
                named |= {member.digest: locator for member, locator in pairs if member.digest in wanted}
    return await _still_there(log, named)


async def _still_there(log: ReadableLog, named: dict[str, Locator]) -> dict[str, Locator]:
    """Those locators at which the record still has its digest."""
    begins, ends = await log.begin_offsets("trajectories"), await log.end_offsets("trajectories")
    kept = [
        (digest, locator)
        for digest, locator in named.items()
        if begins.get(locator.partition, 0) <= locator.offset < ends.get(locator.partition, 0)
    ]
    found: dict[str, Locator] = {}
    for start in range(0, len(kept), FETCHED):
        part = kept[start : start + FETCHED]
        records = await log.fetch([Position("trajectories", locator.partition, locator.offset) for _, locator in part])
        found |= {
            digest: locator for (digest, locator), record in zip(part, records, strict=True) if _is(record, digest)
        }
    return found


def _is(record: Record, digest: str) -> bool:
    try:
        return codec.decode(record).digest == digest
    except DecodeError:
        return False
