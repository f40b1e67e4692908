"""Calls to one server that end, all at once, when it is found to be gone: their callers then ask another server."""

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
