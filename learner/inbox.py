"""The learner's view of the log: reads jobs, batches, weights and groups, and folds them into one state.

What is no event goes to the dead letters, once; that of `groups` is curation's to bury.
"""

import logging
from collections.abc import Mapping, Sequence

from rollstream.eventlog import codec
from rollstream.eventlog.artifacts import ArtifactStore
from rollstream.eventlog.buried import Buried
from rollstream.eventlog.dead_letters import send_dead_letter
from rollstream.eventlog.log import EventLog, LogReader, Record, TopicPartition
from rollstream.learner.progress import LogState, evolve
from rollstream.schemas.errors import DecodeError, RollstreamError, TruncatedError

logger = logging.getLogger(__name__)

BURIES = ("jobs", "batches", "weights")
TOPICS = (*BURIES, "groups")


class Inbox:
    """Reader and state; `open` it, then `poll` or `catch_up`."""

    def __init__(
        self, log: EventLog, reader: LogReader, begins: Mapping[TopicPartition, int], artifacts: ArtifactStore | None
    ) -> None:
        self.state = LogState()
        self.begins = dict(begins)
        """Oldest offsets that were kept: what lay before them is not in the state."""
        self._log = log
        self._reader = reader
        self._artifacts = artifacts
        self._buried = Buried(log)

    @classmethod
    async def open(cls, log: EventLog, artifacts: ArtifactStore | None = None) -> "Inbox":
        """Read all that the topics hold. `artifacts` takes the bytes of dead letters above the record limit."""
        begins = {topic: await log.begin_offsets(topic) for topic in TOPICS}
        start = {TopicPartition(topic, n): offset for topic, found in begins.items() for n, offset in found.items()}
        inbox = cls(log, await log.reader(start), start, artifacts)
        await inbox.catch_up()
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
            if record.topic in BURIES:
                await self._bury(record, error)
            return
        evolve(self.state, received)

    async def _bury(self, record: Record, error: DecodeError) -> None:
        """Write a letter unless there is one: a learner reads its topics from their beginning at every start."""
        await self._buried.refresh()
        if record.offset not in self._buried.offsets(TopicPartition(record.topic, record.partition)):
            await send_dead_letter(
                self._log, record, service="learner", stage="decode", error=error, artifacts=self._artifacts
            )
