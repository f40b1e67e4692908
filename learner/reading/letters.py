"""The records of a learner's topics that have a dead letter, so that a record that is read again gets no second one.

A letter is written after its record. So, for end offsets of the topics that were read after that of `dlq`, every later
record has its letter behind that offset of `dlq`. Such are a run's start offsets, and those of a learner's start.
"""

import bisect
from collections.abc import Collection, Mapping

from rollstream.eventlog.dead_letters import DeadLetterIndex
from rollstream.eventlog.log import EventLog, Record, TopicPartition
from rollstream.eventlog.run_offsets import LETTERS

MAX_CUTS = 100
"""The newer half are the newest; the older a run, the fewer are kept of its time."""


class Letters:
    """The dead letters about records of some topics of one partition, from as late on as a record needs."""

    def __init__(self, log: EventLog, topics: Collection[str]) -> None:
        self._log = log
        self._topics = topics
        self._cuts: list[Mapping[str, int]] = []
        """Offsets by topic, LETTERS among them, that were taken together; rising. Of old ones some are dropped."""
        self._index = DeadLetterIndex(log, topics)
        self._since = 0
        """Offset of `dlq` that the index begins at."""

    def add_cut(self, offsets: Mapping[str, int] | None) -> None:
        """Know offsets that were taken together; those without one of LETTERS say nothing."""
        if offsets and LETTERS in offsets:
            bisect.insort(self._cuts, offsets, key=lambda cut: cut[LETTERS])
        if len(self._cuts) > MAX_CUTS:
            del self._cuts[1 : MAX_CUTS // 2 : 2]

    async def take_cut(self) -> None:
        """Take offsets now."""
        self.add_cut({topic: (await self._log.end_offsets(topic))[0] for topic in (LETTERS, *self._topics)})

    def cut_before(self, offsets: Mapping[str, int]) -> dict[str, int]:
        """The latest known offsets that are all before the given ones; empty if there are none."""
        fitting = [cut for cut in self._cuts if all(_covers(cut, topic, offsets[topic]) for topic in self._topics)]
        return dict(max(fitting, key=lambda cut: cut[LETTERS], default={}))

    async def has(self, record: Record, of_run: Mapping[str, int] | None = None) -> bool:
        """Whether a record has a letter by now. `of_run`: start offsets of the run that it is read for."""
        cuts = self._cuts if of_run is None or LETTERS not in of_run else [of_run]
        since = max((cut[LETTERS] for cut in cuts if _covers(cut, record.topic, record.offset)), default=0)
        if since > self._since:
            self._index = DeadLetterIndex(self._log, self._topics)  # earlier entries are dropped
        self._since = since
        await self._index.refresh(since)
        return record.offset in self._index.offsets(TopicPartition(record.topic, record.partition))


def _covers(cut: Mapping[str, int], topic: str, offset: int) -> bool:
    return topic in cut and cut[topic] <= offset
