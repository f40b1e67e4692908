"""Assembly's shell: batches of raw `steps` records in; trajectories, closed groups and dead letters acknowledged.

Order of the steps for a batch:
1. decode and fold every record;
2. send the trajectories of the groups that closed, all at once, and get their positions;
3. send the closed groups with those positions as locators;
4. only now may the low-water mark pass the first records of these groups.

Steps 2 and 3 of one batch overlap with the next batches: the low-water mark stays before all sends in progress.

A record on which the fold raises becomes a dead letter too. The changes of the fold are discarded: the partition is
folded again from its low-water mark without that record. A record that has a letter is skipped.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any

from rollstream.eventlog import codec
from rollstream.eventlog.artifacts import ArtifactStore
from rollstream.eventlog.failpoints import failpoint
from rollstream.eventlog.log import EventLog, Received, TopicPartition
from rollstream.eventlog.reading import decode_or_none
from rollstream.processors.assemble import fold as assembly
from rollstream.processors.curate import low_water
from rollstream.processors.host.app import Acknowledgement, Batch
from rollstream.processors.host.folding import MAX_IN_A_ROW, DeadRecords, fold_one
from rollstream.schemas.base import Event, Locator
from rollstream.schemas.errors import DecodeError, FoldError, LogError

MAX_UNDER_WAY = 32
"""Sends under way before a further batch waits."""

Evolve = Callable[[assembly.AssemblyState, Received], list[assembly.Closing]]
Sending = Callable[[], Coroutine[Any, Any, None]]
"""A function rather than a coroutine: a task that is cancelled before its first step leaves no coroutine unawaited."""


@dataclass(slots=True)
class _Partition:
    """State of one assigned partition."""

    state: assembly.AssemblyState
    held: dict[int, int] = field(default_factory=dict[int, int])
    """Offset that the low-water mark must not pass, by send in progress."""


class AssembleShell:
    """Assembles the partitions assigned to this process."""

    topic = "steps"

    def __init__(
        self, log: EventLog, artifacts: ArtifactStore | None, *, service: str, evolve: Evolve = assembly.evolve
    ) -> None:
        """`service` names this process in dead letters; `evolve` is the fold."""
        self._log = log
        self._evolve = evolve
        self._num_partitions: int | None = None
        self._dead = DeadRecords(log, artifacts, topic=self.topic, service=service, stage="assemble")
        self._num_read = 0
        self._acknowledgement = Acknowledgement()
        self._partitions: dict[int, _Partition] = {}
        self._sends: set[asyncio.Task[None]] = set()
        self._numbers = count()
        self._has_failed = asyncio.Event()

    async def prepare(self, partition: int, offset: int, metadata: str = "") -> None:
        """Prepare a partition for batches from its committed offset.

        Its state is kept, unless another member has advanced the offset meanwhile. `metadata`: see `low_water`.
        """
        found = low_water.beginning_of(metadata, offset, self.topic)
        known = self._partitions.get(partition)
        if known is None or offset > min([known.state.low_water, *known.held.values()]):
            self._dead.forget(TopicPartition(self.topic, partition))
            self._partitions[partition] = _Partition(assembly.initial(offset))
        await self._dead.refresh(0 if found is None else found.dlq)

    async def take(self, batch: Batch) -> None:
        """Fold a batch and start to send the groups that it closes.

        Raises LogError if an earlier send failed or records between two batches are missing, FoldError if the fold
        raises on every record.
        """
        first = batch.first_offset
        known = self._partitions.get(batch.partition)
        if known is None:
            known = self._partitions[batch.partition] = _Partition(assembly.initial(first))
            await self._dead.refresh()
        await self._wait_for_capacity()
        if self._num_partitions is None:
            self._num_partitions = await self._log.num_partitions(self.topic)
        if self._partitions.get(batch.partition) is not known:
            return  # revoked meanwhile: the next owner folds it
        next_offset = known.state.next_offset
        if first > next_offset:
            raise LogError(
                f"steps partition {batch.partition} has a gap: expected offset {next_offset}, read "
                f"{first}; restart the service"
            )
        number = self._hold(known, known.state.low_water)
        closings = await self._fold(known, batch)
        if self._partitions.get(batch.partition) is not known:
            return
        if closings:
            failpoint("assemble/after-fold-before-send")
            self._begin(known, min(one.first_offset for one in closings), partial(self._publish, closings))
        del known.held[number]
        await asyncio.sleep(0)

    def commit_offset(self, partition: int) -> int | None:
        """Offset of the GroupStarted of the oldest group that is open or whose closing is not yet acknowledged.

        Or of an earlier one, if a repeat of its GroupStarted comes behind.
        """
        known = self._partitions.get(partition)
        if known is None:
            return None
        return known.state.before_repeats(min([known.state.low_water, *known.held.values()]))

    def metadata(self, partition: int) -> str:
        """Metadata of the low-water mark: the offset of `dlq` to read letters from."""
        begin = self.commit_offset(partition)
        if begin is None:
            return ""
        return low_water.metadata_of_steps(begin, self._dead.needed_from(TopicPartition(self.topic, partition), begin))

    def progress(self, partition: int) -> int:
        """The position plus the number of records read again, also those that a kept fold skips, or as dead letters."""
        return (self.position(partition) or 0) + self._num_read + self._dead.num_read

    def is_waiting(self, partition: int) -> bool:
        """Whether acknowledgements must arrive before another batch is folded."""
        return self._acknowledgement.is_under_way

    def position(self, partition: int) -> int | None:
        """Offset of the next record to fold."""
        known = self._partitions.get(partition)
        return None if known is None else known.state.next_offset

    def drop(self, partitions: Iterable[int]) -> None:
        """Forget partitions; their next owner repeats the sends in progress."""
        for partition in partitions:
            self._partitions.pop(partition, None)
            self._dead.drop(TopicPartition(self.topic, partition))

    async def failed(self) -> None:
        """Return once a send has failed; `drain` raises its error."""
        await self._has_failed.wait()

    async def drain(self) -> None:
        """Wait for all sends in progress. Raises the error of a failed one."""
        while self._sends:
            await asyncio.wait(self._sends)
            self._reap()

    async def _fold(self, known: _Partition, batch: Batch) -> list[assembly.Closing]:
        where = TopicPartition(self.topic, batch.partition)
        answered = self._dead.answered(where)
        low_water, closed = known.state.low_water, tuple(known.state.closed_order)
        closings: list[assembly.Closing] = []
        for record in batch.records:
            if record.offset < known.state.next_offset:
                self._num_read += 1
                continue
            if record.offset in answered:
                known.state.next_offset = record.offset + 1
                continue
            try:
                received = codec.decode(record, num_partitions=self._num_partitions)
                closings += self._evolved(known.state, received)
            except DecodeError as error:
                known.state.next_offset = record.offset + 1
                self._begin(known, record.offset, partial(self._dead.send, record, error))
            except FoldError as error:
                await self._dead.add(record, error)
                self._dead.forget(where, before=min(low_water, record.offset - MAX_IN_A_ROW))
                self._begin(known, record.offset, partial(self._dead.send, record, error))
                state = assembly.initial(low_water)
                for group_id in closed:
                    state.remember(group_id)
                state.repeats |= known.state.repeats
                closings = await self._fold_again(state, where, record.offset + 1)
                known.state = state
        return closings

    async def _fold_again(
        self, state: assembly.AssemblyState, where: TopicPartition, end: int
    ) -> list[assembly.Closing]:
        """Fold all records before `end` except the dead-lettered ones, whose letters are sent or in progress."""
        closings: list[assembly.Closing] = []
        dead = self._dead.offsets(where)
        reader = await self._log.reader({where: state.next_offset})
        try:
            while state.next_offset < end:
                for record in await reader.poll():
                    self._num_read += 1
                    if record.offset < end and record.offset not in dead:
                        received = decode_or_none(record, num_partitions=self._num_partitions)
                        closings += [] if received is None else self._evolved(state, received)
                state.next_offset = min(reader.position(where), end)
        finally:
            await reader.close()
        return closings

    def _evolved(self, state: assembly.AssemblyState, received: Received) -> list[assembly.Closing]:
        return fold_one(lambda received: self._evolve(state, received), received)

    async def _wait_for_capacity(self) -> None:
        self._reap()
        while len(self._sends) >= MAX_UNDER_WAY:
            with self._acknowledgement:
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
        task.add_done_callback(self._wake_on_failure)

    def _wake_on_failure(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            self._has_failed.set()

    async def _release(self, known: _Partition, number: int, sending: Sending) -> None:
        await sending()
        del known.held[number]

    async def _publish(self, closings: list[assembly.Closing]) -> None:
        locators = iter(await self._log.send_all([one for closing in closings for one in closing.encoded]))
        failpoint("assemble/after-trajectories-before-groups")
        closed: list[Event] = []
        for closing in closings:
            where = tuple(
                Locator(partition=locator.partition, offset=locator.offset)
                for _, locator in zip(closing.encoded, locators, strict=False)
            )
            closed.append(closing.closed.model_copy(update={"locators": where}))
        await self._log.send_all(closed)
        failpoint("assemble/after-send-before-mark")
