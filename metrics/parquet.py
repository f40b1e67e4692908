"""Rows of any Parquet file, as JSON has their values. The files of an export have a reader of their own."""

from datetime import date, time
from decimal import Decimal
from pathlib import Path
from typing import Any

import duckdb

from rollstream.metrics.database import one_line
from rollstream.schemas.errors import QueryError


def read_parquet(path: Path) -> list[dict[str, Any]]:
    """Rows of a file in its order. Raises QueryError if it is none that DuckDB can read."""
    try:
        with duckdb.connect() as connection:
            found = connection.execute("SELECT * FROM read_parquet(?)", [str(path)])
            names = [column[0] for column in found.description or ()]
            values = found.fetchall()
    except duckdb.Error as error:
        raise QueryError(f"{path}: cannot be read as Parquet: {one_line(error)}") from error
    return [dict(zip(names, map(_json, row), strict=True)) for row in values]


def _json(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_json(item) for item in value]
    if isinstance(value, Decimal):
        return float(value)
    if isinstance(value, (date, time)):
        return value.isoformat()
    return value if value is None or isinstance(value, (str, bool, int, float)) else str(value)
