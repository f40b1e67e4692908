"""A query's result as text: a table, JSON, CSV; or as bytes of a Parquet file."""

import csv
import io
import json
import re
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import duckdb

from rollstream.metrics.projection.connection import cause_of
from rollstream.metrics.sql.printable import json_escaped, printable
from rollstream.metrics.sql.result import Result
from rollstream.metrics.sql.table import table
from rollstream.schemas.errors import QueryError

MAX_CELL_CHARS = 80
FORMULA_BEGINS = ("=", "+", "-", "@", "\t", "\r", "\n", "\uff1d", "\uff0b", "\uff0d", "\uff20")
"""First characters of a text that a spreadsheet evaluates, including the full-width forms of these signs."""
_NUMBER = re.compile(r"[-+]?[0-9]+(\.[0-9]+)?([eE][-+]?[0-9]+)?")
_JSON, _BLOB = re.compile(r'(?<!")\bJSON\b(?!")'), re.compile(r'(?<!")\bBLOB\b(?!")')
"""Types within a type; a field of that name is in quotes."""
NUMBERS = ("INTEGER", "BIGINT", "HUGEINT", "SMALLINT", "TINYINT", "DOUBLE", "FLOAT", "DECIMAL", "UBIGINT", "UINTEGER")


def to_table(result: Result) -> str:
    """Aligned columns, numbers to the right; long texts are cut."""
    cells = [[_cell(value) for value in row] for row in result.rows]
    is_right = [type_name.startswith(NUMBERS) for type_name in result.types]
    text = table(result.columns, cells, is_right, has_rule=True, max_chars=MAX_CELL_CHARS)
    return f"{text}\n{_count(result)}\n"


def to_json(result: Result) -> str:
    """A JSON list of one object a row."""
    names = _unique(result.columns)
    rows = [dict(zip(names, row, strict=True)) for row in result.rows]
    return json_escaped(json.dumps(rows, indent=2, ensure_ascii=False)) + "\n"


def to_csv(result: Result) -> str:
    """CSV with a heading; nothing for NULL, JSON for lists and objects.

    A text that a spreadsheet would take for a formula begins with an apostrophe. Control characters are written as in
    tables, for CSV may go to a terminal too; JSON and Parquet have the exact values.
    """
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(map(_csv_cell, result.columns))
    for row in result.rows:
        writer.writerow("" if value is None else _csv_cell(value) for value in row)
    return out.getvalue()


def to_parquet(result: Result) -> bytes:
    """A Parquet file with the columns' own types. Raises QueryError naming a column whose type it cannot store."""
    kinds = _stored_types(result)
    names = _unique(result.columns)
    columns: list[Sequence[Any]] = list(zip(*result.rows, strict=True)) or [()] * len(names)
    try:
        return _parquet(names, kinds, columns)
    except duckdb.Error:
        for name, kind, column in zip(names, kinds, columns, strict=True):
            _check_column(name, kind, column)
        raise


def _check_column(name: str, kind: str, column: Sequence[Any]) -> None:
    try:
        _parquet([name], [kind], [column])
    except duckdb.Error as error:
        raise QueryError(
            f"column {printable(name)} of type {printable(kind)} cannot be written to Parquet: "
            f"{printable(cause_of(error))}; cast it to VARCHAR or JSON in the query, or use --format json"
        ) from error


def _parquet(names: Sequence[str], kinds: Sequence[str], columns: Sequence[Sequence[Any]]) -> bytes:
    quoted = [name.replace('"', '""') for name in names]
    described = ", ".join(f'"{name}" {kind}' for name, kind in zip(quoted, kinds, strict=True))
    with tempfile.TemporaryDirectory() as folder, duckdb.connect() as connection:
        connection.execute(f"CREATE TABLE result ({described})")
        if columns[0]:
            values = ", ".join(_stored_value(number, kind) for number, kind in enumerate(kinds, start=1))
            texts = [[None if value is None else _text(value) for value in column] for column in columns]
            connection.execute(f"INSERT INTO result SELECT {values}", texts)
        path = Path(folder) / "result.parquet"
        connection.table("result").write_parquet(str(path))
        return path.read_bytes()


FORMATS: dict[str, Callable[[Result], str | bytes]] = {
    "table": to_table,
    "json": to_json,
    "csv": to_csv,
    "parquet": to_parquet,
}
"""Functions that format a result, by the name of the format."""


def _csv_cell(value: Any) -> str:
    text = _text(value)
    is_formula = isinstance(value, str) and text.startswith(FORMULA_BEGINS) and _NUMBER.fullmatch(text) is None
    return printable(f"'{text}" if is_formula else text)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.6g}"
    return _text(value)


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "true" if value else "false"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, (list, dict)) else str(value)


def _count(result: Result) -> str:
    number = len(result.rows)
    return f"({number} row{'' if number == 1 else 's'}{', more were cut by the limit' if result.is_cut else ''})"


def _stored_types(result: Result) -> list[str]:
    """Types to store; what came as plain text only (blobs as hex, intervals, enums) stays text."""
    kinds = [_BLOB.sub("VARCHAR", kind) for kind in result.types]
    kinds = ["VARCHAR" if kind.startswith(("INTERVAL", "ENUM", "BIT", '"')) else kind for kind in kinds]
    return [_exact(kind, (row[number] for row in result.rows)) for number, kind in enumerate(kinds)]


def _exact(kind: str, values: Iterable[Any]) -> str:
    """A type for integers of more than 64 bits, which DuckDB would write to Parquet as DOUBLE."""
    if kind not in ("HUGEINT", "UHUGEINT"):
        return kind
    most = max((abs(int(value)) for value in values if value is not None), default=0)
    if most < 2**63:
        return "BIGINT"
    return "DECIMAL(38, 0)" if most < 10**38 else "VARCHAR"


def _stored_value(number: int, kind: str) -> str:
    text = f"unnest(${number}::VARCHAR[])"
    is_nested = kind.startswith(("STRUCT", "MAP")) or kind.endswith("]")
    if not is_nested:
        return f"CAST({text} AS {kind})"
    # JSON within a list or an object is a text there, which DuckDB would take for a value instead of reading it.
    return f"CAST(CAST(CAST({text} AS JSON) AS {_JSON.sub('VARCHAR', kind)}) AS {kind})"


def _unique(names: Sequence[str]) -> list[str]:
    """Names with `_2`, `_3` ... appended to duplicates."""
    found: list[str] = []
    for name in names:
        number, candidate = 1, name
        while candidate.lower() in {taken.lower() for taken in found}:
            number += 1
            candidate = f"{name}_{number}"
        found.append(candidate)
    return found
