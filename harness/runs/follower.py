"""Reads the events of a run, or of all, from the log into their progress. Only looks, never writes."""

import contextlib
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Collection, Sequence

from rollstream.eventlog.codec import event_id_of, kind_of
from rollstream.eventlog.log import LogReader, ReadableLog, Received, Record, TopicPartition
from rollstream.eventlog.reading import (
    MOST_RECORDS,
    decode_or_none,
    read_events,
    read_to_end,
    unknown_run,
    unreadable_event,
)
from rollstream.eventlog.run_offsets import ends_now, start_offsets_of
from rollstream.harness.runs.progress import Progress, evolve
from rollstream.learner.progress import GroupState, LogState
from rollstream.learner.progress import evolve as evolve_weights
from rollstream.schemas import ids
from rollstream.schemas.base import Event
from rollstream.schemas.errors import TopicError
from rollstream.schemas.events import KINDS, RunContinued, RunStarted, TaskRequested, WeightsCollected

TOPICS = ("groups", "batches", "jobs", "weights")

logger = logging.getLogger(__name__)


class Follower:
    """A run's progress and how many records of it were read. Open it with `follow`."""

    def __init__(
        self, log: ReadableLog, reader: LogReader, run_id: str, on_event: Callable[[Event], None] | None = None
    ) -> None:
        """`on_event` is given every event of the run, also those that are not needed for progress."""
        self._log = log
        self._reader = reader
        self._run_id = run_id
        self._on_event = on_event
        self.progress = Progress(run_id)
        self.num_changes = 0
        """Records of the run so far, those that are not decoded included; its own signs of life apart."""
        self.unreadable = ""
        """The first record with the run's key that is an event of another version, see `unreadable_event`."""
        self.num_unreadable = Counter[str]()
        """Such records by topic."""

    async def advance(self, timeout_s: float) -> Progress:
        """Progress after the next records; the same object if nothing changed within `timeout_s`."""
        for record in await self._reader.poll(timeout_s=timeout_s):
            event = self._event(record)
            if event is not None:
                self.progress = evolve(self.progress, event)
                if self._on_event is not None:
                    self._on_event(event)
        return self.progress

    async def catch_up(self) -> Progress:
        """Progress at the end that the topics had when this was called."""
        ends = {topic: (await self._log.end_offsets(topic))[0] for topic in TOPICS}
        while any(self._reader.position(TopicPartition(topic, 0)) < end for topic, end in ends.items()):
            await self.advance(1.0)
        return self.progress

    async def close(self) -> None:
        """Let go of the connection."""
        await self._reader.close()

    def _event(self, record: Record) -> Event | None:
        if record.key is None or not ids.is_key_of_run(record.key, self._run_id):
            return None
        if self._is_skipped(record):
            self.num_changes += 1
            return None
        received = decode_or_none(record, warns=True)
        if received is None:
            self.unreadable = self.unreadable or unreadable_event(record)
            self.num_unreadable[record.topic] += kind_of(record) is not None
            return None
        self.num_changes += not isinstance(received.event, RunContinued)
        return received.event

    def _is_skipped(self, record: Record) -> bool:
        if kind_of(record) not in MOST_RECORDS:
            return False
        kind, group_id = ids.split_event(event_id_of(record))
        return self._on_event is None and not (kind == "group_closed" and ids.is_validation(group_id))


async def follow(
    log: ReadableLog, run_id: str, *, from_end: bool = False, on_event: Callable[[Event], None] | None = None
) -> Follower:
    """A follower of one run, from where its jobs say that it begins; `from_end` if the log holds nothing of it yet.

    `on_event`: see `Follower`.
    """
    known = await ends_now(log) if from_end else await start_offsets_of(log, run_id)
    start = {TopicPartition(topic, 0): known.get(topic, -1) for topic in TOPICS}
    return Follower(log, await log.reader(start), run_id, on_event)


async def progress_of(log: ReadableLog, run_id: str, unreadable: Counter[str] | None = None) -> Progress:
    """The progress of one run as far as the log says now, read from where its jobs say that it begins.

    `unreadable`: see `read_events`; of this run alone. Raises ConfigError if the run does not exist.
    """
    follower = await follow(log, run_id)
    try:
        progress = await follower.catch_up()
    finally:
        await follower.close()
    if progress.run is None:
        begin = (await log.begin_offsets("groups"))[0]
        raise unknown_run(run_id, begin, unreadable=follower.unreadable)
    if unreadable is not None:
        unreadable.update(+follower.num_unreadable)
    return progress


async def is_known(log: ReadableLog, run_id: str) -> bool:
    """Whether the log has a job or the start of a run. Nothing of other runs is decoded.

    All of the small topic `jobs` is read for a run that it does not have; then `groups`, because a run may have been
    killed before its first job. The other topics have nothing of such a run.
    """
    if await start_offsets_of(log, run_id, ("jobs",)):
        return True
    async with contextlib.aclosing(read_to_end(log, "groups")) as records:
        async for record in records:
            if record.key == run_id.encode() and kind_of(record) == "run_started":
                return True
    return False


async def read_runs(
    log: ReadableLog,
    unreadable: Counter[str] | None = None,
    *,
    topics: Sequence[str] = TOPICS,
    needed: Collection[type[Event]] = tuple(KINDS.values()),
) -> list[Progress]:
    """Every run of a log in order of its first record, as far as the log says now.

    `unreadable`: see `read_events`; their runs may be missing. `topics`, of which `groups` is the first, and `needed`,
    beside which known kinds are passed over undecoded: what the caller does not need of the progress is not read.
    """
    runs: dict[str, Progress] = {}
    skipped = {kind for kind, event_type in KINDS.items() if event_type not in needed} | set(MOST_RECORDS)
    async for received in read_events(log, topics, skipped=skipped, unreadable=unreadable):
        event = received.event
        runs[event.run_id] = evolve(runs.get(event.run_id, Progress(event.run_id)), event)
    return [progress for progress in runs.values() if progress.run is not None]


async def records_of(
    log: ReadableLog, topic: str, run_id: str, key: str, skipped: tuple[str, ...] = MOST_RECORDS
) -> AsyncGenerator[Received, None]:
    """The events of one key in a topic of one partition, from the run's beginning; `skipped`: kinds left out."""
    begin = (await log.begin_offsets(topic))[0]
    start = (await start_offsets_of(log, run_id, (topic,))).get(topic, begin)
    async for record in read_to_end(log, topic, {0: max(begin, start)}):
        if record.key == key.encode() and kind_of(record) not in skipped:
            received = decode_or_none(record)
            if received is not None:
                yield received


async def versions_of(log: ReadableLog, model_group: str, version: int) -> tuple[GroupState, str]:
    """A model group's versions, those of void terms left out, and who collected `version` when; empty if nobody did."""
    state, collected = LogState(), ""
    async for received in records_of(log, "weights", ids.run_of(model_group), model_group):
        evolve_weights(state, received)
        if isinstance(received.event, WeightsCollected) and version in received.event.versions:
            collected = received.event.reason(received.timestamp_ms)
    return state.group(model_group), collected


async def check_partitions(log: ReadableLog, started: RunStarted) -> None:
    """Raises TopicError if partitions were added to the topics: the open tasks of the run would be in wrong ones."""
    found = await log.num_partitions(TaskRequested.TOPIC)
    if found != started.num_partitions:
        raise TopicError(
            f"run {started.run_id} began with {started.num_partitions} partitions, and topic {TaskRequested.TOPIC} has "
            f"{found}; it cannot be continued: begin a new run from one of its versions "
            f"(`rollstream finetune --fork {started.run_id}@VERSION`)"
        )
