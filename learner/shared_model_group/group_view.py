"""Reads what the log says of one model group into its state, and keeps it up to date. Never writes."""

import asyncio
from collections.abc import Mapping

from rollstream.eventlog.codec import kind_of
from rollstream.eventlog.log import LogReader, ReadableLog, TopicPartition
from rollstream.eventlog.reading import decode_or_none
from rollstream.eventlog.run_offsets import TOPICS, start_offsets_of
from rollstream.learner.shared_model_group.job_lifecycle import ModelGroupState, evolve, initial
from rollstream.schemas import ids
from rollstream.schemas.events import RunStarted

IGNORED = ("trajectory_rejected", "submission_received", "run_continued", "step_trained")


class GroupView:
    """State of a model group as of the last `refresh`. Open it with `view`."""

    def __init__(self, log: ReadableLog, reader: LogReader, model_group: str) -> None:
        self.state: ModelGroupState = initial(model_group)
        self.run_started: RunStarted | None = None
        self._log = log
        self._reader = reader
        self._reading = asyncio.Lock()
        """Held from a read until its records are in the state: a reader's position is ahead of it in between."""
        self._keys = (ids.run_of(model_group).encode(), model_group.encode())

    async def refresh(self) -> ModelGroupState:
        """Take in everything that the log holds by now. Raises LogError."""
        ends = {topic: (await self._log.end_offsets(topic))[0] for topic in TOPICS}
        async with self._reading:
            while any(self._reader.position(TopicPartition(topic, 0)) < end for topic, end in ends.items()):
                await self._poll(1.0)
        return self.state

    async def wait(self, timeout_s: float) -> ModelGroupState:
        """Take in the next records; wait up to `timeout_s` for some."""
        async with self._reading:
            await self._poll(timeout_s)
        return self.state

    async def close(self) -> None:
        """Let go of the connection."""
        await self._reader.close()

    async def _poll(self, timeout_s: float) -> None:
        for record in await self._reader.poll(timeout_s=timeout_s):
            if record.key not in self._keys or kind_of(record) in IGNORED:
                continue
            received = decode_or_none(record)
            if received is None:
                continue
            if isinstance(received.event, RunStarted):
                self.run_started = self.run_started or received.event
            self.state = evolve(self.state, received)


async def view(log: ReadableLog, model_group: str, starts: Mapping[str, int] | None = None) -> GroupView:
    """The view of a model group, with its state from the log. `starts`: offsets to begin at, by topic."""
    known = await start_offsets_of(log, ids.run_of(model_group)) if starts is None else starts
    reader = await log.reader({TopicPartition(topic, 0): known.get(topic, -1) for topic in TOPICS})
    found = GroupView(log, reader, model_group)
    await found.refresh()
    return found
