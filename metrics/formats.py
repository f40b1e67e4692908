"""A query's result as text: a table, JSON, CSV; or as bytes of a Parquet file."""

import csv
import io
import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import duckdb

from rollstream.metrics.result import Result

MAX_CELL_CHARS = 80
NUMBERS = ("INTEGER", "BIGINT", "HUGEINT", "SMALLINT", "TINYINT", "DOUBLE", "FLOAT", "DECIMAL", "UBIGINT", "UINTEGER")


def to_table(result: Result) -> str:
    """Aligned columns, numbers to the right; long texts are cut."""
    cells = [[_cell(value) for value in row] for row in result.rows]
    widths = [
        max([len(name), *(len(row[index]) for row in cells)]) for index, name in enumerate(result.columns)
    ]  # at least the heading
    is_right = [type_name.startswith(NUMBERS) for type_name in result.types]
    lines = [
        _line(result.columns, widths, is_right),
        "  ".join("-" * width for width in widths),
        *(_line(row, widths, is_right) for row in cells),
        _count(result),
    ]
    return "\n".join(lines) + "\n"


def to_json(result: Result) -> str:
    """A JSON list of one object a row."""
    names = _unique(result.columns)
    rows = [dict(zip(names, row, strict=True)) for row in result.rows]
    return json.dumps(rows, indent=2, ensure_ascii=False) + "\n"


def to_csv(result: Result) -> str:
    """CSV with a heading; nothing for NULL, JSON for lists and objects."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(result.columns)
    for row in result.rows:
        writer.writerow("" if value is None else _text(value) for value in row)
    return out.getvalue()


def to_parquet(result: Result) -> bytes:
    """A Parquet file with the columns' own types."""
    kinds = _stored_types(result)
    names = [name.replace('"', '""') for name in _unique(result.columns)]
    columns = ", ".join(f'"{name}" {kind}' for name, kind in zip(names, kinds, strict=True))
    with tempfile.TemporaryDirectory() as folder, duckdb.connect() as connection:
        connection.execute(f"CREATE TABLE result ({columns})")
        if result.rows:
            values = ", ".join(_stored_value(number, kind) for number, kind in enumerate(kinds, start=1))
            texts = [
                [None if value is None else _text(value) for value in column]
                for column in zip(*result.rows, strict=True)
            ]
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
"""What shows a result, by the name of the format."""


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.6g}"
    text = _text(value).replace("\r", "").replace("\n", "\\n").replace("\t", " ")
    return text if len(text) <= MAX_CELL_CHARS else text[: MAX_CELL_CHARS - 1] + "…"


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "true" if value else "false"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, (list, dict)) else str(value)


def _line(cells: Sequence[str], widths: Sequence[int], is_right: Sequence[bool]) -> str:
    padded = (
        cell.rjust(width) if right else cell.ljust(width)
        for cell, width, right in zip(cells, widths, is_right, strict=True)
    )
    return "  ".join(padded).rstrip()


def _count(result: Result) -> str:
    number = len(result.rows)
    return f"({number} row{'' if number == 1 else 's'}{', more were cut by the limit' if result.is_cut else ''})"


def _stored_types(result: Result) -> list[str]:
    """Types to store; what came as plain text only (blobs as hex, intervals, enums) stays text."""
    return ["VARCHAR" if kind.startswith(("BLOB", "INTERVAL", "ENUM", "BIT", '"')) else kind for kind in result.types]


def _stored_value(number: int, kind: str) -> str:
    text = f"unnest(${number}::VARCHAR[])"
    is_nested = kind.startswith(("STRUCT", "MAP")) or kind.endswith("]")
    return f"CAST(CAST({text} AS JSON) AS {kind})" if is_nested else f"CAST({text} AS {kind})"


def _unique(names: Sequence[str]) -> list[str]:
    """Names with `_2`, `_3` ... at those that stand there already."""
    found: list[str] = []
    for name in names:
        number, candidate = 1, name
        while candidate.lower() in {taken.lower() for taken in found}:
            number += 1
            candidate = f"{name}_{number}"
        found.append(candidate)
    return found
