"""Runs one SELECT on a cursor: nothing else, in a read-only transaction, within a time and a row limit.

The connection itself is closed to files, network and settings (`database.SAFE_CONFIG`).
"""

import threading

import duckdb

from rollstream.metrics.database import one_line
from rollstream.metrics.result import Result, plain
from rollstream.schemas.errors import QueryError

MAX_ROWS = 1_000_000
"""No query returns more, whatever limit it asks for."""


def check(cursor: duckdb.DuckDBPyConnection, sql: str) -> duckdb.Statement:
    """The one statement of `sql`. Raises QueryError if it is not exactly one SELECT."""
    try:
        statements = cursor.extract_statements(sql)
    except duckdb.Error as error:
        raise QueryError(f"SQL: {one_line(error)}") from error
    if len(statements) != 1:
        raise QueryError(f"SQL: one SELECT at a time; this has {len(statements)} statements")
    if statements[0].type != duckdb.StatementType.SELECT:
        raise QueryError(f"SQL: only SELECT is allowed, not {statements[0].type.name}")
    return statements[0]


def run_select(cursor: duckdb.DuckDBPyConnection, sql: str, *, limit: int, timeout_s: float) -> Result:
    """Rows of one SELECT, at most `limit` of them. Raises QueryError for whatever is refused, wrong or too slow."""
    statement = check(cursor, sql)
    limit = max(0, min(limit, MAX_ROWS))
    timed_out = threading.Event()

    def interrupt() -> None:
        timed_out.set()
        cursor.interrupt()

    timer = threading.Timer(timeout_s, interrupt)
    timer.daemon = True
    timer.start()
    try:
        return _select(cursor, statement, limit)
    except (duckdb.Error, RuntimeError, MemoryError) as error:
        if timed_out.is_set():
            raise QueryError(f"SQL: the query took longer than {timeout_s:g} s and was stopped") from error
        raise QueryError(f"SQL: {one_line(error)}") from error
    finally:
        timer.cancel()


def _select(cursor: duckdb.DuckDBPyConnection, statement: duckdb.Statement, limit: int) -> Result:
    cursor.execute("BEGIN TRANSACTION READ ONLY")
    try:
        cursor.execute(statement)
        described = cursor.description or []
        found = cursor.fetchmany(limit + 1)
    finally:
        cursor.execute("ROLLBACK")
    return Result(
        columns=tuple(str(column[0]) for column in described),
        types=tuple(str(column[1]) for column in described),
        rows=tuple(tuple(plain(value) for value in row) for row in found[:limit]),
        is_cut=len(found) > limit,
    )
