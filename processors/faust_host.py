"""Faust as a thin at-least-once host: it joins the group, fetches and commits; what is committed is the folds' word.

Faust 0.15.3 may commit past a record that is not acknowledged, and takes about 0.1 ms a record through its streams. So
one Faust event is one fetched batch of raw records of one partition, and the offset that is committed is the
low-water mark of the fold that took it. No tables, no web server, no topics made, no decoding.
"""

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, cast

import faust
from aiokafka import AIOKafkaConsumer
from aiokafka.coordinator.assignors.roundrobin import RoundRobinPartitionAssignor
from aiokafka.structs import ConsumerRecord
from faust.transport.drivers import aiokafka as driver
from faust.types import TP
from faust.types.tuples import ConsumerMessage
from yarl import URL

from rollstream.eventlog.log import Record
from rollstream.schemas.topics import BY_NAME, MIB, TOPICS

APP_ID = "rollstream-processors"
"""Consumer group of all processors."""
BATCH_RECORDS = 256
POLL_RECORDS = 2048
QUEUED_BATCHES = 4
"""Batches that wait for a fold; more would only be later."""
FETCH_WAIT_MS = 20
"""A partition whose records were just taken is in no request until the one under way is answered: so long at most."""
COMMIT_INTERVAL_S = 1.0
REBALANCE_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Batch:
    """Consecutive raw records of one partition, at least one."""

    partition: int
    generation: int
    """Of this process's assignment under which they were fetched; `Host.generation` counts them."""
    records: list[Record]


class Shell(Protocol):
    """A fold's shell as the host sees it: takes batches of one topic and says how far they may be committed."""

    topic: str

    async def take(self, batch: Batch) -> None:
        """Fold a batch; batches come one after the other. What it raises ends the service."""
        ...

    def mark(self, partition: int) -> int | None:
        """Offset from which the partition must be read again; None before its first batch."""
        ...

    def drop(self, partitions: Iterable[int]) -> None:
        """Forget partitions: they are revoked, or assigned anew and read again from their committed offset."""
        ...


class Host(faust.App):
    """A Faust app that knows its shells by Kafka's topic name."""

    shells: dict[str, Shell]
    failed: "asyncio.Future[None]"
    """Gets the first error of a shell."""
    generation: int = 0
    """Grows whenever partitions are revoked or assigned; batches of an older one are read again."""

    def shell_of(self, tp: TP) -> Shell | None:
        """The shell that takes a partition's topic."""
        return self.shells.get(tp.topic)

    def drop(self, partitions: Iterable[TP]) -> None:
        """Have the shells forget partitions."""
        for tp in partitions:
            shell = self.shell_of(tp)
            if shell is not None:
                shell.drop([tp.partition])


class BatchSchema(faust.Schema):
    """Hands a batch through as it is."""

    def loads_key(self, app: Any, message: Any, **options: Any) -> Any:
        return None

    def loads_value(self, app: Any, message: Any, **options: Any) -> Any:
        return message.value


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
            auto_offset_reset="earliest",
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
        way when partitions were assigned anew may come late, from where the reading was before.
        """
        found, active = await self._wait_next_records(timeout)
        generation = self.app.generation
        if found is None or self.should_stop:
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

    async def _consecutive(self, tp: TP, fetched: list[ConsumerRecord]) -> list[ConsumerRecord]:
        """The records from the next expected one on; none, and the reading set back, if that one is not there."""
        wanted = self._wanted.get(tp)
        if wanted is None:
            return []
        if fetched[0].offset > wanted:
            await self.seek(tp, wanted)
            return []
        some = [one for one in fetched if one.offset >= wanted]
        if some:
            self._wanted[tp] = some[-1].offset + 1
        return some

    async def perform_seek(self) -> None:
        """Begin at the committed offsets, at the oldest kept one where nothing is committed."""
        await super().perform_seek()
        assigned = self.assignment()
        begins = await self.earliest_offsets(*assigned) if assigned else {}
        self._wanted = {tp: self._committed_offset.get(tp) or begins[tp] for tp in assigned}

    @cached_property
    def _wanted(self) -> dict[TP, int]:
        """By partition: offset of the next record to hand on. Empty until the reading has its place."""
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
        self._wanted = {}
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


def create_host(
    bootstrap_servers: str,
    shells: Iterable[Shell],
    *,
    client_id: str,
    session_timeout_s: float = 10.0,
    app_id: str = APP_ID,
) -> Host:
    """An app with one agent a shell. Start and stop it as a service in the running loop."""
    host = Host(
        app_id,
        broker=[URL(f"kafka://{address.strip()}") for address in bootstrap_servers.split(",")],
        broker_client_id=client_id,
        broker_session_timeout=session_timeout_s,
        broker_heartbeat_interval=session_timeout_s / 3,
        broker_rebalance_timeout=REBALANCE_TIMEOUT_S,
        broker_commit_interval=COMMIT_INTERVAL_S,
        producer_request_timeout=30.0,
        stream_buffer_maxsize=QUEUED_BATCHES,
        stream_wait_empty=False,
        store="memory://",
        table_standby_replicas=0,
        topic_allow_declare=False,
        topic_disable_leader=True,
        web_enabled=False,
        autodiscover=False,
    )
    host.transport = Transport([URL(f"kafka://{one.strip()}") for one in bootstrap_servers.split(",")], host)
    host.failed = asyncio.get_running_loop().create_future()
    host.shells = {TOPICS[shell.topic].name: shell for shell in shells}
    for name, shell in host.shells.items():
        topic = host.topic(name, schema=BatchSchema(allow_empty=True))
        host.agent(topic, name=shell.topic)(_agent_of(host, shell))
    return host


def _agent_of(host: Host, shell: Shell) -> Any:
    async def agent(batches: Any) -> None:
        async for batch in batches:
            if not host.failed.done():
                await _watched(host, _take(host, shell, batch))

    return agent


async def _take(host: Host, shell: Shell, batch: Batch) -> None:
    """Give its shell a batch of the present assignment; nothing comes between the look and its first step."""
    if batch.generation == host.generation:
        await shell.take(batch)


async def _watched(host: Host, work: Coroutine[Any, Any, None]) -> None:
    """Await `work` and keep its error for the service; Faust would log it and go on with the next batch."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait([task])
    finally:
        task.cancel()
    error = task.exception()
    if error is not None and not host.failed.done():
        host.failed.set_exception(error)


def _record_of(topic: str, one: ConsumerRecord) -> Record:
    return Record(topic, one.partition, one.offset, one.key, one.value, tuple(one.headers), one.timestamp)
