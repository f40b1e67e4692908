"""Curation's shell: batches of raw `groups` records in; requests, manifests, rejections and seals acknowledged.

Order of what it does:
1. at the first batch of an assignment, fold silently everything before it: its answers are sent already;
2. decode and fold the batch, datasets fetched when an epoch first needs them;
3. send the answers in the order of the fold, dead letters first, and wait for all acknowledgements;
4. only now move the mark behind the batch.

A record on which the fold raises becomes a dead letter too; what the fold had changed by then is thrown away and folded
again without it. A record that has a letter is passed over.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from rollstream.eventlog import codec
from rollstream.eventlog.artifacts import ArtifactStore
from rollstream.eventlog.buried import Buried
from rollstream.eventlog.dead_letters import send_dead_letter
from rollstream.eventlog.failpoints import failpoint
from rollstream.eventlog.log import EventLog, Received, Record, TopicPartition
from rollstream.processors import beginning, curate
from rollstream.processors.dataset import load_dataset
from rollstream.processors.faust_app import Batch
from rollstream.processors.task_requests import Dataset
from rollstream.processors.unfolded import fold_one, is_broken
from rollstream.schemas.base import Event
from rollstream.schemas.errors import ArtifactError, DecodeError, FoldError, LogError
from rollstream.schemas.events import EpochStarted, RunEnded

ATTEMPTS = 3
RETRY_S = 1.0
GROUPS = TopicPartition("groups", 0)

Evolve = Callable[[curate.CurateState, Received, curate.Datasets], list[Event]]

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Fold:
    """The fold of one assignment."""

    generation: int
    next_offset: int = 0
    begin: int = 0
    """Oldest offset that was kept when the fold began."""
    mark: int | None = None
    state: curate.CurateState = field(default_factory=curate.initial)
    datasets: dict[str, Dataset] = field(default_factory=dict[str, Dataset])
    unfolded: set[int] = field(default_factory=set[int])
    """Offsets of records on which the fold raised."""


class CurateShell:
    """Curates the one partition of `groups` while it is assigned to this process."""

    topic = "groups"

    def __init__(
        self,
        log: EventLog,
        artifacts: ArtifactStore,
        *,
        service: str,
        retry_s: float = RETRY_S,
        evolve: Evolve = curate.evolve,
    ) -> None:
        """`service` names this process in dead letters; `evolve` is the fold."""
        self._log = log
        self._evolve = evolve
        self._buried = Buried(log)
        self._artifacts = artifacts
        self._service = service
        self._retry_s = retry_s
        self._fold: _Fold | None = None

    async def take(self, batch: Batch) -> None:
        """Fold a batch; returns once what it makes is acknowledged.

        Raises LogError if that fails, or if records between two batches are missing, and FoldError if the fold raises
        on every record, or on one that it has answered before.
        """
        fold = self._fold
        if fold is None or fold.generation != batch.generation:
            fold = self._fold = _Fold(batch.generation)
            await self._catch_up(fold, batch.records[0].offset)
        if batch.records[0].offset > fold.next_offset:
            first = batch.records[0].offset
            raise LogError(f"groups partition 0 was read up to offset {fold.next_offset}, then from {first}")
        answers: list[Event] = []
        for record in batch.records:
            if record.offset >= fold.next_offset:
                answers += await self._answer(fold, record)
        if self._fold is not fold:
            return  # revoked meanwhile: the next owner answers
        failpoint("curate/after-fold-before-send")
        await self._log.send_all(answers)
        failpoint("curate/after-send-before-mark")
        fold.mark = fold.next_offset

    def mark(self, partition: int) -> int | None:
        """The record after the last one whose answers are acknowledged."""
        return None if self._fold is None else self._fold.mark

    def position(self, partition: int) -> int | None:
        """Offset of the next record to fold, also while what came before is folded again."""
        return None if self._fold is None else self._fold.next_offset

    def drop(self, partitions: Iterable[int]) -> None:
        """Forget the fold."""
        self._fold = None

    async def _catch_up(self, fold: _Fold, end: int) -> None:
        """Fold everything before `end` anew and in silence."""
        await self._buried.refresh()
        begin = fold.begin = (await self._log.begin_offsets("groups"))[0]
        fold.state = curate.initial()
        fold.next_offset = begin
        if begin >= end:
            return
        reader = await self._log.reader({GROUPS: begin})
        try:
            while reader.position(GROUPS) < end and self._fold is fold:
                for record in await reader.poll(max_records=500):
                    if record.offset < end:
                        await self._refold(fold, record)
                        fold.next_offset = record.offset + 1
        finally:
            await reader.close()
        fold.next_offset = end

    async def _refold(self, fold: _Fold, record: Record) -> None:
        if record.offset in self._buried.offsets(GROUPS):
            return
        try:
            received = codec.decode(record)
        except DecodeError:
            return  # its dead letter is acknowledged
        await self._take_in(fold, received)

    async def _answer(self, fold: _Fold, record: Record) -> list[Event]:
        fold.next_offset = record.offset + 1
        if record.offset in self._buried.offsets(GROUPS):
            return []
        try:
            return await self._take_in(fold, codec.decode(record))
        except DecodeError as error:
            await self._bury(record, error, "curate")
        except FoldError as error:
            if is_broken(fold.unfolded | self._buried.offsets(GROUPS), record.offset):
                raise
            logger.error("%s; it goes to the dead letters", error, exc_info=error.__cause__)
            await self._bury(record, error.__cause__ or error, "fold")
            fold.unfolded.add(record.offset)
            await self._catch_up(fold, record.offset)
            fold.next_offset = record.offset + 1
        return []

    async def _bury(self, record: Record, error: BaseException, stage: str) -> None:
        await send_dead_letter(
            self._log, record, service=self._service, stage=stage, error=error, artifacts=self._artifacts
        )

    async def _take_in(self, fold: _Fold, received: Received) -> list[Event]:
        event = received.event
        try:
            if isinstance(event, EpochStarted):
                await self._provide(fold, event.run_id)
            outputs = fold_one(lambda received: self._evolve(fold.state, received, fold.datasets), received)
            return outputs + beginning.end_of_lost(fold.state, event, fold.begin)
        except ArtifactError as error:
            logger.error("run_id=%s cannot go on: %s", event.run_id, error)
            return [RunEnded(run_id=event.run_id, time_ms=event.time_ms, cause="failed", message=str(error))]
        finally:
            if isinstance(event, RunEnded):
                fold.datasets.pop(event.run_id, None)

    async def _provide(self, fold: _Fold, run_id: str) -> None:
        """Load the dataset of a run that the fold knows. Raises ArtifactError if it cannot be had."""
        run = fold.state.runs.get(run_id)
        if run is None or run_id in fold.datasets:
            return
        for left in reversed(range(ATTEMPTS)):
            try:
                fold.datasets[run_id] = await asyncio.to_thread(load_dataset, self._artifacts, run.started)
            except ArtifactError:
                if not left:
                    raise
                await asyncio.sleep(self._retry_s)
            else:
                return
