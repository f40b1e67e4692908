"""Source of a replay, the topics or an export, and the run's own events in the order of the log."""

from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

from rollstream.eventlog import codec, dead_letters
from rollstream.eventlog.artifacts import ArtifactStore
from rollstream.eventlog.log import ReadableLog, Received, Record, format_position
from rollstream.eventlog.reading import read_to_end, unknown_run, unreadable_event
from rollstream.eventlog.run_offsets import LETTERS, offset_name, start_offsets_of
from rollstream.schemas import ids
from rollstream.schemas.base import Event
from rollstream.schemas.errors import ConfigError, DecodeError, LogError
from rollstream.schemas.events import (
    BatchPlanned,
    GroupClosed,
    ReferenceScored,
    RunEnded,
    RunStarted,
    TaskRequested,
)
from rollstream.schemas.kafka import KafkaSettings
from rollstream.schemas.settings import RolloutSettings

EFFECTS_FIRST = ("weights", "jobs", "tasks", "batches", "groups")

_UNREAD: Mapping[type[Event], dict[str, Any]] = {ReferenceScored: {"logprobs": ""}}
"""Fields that are not kept, and what is there instead: these are read again where they count."""
_UNCHECKED: Mapping[type[Event], dict[str, Any]] = {
    BatchPlanned: {"members": ()},
    GroupClosed: {"attempts": ()},
    TaskRequested: {"inputs": {}},
}
"""Those that no check of completeness reads."""

T = TypeVar("T")


class _OfJob(Protocol):
    @property
    def job_id(self) -> str: ...


J = TypeVar("J", bound=_OfJob)


@dataclass(frozen=True, slots=True)
class Source:
    """Connection settings of a broker, or the folder of an export. Sent to other processes, each of which opens it."""

    kafka: KafkaSettings | None = None
    export: Path | None = None

    @asynccontextmanager
    async def open(self, *, is_checked: bool = False) -> AsyncIterator[tuple[ReadableLog, ArtifactStore | None]]:
        """The log, to be read only, and the artifacts that an export holds. Raises LogError.

        `is_checked`: the files of an export were compared with its manifest by the process that started this one.
        """
        if self.export is not None:
            from rollstream.replay.archive.log import open_export

            async with open_export(self.export, is_checked=is_checked) as found:
                yield found
            return
        from rollstream.eventlog.kafka.log import KafkaLog

        assert self.kafka is not None, "neither a broker nor an export"
        async with KafkaLog(self.kafka, client_id="rollstream-replay") as log:
            yield log, None


def check_export(folder: Path, run_id: str) -> None:
    """Raises ConfigError if an export holds another run, LogError if the folder is not an export."""
    from rollstream.replay.archive.manifest import read_manifest

    found = read_manifest(folder).run_id
    if found != run_id:
        raise ConfigError(f"export {folder} holds run {found}, not {run_id}; give that run, or another --export")


@dataclass(slots=True)
class RunEvents:
    """One run's events in `tasks` and the topics with one partition; the first record of an event id counts."""

    run_id: str
    by_topic: dict[str, list[Received]] = field(default_factory=dict[str, list[Received]])
    later: dict[str, list[Received]] = field(default_factory=dict[str, list[Received]])
    """Records behind those of `by_topic`, read so that all causes of `by_topic` are known; what follows from them may
    not be read."""
    by_id: dict[str, Received] = field(default_factory=dict[str, Received])
    twice: list[tuple[Received, Received]] = field(default_factory=list[tuple[Received, Received]])
    """Pairs of records with the same event id but different content."""
    damaged: list[str] = field(default_factory=list[str])
    """Records that do not decode and have no dead letter."""
    unreadable: str = ""
    """The first record that is an event of another version, with or without a dead letter, see `unreadable_event`."""
    dead: set[tuple[str, int, int]] = field(default_factory=set[tuple[str, int, int]])
    """Topic, partition and offset of every record that is a dead letter."""
    dead_by_fold: set[tuple[str, int, int]] = field(default_factory=set[tuple[str, int, int]])
    """Those of `groups` on which curation's fold raised."""
    poison: list[Received] = field(default_factory=list[Received])
    """Records of the run among them."""
    refused_at: int | None = None
    """Offset in `groups` from which curation requested no tasks, because it could not read the run's dataset."""
    kept: dict[str, dict[int, tuple[int, int]]] = field(default_factory=dict[str, dict[int, tuple[int, int]]])
    """Oldest retained offset and the one after the newest, by topic and partition."""
    is_for_checks: bool = False
    """Only what `completeness.check_whole` and its caller read of an event is kept; the rest of it is empty."""
    _settings: dict[str, RolloutSettings] = field(default_factory=dict[str, RolloutSettings])
    """Settings of tasks by their JSON: those of an epoch share one object."""

    @property
    def is_begun(self) -> bool:
        """Whether the run's start is among them."""
        return ids.event_id("run_started", self.run_id) in self.by_id

    @property
    def started(self) -> RunStarted:
        """Raises ConfigError if there is no such run."""
        found = self.by_id.get(ids.event_id("run_started", self.run_id))
        if found is None or not isinstance(found.event, RunStarted):
            begin, _ = self.kept.get("groups", {}).get(0, (0, 0))
            raise unknown_run(self.run_id, begin, unreadable=self.unreadable)
        return found.event

    def held(self, topic: str) -> str:
        """Topic and partitions with the range of offsets that each holds, for a message."""
        ranges = [
            f"partition {number} (it holds " + (f"offsets {begin} to {end - 1})" if end > begin else "nothing)")
            for number, (begin, end) in sorted(self.kept.get(topic, {}).items())
        ]
        return f"topic {topic}" + (f" {', '.join(ranges)}" if ranges else "")

    @property
    def has_ended(self) -> bool:
        """Whether nothing is still to come."""
        return any(isinstance(received.event, RunEnded) for received in self.by_topic.get("groups", ()))

    def take(self, record: Record, *, is_later: bool = False) -> None:
        """Take in one record in the order of the log. `is_later`: it may name records that are not read."""
        if record.key is not None and not ids.is_key_of_run(record.key, self.run_id):
            return  # an event has the key of its run, else it does not decode
        is_dead = tuple(record.position) in self.dead
        if is_dead and (is_later or tuple(record.position) not in self.dead_by_fold):
            self.unreadable = self.unreadable or unreadable_event(record)
            return
        try:
            received = codec.decode(record)
        except DecodeError as error:
            self.unreadable = self.unreadable or unreadable_event(record)
            if not is_dead:
                self.damaged.append(
                    f"{format_position(record.position)} is not an event and has no dead letter: {error}"
                )
            return
        if received.event.run_id != self.run_id:
            return
        received = self._without_unread(received)
        if is_dead:
            self.poison.append(received)
            return
        self._note_refusal(received.event)
        first = self.by_id.setdefault(received.event.event_id, received)
        if first is received:
            (self.later if is_later else self.by_topic).setdefault(record.topic, []).append(received)
        elif first.digest != received.digest and not isinstance(received.event, RunEnded):  # its first one counts
            self.twice.append((first, received))

    def _without_unread(self, received: Received) -> Received:
        """A record without what nothing reads of it here, so that a long run fits into memory."""
        event = received.event
        unread = _UNREAD.get(type(event), {}) | (_UNCHECKED.get(type(event), {}) if self.is_for_checks else {})
        if isinstance(event, TaskRequested):
            unread |= {"settings": self._settings.setdefault(event.settings.model_dump_json(), event.settings)}
        found = received.with_event(event.model_copy(update=unread)) if unread else received
        _ = found.digest  # from here on it holds the digest alone, and no longer the record's content
        return found

    def _note_refusal(self, event: Event) -> None:
        """Note the refusal that an end names, also one that came after another end."""
        if isinstance(event, RunEnded) and self.refused_at is None:
            self.refused_at = event.refused_at


async def read_run(log: ReadableLog, run_id: str, *, for_checks: bool = False) -> RunEvents:
    """All that `groups`, `tasks`, `batches`, `jobs` and `weights` hold of a run. Raises ConfigError, LogError.

    Topics are read from where the run's newest job says that it begins, that of dead letters too; from their beginning
    if it does not say, or if the run's start does not lie there. `for_checks`: see `RunEvents.is_for_checks`.
    """
    starts = await start_offsets_of(log, run_id, (*EFFECTS_FIRST, LETTERS))
    events = await _read_from(log, RunEvents(run_id, is_for_checks=for_checks), starts)
    if starts and not events.is_begun:
        events = await _read_from(log, RunEvents(run_id, is_for_checks=for_checks), {})
    _ = events.started
    return events


async def _read_from(log: ReadableLog, events: RunEvents, starts: Mapping[str, int]) -> RunEvents:
    """The run's records up to two ends of every topic, taken one after the other.

    Whatever a record before the first end names was written before it, in whichever topic, and so lies before the
    second one. The first ends are taken effects first: a fold's inputs are read at least as far as its outputs.
    """
    begins = await log.begin_offsets(LETTERS)
    await take_letters(log, events, _starts(LETTERS, begins, starts))
    ends = {topic: await log.end_offsets(topic) for topic in EFFECTS_FIRST}
    for topic in reversed(EFFECTS_FIRST):
        begins = await log.begin_offsets(topic)
        events.kept[topic] = {number: (begins[number], end) for number, end in ends[topic].items()}
        async for record in read_to_end(log, topic, _starts(topic, begins, starts), ends[topic]):
            events.take(record)
    for topic in EFFECTS_FIRST:
        until = await log.end_offsets(topic)
        async for record in read_to_end(log, topic, ends[topic], until):
            events.take(record, is_later=True)
    return events


async def take_letters(log: ReadableLog, events: RunEvents, starts: Mapping[int, int] | None = None) -> None:
    """Note the records of all runs that are dead letters, from `starts` on (default: from the beginning)."""
    async for record in read_to_end(log, LETTERS, starts):
        try:
            origin = dead_letters.origin(record.headers)
        except LogError:
            continue
        events.dead.add(origin)
        if origin[0] == "groups" and dead_letters.is_of_fold(record.headers):
            events.dead_by_fold.add(origin)


def _starts(topic: str, begins: Mapping[int, int], starts: Mapping[str, int]) -> dict[int, int]:
    return {partition: starts.get(offset_name(topic, partition), begin) for partition, begin in begins.items()}


def of_type(received: Iterable[Received], kind: type[T]) -> list[tuple[T, Received]]:
    """Events of one type with the records that they came in."""
    return [(one.event, one) for one in received if isinstance(one.event, kind)]


def by_job(received: Iterable[Received], kind: type[J]) -> dict[str, list[J]]:
    """Events of one type by job, in the order of the log."""
    found: dict[str, list[J]] = {}
    for event, _ in of_type(received, kind):
        found.setdefault(event.job_id, []).append(event)
    return found
