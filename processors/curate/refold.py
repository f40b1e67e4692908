"""Reads `groups` again: records in slices that yield to other tasks, ended runs by headers, one run by key."""

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

from rollstream.eventlog import codec
from rollstream.eventlog.log import ReadableLog, Record
from rollstream.eventlog.reading import read_to_end
from rollstream.schemas.events import RunEnded, RunStarted

SLICE_S = 0.01
"""After so long others of the event loop have their turn."""
BEGIN, END = (event.model_fields["kind"].default for event in (RunStarted, RunEnded))


class GroupsReader:
    """Reads `groups` again and counts the records."""

    def __init__(self, log: ReadableLog) -> None:
        self._log = log
        self.num_read = 0
        """Number of records so far: shows that a long pass makes progress."""

    async def records(self, start: int, end: int) -> AsyncGenerator[Record, None]:
        """Records from `start` up to `end`. Raises LogError; TruncatedError if some are no longer retained."""
        if start >= end:
            return
        began = time.monotonic()
        async with aclosing(read_to_end(self._log, "groups", {0: start}, {0: end})) as found:
            async for record in found:
                self.num_read += 1
                yield record
                if time.monotonic() > began + SLICE_S:
                    await asyncio.sleep(0)
                    began = time.monotonic()

    async def ended_runs(self, start: int, end: int) -> set[str]:
        """Runs that ended between two offsets, from headers only."""
        found: set[str] = set()
        async with aclosing(self.records(start, end)) as reading:
            async for record in reading:
                if record.key is not None and codec.kind_of(record) == END:
                    found.add(record.key.decode(errors="replace"))
        return found

    async def has_beginning_or_end(self, run_id: str, start: int, end: int) -> bool:
        """Whether a run started or ended between two offsets, from headers only."""
        key = run_id.encode()
        async with aclosing(self.records(start, end)) as reading:
            async for record in reading:
                if record.key == key and codec.kind_of(record) in (BEGIN, END):
                    return True
        return False
