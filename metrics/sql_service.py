"""SQL over HTTP on 127.0.0.1 for whoever can read the workspace's token: `POST /query`. It never writes."""

import asyncio
import hmac
import json
import os
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import duckdb
import orjson
from aiohttp import web
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rollstream.metrics.database import Database
from rollstream.metrics.projector import Projector
from rollstream.metrics.result import Result
from rollstream.metrics.select_only import run_select
from rollstream.schemas.errors import QueryError, RollstreamError

HOST = "127.0.0.1"
MAX_SQL_BYTES = 1024 * 1024
MAX_AT_ONCE = 4
"""Queries that run together; others wait."""
INTERRUPT_EVERY_S = 0.05


class QueryRequest(BaseModel):
    """Body of a request."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    sql: str
    fresh: bool = True
    """First wait until the file holds all that is in the log at this moment."""
    limit: int = Field(default=10_000, ge=0)
    timeout_s: float = Field(default=30.0, gt=0, le=3600)


def token_file(workspace: Path) -> Path:
    """Where the token stands."""
    return workspace / "sql.token"


def port_file(workspace: Path) -> Path:
    """Where the port stands while the service is up."""
    return workspace / "metrics.json"


class SqlService:
    """Answers queries from cursors of the projector's own database."""

    def __init__(self, database: Database, projector: Projector, token: str) -> None:
        self._database = database
        self._projector = projector
        self._authorization = f"Bearer {token}".encode()
        self._free = asyncio.Semaphore(MAX_AT_ONCE)
        self._running: list[duckdb.DuckDBPyConnection] = []
        self._is_ending = False

    async def handle(self, request: web.Request) -> web.Response:
        """One query. 401 without the token, 400 with one clear line for what is refused, 503 if the service ends."""
        given = request.headers.get("Authorization", "").encode(errors="replace")
        if not hmac.compare_digest(given, self._authorization):
            return _answer({"error": "the token is missing or wrong"}, status=401)
        try:
            result = await self._query(QueryRequest.model_validate_json(await request.read()))
        except ValidationError as error:
            return _answer({"error": f"request: {error.errors()[0]['loc']}: {error.errors()[0]['msg']}"}, status=400)
        except QueryError as error:
            if self._is_ending:
                return _answer({"error": "the metrics service has ended: ask again"}, status=503)
            return _answer({"error": str(error)}, status=400)
        return _answer(result, status=200)

    async def end(self) -> None:
        """Interrupt what runs, and begin no other: nothing holds the file afterwards."""
        self._is_ending = True
        while self._running:
            for cursor in self._running:
                cursor.interrupt()  # again and again: one that comes before its query begins is lost
            await asyncio.sleep(INTERRUPT_EVERY_S)

    async def _query(self, asked: QueryRequest) -> Result:
        if asked.fresh:
            await self._catch_up(asked.timeout_s)
        async with self._free:
            if self._is_ending:
                raise QueryError("the service ends")
            cursor = self._database.cursor()
            self._running.append(cursor)
            try:
                return await asyncio.to_thread(
                    run_select, cursor, asked.sql, limit=asked.limit, timeout_s=asked.timeout_s
                )
            finally:
                self._running.remove(cursor)
                cursor.close()

    async def _catch_up(self, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await self._projector.wait_for(await self._projector.ends())
        except TimeoutError as error:
            raise QueryError(
                f"the metrics did not reach the log's end within {timeout_s:g} s; ask again, or without waiting"
            ) from error
        except RollstreamError as error:
            raise QueryError(f"the log's end is not known: {error}; ask without waiting") from error


@asynccontextmanager
async def listening(service: SqlService, workspace: Path, port: int) -> AsyncIterator[int]:
    """Serve while inside; the port taken stands in `metrics.json`. Raises RollstreamError if the port is in use."""
    app = web.Application(client_max_size=MAX_SQL_BYTES)
    app.router.add_post("/query", service.handle)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=2.0)
    await runner.setup()
    try:
        site = web.TCPSite(runner, HOST, port)
        try:
            await site.start()
        except OSError as error:
            raise RollstreamError(
                f"port {port} of {HOST} cannot be used for SQL ({error.strerror}): set another port, or 0 for any"
            ) from error
        taken = int(runner.addresses[0][1])
        _write(port_file(workspace), json.dumps({"port": taken, "pid": os.getpid()}), mode=0o644)
        yield taken
    finally:
        port_file(workspace).unlink(missing_ok=True)
        await service.end()
        await runner.cleanup()


def make_token(workspace: Path) -> str:
    """The workspace's token, made on first use; only its owner can read it."""
    path = token_file(workspace)
    if path.exists():
        path.chmod(0o600)
        if len(token := path.read_text().strip()) >= 32:
            return token
    token = secrets.token_hex(32)
    _write(path, token, mode=0o600)
    return token


def _write(path: Path, text: str, *, mode: int) -> None:
    beside = path.with_name(f"{path.name}.{os.getpid()}")
    with os.fdopen(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "w") as file:
        file.write(text)
    beside.replace(path)


def _answer(body: object, *, status: int) -> web.Response:
    return web.Response(body=orjson.dumps(body), status=status, content_type="application/json")
