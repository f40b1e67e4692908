"""The learner's view of the log: reads jobs, batches, weights and groups, and folds them into one state."""

import logging
from collections.abc import Mapping, Sequence

from rollstream.eventlog import codec
from rollstream.eventlog.dead_letters import send_dead_letter
from rollstream.eventlog.log import EventLog, LogReader, Record, TopicPartition
from rollstream.learner.progress import LogState, evolve
from rollstream.schemas.errors import DecodeError, RollstreamError, TruncatedError

logger = logging.getLogger(__name__)

TOPICS = ("jobs", "batches", "weights", "groups")


class Inbox:
    """Reader and state; `open` it, then `poll` or `catch_up`."""

    def __init__(self, log: EventLog, reader: LogReader, begins: Mapping[TopicPartition, int]) -> None:
        self.state = LogState()
        self.begins = dict(begins)
        """Oldest offsets that were kept: what lay before them is not in the state."""
        self._log = log
        self._reader = reader
        self._is_live = False

    @classmethod
    async def open(cls, log: EventLog) -> "Inbox":
        """Read all that the topics hold."""
        begins = {topic: await log.begin_offsets(topic) for topic in TOPICS}
        start = {TopicPartition(topic, n): offset for topic, found in begins.items() for n, offset in found.items()}
        inbox = cls(log, await log.reader(start), start)
        await inbox.catch_up()
        inbox._is_live = True
        return inbox

    async def poll(self, *, timeout_s: float) -> None:
        """Fold in what is there; wait up to `timeout_s` for it."""
        for record in await self._reader.poll(timeout_s=timeout_s):
            await self._take(record)

    async def catch_up(self, topics: Sequence[str] = TOPICS) -> None:
        """Fold in everything that the given topics hold by now."""
        ends = {topic: await self._log.end_offsets(topic) for topic in topics}
        while any(
            self._reader.position(where) < ends[where.topic][where.partition]
            for where in self.begins
            if where.topic in ends
        ):
            await self.poll(timeout_s=1.0)

    def missing(self, what: str, topic: str) -> RollstreamError:
        """The error of something that must be in a topic: TruncatedError where it may have been removed."""
        begin = self.begins[TopicPartition(topic, 0)]
        if not begin:
            return DecodeError(f"{what} is missing in topic {topic}")
        return TruncatedError(
            f"{what} is gone: topic {topic} partition 0 holds nothing before offset {begin} any more, retention or a "
            "truncation removed it"
        )

    async def close(self) -> None:
        """Let go of the reader."""
        await self._reader.close()

    async def _take(self, record: Record) -> None:
        try:
            received = codec.decode(record)
        except DecodeError as error:
            logger.warning("%s %s@%s is not an event: %s", record.topic, record.partition, record.offset, error)
            if self._is_live:
                await send_dead_letter(self._log, record, service="learner", stage="decode", error=error)
            return
        evolve(self.state, received)
