"""Where replay reads a run from, the topics or an export of it, and the run's own events in the order of the log."""

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from rollstream.eventlog import codec, dead_letters
from rollstream.eventlog.artifacts import ArtifactStore
from rollstream.eventlog.log import EventLog, Received, Record
from rollstream.eventlog.reading import read_to_end
from rollstream.schemas.errors import ConfigError, DecodeError, LogError
from rollstream.schemas.events import RunEnded, RunStarted

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Source:
    """A broker's address, or the folder of an export. Goes to other processes, where each opens it for itself."""

    bootstrap_servers: str = ""
    export: Path | None = None

    @asynccontextmanager
    async def open(self) -> AsyncIterator[tuple[EventLog, ArtifactStore | None]]:
        """The log, to be read only, and the artifacts that an export holds. Raises LogError."""
        if self.export is not None:
            from rollstream.metrics.export_log import open_export

            async with open_export(self.export) as found:
                yield found
            return
        from rollstream.eventlog.kafka_log import KafkaLog

        log = KafkaLog(self.bootstrap_servers, client_id="rollstream-replay")
        try:
            await log.start()
            yield log, None
        finally:
            await log.close()


def check_export(folder: Path, run_id: str) -> None:
    """Raises ConfigError if an export holds another run, LogError if the folder is no export."""
    from rollstream.metrics.export_manifest import read_manifest

    found = read_manifest(folder).run_id
    if found != run_id:
        raise ConfigError(f"export {folder} holds run {found}, not {run_id}")


@dataclass(slots=True)
class RunEvents:
    """What the topics with one partition, and `tasks`, say of one run; the first record of an event id counts."""

    run_id: str
    by_topic: dict[str, list[Received]] = field(default_factory=dict[str, list[Received]])
    by_id: dict[str, Received] = field(default_factory=dict[str, Received])
    twice: list[tuple[Received, Received]] = field(default_factory=list[tuple[Received, Received]])
    """Records of one event id that say different things."""
    damaged: list[str] = field(default_factory=list[str])
    """Records that do not decode and have no dead letter."""
    dead: set[tuple[str, int, int]] = field(default_factory=set[tuple[str, int, int]])
    """Topic, partition and offset of every record that is a dead letter."""

    @property
    def started(self) -> RunStarted:
        """Raises ConfigError if there is no such run."""
        found = self.by_id.get(f"run_started:{self.run_id}")
        if found is None or not isinstance(found.event, RunStarted):
            raise ConfigError(f"no run is called {self.run_id}; `rollstream runs` lists them")
        return found.event

    @property
    def has_ended(self) -> bool:
        """Whether nothing is still to come."""
        return any(isinstance(received.event, RunEnded) for received in self.by_topic.get("groups", ()))

    def take(self, record: Record) -> None:
        """Take in one record in the order of the log."""
        if tuple(record.position) in self.dead:
            return
        try:
            received = codec.decode(record)
        except DecodeError as error:
            is_own = record.key is None or record.key.startswith(self.run_id.encode())
            if is_own:
                self.damaged.append(f"{place(record)} is not an event and has no dead letter: {error}")
            return
        if received.event.run_id != self.run_id:
            return
        first = self.by_id.setdefault(received.event.event_id, received)
        if first is received:
            self.by_topic.setdefault(record.topic, []).append(received)
        elif first.digest != received.digest and not isinstance(received.event, RunEnded):  # its first one counts
            self.twice.append((first, received))


async def read_run(log: EventLog, run_id: str) -> RunEvents:
    """All that `groups`, `tasks`, `batches`, `jobs` and `weights` hold of a run. Raises ConfigError, LogError.

    Of a run that goes on, what caused something is read at least as far as what came of it.
    """
    events = RunEvents(run_id)
    async for record in read_to_end(log, "dlq"):
        try:
            events.dead.add(dead_letters.origin(record.headers))
        except LogError:
            continue
    effects_first = ("weights", "jobs", "tasks", "batches", "groups")
    ends = {topic: await log.end_offsets(topic) for topic in effects_first}
    for topic in reversed(effects_first):
        async for record in read_to_end(log, topic, ends=ends[topic]):
            events.take(record)
    _ = events.started
    return events


def place(record: Record) -> str:
    """Topic, partition and offset for a message."""
    return f"{record.topic} {record.partition}@{record.offset}"


def of_type(received: Iterable[Received], kind: type[T]) -> list[tuple[T, Received]]:
    """Events of one type with the records that they came in."""
    return [(one.event, one) for one in received if isinstance(one.event, kind)]
