"""Statements that add rows to the tables of the metrics file, and the text in which the rows are handed to them."""

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from math import isfinite
from typing import Any, NamedTuple

import duckdb
import orjson

from rollstream.metrics.projection.attempts import COMBINE, MAX_BIGINT, READ

ROWS_AT_ONCE = 2000
"""Rows of one statement. With 20,000 rows of 2 kB, one statement takes three times the memory and the time."""


class Insert(NamedTuple):
    """The statement that inserts rows into one table."""

    statement: str
    """Takes rows as one JSON text: DuckDB parses it in half the time that it needs for lists of Python values."""
    columns: tuple[str, ...]
    floats: tuple[str, ...]
    """Columns of type DOUBLE."""
    integers: tuple[str, ...]
    """Columns of type BIGINT."""

    def texts(self, rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
        """The statement's parameter, once for each part of the rows, which have a value or None for every column."""
        for first in range(0, len(rows), ROWS_AT_ONCE):
            part = rows[first : first + ROWS_AT_ONCE]
            yield orjson.dumps([self._writable(row) for row in part] if self.floats else part).decode()

    def fitting(self, rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """The rows with the nearest integer that a column can hold in place of one beyond 64 bits."""
        return [{**row, **{name: _fitting(row[name]) for name in self.integers}} for row in rows]

    def _writable(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        """JSON has no number for infinity and NaN; DuckDB reads them from texts."""
        texts = {name: str(row[name]) for name in self.floats if not isfinite(row[name] or 0)}
        return {**row, **texts} if texts else row


@cache
def inserts_into(tables: str) -> dict[str, Insert]:
    """Insert statements for each table of schema `log`."""
    columns: dict[str, dict[str, str]] = {}
    with duckdb.connect(":memory:", config={"threads": "1"}) as connection:
        connection.execute(tables)
        found = connection.execute(
            "SELECT table_name, column_name, data_type FROM duckdb_columns() "
            "WHERE schema_name = 'log' ORDER BY table_name, column_index"
        ).fetchall()
    for table, column, data_type in found:
        columns.setdefault(table, {})[column] = data_type
    return {table: _insert(table, of_table) for table, of_table in columns.items()}


def _insert(table: str, columns: Mapping[str, str]) -> Insert:
    names = ", ".join(f'"{name}"' for name in columns)
    values = ", ".join(_value(name, data_type) for name, data_type in columns.items())
    types = orjson.dumps([{name: _transported(data_type) for name, data_type in columns.items()}]).decode()
    # From a relation, because DuckDB would evaluate a mere parameter into boxed values while it plans the statement.
    rows = f"(SELECT unnest(from_json_strict(given.rows, '{types}')) AS row FROM (VALUES ($1::VARCHAR)) AS given(rows))"
    insert = f'INSERT INTO log."{table}" ({names}) SELECT {values} FROM {rows} ON CONFLICT'
    if table == "attempt":
        combined = ", ".join(f"{name} = {how.format(name)}" for name, how in COMBINE.items())
        insert += f" (rollout_id) DO UPDATE SET {combined}"
    else:
        insert += " DO NOTHING" + (f" RETURNING {', '.join(READ[table])}" if table in READ else "")
    floats, integers = (
        tuple(name for name, data_type in columns.items() if data_type == wanted) for wanted in ("DOUBLE", "BIGINT")
    )
    return Insert(insert, tuple(columns), floats, integers)


def _fitting(value: int | None) -> int | None:
    return None if value is None else max(-MAX_BIGINT - 1, min(value, MAX_BIGINT))


def _transported(data_type: str) -> str:
    """Type in which a column's values are in the text: what holds JSON itself is a text there."""
    return "VARCHAR" if _holds_json(data_type) else data_type


def _value(name: str, data_type: str) -> str:
    if data_type.startswith("MAP"):
        return f'CAST(CAST(row."{name}" AS JSON) AS {data_type})'
    return f'CAST(row."{name}" AS JSON)' if _holds_json(data_type) else f'row."{name}"'


def _holds_json(data_type: str) -> bool:
    return data_type == "JSON" or data_type.startswith("MAP")
