"""Faust's consumer and transport, fetching raw records by the batch and committing what the folds say.

What is handed on is told by offsets alone, from the committed one on and without a gap. So nothing depends on what
Faust holds for read or acknowledged, nor on records that surface late around a rebalance.
"""

from collections.abc import AsyncIterator, Iterator, Mapping
from functools import cached_property
from typing import Any, cast

from aiokafka import AIOKafkaConsumer
from aiokafka.coordinator.assignors.roundrobin import RoundRobinPartitionAssignor
from aiokafka.errors import NoOffsetForPartitionError, OffsetOutOfRangeError
from aiokafka.structs import ConsumerRecord
from faust.transport.drivers import aiokafka as driver
from faust.types import TP
from faust.types.tuples import ConsumerMessage

from rollstream.eventlog.log import Record, TopicPartition, check_kept
from rollstream.processors.faust_app import Batch, Host
from rollstream.schemas.errors import TruncatedError
from rollstream.schemas.topics import BY_NAME, MIB

BATCH_RECORDS = 256
POLL_RECORDS = 2048
FETCH_WAIT_MS = 20
"""A partition whose records were just taken is in no request until the one under way is answered: so long at most."""

NO_PLACE_S = 0.05


class _Thread(driver.AIOKafkaConsumerThread):
    """Faust's consumer thread; its client has a fetch size of the largest record and small waits."""

    def _create_worker_consumer(self, transport: driver.Transport) -> AIOKafkaConsumer:
        conf = self.app.conf
        self._assignor = RoundRobinPartitionAssignor
        return AIOKafkaConsumer(
            client_id=conf.broker_client_id,
            group_id=conf.id,
            bootstrap_servers=cast(str, driver.server_list(transport.url, transport.default_port)),
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


class Consumer(driver.Consumer):
    """Faust's consumer, fetching by the batch and committing the shells' marks."""

    app: Host  # pyright: ignore[reportIncompatibleVariableOverride]

    def _new_consumer_thread(self) -> _Thread:
        return _Thread(self, loop=self.loop, beacon=self.beacon)

    async def getmany(self, timeout: float) -> AsyncIterator[tuple[TP, ConsumerMessage]]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Batches of what has been fetched, one partition after the other; ends when the assignment changes.

        What is handed on is told by offsets alone: from the committed one on, without a gap. Records that were under
        way when partitions were assigned anew may come late, from where the reading was before; and what was fetched
        but not handed on is fetched again once nothing else comes.
        """
        try:
            found, active = await self._wait_next_records(timeout)
        except NoOffsetForPartitionError:
            await self.sleep(NO_PLACE_S)  # a partition was looked at before `perform_seek` had told where to begin
            return
        except OffsetOutOfRangeError:
            await self._check_kept(self.wanted)
            return
        generation = self.app.generation
        if found is None or self.should_stop or not self.flow_active:
            return
        for tp, fetched in cast(dict[TP, list[ConsumerRecord]], found).items():
            if active is not None and tp not in active:
                continue
            for first in range(0, len(fetched), BATCH_RECORDS):
                if not self.flow_active or self.app.generation != generation:
                    return
                some = await self._consecutive(tp, fetched[first : first + BATCH_RECORDS])
                if some:
                    yield tp, self._message_of(tp, some, generation)
        if not found:
            await self._set_right(generation)

    async def _consecutive(self, tp: TP, fetched: list[ConsumerRecord]) -> list[ConsumerRecord]:
        """The records from the next expected one on; none, and the reading set back, if that one is not there."""
        wanted = self.wanted.get(tp)
        if wanted is None:
            return []
        if fetched[0].offset > wanted:
            await self.seek(tp, wanted)
            return []
        some = [one for one in fetched if one.offset >= wanted]
        if some:
            self.wanted[tp] = some[-1].offset + 1
        return some

    async def _set_right(self, generation: int) -> None:
        """Nothing is under way: have every partition be read from where the handing on stands."""
        assigned = cast(set[TP], self.assignment())
        if not assigned <= self.wanted.keys():
            await self.perform_seek()
            return
        for tp in assigned:
            if not self.flow_active or self.app.generation != generation:
                return
            wanted = self.wanted[tp]
            if await self.position(tp) != wanted:
                await self.seek(tp, wanted)

    async def perform_seek(self) -> None:
        """Begin at the committed offsets, at the oldest kept one where nothing is committed.

        An offset that is not kept any more fails the host: nothing is read from elsewhere in its place.
        """
        generation = self.app.generation
        await super().perform_seek()
        assigned = cast(set[TP], self.assignment())
        begins = await self.earliest_offsets(*assigned) if assigned else {}
        wanted = {tp: begins[tp] if (told := self.told_committed.get(tp)) is None else told for tp in assigned}
        if not await self._check_kept(wanted) or self.app.generation != generation:
            return
        for tp in assigned:
            if not self.told_committed.get(tp):  # the others have been sought already
                await self.seek(tp, wanted[tp])
        self.wanted = wanted

    async def seek_to_committed(self) -> Mapping[TP, int]:
        """As Faust does it; keeps apart what is committed as 0 and what is not."""
        found = await super().seek_to_committed()
        self.told_committed = dict(found)
        return found

    async def _check_kept(self, offsets: Mapping[TP, int]) -> bool:
        """Whether reading can go on at these offsets; if not, the host has failed with the first that is gone."""
        if not offsets:
            return True
        begins, ends = await self.earliest_offsets(*offsets), await self.highwaters(*offsets)
        for tp, offset in offsets.items():
            needed = offset if offset < begins[tp] else max(offset, self.reached.get(tp, 0))
            try:
                check_kept(TopicPartition(BY_NAME[tp.topic].short, tp.partition), needed, begins[tp], ends[tp])
            except TruncatedError as error:
                self.app.fail(error)
                return False
        return True

    @cached_property
    def wanted(self) -> dict[TP, int]:
        """By partition: offset of the next record to hand on. Empty until the reading has its place."""
        return {}

    @cached_property
    def told_committed(self) -> dict[TP, int | None]:
        """By partition: the offset that Kafka held for committed when last asked, None for none."""
        return {}

    @cached_property
    def reached(self) -> dict[TP, int]:
        """By partition: how far this process has read it in earlier assignments; the log cannot end before that."""
        return {}

    def _message_of(self, tp: TP, fetched: list[ConsumerRecord], generation: int) -> ConsumerMessage:
        topic = BY_NAME[tp.topic].short
        batch = Batch(tp.partition, generation, [_record_of(topic, one) for one in fetched])
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
        """All assigned partitions: a mark may move without an acknowledgement, and stay in spite of many."""
        return (
            tp
            for tp in self.assignment()
            if self.app.shell_of(tp) is not None and (topics is None or tp in topics or tp.topic in topics)
        )

    def _new_offset(self, tp: TP) -> int | None:
        """The fold's low-water mark, whatever Faust holds for acknowledged."""
        self._acked[tp].clear()
        self._acked_index[tp].clear()
        shell = self.app.shell_of(tp)
        return None if shell is None else shell.mark(tp.partition)

    async def _add_gap(self, tp: TP, offset_from: int, offset_to: int) -> None:
        """Nothing: gaps between the last records of batches are no gaps."""

    def on_buffer_full(self, tp: TP) -> None:
        """Nothing: a full queue holds the fetcher itself; Faust would sleep a second without active partitions."""

    def on_buffer_drop(self, tp: TP) -> None:
        """Nothing, as above."""

    async def create_topic(self, topic: str, *args: Any, **options: Any) -> None:
        """Nothing: topics exist before a service starts."""

    async def on_partitions_revoked(self, revoked: set[TP]) -> None:
        """Commit what is settled, then forget."""
        await self.commit()
        self._forget(revoked)
        await super().on_partitions_revoked(revoked)

    async def on_partitions_assigned(self, assigned: set[TP], generation_id: int = 0) -> None:
        """Begin anew from the committed offsets, also where a partition has stayed."""
        self._forget(assigned)
        await super().on_partitions_assigned(assigned, generation_id)

    def _forget(self, partitions: set[TP]) -> None:
        self.reached.update(self.wanted)
        self.wanted = {}
        self.app.generation += 1
        self.app.drop(partitions)


class Producer(driver.Producer):
    """Faust's producer; sends nothing here, and makes no topics."""

    async def create_topic(self, topic: str, *args: Any, **options: Any) -> None:
        """Nothing: topics exist before a service starts."""


class Transport(driver.Transport):
    """Faust's transport with the consumer above."""

    Consumer = Consumer
    Producer = Producer


def _record_of(topic: str, one: ConsumerRecord) -> Record:
    return Record(topic, one.partition, one.offset, one.key, one.value, tuple(one.headers), one.timestamp)
