"""Records on their way to Kafka: those of a partition are collected, sent as one batch, and acknowledged together.

aiokafka sends record by record too, but a call of it costs more than all else on a record's way.
"""

import asyncio
import copy
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

from aiokafka import AIOKafkaProducer

from rollstream.eventlog.kafka.client import log_errors
from rollstream.eventlog.log import Headers, Position
from rollstream.schemas.errors import LogError
from rollstream.schemas.kafka import KafkaSettings

LINGER_S = 0.002
"""How long the first record of a batch waits for others."""
BATCH_BYTES = 256 * 1024


class _Unsent(NamedTuple):
    key: bytes | None
    value: bytes | None
    headers: Headers
    offset: "asyncio.Future[int]"


class Sender:
    """Sends through one producer, in order in each partition, one batch of a partition at a time."""

    def __init__(self, producer: AIOKafkaProducer, kafka: KafkaSettings, send_timeout_s: float) -> None:
        """`send_timeout_s`: time without an acknowledgement after which a send fails."""
        self._producer = producer
        self._kafka = kafka
        self._send_timeout_s = send_timeout_s
        self._unsent: dict[tuple[str, int], deque[_Unsent]] = {}
        """By topic and partition; those that a task is sending have a queue."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._unacknowledged: dict[asyncio.Future[int], tuple[float, str]] = {}
        """Deadline (event loop's time) and topic of what was sent, oldest first."""
        self._overdue_timer: asyncio.TimerHandle | None = None

    def put(
        self, topic: str, partition: int, key: bytes | None, value: bytes | None, headers: Headers
    ) -> "asyncio.Future[int]":
        """Send a record after those before it. The future is its offset; cancelled in time, nothing is sent."""
        where, loop = (topic, partition), asyncio.get_running_loop()
        offset: asyncio.Future[int] = loop.create_future()
        unsent = self._unsent.get(where)
        if unsent is None:
            unsent = self._unsent[where] = deque()
            task = loop.create_task(self._send(where, unsent))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        unsent.append(_Unsent(key, value, headers, offset))
        return offset

    async def acknowledged(self, sent: "Sequence[tuple[Position, asyncio.Future[int]]]") -> list[Position]:
        """The positions of what was put, once all of it is acknowledged. `sent`: each with its topic and partition.

        Raises what the first one met that was not.
        """
        deadline = asyncio.get_running_loop().time() + self._send_timeout_s
        for where, offset in sent:
            self._unacknowledged[offset] = deadline, where.topic
        if self._overdue_timer is None:
            self._fail_overdue()
        try:
            if len(sent) > 1:
                await asyncio.wait({offset for _, offset in sent})
            return [where._replace(offset=await self._landed(where.topic, offset)) for where, offset in sent]
        finally:
            for _, offset in sent:
                del self._unacknowledged[offset]
                if not offset.cancel() and not offset.cancelled():
                    offset.exception()  # only the first one is raised

    async def close(self) -> None:
        """Send what is left that somebody waits for, and disconnect."""
        if self._tasks:
            await asyncio.wait(self._tasks)
        if self._overdue_timer is not None:
            self._overdue_timer.cancel()
            self._overdue_timer = None
        await self._producer.stop()

    async def _send(self, where: tuple[str, int], unsent: "deque[_Unsent]") -> None:
        """1. Collect. 2. Send as much as fits into a batch. 3. Go on when it is acknowledged, which keeps the order."""
        await asyncio.sleep(LINGER_S)
        while unsent:
            offsets: list[asyncio.Future[int]] = []
            try:
                batch = self._batch_of(unsent, offsets)
                if not offsets:
                    continue
                sent = await self._producer.send_batch(batch, self._kafka.topic_name(where[0]), partition=where[1])
                first: int = (await sent).offset
            except Exception as error:  # noqa: BLE001 -- each of those who wait raises it
                for offset in (one for one in offsets if not one.done()):
                    offset.set_exception(copy.copy(error))
            else:
                for index, offset in enumerate(offsets):
                    if not offset.done():  # first -1: sent again after so long that Kafka has forgotten the offset
                        offset.set_result(first + index if first >= 0 else -1)
        del self._unsent[where]

    def _batch_of(self, unsent: "deque[_Unsent]", offsets: "list[asyncio.Future[int]]") -> Any:
        batch = self._producer.create_batch()
        while unsent:
            record = unsent.popleft()
            if record.offset.done():
                continue
            offsets.append(record.offset)
            headers = list(record.headers)
            if batch.append(timestamp=None, key=record.key, value=record.value, headers=headers) is None:
                unsent.appendleft(record)
                offsets.pop()
                break
        batch.close()
        return batch

    async def _landed(self, topic: str, offset: "asyncio.Future[int]") -> int:
        try:
            return await offset
        except Exception as error:
            with log_errors(f"send to topic {self._kafka.topic_name(topic)}", self._kafka, "Write"):
                raise error

    def _fail_overdue(self) -> None:
        """Fail the sends whose deadline has passed; one timer serves all, because each would cost as much as a send."""
        loop = asyncio.get_running_loop()
        self._overdue_timer = None
        for offset, (deadline, topic) in self._unacknowledged.items():  # oldest first
            if deadline > loop.time():
                self._overdue_timer = loop.call_at(deadline, self._fail_overdue)
                return
            if not offset.done():
                seconds = f"{self._send_timeout_s:.0f} s"
                offset.set_exception(LogError(f"cannot send to topic {topic}: no acknowledgement within {seconds}"))
