"""SQL over HTTP on 127.0.0.1 for every process that can read the workspace's token: `POST /query`. It never writes."""

import asyncio
import hmac
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import orjson
from aiohttp import web
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rollstream.eventlog.files import write_whole
from rollstream.eventlog.private import token_in
from rollstream.metrics.projection.database import Database
from rollstream.metrics.projection.projector import Projector
from rollstream.metrics.sql.client import HOST, MAX_SQL_BYTES, folder_id, port_file, token_file
from rollstream.metrics.sql.lanes import QueryLanes
from rollstream.metrics.sql.query import Limits
from rollstream.schemas.errors import QueryError, RollstreamError, first_invalid

MAX_REQUEST_BYTES = 6 * MAX_SQL_BYTES + 65_536
"""JSON escapes a byte of a query by at most six."""


class QueryRequest(BaseModel):
    """Body of a request."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    sql: str
    fresh: bool = True
    """First wait until the file holds all that is in the log at this moment."""
    limit: int = Field(default=10_000, ge=0)
    timeout_s: float = Field(default=30.0, gt=0, le=3600)


class SqlService:
    """Answers queries on forks of the process that has the projector's database open."""

    def __init__(self, database: Database, projector: Projector, token: str) -> None:
        self._lanes = QueryLanes(database)
        self._projector = projector
        self._authorization = f"Bearer {token}".encode()
        self._is_ending = False

    async def handle(self, request: web.Request) -> web.Response:
        """One query. 401 without the token, 400 with one clear line for a refused query, 503 if the service ends."""
        given = request.headers.get("Authorization", "").encode(errors="replace")
        if not hmac.compare_digest(given, self._authorization):
            return _answer({"error": "the token is missing or wrong"}, status=401)
        try:
            result = await self._query(QueryRequest.model_validate_json(await request.read()))
        except ValidationError as error:
            return _answer({"error": str(first_invalid(error, "request"))}, status=400)
        except QueryError as error:
            if self._is_ending:
                return _answer({"error": "the metrics service has stopped; run the query again"}, status=503)
            return _answer({"error": str(error)}, status=400)
        return web.Response(body=result, content_type="application/json")

    async def end(self) -> None:
        """Kill what runs, and begin no other: nothing holds the file afterwards."""
        self._is_ending = True
        await self._lanes.end()

    async def _query(self, asked: QueryRequest) -> bytes:
        if asked.fresh:
            await self._catch_up(asked.timeout_s)
        return await self._lanes.run(asked.sql, Limits(asked.limit, asked.timeout_s))

    async def _catch_up(self, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await self._projector.wait_for(await self._projector.ends())
        except TimeoutError as error:
            raise QueryError(
                f"the metrics did not reach the log's end within {timeout_s:g} s; try again, or add --no-wait "
                f"to query what they have"
            ) from error
        except RollstreamError as error:
            raise QueryError(
                f"the log's end is unknown: {error}; add --no-wait to query what the metrics have"
            ) from error


@asynccontextmanager
async def listening(service: SqlService, workspace: Path, port: int) -> AsyncIterator[int]:
    """Serve while inside; the port in use is in `metrics.json`. Raises RollstreamError if the port is in use."""
    app = web.Application(client_max_size=MAX_REQUEST_BYTES)
    app.router.add_post("/query", service.handle)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=2.0)
    await runner.setup()
    try:
        site = web.TCPSite(runner, HOST, port)
        try:
            await site.start()
        except OSError as error:
            raise RollstreamError(
                f"port {port} of {HOST} cannot be used for SQL ({error.strerror}); set another port, or 0 for any"
            ) from error
        taken = int(runner.addresses[0][1])
        write_whole(
            port_file(workspace), json.dumps({"port": taken, "pid": os.getpid(), "folder": folder_id(workspace)})
        )
        yield taken
    finally:
        port_file(workspace).unlink(missing_ok=True)
        await service.end()
        await runner.cleanup()


def make_token(workspace: Path) -> str:
    """The workspace's token, made on first use; only its owner can read it."""
    return token_in(token_file(workspace))


def _answer(body: object, *, status: int) -> web.Response:
    return web.Response(body=orjson.dumps(body), status=status, content_type="application/json")
