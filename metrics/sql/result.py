"""The result of a query: columns, DuckDB's type names, and rows of plain JSON values. Contains no formatting."""

import datetime
import decimal
import json
import math
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import orjson


@dataclass(frozen=True)
class Result:
    """Rows of a query. Times are ISO texts, blobs hex, maps and structs objects.

    Decimals are numbers, or texts where a number of 64 bits would not be exact.
    """

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
        return _plain_decimal(value)
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


def _plain_decimal(value: decimal.Decimal) -> int | float | str:
    if value == value.to_integral_value():
        return int(value)
    number = float(value)
    return number if decimal.Decimal(repr(number)) == value else format(value, "f")


def to_json_bytes(result: Result) -> bytes:
    """The whole result as one JSON object, whose keys are the fields of `Result`."""
    try:
        return orjson.dumps(result)
    except TypeError:  # an integer of more than 64 bits
        return json.dumps(asdict(result), ensure_ascii=False, allow_nan=False).encode()


def result_of(found: Mapping[str, Any]) -> Result:
    """The result in such an object."""
    return Result(
        columns=tuple(found["columns"]),
        types=tuple(found["types"]),
        rows=tuple(tuple(row) for row in found["rows"]),
        is_cut=found["is_cut"],
    )
