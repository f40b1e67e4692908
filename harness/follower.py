"""Reads one run's events on from the log into its progress. Only looks, never writes."""

import logging
from collections.abc import Callable

from rollstream.eventlog.codec import decode
from rollstream.eventlog.log import EventLog, LogReader, Record, TopicPartition
from rollstream.harness.progress import Progress, evolve
from rollstream.schemas import ids
from rollstream.schemas.base import Event
from rollstream.schemas.errors import DecodeError

TOPICS = ("groups", "batches", "jobs", "weights")
SKIPPED = (b"rollstream.group_closed.", b"rollstream.trajectory_rejected.")
"""Not needed for progress; most of what these topics hold."""

logger = logging.getLogger(__name__)


class Follower:
    """A run's progress and how many of its records were passed over. Open it with `follow`."""

    def __init__(
        self, log: EventLog, reader: LogReader, run_id: str, on_event: Callable[[Event], None] | None = None
    ) -> None:
        """`on_event` is given every event of the run, also the groups that are not needed for progress."""
        self._log = log
        self._reader = reader
        self._key = run_id.encode()
        self._on_event = on_event
        self.progress = Progress(run_id)
        self.num_skipped = 0

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
        if record.key is None or record.key.split(b"/", 1)[0] != self._key:
            return None
        if self._is_skipped(record):
            self.num_skipped += 1
            return None
        try:
            return decode(record).event
        except DecodeError as error:
            logger.warning("passing over %s offset %d: %s", record.topic, record.offset, error)
            return None

    def _is_skipped(self, record: Record) -> bool:
        headers = dict(record.headers)
        if not headers.get("ce_type", b"").startswith(SKIPPED):
            return False
        kind, _, group_id = headers.get("ce_id", b"").decode(errors="replace").partition(":")
        if kind != "group_closed":
            return True
        return self._on_event is None and not ids.is_validation(group_id)


async def follow(
    log: EventLog, run_id: str, *, from_end: bool = False, on_event: Callable[[Event], None] | None = None
) -> Follower:
    """A follower of one run; `from_end` if the log holds nothing of it yet. `on_event`: see `Follower`."""
    start = {}
    for topic in TOPICS:
        start[TopicPartition(topic, 0)] = (await log.end_offsets(topic))[0] if from_end else -1
    return Follower(log, await log.reader(start), run_id, on_event)
