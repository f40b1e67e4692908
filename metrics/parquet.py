"""Rows of any Parquet file, as JSON has their values. The files of an export have a reader of their own."""

from collections.abc import Iterator
from datetime import date, time
from decimal import Decimal
from glob import escape
from pathlib import Path
from typing import Any

import duckdb

from rollstream.metrics.projection.connection import cause_of
from rollstream.schemas.errors import QueryError

PARQUET_FILE = "read_parquet($1, hive_partitioning = false)"
"""Table of one file, given as `pattern_of` its path: folders named `key=value` add no columns."""


def pattern_of(path: Path) -> str:
    """A file's path for DuckDB, which takes `*`, `?` and `[` for wildcards."""
    return escape(str(path))


def read_parquet(path: Path) -> list[dict[str, Any]]:
    """Rows of a file in its order; bytes, which a writer that declares no strings leaves, as text.

    Raises QueryError if DuckDB cannot read it, or naming row and column of bytes that are not UTF-8.
    """
    try:
        with duckdb.connect() as connection:
            connection.execute("SET TimeZone = 'UTC'")  # else times with a zone would be in the machine's
            found = connection.execute(f"SELECT * FROM {PARQUET_FILE}", [pattern_of(path)])
            names = [column[0] for column in found.description or ()]
            values = found.fetchall()
    except duckdb.Error as error:
        raise QueryError(f"{path}: cannot be read as Parquet: {cause_of(error)}; correct it, or its path") from error
    try:
        return [dict(zip(names, map(_json, row), strict=True)) for row in values]
    except UnicodeDecodeError as error:
        row, column = next(_not_text(names, values))
        remedy = "write them as base64 text, or leave the column out"
        raise QueryError(
            f"{path} row {row}: column {column} contains bytes that are not UTF-8 text; {remedy}"
        ) from error


def _json(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(_json(key)): _json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_json(item) for item in value]
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, Decimal):
        return float(value)
    if isinstance(value, (date, time)):
        return value.isoformat()
    return value if value is None or isinstance(value, (str, bool, int, float)) else str(value)


def _not_text(names: list[str], values: list[tuple[Any, ...]]) -> Iterator[tuple[int, str]]:
    """Row number and path of bytes that are not UTF-8."""
    for number, row in enumerate(values, 1):
        for name, value in zip(names, row, strict=True):
            yield from ((number, path) for path in _paths_not_text(value, name))


def _paths_not_text(value: Any, path: str) -> Iterator[str]:
    if isinstance(value, bytes):
        try:
            value.decode()
        except UnicodeDecodeError:
            yield path
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _paths_not_text(key, path)
            yield from _paths_not_text(item, f"{path}.{_json(key)}")
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _paths_not_text(item, f"{path}.{index}")
