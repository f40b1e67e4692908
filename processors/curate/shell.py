"""Curation's shell: batches of raw `groups` records in; requests, manifests, rejections and seals acknowledged.

Order of its steps:
1. `prepare`, before the first batch of an assignment: fold from the low-water mark to the committed offset without
   sending, because the answers are already sent;
2. decode and fold the batch, fetching datasets when an epoch first needs them;
3. send the answers in the order of the fold, dead letters first, and wait for all acknowledgements;
4. only now advance the commit offset, and the low-water mark in its metadata, past the batch.

A fold whose answers are all acknowledged is kept after a revocation and continues if the partition is assigned again. A
record on which the fold raises becomes a dead letter too; the changes of the fold to its run are discarded, and the run
is folded again without the record. A record that has a letter is skipped. A run with MAX_OF_A_RUN such letters is ended
as failed, and no other record of it is folded until its end.

Runs whose first records are no longer in `groups` are ended with an error instead of being ignored. So is a run of
which an answer would be above the limit of its topic: that answer is left out.
"""

import logging
from collections.abc import Callable, Iterable
from contextlib import aclosing
from dataclasses import dataclass, field

from rollstream.eventlog import codec
from rollstream.eventlog.artifacts import ArtifactStore
from rollstream.eventlog.blocking_calls import Retry
from rollstream.eventlog.failpoints import failpoint
from rollstream.eventlog.log import Encoded, EventLog, Received, Record, TopicPartition, check_event_size
from rollstream.eventlog.reading import decode_or_none
from rollstream.processors.curate import fold as curate
from rollstream.processors.curate import low_water
from rollstream.processors.curate.refold import END, GroupsReader
from rollstream.processors.curate.state import CurateState
from rollstream.processors.curate.tasks import RunDatasets
from rollstream.processors.curate.undo import Undo
from rollstream.processors.host.app import Acknowledgement, Batch
from rollstream.processors.host.folding import MAX_OF_A_RUN, DeadRecords, FaultyRuns, fold_one
from rollstream.schemas.base import Event
from rollstream.schemas.errors import ArtifactError, DecodeError, FoldError, LogError
from rollstream.schemas.events import EpochStarted, GroupClosed, JobStarted, RunEnded, RunStarted, SubmissionReceived

GROUPS = TopicPartition("groups", 0)

Evolve = Callable[[curate.CurateState, Received, curate.Datasets], list[Event]]

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Fold:
    """The fold and its start."""

    next_offset: int
    kept_from: int
    """Oldest offset that the partition held when the fold began."""
    datasets: RunDatasets
    state: curate.CurateState = field(default_factory=curate.initial)
    commit_offset: int | None = None
    metadata: str = ""
    """Metadata to commit with that offset."""
    faulty: FaultyRuns = field(default_factory=FaultyRuns)
    lost: set[str] = field(default_factory=set[str])
    """Runs that were ended because their beginning is not kept, until their end comes back."""

    wanted: tuple[int, str] | None = None
    """Committed offset and metadata up to which it is being folded again; none: it is whole."""

    def can_go_on(self, offset: int, metadata: str) -> bool:
        """Whether it can continue in an assignment that sends answers from `offset`.

        All its answers must be acknowledged; if its preparation was interrupted, only the same one can continue.
        """
        if self.wanted is not None:
            return self.wanted == (offset, metadata)
        return self.next_offset <= offset if self.commit_offset is None else self.commit_offset == self.next_offset


class CurateShell:
    """Curates the single partition of `groups` while it is assigned to this process."""

    topic = "groups"

    def __init__(
        self,
        log: EventLog,
        artifacts: ArtifactStore,
        *,
        service: str,
        retry: Retry = Retry(),  # noqa: B008 -- frozen
        evolve: Evolve = curate.evolve,
    ) -> None:
        """`service` names this process in dead letters, `evolve` is the fold.

        `retry`: how long to retry an unreachable artifact store before ending a run that needs it.
        """
        self._log = log
        self._evolve = evolve
        self._dead = DeadRecords(log, artifacts, topic=self.topic, service=service, stage="curate")
        self._groups = GroupsReader(log)
        self._artifacts = artifacts
        self._retry = retry
        self._fold: _Fold | None = None
        self._num_folded = 0
        self._acknowledgement = Acknowledgement()

    async def prepare(self, partition: int, offset: int, metadata: str = "") -> None:
        """Prepare for batches from the committed `offset` with its `metadata`.

        Waits for an unreachable artifact store, because the fold of an open run must give the same result as before.
        Raises LogError if the log cannot be read.
        """
        found = low_water.beginning_of(metadata, offset)
        fold = self._fold
        await self._dead.refresh(0 if found is None else found.dlq)
        kept_from = (await self._log.begin_offsets("groups"))[0]
        if fold is None or not fold.can_go_on(offset, metadata):
            begin = max(kept_from, kept_from if found is None else found.offset)
            datasets = RunDatasets(self._artifacts, self._retry)
            self._dead.forget(GROUPS)
            fold = self._fold = _Fold(min(begin, offset), kept_from, datasets)
            fold.faulty.restore({} if found is None else found.faulty)
        if fold.next_offset < offset or fold.wanted is not None:
            logger.info("groups partition 0: folding again from offset %d to %d", fold.next_offset, offset)
            fold.commit_offset, fold.wanted = None, (offset, metadata)
            await self._catch_up(fold, offset, found)
            fold.wanted = None
            fold.faulty.restore({} if found is None else found.faulty)  # not counted once more

    async def take(self, batch: Batch) -> None:
        """Fold a batch; returns once its answers are acknowledged.

        Raises LogError if sending fails or records between two batches are missing, FoldError if the fold raises on
        every record, or on one that it has already answered.
        """
        first = batch.first_offset
        if self._fold is None:
            await self.prepare(batch.partition, first)
        fold = self._fold
        if fold is None:
            return  # revoked meanwhile
        if first > fold.next_offset:
            raise LogError(
                f"groups partition 0 has a gap: expected offset {fold.next_offset}, read {first}; restart the service"
            )
        answers: list[Encoded] = []
        for record in batch.records:
            if record.offset >= fold.next_offset:
                answers += await self._answer(fold, record)
        if self._fold is not fold:
            return  # revoked meanwhile: the next owner answers
        failpoint("curate/after-fold-before-send")
        with self._acknowledgement:
            await self._log.send_all(answers)
        failpoint("curate/after-send-before-mark")
        fold.commit_offset = fold.next_offset
        needed = self._dead.needed_from(GROUPS, low_water.begin_of(fold.state, fold.next_offset))
        faulty = fold.faulty.committed(fold.state.idle_runs())
        metadata = low_water.metadata_of(fold.state, fold.next_offset, needed, faulty)
        if low_water.names_runs(fold.metadata) and not low_water.names_runs(metadata):
            logger.warning(
                "groups: too many open runs for the commit metadata; a restart decodes all records since the oldest run"
            )
        fold.metadata = metadata

    def commit_offset(self, partition: int) -> int | None:
        """Offset after the last record whose answers are acknowledged."""
        return None if self._fold is None else self._fold.commit_offset

    def metadata(self, partition: int) -> str:
        """Metadata to commit with the offset."""
        return "" if self._fold is None else self._fold.metadata

    def position(self, partition: int) -> int | None:
        """Offset of the next record to fold, also during a refold of earlier records."""
        return None if self._fold is None else self._fold.next_offset

    def progress(self, partition: int) -> int:
        """Number of records folded or read so far, including repeats and dead letters."""
        return self._num_folded + self._groups.num_read + self._dead.num_read

    def is_waiting(self, partition: int) -> bool:
        """Whether the fold waits for the artifact store, or for acknowledgements."""
        return self._acknowledgement.is_under_way or (self._fold is not None and self._fold.datasets.is_loading)

    def drop(self, partitions: Iterable[int]) -> None:
        """Forget the fold."""
        self._fold = None

    async def _catch_up(self, fold: _Fold, end: int, found: low_water.Beginning | None) -> None:
        """Fold up to `end` without sending; decodes only live runs if they are known."""
        live = None if found is None else found.live
        if found is None or live is None:
            over = await self._groups.ended_runs(fold.next_offset, end)
        else:
            over = {run_id for run_id, run in live.items() if run.has_ended}
            refused = {run_id: run.refused_at for run_id, run in live.items() if run.refused_at is not None}
            fold.state.refused.update(refused)
        async with aclosing(self._groups.records(fold.next_offset, end)) as reading:
            async for record in reading:
                if found is None or live is None or record.key is None or record.key in found.keys:
                    await self._refold(fold, record, over)
                elif codec.kind_of(record) == END:
                    fold.state.remember(record.key.decode(errors="replace"))
                elif not found.has_clocks and record.offset not in self._dead.answered(GROUPS):
                    low_water.pass_time(fold.state, record)
                fold.next_offset = record.offset + 1
        fold.next_offset = end
        if live is not None:
            low_water.complete(fold.state, live, has_clocks=found is None or found.has_clocks)
        fold.datasets.keep_only(fold.state.runs)

    async def _refold(self, fold: _Fold, record: Record, over: set[str]) -> None:
        received = decode_or_none(record)
        if received is None:
            return  # its dead letter is acknowledged
        if record.offset in self._dead.answered(GROUPS):
            if self._dead.is_poison(GROUPS, record.offset):
                _give_up(fold.state, fold.faulty, received.event)
            return
        run = _needs_dataset(fold, received)
        if run is not None:
            await fold.datasets.provide_again(run, is_over=run.run_id in over)
        self._evolved(fold.state, fold.faulty, received, fold.datasets.by_run)

    async def _answer(self, fold: _Fold, record: Record) -> list[Encoded]:
        """Fold a record and return the events to send."""
        fold.next_offset = record.offset + 1
        self._num_folded += 1
        if record.offset in self._dead.answered(GROUPS):
            received = decode_or_none(record) if self._dead.is_poison(GROUPS, record.offset) else None
            return [] if received is None else _encoded(_give_up(fold.state, fold.faulty, received.event))
        try:
            received = codec.decode(record)
        except DecodeError as error:
            await self._send_letter(record, error)
            return []
        undo = Undo.before(fold.state, received.event)
        try:
            answers = _encoded(await self._take_in(fold, received))
            if (problem := _too_large(answers)) is None:
                return answers
            await self._take_back(fold, undo, record.offset)
            return await self._refuse(fold, received, problem)
        except FoldError as error:
            await self._dead.add(record, error)
            await self._send_letter(record, error)
            await self._take_back(fold, undo, record.offset)
            return _encoded(_give_up(fold.state, fold.faulty, received.event))

    async def _refuse(self, fold: _Fold, received: Received, problem: str) -> list[Encoded]:
        """End the run of a record with an answer that its topic has no room for, and fold it without tasks.

        If its manifest is too large, none of the run's answers are sent but its end.
        """
        event, offset = received.event, received.position.offset
        logger.error("run_id=%s cannot continue: %s", event.run_id, problem)
        is_over = isinstance(event, RunEnded) or fold.state.refused.get(event.run_id, offset) < offset
        ended: list[Event] = [] if is_over else [curate.refuse(fold.state, received, problem)]
        answers = _encoded(await self._take_in(fold, received))
        if _too_large(answers) is not None:
            answers = [one for one in answers if isinstance(one.event, RunEnded)]
        return answers + _encoded(ended)

    async def _take_in(self, fold: _Fold, received: Received) -> list[Event]:
        event = received.event
        try:
            if (run := _needs_dataset(fold, received)) is not None:
                await fold.datasets.provide(run)
            outputs = self._evolved(fold.state, fold.faulty, received, fold.datasets.by_run)
        except ArtifactError as error:
            logger.error("run_id=%s cannot continue: %s", event.run_id, error)
            ended = curate.refuse(fold.state, received, str(error))
            if not isinstance(event, GroupClosed):
                return [ended]
            return [*self._evolved(fold.state, fold.faulty, received, {}), ended]  # its batch, without a refill
        if isinstance(event, RunEnded):
            fold.datasets.drop(event.run_id)
            fold.lost.discard(event.run_id)
        return outputs + await self._end_lost(fold, received)

    def _evolved(
        self, state: curate.CurateState, faulty: FaultyRuns, received: Received, datasets: curate.Datasets
    ) -> list[Event]:
        """Fold one event; for a run with too many poison records only its time."""
        event = received.event
        if faulty.passes_over(event):
            return fold_one(lambda received: _pass_time(state, received.event), received)
        outputs = fold_one(lambda received: self._evolve(state, received, datasets), received)
        if isinstance(event, RunEnded):
            faulty.end(event.run_id)
        elif isinstance(event, RunStarted) and _begins(state, received):
            faulty.begin(event.run_id)
        return outputs

    async def _end_lost(self, fold: _Fold, received: Received) -> list[Event]:
        """End a run whose beginning is no longer retained, once; runs that already ended are known by their RunEnded
        header."""
        event, offset = received.event, received.position.offset
        ends = fail_truncated_run(fold.state, event, fold.kept_from)
        if not ends or event.run_id in fold.lost:
            return []
        if await self._groups.has_beginning_or_end(event.run_id, fold.kept_from, offset):
            fold.state.remember(event.run_id)
            return []
        fold.lost.add(event.run_id)
        return list(ends)

    async def _take_back(self, fold: _Fold, undo: Undo, end: int) -> None:
        """Restore the state before the record at `end` by folding its run's earlier records again."""
        rebuilt, faulty = curate.CurateState(refused=dict(fold.state.refused)), FaultyRuns()
        if undo.first_offset is not None:
            dead = self._dead.offsets(GROUPS)
            key = undo.run_id.encode()
            async with aclosing(self._groups.records(undo.first_offset, end)) as reading:
                async for record in reading:
                    received = decode_or_none(record) if record.key in (key, None) else None
                    if received is None or received.event.run_id != undo.run_id:
                        continue
                    if record.offset in dead:
                        if self._dead.is_poison(GROUPS, record.offset):
                            _give_up(rebuilt, faulty, received.event)
                        continue
                    datasets = fold.datasets.with_unnamed(rebuilt.runs.get(undo.run_id))
                    self._evolved(rebuilt, faulty, received, datasets)
        undo.apply(fold.state, rebuilt)

    async def _send_letter(self, record: Record, error: DecodeError | FoldError) -> None:
        with self._acknowledgement:
            await self._dead.send(record, error)


def _pass_time(state: curate.CurateState, event: Event) -> list[Event]:
    steps_at = event.steps_at if isinstance(event, GroupClosed) else None
    return curate.pass_time(state, event.run_id, event.time_ms, steps_at)


def _begins(state: curate.CurateState, received: Received) -> bool:
    run = state.runs.get(received.event.run_id)
    return run is not None and run.first_offset == received.position.offset


def _encoded(events: list[Event]) -> list[Encoded]:
    """Raises FoldError for an event that cannot be written, as with a version of 65 bits: a record has led to it."""
    encoded: list[Encoded] = []
    for event in events:
        try:
            encoded.append(codec.encode(event))
        except TypeError as error:
            raise FoldError(f"a record of groups is answered with {event.event_id}, not writable: {error}") from error
    return encoded


def _too_large(answers: list[Encoded]) -> str | None:
    """Error message about the first answer that is above the limit of its topic; None if all have room."""
    for one in answers:
        try:
            check_event_size(one)
        except LogError as error:
            parts = ": the settings of its job, such as environment_config, and its example's inputs are part of it"
            return f"{one.event.event_id}: {error}{parts if one.topic == 'tasks' else ''}"
    return None


def _needs_dataset(fold: _Fold, received: Received) -> RunStarted | None:
    """The run whose dataset the fold of an event needs; None if it needs none."""
    event = received.event
    needs = curate.needs_dataset(fold.state, received) and not fold.faulty.passes_over(event)
    return fold.state.runs[event.run_id].started if needs else None


def _give_up(state: curate.CurateState, faulty: FaultyRuns, event: Event) -> list[Event]:
    """Count a poison record; returns RunEnded if its run has too many, to be sent, not applied.

    If the end cannot be folded either, the run is dropped.
    """
    run_id = event.run_id
    must_end = faulty.add(run_id)
    if isinstance(event, RunEnded) and faulty.is_given_up(run_id):
        state.runs.pop(run_id, None)
        state.remember(run_id)
    if not must_end or run_id in state.ended or run_id in state.past:
        return []
    message = f"{MAX_OF_A_RUN} records of the run in topic groups cannot be folded; `rollstream dlq list` shows why"
    return [RunEnded(run_id=run_id, time_ms=event.time_ms, cause="failed", message=message)]


def fail_truncated_run(state: CurateState, event: Event, begin: int) -> list[Event]:
    """End a run that continues although its RunStarted is before `begin`, the oldest retained offset.

    The end is sent, not applied: it takes effect when it is read back as a record.
    """
    needs_run = isinstance(event, JobStarted | EpochStarted | GroupClosed | SubmissionReceived)
    is_known = event.run_id in state.runs or event.run_id in state.ended or event.run_id in state.past
    if not begin or not needs_run or is_known:
        return []
    message = (
        f"the run's first records were removed: topic groups partition 0 no longer has records before offset {begin}, "
        "retention or a truncation removed it"
    )
    return [RunEnded(run_id=event.run_id, time_ms=event.time_ms, cause="failed", message=message)]
