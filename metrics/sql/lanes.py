"""Limits on concurrent queries: long ones never keep a short one waiting, nor the projector.

Every query begins in the short lane. One that takes longer than SHORT_S continues in the long lane if that has space;
otherwise it is ended and runs again in the long lane as soon as there is space, which is safe because queries change
nothing.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

from rollstream.metrics.projection.database import Database
from rollstream.metrics.sql.query import Limits, QueryProcess, start
from rollstream.schemas.errors import QueryError

NUM_SHORT = 2
NUM_LONG = 2
SHORT_S = 1.0
"""Maximum seconds of a query in the short lane."""
POLL_S = 0.05


class QueryLanes:
    """Runs queries on forks of this process, at most NUM_SHORT + NUM_LONG of them together."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._short = asyncio.Semaphore(NUM_SHORT)
        self._long = asyncio.Semaphore(NUM_LONG)
        # Threads of their own: waiting for queries must not keep the projector's writes waiting.
        self._threads = ThreadPoolExecutor(NUM_SHORT + NUM_LONG, thread_name_prefix="sql")
        self._running: set[QueryProcess] = set()
        self._num_open = 0
        self._is_ending = False

    async def run(self, sql: str, limits: Limits) -> bytes:
        """The result as JSON. Waits to begin, all in all, as long as it may run. Raises QueryError."""
        self._num_open += 1
        begins_by = time.monotonic() + limits.timeout_s
        try:
            answer = await self._begin(sql, limits, begins_by)
            return await self._run_long(sql, limits, begins_by) if answer is None else answer
        finally:
            self._num_open -= 1

    async def end(self) -> None:
        """Kill what runs and begin no other: nothing reads the file afterwards."""
        self._is_ending = True
        while self._num_open:
            for query in tuple(self._running):
                query.kill()
            await asyncio.sleep(POLL_S)
        self._threads.shutdown(wait=False)

    async def _begin(self, sql: str, limits: Limits, begins_by: float) -> bytes | None:
        """Run in the short lane and, if there is room, on in the long one; None if there was none."""
        lane = self._short
        await _enter(lane, limits, begins_by)
        try:
            async with self._started(sql, limits, begins_by) as query:
                short_s = min(SHORT_S, limits.timeout_s)
                if await self._is_over(query, short_s):
                    return query.answer()
                if short_s == limits.timeout_s:
                    raise query.took_too_long()
                if self._long.locked():
                    return None
                await self._long.acquire()
                lane.release()
                lane = self._long
                return await self._answer(query, limits.timeout_s - short_s)
        finally:
            lane.release()

    async def _run_long(self, sql: str, limits: Limits, begins_by: float) -> bytes:
        await _enter(self._long, limits, begins_by)
        try:
            async with self._started(sql, limits, begins_by) as query:
                return await self._answer(query, limits.timeout_s)
        finally:
            self._long.release()

    async def _answer(self, query: QueryProcess, timeout_s: float) -> bytes:
        if not await self._is_over(query, timeout_s):
            raise query.took_too_long()
        return query.answer()

    async def _is_over(self, query: QueryProcess, timeout_s: float) -> bool:
        return await asyncio.get_running_loop().run_in_executor(self._threads, query.wait, timeout_s)

    @asynccontextmanager
    async def _started(self, sql: str, limits: Limits, begins_by: float) -> AsyncIterator[QueryProcess]:
        if self._is_ending:
            raise QueryError("SQL: the service is stopping; query again once it has restarted")
        loop = asyncio.get_running_loop()
        query = await loop.run_in_executor(self._threads, self._start, sql, limits, begins_by)
        self._running.add(query)
        try:
            yield query
        finally:
            self._running.discard(query)
            await loop.run_in_executor(self._threads, self._close, query)

    def _start(self, sql: str, limits: Limits, begins_by: float) -> QueryProcess:
        try:
            return self._database.fork(
                lambda connection: start(connection, self._database.path, sql, limits),
                timeout_s=begins_by - time.monotonic(),
            )
        except TimeoutError as error:
            raise QueryError(
                f"SQL: the query did not start within {limits.timeout_s:g} s, because the metrics file's write-ahead "
                f"log must be checkpointed after the running queries; try again later"
            ) from error

    def _close(self, query: QueryProcess) -> None:
        query.close()
        self._database.fork_ended()


async def _enter(lane: asyncio.Semaphore, limits: Limits, begins_by: float) -> None:
    try:
        async with asyncio.timeout(begins_by - time.monotonic()):
            await lane.acquire()
    except TimeoutError as error:
        raise QueryError(f"SQL: all query slots were in use for {limits.timeout_s:g} s; try again later") from error
