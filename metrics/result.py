"""What a query answers: columns, DuckDB's type names, and rows of plain JSON values. Leaves out how it is shown."""

import datetime
import decimal
import math
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Result:
    """Rows of a query. Times are ISO texts, decimals numbers, blobs hex, maps and structs objects."""

    columns: tuple[str, ...]
    types: tuple[str, ...]
    """DuckDB's names: VARCHAR, BIGINT, TIMESTAMP, ..."""
    rows: tuple[tuple[Any, ...], ...]
    is_cut: bool = False
    """There were more rows than the limit."""


def plain(value: Any) -> Any:
    """A DuckDB value as a JSON value; a number that is not finite becomes its name."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if value is None or isinstance(value, (str, int)):
        return value
    if isinstance(value, decimal.Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    if isinstance(value, (datetime.datetime, datetime.date, datetime.time)):
        return value.isoformat(" ") if isinstance(value, datetime.datetime) else value.isoformat()
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value).hex()
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [plain(item) for item in value]
    if isinstance(value, (datetime.timedelta, uuid.UUID)):
        return str(value)
    return str(value)
