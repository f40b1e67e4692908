"""The runs that are over: follows `groups` from its end, and reads back only as far as the oldest uncommitted task
needs.

The commit metadata of a `tasks` partition holds the position in `groups` that its owner had read up to, and the runs
that had ended last, for tasks that were in progress when their run ended.
"""

import asyncio
import json
from collections.abc import Callable, Iterable
from typing import NamedTuple

from rollstream.eventlog import codec
from rollstream.eventlog.log import MAX_METADATA_BYTES, EventLog, LogReader, Record, TopicPartition
from rollstream.eventlog.reading import read_to_end
from rollstream.eventlog.recent_set import RecentSet
from rollstream.schemas.errors import DecodeError
from rollstream.schemas.events import RunEnded

GROUPS = TopicPartition("groups", 0)
FOLLOW_PAUSE_S = 0.2
"""Between two looks: `groups` has a record for each group, and each fetch costs the broker as much as many records."""
MAX_ENDED = 10_000
NUM_COMMITTED_ENDS = 16
"""Ended runs in the commit metadata: with ids of 100 characters half of what an offset can carry."""
_RUN_ENDED = "run_ended"


class CommitMetadata(NamedTuple):
    """Metadata committed with the offset of a `tasks` partition."""

    steps: int
    """Offset in `steps` at which the oldest open group begins."""
    groups: int | None = None
    """Offset up to which `groups` was read. None: unknown, for offsets that an older rollstream has committed."""
    ended: tuple[str, ...] = ()
    """Runs that had ended last."""

    def text(self) -> str:
        """The text to commit: with as many of the ended runs as fit, the newest ones."""
        ended = self.ended
        while True:
            text = json.dumps({"steps": self.steps, "groups": self.groups, "ended": ended}, ensure_ascii=False)
            if len(text.encode()) <= MAX_METADATA_BYTES or not ended:
                return text
            ended = ended[1:]

    @classmethod
    def of(cls, text: str) -> "CommitMetadata | None":
        """Parse a committed text; None if there is none."""
        found = json.loads(text) if text else None
        return None if found is None else cls(int(found["steps"]), found.get("groups"), tuple(found.get("ended", ())))


class EndedRuns:
    """Runs that are over, as far as `groups` has been read; `open` it, `follow` it."""

    def __init__(self, log: EventLog, reader: LogReader, on_end: Callable[[str], None]) -> None:
        self.ended = RecentSet(MAX_ENDED)
        self._log = log
        self._reader = reader
        self._on_end = on_end
        self._read_from = reader.position(GROUPS)

    @classmethod
    async def open(cls, log: EventLog, on_end: Callable[[str], None]) -> "EndedRuns":
        """Follow `groups` from now on. `on_end` is called for each run that ends, also for those that `read_back`
        finds.
        """
        end = (await log.end_offsets("groups"))[0]
        return cls(log, await log.reader({GROUPS: end}), on_end)

    def metadata(self, steps: int) -> CommitMetadata:
        """Metadata to commit with an offset."""
        return CommitMetadata(steps, self._reader.position(GROUPS), tuple(self.ended)[-NUM_COMMITTED_ENDS:])

    async def read_back(self, metadata: Iterable[CommitMetadata | None]) -> None:
        """Learn what the owner of a partition must know, by its commit metadata (None: by all of `groups`)."""
        begin = (await self._log.begin_offsets("groups"))[0]
        start = self._read_from
        for found in metadata:
            for run_id in found.ended if found is not None else ():
                self._end(run_id)
            start = min(start, begin if found is None or found.groups is None else max(begin, found.groups))
        if start < self._read_from:
            async for record in read_to_end(self._log, "groups", {0: start}, {0: self._read_from}):
                self._take(record)
            self._read_from = start

    async def follow(self) -> None:
        """Read on until cancelled."""
        while True:
            for record in await self._reader.poll():
                self._take(record)
            await asyncio.sleep(FOLLOW_PAUSE_S)

    async def close(self) -> None:
        """Let go of the reader."""
        await self._reader.close()

    def _take(self, record: Record) -> None:
        if codec.kind_of(record) != _RUN_ENDED:
            return
        try:
            event = codec.decode(record).event
        except DecodeError:
            return  # curation sends it to the dead letters
        if isinstance(event, RunEnded):
            self._end(event.run_id)

    def _end(self, run_id: str) -> None:
        if run_id not in self.ended:
            self.ended.add(run_id)
            self._on_end(run_id)
