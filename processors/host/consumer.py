"""Faust's consumer and transport, changed to fetch raw records in batches and commit the folds' offsets.

Records are delivered strictly by offset, from the committed one and without gaps. So nothing depends on Faust's own
tracking of read and acknowledged records, or on records that arrive late around a rebalance.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from functools import cached_property
from typing import Any, cast

from aiokafka import AIOKafkaConsumer
from aiokafka import TopicPartition as KafkaPartition
from aiokafka.coordinator.assignors.roundrobin import RoundRobinPartitionAssignor
from aiokafka.errors import KafkaError, NoOffsetForPartitionError, OffsetOutOfRangeError
from aiokafka.structs import ConsumerRecord
from faust.transport.drivers import aiokafka as driver
from faust.types import TP
from faust.types.tuples import ConsumerMessage

from rollstream.eventlog.kafka.access import DENIED, denied
from rollstream.eventlog.kafka.security import client_options
from rollstream.eventlog.log import Record, TopicPartition, check_kept
from rollstream.processors.host.app import Batch, Host
from rollstream.processors.host.client import MetadataConsumer
from rollstream.schemas.errors import TruncatedError
from rollstream.schemas.topics import MIB

BATCH_RECORDS = 256
POLL_RECORDS = 2048
FETCH_WAIT_MS = 20
"""Maximum wait of a fetch request; a partition whose records were just taken is not in a request in flight."""

NO_POSITION_S = 0.05


FINISH_BATCHES_S = 2.0
"""Seconds that a rebalance waits for batches being folded, so that retained partitions keep their fold."""
IDLE_S = 1.0
"""Seconds between two corrections of the fetch positions while nothing arrives."""
HELD_POLL_S = 0.02
"""Seconds to wait for records of other partitions while one is not ready."""


class _Thread(driver.AIOKafkaConsumerThread):
    """Faust's consumer thread; its client fetches up to the largest record size and waits briefly."""

    def close(self) -> None:
        """Do nothing, because the thread closes its client when it stops. At a rebalance during its shutdown, Faust
        closes it in another event loop too, and marks it as closed, so that the thread would leave its connections
        open."""

    def _create_worker_consumer(self, transport: driver.Transport) -> AIOKafkaConsumer:
        conf = self.app.conf
        self._assignor = RoundRobinPartitionAssignor
        self.client = MetadataConsumer(
            cast(Consumer, self.consumer).metadata_of,
            client_id=conf.broker_client_id,
            group_id=conf.id,
            **client_options(cast(Host, self.app).kafka),
            partition_assignment_strategy=[RoundRobinPartitionAssignor],
            enable_auto_commit=False,
            auto_offset_reset="none",
            max_poll_records=POLL_RECORDS,
            max_poll_interval_ms=int((conf.broker_max_poll_interval or 0) * 1000),
            max_partition_fetch_bytes=MIB,
            fetch_max_wait_ms=FETCH_WAIT_MS,
            request_timeout_ms=int(conf.broker_request_timeout * 1000),
            session_timeout_ms=int(conf.broker_session_timeout * 1000),
            rebalance_timeout_ms=int(conf.broker_rebalance_timeout * 1000),
            heartbeat_interval_ms=int(conf.broker_heartbeat_interval * 1000),
        )
        return self.client


class Consumer(driver.Consumer):
    """Faust's consumer, fetching in batches and committing the shells' offsets."""

    app: Host  # pyright: ignore[reportIncompatibleVariableOverride]
    _thread: _Thread  # pyright: ignore[reportIncompatibleVariableOverride]
    _set_right_at = 0.0
    _num_polls = 0

    def _new_consumer_thread(self) -> _Thread:
        return _Thread(self, loop=self.loop, beacon=self.beacon)

    # pyright: ignore[reportIncompatibleMethodOverride]
    async def getmany(self, timeout: float) -> AsyncIterator[tuple[TP, ConsumerMessage]]:
        """Batches of fetched records, one partition after the other; ends when the assignment changes.

        Records are delivered strictly by offset: from the committed one, without gaps. Records in flight during a
        rebalance may arrive late, from the earlier position; fetched records that were not delivered are fetched again
        when no others arrive.
        """
        self._num_polls += 1
        found, active = await self._next_records(timeout)
        generation = self.app.generation
        if found is None or self.should_stop or not self.flow_active:
            return
        for tp, fetched in cast(dict[TP, list[ConsumerRecord]], found).items():
            if active is not None and tp not in active:
                continue
            for first in range(0, len(fetched), BATCH_RECORDS):
                if not self.flow_active or self.app.generation != generation:
                    return
                begin = self.wanted.get(tp)
                some = await self._consecutive(tp, fetched[first : first + BATCH_RECORDS])
                if some:
                    self.app.queued[tp.topic] += 1
                    yield tp, self._message_of(tp, some, generation, begin)
        if not found and time.monotonic() >= self._set_right_at + IDLE_S:
            self._set_right_at = time.monotonic()
            await self._set_right(generation)

    async def _next_records(self, timeout: float) -> tuple[Any, set[TP] | None]:
        """The next fetched records; None if the current position cannot be read."""
        try:
            return await self._wait_next_records(timeout)
        except NoOffsetForPartitionError:
            await self.sleep(NO_POSITION_S)  # a partition was polled before `perform_seek` had set its start offset
        except OffsetOutOfRangeError:
            await self._check_kept(self.wanted)
        except DENIED as error:
            self._fail_denied(error, "read records")
        return None, None

    async def _getmany(self, active_partitions: set[TP] | None, timeout: float) -> Any:
        """Fetched records of partitions whose shells are ready; None if none is ready.

        A partition that is refolding or lagging does not block others: its records stay in the client.
        """
        self.app.changed.clear()
        ready = {tp for tp in active_partitions or () if self.app.is_ready(tp)}
        if not ready:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(NO_POSITION_S):
                    await self.app.changed.wait()
            return None
        is_complete = len(ready) == len(active_partitions or ())
        found = await super()._getmany(ready, timeout if is_complete else HELD_POLL_S)
        for tp, fetched in found.items():
            self.first_fetched.setdefault(tp, fetched[0].offset)
        return found

    def check_membership(self) -> None:
        """Fail the host if joining the group is denied: aiokafka retries without limit and reports no error."""
        client = getattr(self._thread, "client", None)  # None before the thread has started
        coordinator: Any = getattr(client, "_coordinator", None)
        error: BaseException | None = getattr(coordinator, "_pending_exception", None)
        if isinstance(error, DENIED):
            self._fail_denied(error, f"join group {self.app.conf.id}")

    def _fail_denied(self, error: KafkaError, doing: str) -> None:
        refused = denied(error, doing, self.app.kafka, "Read")
        self.app.fail(refused or error)

    async def _consecutive(self, tp: TP, fetched: list[ConsumerRecord]) -> list[ConsumerRecord]:
        """The records from the next expected offset; if that record is missing, none, after a seek back."""
        wanted = self.wanted.get(tp)
        if wanted is None:
            return []
        if fetched[0].offset > wanted and not await self._are_control_records(tp, wanted, fetched[0].offset):
            return []
        some = [one for one in fetched if one.offset >= wanted]
        if some:
            self.wanted[tp] = some[-1].offset + 1
        return some

    async def _are_control_records(self, tp: TP, wanted: int, reached: int) -> bool:
        """Whether only control records, which aiokafka skips, are between the expected offset and the one reached: the
        expected one was sought by an earlier poll, and no record between them was fetched since. Otherwise it is sought
        now.
        """
        offset, poll = self.sought.get(tp, (-1, 0))
        if offset == wanted and poll < self._num_polls and self.first_fetched.get(tp, reached) >= reached:
            return True
        self.sought[tp] = (wanted, self._num_polls)
        self.first_fetched.pop(tp, None)
        await self.seek(tp, wanted)
        return False

    async def _set_right(self, generation: int) -> None:
        """No fetch is in flight: seek each partition back to its next undelivered offset."""
        assigned = cast(set[TP], self.assignment())
        if not assigned <= self.wanted.keys():
            await self.perform_seek()
            return
        for tp in assigned:
            if not self.flow_active or self.app.generation != generation:
                return
            wanted, position = self.wanted[tp], await self.position(tp)
            if position is None or position < wanted:
                await self.seek(tp, wanted)
            elif position > wanted and await self._are_control_records(tp, wanted, position):
                self.passed[tp] = (wanted, position)

    async def perform_seek(self) -> None:
        """Start at the committed offsets, or at the oldest retained offset without a commit.

        A committed offset that is no longer retained fails the host instead of being reset.
        """
        generation = self.app.generation
        await super().perform_seek()
        assigned = cast(set[TP], self.assignment())
        begins = await self.earliest_offsets(*assigned) if assigned else {}
        wanted = {
            tp: begins[tp] if (committed := self.committed_offsets_read.get(tp)) is None else committed
            for tp in assigned
        }
        if not await self._check_kept(wanted) or self.app.generation != generation:
            return
        for tp in assigned:
            if not self.committed_offsets_read.get(tp):  # the others are already positioned
                await self.seek(tp, wanted[tp])
        self.wanted, self.sought, self.first_fetched, self.passed = wanted, {}, {}, {}
        for tp in assigned:
            self.app.prepare(tp, wanted[tp], self._thread.client.metadata_read(tp.topic, tp.partition))

    async def seek_to_committed(self) -> Mapping[TP, int]:
        """Like Faust's method, but distinguishes a committed offset of 0 from none."""
        found = await super().seek_to_committed()
        self.committed_offsets_read = dict(found)
        return found

    async def _check_kept(self, offsets: Mapping[TP, int]) -> bool:
        """Whether all these offsets are retained; if not, fails the host with the first that is not."""
        if not offsets:
            return True
        begins, ends = await self.earliest_offsets(*offsets), await self.highwaters(*offsets)
        for tp, offset in offsets.items():
            needed = offset if offset < begins[tp] else max(offset, self.reached.get(tp, 0))
            try:
                check_kept(TopicPartition(self._short(tp), tp.partition), needed, begins[tp], ends[tp])
            except TruncatedError as error:
                self.app.fail(error)
                return False
        return True

    @cached_property
    def wanted(self) -> dict[TP, int]:
        """Offset of the next record to deliver, by partition. Empty before the consumer has a position."""
        return {}

    @cached_property
    def sought(self) -> dict[TP, tuple[int, int]]:
        """The expected offset that was last sought because others were fetched, and the number of the poll that had
        fetched them, by partition."""
        return {}

    @cached_property
    def first_fetched(self) -> dict[TP, int]:
        """Offset of the first record fetched since the last seek, by partition; it may have been lost."""
        return {}

    @cached_property
    def passed(self) -> dict[TP, tuple[int, int]]:
        """The next offset to deliver, and the end of the control records there, by partition that ends with some."""
        return {}

    @cached_property
    def committing(self) -> dict[TP, tuple[int, str]]:
        """The offset to commit next, or committed last, and its metadata, by partition."""
        return {}

    @cached_property
    def owned(self) -> set[TP]:
        """Partitions that a shell may have state of."""
        return set()

    @cached_property
    def committed_offsets_read(self) -> dict[TP, int | None]:
        """The committed offset last read from Kafka, by partition; None if there is none."""
        return {}

    @cached_property
    def reached(self) -> dict[TP, int]:
        """The furthest offset that this process has read in earlier assignments, by partition; the log cannot end
        before it."""
        return {}

    def _message_of(self, tp: TP, fetched: list[ConsumerRecord], generation: int, begin: int | None) -> ConsumerMessage:
        topic = self._short(tp)
        batch = Batch(tp.partition, generation, [_record_of(topic, one) for one in fetched], begin)
        last = fetched[-1]
        return ConsumerMessage(
            tp.topic,
            tp.partition,
            last.offset,
            last.timestamp / 1000,
            last.timestamp_type,
            [],
            None,
            cast(bytes, batch),
            None,
            0,
            0,
            TP(tp.topic, tp.partition),
            generation_id=self.app.consumer_generation_id,
        )

    def _filter_tps_with_pending_acks(self, topics: Any = None) -> Iterator[TP]:
        """All assigned partitions, because a commit offset may advance without an acknowledgement and stay despite
        many."""
        return (
            tp
            for tp in self.assignment()
            if self.app.shell_of(tp) is not None and (topics is None or tp in topics or tp.topic in topics)
        )

    def _short(self, tp: TP) -> str:
        """Short name of a partition's topic, which is one of `TOPICS`."""
        short = self.app.kafka.short_name(tp.topic)
        assert short is not None
        return short

    def _new_offset(self, tp: TP) -> int | None:
        """The shell's commit offset, independent of Faust's acknowledgements."""
        self._acked[tp].clear()
        self._acked_index[tp].clear()
        shell = self.app.shell_of(tp)
        if shell is None or (offset := shell.commit_offset(tp.partition)) is None:
            return None
        self.committing[tp] = (offset, shell.metadata(tp.partition))
        return offset

    def metadata_of(self, tp: KafkaPartition, offset: int) -> str:
        """The metadata to commit with an offset. Called in the consumer's thread."""
        committing, metadata = self.committing.get(TP(tp.topic, tp.partition), (-1, ""))
        return metadata if committing == offset else ""

    async def _add_gap(self, tp: TP, offset_from: int, offset_to: int) -> None:
        """Do nothing: offsets between the last records of batches are not gaps."""

    def on_buffer_full(self, tp: TP) -> None:
        """Do nothing: a full queue already blocks the fetcher; Faust would sleep a second without active partitions."""

    def on_buffer_drop(self, tp: TP) -> None:
        """Nothing, as above."""

    async def create_topic(self, topic: str, *args: Any, **options: Any) -> None:
        """Nothing: topics exist before a service starts."""

    async def on_partitions_revoked(self, revoked: set[TP]) -> None:
        """Commit acknowledged offsets. Folds are kept until the new assignment is known."""
        self._next_generation()
        await self.app.finish_batches(FINISH_BATCHES_S)
        await self.commit()
        await super().on_partitions_revoked(revoked)

    async def on_partitions_assigned(self, assigned: set[TP], generation_id: int = 0) -> None:
        """Start from the committed offsets; a partition that was assigned again may keep its fold."""
        self._next_generation()
        self.app.drop(self.owned - assigned)
        self.owned = set(assigned)
        await super().on_partitions_assigned(assigned, generation_id)

    def _next_generation(self) -> None:
        for tp, offset in self.wanted.items():  # committed ones, if an assignment ended before it read anything
            self.reached[tp] = max(offset, self.reached.get(tp, 0))
        self.wanted, self.sought, self.first_fetched, self.passed = {}, {}, {}, {}
        self.app.next_generation()


class Producer(driver.Producer):
    """Faust's producer; sends nothing and creates no topics here."""

    def _settings_auth(self) -> Mapping[str, Any]:
        return client_options(cast(Host, self.app).kafka)

    async def create_topic(self, topic: str, *args: Any, **options: Any) -> None:
        """Nothing: topics exist before a service starts."""


class Transport(driver.Transport):
    """Faust's transport with the consumer above."""

    Consumer = Consumer
    Producer = Producer


def _record_of(topic: str, one: ConsumerRecord) -> Record:
    return Record(topic, one.partition, one.offset, one.key, one.value, tuple(one.headers), one.timestamp)
