"""Writer of events to a steps partition: explicitly to that partition, in order within an attempt, many attempts at
once.

Within an attempt an event is sent once the one before it is acknowledged, while the rollout goes on; the client
batches across attempts. Only the terminal event is waited for.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from types import TracebackType

from rollstream.eventlog.log import Encoded, EventLog, TopicPartition, check_kept
from rollstream.producers.clock import EventClock
from rollstream.schemas.errors import LogError
from rollstream.schemas.events import RolloutEnded, RolloutFailed

MAX_WAITING = 64
"""Events of one attempt that may wait to be sent before the next one has to."""

_TERMINAL = (RolloutEnded, RolloutFailed)


class StepsWriter:
    """The owner's end of one steps partition: its clock, and how far acknowledged sends reach."""

    def __init__(self, log: EventLog, partition: int, clock: EventClock, next_offset: int) -> None:
        """`next_offset`: after the newest record that is known."""
        self.partition = partition
        self.clock = clock
        self._log = log
        self._next_offset = next_offset
        self._in_flight: dict[int, int] = {}
        self._num_sent = 0
        self._landing = asyncio.Event()
        self._resumed = asyncio.Event()
        self._resumed.set()
        self._own: set[int] = set()
        """Offsets of own records from `_checked_until` on."""
        self._checked_until = next_offset

    async def send(self, event: Encoded) -> int:
        """Append an event; returns its offset once it is acknowledged. Waits while paused.

        Raises TruncatedError if it is before the last known one: the partition was created again.
        """
        if not self._resumed.is_set():
            await self._resumed.wait()
        number, self._num_sent = self._num_sent, self._num_sent + 1
        known = self._in_flight[number] = self._next_offset
        try:
            sent = await self._log.send_raw(
                event.topic, key=event.key, value=event.value, headers=event.headers, partition=self.partition
            )
            offset = sent.offset
        finally:
            del self._in_flight[number]
            self._landing.set()
        if 0 <= offset < known:  # -1: sent again after a time so long that Kafka knows its place no more
            check_kept(TopicPartition("steps", self.partition), known, 0, offset)
        self._own.add(offset)
        self._next_offset = max(self._next_offset, offset + 1)
        return offset

    def floor(self) -> int:
        """No event in flight has an offset below this one."""
        return min(self._in_flight.values(), default=self._next_offset)

    async def landed(self) -> None:
        """Wait until all that was sent before is acknowledged."""
        num_sent = self._num_sent
        while min(self._in_flight, default=num_sent) < num_sent:
            self._landing.clear()
            await self._landing.wait()

    async def pause(self) -> None:
        """Let what is in flight land, and hold back what is sent from now on."""
        self._resumed.clear()
        await self.landed()

    def resume(self) -> None:
        """Send on."""
        self._resumed.set()

    @property
    def is_paused(self) -> bool:
        """Whether sends are held back."""
        return not self._resumed.is_set()

    def is_end(self, end: int) -> bool:
        """Whether the newest record before offset `end` is one that is known here, so that nobody else wrote since."""
        return end == self._next_offset

    def take_foreign(self) -> list[int]:
        """Offsets before `floor` that are not own ones and were not returned before."""
        floor = self.floor()
        foreign = [offset for offset in range(self._checked_until, floor) if offset not in self._own]
        self._own = {offset for offset in self._own if offset >= floor}
        self._checked_until = max(self._checked_until, floor)
        return foreign


class Outbox:
    """Events of one attempt on their way. As a context manager: nothing is sent after it is left."""

    def __init__(self, send: Callable[[Encoded], Awaitable[None]]) -> None:
        self._send = send
        self._waiting: deque[Encoded] = deque()
        self._sender: asyncio.Task[None] | None = None
        self._num_put = 0
        self._num_sent = 0
        self._landing = asyncio.Event()
        self.terminal: RolloutEnded | RolloutFailed | None = None
        """Set once it is acknowledged."""

    async def put(self, encoded: Encoded) -> None:
        """Send an event after those before it; returns at once, or for a terminal event when all are acknowledged.

        Waits when many are on their way: an environment that never stops must not keep all others from their turn.
        Raises what an earlier send raised.
        """
        if self._sender is not None and self._sender.done():
            self._sender.result()
            self._sender = None
        self._waiting.append(encoded)
        self._num_put += 1
        if self._sender is None:
            self._sender = asyncio.create_task(self._drain())
        if isinstance(encoded.event, _TERMINAL):
            await self._sender
            self.terminal = self.terminal or encoded.event
        elif len(self._waiting) >= MAX_WAITING:
            await asyncio.wait({self._sender})

    async def acknowledged(self) -> None:
        """Return once all that was put so far is acknowledged. Raises what a send raised."""
        num_put = self._num_put
        while self._num_sent < num_put:
            if self._sender is None or self._sender.done():
                if self._sender is not None and not self._sender.cancelled():
                    self._sender.result()
                raise LogError("the attempt has ended before its events were acknowledged")
            self._landing.clear()
            await self._landing.wait()

    async def __aenter__(self) -> "Outbox":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._waiting.clear()
        if self._sender is None:
            return
        self._sender.cancel()
        await asyncio.wait({self._sender})
        if not self._sender.cancelled() and (failure := self._sender.exception()) is not None and kind is None:
            raise failure

    async def _drain(self) -> None:
        try:
            while self._waiting:
                await self._send(self._waiting.popleft())
                self._num_sent += 1
                self._landing.set()
        finally:
            self._landing.set()
