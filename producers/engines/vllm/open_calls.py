"""Calls to one server that are in progress: they end, all at once, when it is found to be gone, and some must be over
before it is changed.
"""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from rollstream.eventlog.http.http_json import TryAgainError

T = TypeVar("T")


class LeftError(TryAgainError):
    """The server left the pool while a call was in progress."""


class OpenCalls:
    """The calls of one kind that are in progress."""

    def __init__(self) -> None:
        self._scopes: set[asyncio.Timeout] = set()
        self._reason = ""

    @asynccontextmanager
    async def until_ended(self) -> AsyncIterator[None]:
        """Raises LeftError in the block once `end` is called. A caller that is cancelled stays cancelled."""
        try:
            async with asyncio.timeout(None) as scope:
                self._scopes.add(scope)
                try:
                    yield
                finally:
                    self._scopes.discard(scope)
        except TimeoutError as error:
            raise LeftError(self._reason) from error

    def end(self, reason: str) -> None:
        """End those that are in progress now."""
        self._reason = reason
        now = asyncio.get_running_loop().time()
        for scope in self._scopes:
            if not scope.expired():
                scope.reschedule(now)


class Gate:
    """Calls during which nothing may change: a change waits for their end, and further calls wait for its end."""

    def __init__(self) -> None:
        self._num_within = 0
        self._opened = asyncio.Event()
        self._opened.set()
        self._emptied = asyncio.Event()
        self._emptied.set()

    @asynccontextmanager
    async def within(self) -> AsyncIterator[None]:
        """A call. It counts from when the gate is open: a change does not wait for those that wait for it."""
        while not self._opened.is_set():  # it may have been closed again since it was opened
            await self._opened.wait()
        self._num_within += 1
        self._emptied.clear()
        try:
            yield
        finally:
            self._num_within -= 1
            if not self._num_within:
                self._emptied.set()

    @asynccontextmanager
    async def closed(self) -> AsyncIterator[None]:
        """A change, one at a time. It begins once no call is in progress, however long they take."""
        self._opened.clear()
        try:
            await self._emptied.wait()
            yield
        finally:
            self._opened.set()


@asynccontextmanager
async def loaded_in_time(name: str, limit_s: float) -> AsyncIterator[None]:
    """Raises TryAgainError if a version's load takes too long. Calls within have a later limit: this one is named."""
    try:
        async with asyncio.timeout(limit_s):
            yield
    except TimeoutError as error:
        raise TryAgainError(f"did not load {name} within {limit_s:g} s (load_timeout_s)") from error


async def finished(call: Coroutine[Any, Any, T]) -> T:
    """Wait for the end of a call and return or raise its result; a cancellation of the caller meanwhile is raised at
    that end.
    """
    task, cancelled = asyncio.ensure_future(call), None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        task.exception()  # else asyncio logs that nobody has asked for it
        raise cancelled
    return task.result()
