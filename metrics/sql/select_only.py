"""Runs one SELECT on a connection: nothing else, and in a read-only transaction.

The connection itself is closed to files, network and settings (`connection.close_doors`); time and memory are limited
by the process that this runs in (`query`).
"""

import duckdb

from rollstream.metrics.projection.connection import cause_of
from rollstream.metrics.sql.result import Result, plain
from rollstream.schemas.errors import QueryError

MAX_ROWS = 1_000_000
"""No query returns more, whatever limit it asks for."""


def check(cursor: duckdb.DuckDBPyConnection, sql: str) -> duckdb.Statement:
    """The one statement of `sql`. Raises QueryError if it is not exactly one SELECT."""
    try:
        statements = cursor.extract_statements(sql)
    except duckdb.Error as error:
        raise QueryError(f"SQL: {cause_of(error)}") from error
    if len(statements) != 1:
        raise QueryError(f"SQL: one SELECT at a time; this has {len(statements)} statements; send each alone")
    if statements[0].type == duckdb.StatementType.MULTI:
        raise QueryError("SQL: PIVOT does not find its values by itself here; list them: PIVOT t ON column IN (...)")
    if statements[0].type != duckdb.StatementType.SELECT:
        raise QueryError(f"SQL: only SELECT is allowed, not {statements[0].type.name}; write a SELECT")
    return statements[0]


def run_select(cursor: duckdb.DuckDBPyConnection, sql: str, *, limit: int) -> Result:
    """Rows of one SELECT, at most `limit` of them. Raises QueryError for a statement that is refused or wrong, and
    MemoryError.
    """
    statement = check(cursor, sql)
    try:
        return _select(cursor, statement, max(0, min(limit, MAX_ROWS)))
    except duckdb.OutOfMemoryException as error:
        raise MemoryError(cause_of(error)) from error
    except (duckdb.Error, RuntimeError) as error:
        raise QueryError(f"SQL: {cause_of(error)}") from error


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
