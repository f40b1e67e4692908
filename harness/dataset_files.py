"""Rows of a dataset's file, each with the place that an error names: JSON lines, a JSON list, CSV or Parquet."""

import csv
import io
import json
import re
from pathlib import Path
from typing import Any

from rollstream.schemas.errors import ConfigError, QueryError

Rows = list[tuple[str, Any]]
"""Place and row."""
SUFFIXES = {".json": "json", ".csv": "csv", ".parquet": "parquet"}
"""Type by suffix; any other one is JSON lines."""
_INTEGER = re.compile(r"-?(0|[1-9][0-9]*)")
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)\.[0-9]+([eE][-+]?[0-9]+)?")


def rows_of(path: Path, kind: str) -> Rows:
    """Rows of a file of a type. Raises ConfigError naming the file and, where there is one, the line."""
    if kind == "parquet":
        return _rows_of_parquet(path)
    text = _text(path)
    return {"json": _rows_of_list, "jsonl": _rows_of_lines, "csv": _rows_of_csv}[kind](text, path)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"dataset {path}: cannot be read: {error}") from error


def _rows_of_lines(text: str, path: Path) -> Rows:
    rows: Rows = []
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            place = f"dataset {path} line {number}"
            try:
                rows.append((place, json.loads(line)))
            except ValueError as error:
                raise ConfigError(f"{place}: not valid JSON: {error}") from error
    return rows


def _rows_of_list(text: str, path: Path) -> Rows:
    if not text.strip():
        return []
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"dataset {path}: not valid JSON: {error}") from error
    if not isinstance(found, list):
        raise ConfigError(f"dataset {path}: must be a JSON list of objects (for JSON lines: _type: jsonl)")
    return [(f"dataset {path} item {number}", row) for number, row in enumerate(found, 1)]


def _rows_of_csv(text: str, path: Path) -> Rows:
    """The first line names the columns; numbers are numbers, what is empty is null."""
    reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
    rows: Rows = []
    try:
        for row in reader:
            place = f"dataset {path} line {reader.line_num}"
            if None in row or None in row.values():
                raise ConfigError(f"{place}: has not as many values as the {len(reader.fieldnames or ())} columns")
            rows.append((place, {key: _scalar(value) for key, value in row.items()}))
    except csv.Error as error:
        raise ConfigError(f"dataset {path} line {reader.line_num + 1}: not valid CSV: {error}") from error
    return rows


def _scalar(text: str) -> str | int | float | None:
    if _INTEGER.fullmatch(text):
        return int(text)
    if _NUMBER.fullmatch(text):
        return float(text)
    return text or None


def _rows_of_parquet(path: Path) -> Rows:
    from rollstream.metrics.parquet import read_parquet

    if not path.is_file():
        _text(path)  # raises
    try:
        return [(f"dataset {path} row {number}", row) for number, row in enumerate(read_parquet(path), 1)]
    except QueryError as error:
        raise ConfigError(f"dataset {error}") from error
