"""Assembly's shell: batches of raw `steps` records in; trajectories, closed groups and dead letters acknowledged.

Order of what it does for a batch:
1. decode and fold every record;
2. send the trajectories of the groups that closed, all at once, and learn their places;
3. send the closed groups with those places as locators;
4. only now may the mark pass the first records of these groups.
Steps 2 and 3 of one batch overlap with the next batches: the mark stays behind whatever is under way.
"""

import asyncio
from collections.abc import Coroutine, Iterable
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from rollstream.eventlog import codec
from rollstream.eventlog.artifacts import ArtifactStore
from rollstream.eventlog.dead_letters import send_dead_letter
from rollstream.eventlog.failpoints import failpoint
from rollstream.eventlog.log import EventLog, Record
from rollstream.processors import assembly
from rollstream.processors.faust_app import Batch
from rollstream.schemas.base import Event, Locator
from rollstream.schemas.errors import DecodeError, LogError

MAX_UNDER_WAY = 32
"""Sends under way before a further batch waits."""


@dataclass(slots=True)
class _Partition:
    """What is known of one assigned partition."""

    state: assembly.AssemblyState
    held: dict[int, int] = field(default_factory=dict[int, int])
    """By send under way: the offset that the mark must not pass."""


class AssembleShell:
    """Assembles the partitions that are assigned to this process."""

    topic = "steps"

    def __init__(self, log: EventLog, artifacts: ArtifactStore | None, *, service: str) -> None:
        """`service` names this process in dead letters."""
        self._log = log
        self._artifacts = artifacts
        self._service = service
        self._partitions: dict[int, _Partition] = {}
        self._sends: set[asyncio.Task[None]] = set()
        self._numbers = count()
        self._has_failed = asyncio.Event()

    async def take(self, batch: Batch) -> None:
        """Fold a batch and begin to send what it closes.

        Raises LogError if an earlier send failed, or if records between two batches are missing.
        """
        first = batch.records[0].offset
        known = self._partitions.get(batch.partition)
        if known is None:
            known = self._partitions[batch.partition] = _Partition(assembly.initial(first))
        await self._wait_for_room()
        if self._partitions.get(batch.partition) is not known:
            return  # revoked meanwhile: the next owner folds it
        next_offset = known.state.next_offset
        if first > next_offset:
            raise LogError(f"steps partition {batch.partition} was read up to offset {next_offset}, then from {first}")
        number = self._hold(known, known.state.low_water)
        closings = self._fold(known, batch.records)
        if closings:
            failpoint("assemble/after-fold-before-send")
            self._begin(known, min(one.first_offset for one in closings), self._publish(closings))
        del known.held[number]
        await asyncio.sleep(0)

    def mark(self, partition: int) -> int | None:
        """The GroupStarted of the oldest group that is open or whose closing is not acknowledged yet."""
        known = self._partitions.get(partition)
        return None if known is None else min([known.state.low_water, *known.held.values()])

    def position(self, partition: int) -> int | None:
        """Offset of the next record to fold."""
        known = self._partitions.get(partition)
        return None if known is None else known.state.next_offset

    def drop(self, partitions: Iterable[int]) -> None:
        """Forget partitions; what is being sent for them repeats what their next owner will send."""
        for partition in partitions:
            self._partitions.pop(partition, None)

    async def failed(self) -> None:
        """Return once a send has failed; `drain` raises its error."""
        await self._has_failed.wait()

    async def drain(self) -> None:
        """Wait for all sends under way. Raises what one of them raised."""
        while self._sends:
            await asyncio.wait(self._sends)
            self._reap()

    def _fold(self, known: _Partition, records: Iterable[Record]) -> list[assembly.Closing]:
        closings: list[assembly.Closing] = []
        for record in records:
            if record.offset < known.state.next_offset:
                continue
            try:
                received = codec.decode(record)
            except DecodeError as error:
                known.state.next_offset = record.offset + 1
                self._begin(known, record.offset, self._bury(record, error))
                continue
            closings += assembly.evolve(known.state, received)
        return closings

    async def _wait_for_room(self) -> None:
        self._reap()
        while len(self._sends) >= MAX_UNDER_WAY:
            await asyncio.wait(self._sends, return_when=asyncio.FIRST_COMPLETED)
            self._reap()

    def _reap(self) -> None:
        for task in [task for task in self._sends if task.done()]:
            self._sends.discard(task)
            task.result()

    def _hold(self, known: _Partition, offset: int) -> int:
        number = next(self._numbers)
        known.held[number] = offset
        return number

    def _begin(self, known: _Partition, offset: int, sending: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(self._release(known, self._hold(known, offset), sending))
        self._sends.add(task)
        task.add_done_callback(self._tell_failure)

    def _tell_failure(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            self._has_failed.set()

    async def _release(self, known: _Partition, number: int, sending: Coroutine[Any, Any, None]) -> None:
        await sending
        failpoint("assemble/after-send-before-mark")
        del known.held[number]

    async def _publish(self, closings: list[assembly.Closing]) -> None:
        places = iter(await self._log.send_all([one for closing in closings for one in closing.trajectories]))
        failpoint("assemble/after-trajectories-before-groups")
        closed: list[Event] = []
        for closing in closings:
            where = tuple(
                Locator(partition=place.partition, offset=place.offset)
                for _, place in zip(closing.trajectories, places, strict=False)
            )
            closed.append(closing.closed.model_copy(update={"locators": where}))
        await self._log.send_all(closed)

    async def _bury(self, record: Record, error: DecodeError) -> None:
        await send_dead_letter(
            self._log, record, service=self._service, stage="assemble", error=error, artifacts=self._artifacts
        )
