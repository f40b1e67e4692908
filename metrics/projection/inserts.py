"""Statements that add rows to the tables of the metrics file."""

from collections.abc import Mapping
from functools import cache

import duckdb

from rollstream.metrics.projection.attempts import COMBINE, READ


@cache
def inserts_into(tables: str) -> dict[str, tuple[str, list[str]]]:
    """How rows go into each table of schema `log`: the statement, and the order of its columns."""
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


def _insert(table: str, columns: Mapping[str, str]) -> tuple[str, list[str]]:
    """Statement that takes one list a column (far faster than a row at a time), and the columns' order."""
    values = ", ".join(_values(index, data_type) for index, data_type in enumerate(columns.values(), start=1))
    names = ", ".join(f'"{name}"' for name in columns)
    insert = f'INSERT INTO log."{table}" ({names}) SELECT {values} ON CONFLICT'
    if table == "attempt":
        combined = ", ".join(f"{name} = {how.format(name)}" for name, how in COMBINE.items())
        return f"{insert} (rollout_id) DO UPDATE SET {combined}", list(columns)
    returning = f" RETURNING {', '.join(READ[table])}" if table in READ else ""
    return f"{insert} DO NOTHING{returning}", list(columns)


def _values(index: int, data_type: str) -> str:
    if data_type.startswith("MAP"):
        return f"CAST(CAST(unnest(${index}::VARCHAR[]) AS JSON) AS {data_type})"
    if data_type == "JSON":
        return f"CAST(unnest(${index}::VARCHAR[]) AS JSON)"
    return f"unnest(${index}::{data_type}[])"
