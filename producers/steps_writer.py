"""Writer of events to a steps partition: explicitly to that partition, in the order in which they were put, those of
many attempts together.

What is put while a send is in progress is sent once that is acknowledged, while the rollouts go on. The terminal event
of an attempt is sent once all before it are acknowledged, and only it is waited for.
"""

import asyncio
import contextvars
from collections.abc import Callable
from types import TracebackType
from typing import Protocol

from rollstream.eventlog.failpoints import failpoint
from rollstream.eventlog.log import Encoded, EventLog, TopicPartition, check_kept
from rollstream.producers.clock import EventClock
from rollstream.schemas.errors import LogError
from rollstream.schemas.events import RolloutEnded, RolloutFailed

MAX_WAITING = 64
"""Events of one attempt that may wait to be sent before the next one has to."""

_TERMINAL = (RolloutEnded, RolloutFailed)


class Poster(Protocol):
    """The one who put an event, and hears what became of it."""

    is_left: bool
    """Whether what is not sent yet is to be dropped."""

    def landed(self, event: Encoded, offset: int) -> None:
        """The event is acknowledged."""
        ...

    def failed(self, error: BaseException) -> None:
        """The event was not acknowledged, and nothing more is sent."""
        ...


class StepsWriter:
    """The owner's end of one steps partition: its clock, and how far acknowledged sends reach."""

    def __init__(self, log: EventLog, partition: int, clock: EventClock, next_offset: int) -> None:
        """`next_offset`: after the newest record that is known."""
        self.partition = partition
        self.clock = clock
        self._log = log
        self._next_offset = next_offset
        self._waiting: list[tuple[Encoded, Poster]] = []
        self._sender: asyncio.Task[None] | None = None
        self._in_flight: asyncio.Future[None] | None = None
        """Done once what is being sent is acknowledged, or failed."""
        self._failure: BaseException | None = None
        self._resumed = asyncio.Event()
        self._resumed.set()
        self._own: set[int] = set()
        """Offsets of own records from `_checked_until` on."""
        self._checked_until = next_offset

    def post(self, event: Encoded, poster: Poster) -> None:
        """Append an event after those that were put before it; held back while paused. Raises what a send raised."""
        _check(self._failure)
        self._waiting.append((event, poster))
        if self._sender is None:  # in a context of its own: user code may have put the event
            loop = asyncio.get_running_loop()
            self._sender = loop.create_task(self._send_waiting(), context=contextvars.Context())

    async def send(self, event: Encoded, on_landed: Callable[[int], None] = lambda offset: None) -> int:
        """Append an event; returns its offset once it is acknowledged. Waits while paused.

        `on_landed` is called with the offset before `floor` moves on for anybody else to see. Raises TruncatedError if
        the offset is before the last known one: the partition was created again.
        """
        sent = _Sent(on_landed)
        self.post(event, sent)
        try:
            return await sent.offset
        finally:
            sent.is_left = True

    def floor(self) -> int:
        """No event in flight has an offset below this one."""
        return self._next_offset

    async def landed(self) -> None:
        """Wait until all that was sent before is acknowledged."""
        if self._in_flight is not None:
            await asyncio.wait({self._in_flight})

    async def pause(self) -> None:
        """Let what is in flight land, and hold back what is sent from now on."""
        self._resumed.clear()
        await self.landed()

    def resume(self) -> None:
        """Send on."""
        self._resumed.set()

    async def close(self) -> None:
        """Write nothing more: what waits, and what is put from now on, fails."""
        self._fail(self._closed())
        if self._sender is not None:
            self._sender.cancel()
            await asyncio.wait({self._sender})

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

    async def _send_waiting(self) -> None:
        taken: list[tuple[Encoded, Poster]] = []
        try:
            while self._waiting:
                while self.is_paused:
                    await self._resumed.wait()
                taken, self._waiting = [one for one in self._waiting if not one[1].is_left], []
                await self._send(taken)
                taken = []
        except asyncio.CancelledError:
            self._fail(self._closed(), *taken)
            raise
        except BaseException as error:  # noqa: BLE001 -- it ends those who wait, and by them the worker
            self._fail(error, *taken)
        finally:
            self._sender = None

    def _closed(self) -> LogError:
        return LogError(f"partition {self.partition} of steps is closed here; its next owner goes on")

    def _fail(self, error: BaseException, *taken: tuple[Encoded, Poster]) -> None:
        """Send nothing more; the first failure counts for all."""
        self._failure = self._failure or error
        waiting, self._waiting = self._waiting, []
        for _, poster in (*taken, *waiting):
            poster.failed(self._failure)

    async def _send(self, taken: list[tuple[Encoded, Poster]]) -> None:
        known = self._next_offset
        self._in_flight = asyncio.get_running_loop().create_future()
        try:
            sent = await self._log.send_all([event for event, _ in taken], partition=self.partition)
        finally:
            self._in_flight.set_result(None)
            self._in_flight = None
        for (event, poster), (_, _, offset) in zip(taken, sent, strict=True):
            if 0 <= offset < known:  # -1: sent again after a time so long that Kafka knows its place no more
                check_kept(TopicPartition("steps", self.partition), known, 0, offset)
            self._own.add(offset)
            self._next_offset = max(self._next_offset, offset + 1)
            poster.landed(event, offset)


def _check(failure: BaseException | None) -> None:
    if failure is not None:
        raise failure.with_traceback(None)  # many raise it, each from its own place


class _Sent:
    """One event that is waited for."""

    def __init__(self, on_landed: Callable[[int], None]) -> None:
        self._on_landed = on_landed
        self.is_left = False
        self.offset: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def landed(self, event: Encoded, offset: int) -> None:
        self._on_landed(offset)
        if not self.offset.done():
            self.offset.set_result(offset)

    def failed(self, error: BaseException) -> None:
        if not self.offset.done():
            self.offset.set_exception(error)


class Outbox:
    """Events of one attempt on their way. As a context manager: nothing is sent after it is left."""

    def __init__(self, writer: StepsWriter, on_landed: Callable[[Encoded], None] = lambda event: None) -> None:
        """`on_landed` is called with each event that is acknowledged, in order."""
        self._writer = writer
        self._on_landed = on_landed
        self._num_put = 0
        self._num_landed = 0
        self._failure: BaseException | None = None
        self._changed: asyncio.Future[None] | None = None
        """Awaited by `acknowledged`."""
        self.is_left = False
        self.terminal: RolloutEnded | RolloutFailed | None = None
        """Set once it is acknowledged."""

    async def put(self, encoded: Encoded) -> None:
        """Send an event after those before it; returns at once, or for a terminal event when all are acknowledged.

        Waits when many are on their way: an environment that never stops must not keep all others from their turn.
        Raises what an earlier send raised.
        """
        event = encoded.event
        is_terminal = isinstance(event, _TERMINAL)
        if is_terminal:
            await self.acknowledged()
        if isinstance(event, RolloutEnded):
            failpoint("producer/before-rollout-ended")
        _check(self._failure)
        self._writer.post(encoded, self)
        self._num_put += 1
        if is_terminal or self._num_put - self._num_landed > MAX_WAITING:
            await self.acknowledged()
        if isinstance(event, _TERMINAL):
            self.terminal = self.terminal or event

    async def acknowledged(self) -> None:
        """Return once all that was put so far is acknowledged. Raises what a send raised."""
        num_put = self._num_put
        while self._num_landed < num_put:
            _check(self._failure)
            if self.is_left:
                raise LogError("the attempt has ended before its events were acknowledged")
            if self._changed is None:
                self._changed = asyncio.get_running_loop().create_future()
            await asyncio.wait({self._changed})

    def landed(self, event: Encoded, offset: int) -> None:
        """An event is acknowledged."""
        self._num_landed += 1
        self._on_landed(event)
        self._wake()

    def failed(self, error: BaseException) -> None:
        """A send failed."""
        self._failure = error
        self._wake()

    async def __aenter__(self) -> "Outbox":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.is_left = True
        self._wake()
        if kind is None:
            _check(self._failure)

    def _wake(self) -> None:
        if self._changed is not None:
            self._changed.set_result(None)
            self._changed = None
