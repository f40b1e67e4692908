"""Assembly's shell: batches of raw `steps` records in; trajectories, closed groups and dead letters acknowledged.

Order of what it does for a batch:
1. decode and fold every record;
2. send the trajectories of the groups that closed, all at once, and learn their places;
3. send the closed groups with those places as locators;
4. only now may the mark pass the first records of these groups.
Steps 2 and 3 of one batch overlap with the next batches: the mark stays behind whatever is under way.

A record on which the fold raises becomes a dead letter too. What the fold had changed by then is thrown away: the
partition is folded again from its low-water mark without that record. A record that has a letter is passed over.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any

from rollstream.eventlog import codec
from rollstream.eventlog.artifacts import ArtifactStore
from rollstream.eventlog.buried import Buried
from rollstream.eventlog.dead_letters import send_dead_letter
from rollstream.eventlog.failpoints import failpoint
from rollstream.eventlog.log import EventLog, Received, Record, TopicPartition
from rollstream.processors import assembly
from rollstream.processors.faust_app import Batch
from rollstream.processors.unfolded import fold_one, is_broken
from rollstream.schemas.base import Event, Locator
from rollstream.schemas.errors import DecodeError, FoldError, LogError

MAX_UNDER_WAY = 32
"""Sends under way before a further batch waits."""

Evolve = Callable[[assembly.AssemblyState, Received], list[assembly.Closing]]
Sending = Callable[[], Coroutine[Any, Any, None]]
"""No coroutine yet: a task that is cancelled before its first step leaves none unawaited."""

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Partition:
    """What is known of one assigned partition."""

    state: assembly.AssemblyState
    held: dict[int, int] = field(default_factory=dict[int, int])
    """By send under way: the offset that the mark must not pass."""
    unfolded: set[int] = field(default_factory=set[int])
    """Offsets from the low-water mark on of records on which the fold raised."""


class AssembleShell:
    """Assembles the partitions that are assigned to this process."""

    topic = "steps"

    def __init__(
        self, log: EventLog, artifacts: ArtifactStore | None, *, service: str, evolve: Evolve = assembly.evolve
    ) -> None:
        """`service` names this process in dead letters; `evolve` is the fold."""
        self._log = log
        self._evolve = evolve
        self._num_partitions: int | None = None
        self._artifacts = artifacts
        self._buried = Buried(log)
        self._service = service
        self._partitions: dict[int, _Partition] = {}
        self._sends: set[asyncio.Task[None]] = set()
        self._numbers = count()
        self._has_failed = asyncio.Event()

    async def take(self, batch: Batch) -> None:
        """Fold a batch and begin to send what it closes.

        Raises LogError if an earlier send failed, or if records between two batches are missing, and FoldError if the
        fold raises on every record.
        """
        first = batch.records[0].offset
        known = self._partitions.get(batch.partition)
        if known is None:
            known = self._partitions[batch.partition] = _Partition(assembly.initial(first))
            await self._buried.refresh()
        await self._wait_for_room()
        if self._num_partitions is None:
            self._num_partitions = await self._log.num_partitions(self.topic)
        if self._partitions.get(batch.partition) is not known:
            return  # revoked meanwhile: the next owner folds it
        next_offset = known.state.next_offset
        if first > next_offset:
            raise LogError(f"steps partition {batch.partition} was read up to offset {next_offset}, then from {first}")
        number = self._hold(known, known.state.low_water)
        closings = await self._fold(known, batch)
        if self._partitions.get(batch.partition) is not known:
            return
        if closings:
            failpoint("assemble/after-fold-before-send")
            self._begin(known, min(one.first_offset for one in closings), partial(self._publish, closings))
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

    async def _fold(self, known: _Partition, batch: Batch) -> list[assembly.Closing]:
        where = TopicPartition(self.topic, batch.partition)
        dead = self._buried.offsets(where)
        low_water, closed = known.state.low_water, tuple(known.state.closed_order)
        closings: list[assembly.Closing] = []
        for record in batch.records:
            if record.offset < known.state.next_offset:
                continue
            if record.offset in dead:
                known.state.next_offset = record.offset + 1
                continue
            try:
                closings += self._fold_record(known.state, record)
            except DecodeError as error:
                known.state.next_offset = record.offset + 1
                self._begin(known, record.offset, partial(self._bury, record, error, "assemble"))
            except FoldError as error:
                if is_broken(known.unfolded | dead, record.offset):
                    raise
                logger.error("%s; it goes to the dead letters", error, exc_info=error.__cause__)
                self._begin(known, record.offset, partial(self._bury, record, error.__cause__ or error, "fold"))
                known.unfolded = {offset for offset in known.unfolded if offset >= low_water} | {record.offset}
                state = assembly.initial(low_water)
                for group_id in closed:
                    state.remember(group_id)
                closings = await self._fold_again(state, where, record.offset + 1, dead | known.unfolded)
                known.state = state
        return closings

    async def _fold_again(
        self, state: assembly.AssemblyState, where: TopicPartition, end: int, dead: set[int]
    ) -> list[assembly.Closing]:
        """Fold all that lies before `end`, without the dead; their letters are sent or under way."""
        closings: list[assembly.Closing] = []
        reader = await self._log.reader({where: state.next_offset})
        try:
            while state.next_offset < end:
                for record in await reader.poll():
                    if record.offset < end and record.offset not in dead:
                        with contextlib.suppress(DecodeError):
                            closings += self._fold_record(state, record)
                state.next_offset = min(reader.position(where), end)
        finally:
            await reader.close()
        return closings

    def _fold_record(self, state: assembly.AssemblyState, record: Record) -> list[assembly.Closing]:
        received = codec.decode(record, num_partitions=self._num_partitions)
        return fold_one(lambda received: self._evolve(state, received), received)

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

    def _begin(self, known: _Partition, offset: int, sending: Sending) -> None:
        task = asyncio.ensure_future(self._release(known, self._hold(known, offset), sending))
        self._sends.add(task)
        task.add_done_callback(self._tell_failure)

    def _tell_failure(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            self._has_failed.set()

    async def _release(self, known: _Partition, number: int, sending: Sending) -> None:
        await sending()
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
        failpoint("assemble/after-send-before-mark")

    async def _bury(self, record: Record, error: BaseException, stage: str) -> None:
        await send_dead_letter(
            self._log, record, service=self._service, stage=stage, error=error, artifacts=self._artifacts
        )
