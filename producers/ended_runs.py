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
from rollstream.eventlog.log import MAX_METADATA_BYTES, LogReader, ReadableLog, Record, TopicPartition
from rollstream.eventlog.reading import read_to_end
from rollstream.schemas.errors import DecodeError
from rollstream.schemas.events import RunEnded

GROUPS = TopicPartition("groups", 0)
FOLLOW_PAUSE_S = 0.2
"""Between two looks: `groups` has a record for each group, and each fetch costs the broker as much as many records."""
MAX_ENDED = 10_000
NAMED = -(2**63)
"""Added to the positions of runs that commit metadata names and no record that was read: they ended before all of
those, in the order of the positions up to which `groups` was read for the metadata."""
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

    def __init__(self, log: ReadableLog, reader: LogReader, on_end: Callable[[str], None]) -> None:
        self.ended: dict[str, int] = {}
        """The newest of them, in the order in which they ended, with the offset of their end."""
        self._log = log
        self._reader = reader
        self._on_end = on_end
        self._read_from = reader.position(GROUPS)

    @classmethod
    async def open(cls, log: ReadableLog, on_end: Callable[[str], None]) -> "EndedRuns":
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
        known: dict[str, int] = {}
        for found in metadata:
            for back, run_id in enumerate(reversed(found.ended if found is not None else ())):
                groups = found.groups or 0 if found is not None else 0
                known[run_id] = max(known.get(run_id, NAMED), NAMED + groups - back)
            start = min(start, begin if found is None or found.groups is None else max(begin, found.groups))
        if start < self._read_from:
            async for record in read_to_end(self._log, "groups", {0: start}, {0: self._read_from}):
                if (run_id := _ended_in(record)) is not None:
                    known[run_id] = record.offset
            self._read_from = start
        self._learn(known)

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
        run_id = _ended_in(record)
        if run_id is not None and run_id not in self.ended:
            self.ended[run_id] = record.offset
            if len(self.ended) > MAX_ENDED:
                del self.ended[next(iter(self.ended))]
            self._on_end(run_id)

    def _learn(self, known: dict[str, int]) -> None:
        """Put runs that ended earlier where they belong in the order."""
        new = [run_id for run_id in known if run_id not in self.ended]
        merged = [(max(at, self.ended.get(run_id, NAMED)), run_id) for run_id, at in known.items()]
        merged += [(at, run_id) for run_id, at in self.ended.items() if run_id not in known]
        self.ended.clear()
        self.ended.update((run_id, at) for at, run_id in sorted(merged)[-MAX_ENDED:])
        for run_id in new:
            self._on_end(run_id)


def _ended_in(record: Record) -> str | None:
    """The run that a record of `groups` ends."""
    if codec.kind_of(record) != _RUN_ENDED:
        return None
    try:
        event = codec.decode(record).event
    except DecodeError:
        return None  # curation sends it to the dead letters
    return event.run_id if isinstance(event, RunEnded) else None
