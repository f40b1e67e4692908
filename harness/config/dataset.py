"""A run's examples, from a dataset file (JSON lines, a JSON list, CSV or Parquet) or from the environment.

Errors name file and line.
"""

import csv
import fnmatch
import io
import json
import math
import re
from collections.abc import Iterable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple, cast

import orjson

from rollstream.harness.config.checks import warn_meaningless
from rollstream.schemas.errors import ConfigError, QueryError
from rollstream.schemas.evaluators import DatasetFilter, DatasetSection, DatasetStructure

MAX_INPUT_BYTES = 512 * 1024
"""Maximum size of one example as JSON; a task carries it, and a record of `tasks` has at most 1 MiB."""
MAX_SHOWN = 12
"""Keys or columns that a message lists."""


ID_KEY: str = DatasetSection.model_fields["id_key"].default


class Example(NamedTuple):
    """One example: an id unique in its dataset, and the inputs of the environment."""

    example_id: str
    inputs: dict[str, Any]


def read_dataset(section: DatasetSection) -> list[Example]:
    """Examples of a file in file order, filtered. Raises ConfigError naming file and line.

    If no row has a key `id`, the rows are numbered from 0.
    """
    path = section.file_path
    rows = rows_of(path, section.type)
    if not rows:
        raise ConfigError(f"dataset {path} is empty; add at least one example")
    has_ids = section.id_key != ID_KEY or any(isinstance(row, dict) and ID_KEY in row for _, row in rows)
    if section.filter is not None:
        _warn_unknown_columns(section.filter, [row for _, row in rows if isinstance(row, dict)], path)
    kept = [(n, location, row) for n, (location, row) in enumerate(rows) if _is_wanted(row, section.filter)]
    if not kept:
        raise ConfigError(
            f"dataset {path}: eval.general.dataset.filter excludes all {len(rows)} rows; relax the filter"
        )
    examples = [_example(row, location, section.id_key, None if has_ids else n) for n, location, row in kept]
    standard = [
        example._replace(inputs=_with_standard_names(row, example.inputs, location, section.structure))
        for (_, location, row), example in zip(kept, examples, strict=True)
    ]
    return _unique(standard, f"dataset {path}")


def section_of(path: Path, section: DatasetSection | None) -> DatasetSection:
    """The dataset section with another file, its type given by the suffix (.json, .csv, .parquet; else JSON lines)."""
    kind = SUFFIXES.get(path.suffix.lower(), "jsonl")
    return (section or DatasetSection(file_path=path)).model_copy(update={"file_path": path, "type": kind})


def validation_section(path: Path, examples: DatasetSection | None) -> DatasetSection:
    """The section of a validation dataset: the columns of the run's examples, but not their filter."""
    return section_of(path, examples.model_copy(update={"filter": None}) if examples else None)


def _warn_unknown_columns(chosen: DatasetFilter, rows: Iterable[dict[str, Any]], path: Path) -> None:
    known = dict.fromkeys(key for row in rows for key in row)
    for name, entry in (("allowlist", chosen.allowlist), ("denylist", chosen.denylist)):
        unknown = [column for column in (entry.field if entry else ()) if column not in known]
        why = f"no row of {path} has this column; its columns are: {', '.join([*known][:MAX_SHOWN])}"
        warn_meaningless(f"eval.general.dataset.filter.{name}.field", unknown, why)


def _is_wanted(row: Any, chosen: DatasetFilter | None) -> bool:
    """Whether a row passes the filter; missing columns are ignored, and rows that are not objects are reported
    later."""
    if chosen is None or not isinstance(row, dict):
        return True
    allowed = chosen.allowlist.field if chosen.allowlist else {}
    denied = chosen.denylist.field if chosen.denylist else {}
    is_allowed = all(_fits(row[column], patterns) for column, patterns in allowed.items() if column in row)
    return is_allowed and not any(_fits(row[column], patterns) for column, patterns in denied.items() if column in row)


def _fits(value: Any, patterns: Iterable[Any]) -> bool:
    """Whether a value matches a pattern; a number, true or false also match what is written otherwise (3 and 3.0)."""
    return any(_matches(value, pattern) for pattern in patterns)


def _matches(value: Any, pattern: Any) -> bool:
    if isinstance(pattern, bool):
        return str(value).lower() == str(pattern).lower()
    if isinstance(pattern, int | float) and not isinstance(value, bool):
        number = float(value) if isinstance(value, str) and _is_number(value) else value
        if isinstance(number, int | float):
            return number == pattern
    texts = {str(value), json.dumps(value)} if isinstance(value, bool) else {str(value)}
    return any(fnmatch.fnmatch(text, str(pattern)) for text in texts)


def _is_number(text: str) -> bool:
    return bool(_INTEGER.fullmatch(text) or _NUMBER.fullmatch(text))


def _with_standard_names(
    row: Any, inputs: dict[str, Any], location: str, structure: DatasetStructure
) -> dict[str, Any]:
    """Inputs with the keys that `structure` names also under their standard names. Raises ConfigError."""
    if structure.disable:
        return {**inputs, "question": json.dumps(row, ensure_ascii=False)}
    if "question_key" in structure.model_fields_set and structure.question_key not in inputs:
        raise ConfigError(
            f"{location} has no key {structure.question_key!r}; set eval.general.dataset.structure.question_key to the "
            f"key of the question"
        )
    standard = {
        name: inputs[key]
        for name, key in (
            ("question", structure.question_key),
            ("answer", structure.answer_key),
            ("generated_answer", structure.generated_answer_key),
            ("intermediate_steps", structure.trajectory_key),
            ("expected_intermediate_steps", structure.expected_trajectory_key),
        )
        if key in inputs
    }
    return {**inputs, **standard}


def examples_of(inputs: Iterable[object], location: str) -> list[Example]:
    """Examples made by an environment, with their own `id` or else numbered; the inputs as JSON holds them, such as a
    list for a tuple and a text for a date. Raises ConfigError.
    """
    examples = _unique(
        [_example(_made(row, f"{location}, example {n}"), location, "id", number=n) for n, row in enumerate(inputs)],
        location,
    )
    return [example._replace(inputs=orjson.loads(orjson.dumps(example.inputs))) for example in examples]


def _made(row: object, location: str) -> dict[str, Any]:
    if not isinstance(row, Mapping):
        raise ConfigError(f"{location}: is {row!r:.80}; return a mapping of inputs for each example")
    return dict(cast("Mapping[str, Any]", row))


def to_json_lines(examples: Iterable[Example]) -> bytes:
    """The dataset artifact's bytes: JSON lines of {"example_id", "inputs"}."""
    return b"".join(orjson.dumps(example._asdict(), option=orjson.OPT_APPEND_NEWLINE) for example in examples)


def _example(row: Any, location: str, id_key: str, number: int | None = None) -> Example:
    if not isinstance(row, dict):
        raise ConfigError(f"{location} must be a JSON object")
    if row.get(id_key) is None and number is None:
        raise ConfigError(f"{location} has no key {id_key!r}; set eval.general.dataset.id_key to the key of the id")
    inputs = {key: value for key, value in row.items() if key != id_key}
    return Example(str(row.get(id_key, number)), inputs)


def _unique(examples: list[Example], location: str) -> list[Example]:
    if not examples:
        raise ConfigError(f"{location} has no examples; at least one is required")
    seen: set[str] = set()
    for example in examples:
        if example.example_id in seen:
            raise ConfigError(f"{location}: duplicate example id {example.example_id!r}; rename one")
        seen.add(example.example_id)
        size = _size(example, location)
        if size > MAX_INPUT_BYTES:
            raise ConfigError(
                f"{location}: example {example.example_id!r} has {size} bytes of inputs, more than {MAX_INPUT_BYTES}; "
                f"move large values into a file and refer to it"
            )
    return examples


def _size(example: Example, location: str) -> int:
    """Bytes of the inputs as JSON. Raises ConfigError for values that no record can carry."""
    try:
        orjson.dumps(example.example_id)
        size = len(orjson.dumps(example.inputs, option=orjson.OPT_PASSTHROUGH_DATACLASS))
        _check_finite(example.inputs)
    except (orjson.JSONEncodeError, ValueError) as error:
        raise ConfigError(
            f"{location}: example {example.example_id!r} cannot be recorded: {error}; give text without halves of "
            "surrogate pairs, finite numbers of at most 64 bits, true, false, null, and lists and objects of these "
            "with less nesting"
        ) from error
    return size


def _check_finite(value: Any) -> None:
    """Raises ValueError for a number that JSON lacks: it would be recorded as null."""
    if isinstance(value, Enum):
        value = value.value
    if isinstance(value, dict):
        value = [*cast("dict[str, Any]", value).values()]
    if isinstance(value, list | tuple):
        for one in cast("Iterable[Any]", value):
            _check_finite(one)
    elif isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{value} is not a finite number")


Rows = list[tuple[str, Any]]
"""Place and row."""
SUFFIXES = {".json": "json", ".csv": "csv", ".parquet": "parquet"}
"""Type by suffix; any other one is JSON lines."""
_FOR_LIST = "for a JSON list, set eval.general.dataset._type: json, or give --dataset a file named .json"
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
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"dataset {path} line {line}: not UTF-8: {error.reason}; save the file as UTF-8") from error
    except OSError as error:
        raise ConfigError(f"dataset {path}: cannot be read: {error}; correct its path or permissions") from error


def _rows_of_lines(text: str, path: Path) -> Rows:
    rows: Rows = []
    is_list = text.lstrip().startswith("[")
    for number, line in enumerate(text.split("\n"), 1):  # splitlines would divide texts at U+2028 and others, too
        if line.strip():
            location = f"dataset {path} line {number}"
            try:
                rows.append((location, json.loads(line)))
            except (ValueError, RecursionError) as error:
                remedy = _FOR_LIST if is_list else "correct the line"
                raise ConfigError(f"{location}: not valid JSON: {error}; {remedy}") from error
            if is_list:
                raise ConfigError(f"{location} must be a JSON object; {_FOR_LIST}")
    return rows


def _rows_of_list(text: str, path: Path) -> Rows:
    if not text.strip():
        return []
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"dataset {path}: not valid JSON: {error}; correct the file") from error
    if not isinstance(found, list):
        raise ConfigError(f"dataset {path}: must be a JSON list of objects (for JSON lines: _type: jsonl)")
    return [(f"dataset {path} item {number}", row) for number, row in enumerate(found, 1)]


def _rows_of_csv(text: str, path: Path) -> Rows:
    """The first line names the columns; text that is a number of up to 64 bits as Python writes it becomes that number,
    empty text null.
    """
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    rows: Rows = []
    csv.field_size_limit(max(csv.field_size_limit(), len(text)))  # of the process; examples have their own
    end = 0
    try:
        names, end = next(reader, []), reader.line_num
        for name in names:
            if name and names.count(name) > 1:  # spreadsheets add empty columns without names
                raise ConfigError(f"dataset {path} line {end}: duplicate column {name!r}; rename one")
        for values in reader:
            end = reader.line_num
            if not values:
                continue
            location = f"dataset {path} line {end}"
            if len(values) != len(names):
                raise ConfigError(
                    f"{location} must have {len(names)} values, one per column; quote values that contain a comma"
                )
            _check_unnamed(names, values, location)
            rows.append((location, dict(zip(names, map(_scalar, values), strict=True))))
    except csv.Error as error:
        raise ConfigError(f"dataset {path} line {end + 1}: not valid CSV: {error}; correct the line") from error
    return rows


def _check_unnamed(names: list[str], values: list[str], location: str) -> None:
    """Raises ConfigError for a value in one of several columns without a name, of which a row would keep only one."""
    if names.count("") > 1:
        filled = [n for n, (name, value) in enumerate(zip(names, values, strict=True), 1) if value.strip() and not name]
        if filled:
            raise ConfigError(
                f"{location}: column {filled[0]} has a value, but {names.count('')} columns have no name; name it in "
                "the first line, or leave it out"
            )


def _scalar(text: str) -> str | int | float | None:
    """A number only where its text can be restored: 3.10 is not 3.1 for whoever compares answers, or ids."""
    if _INTEGER.fullmatch(text) and len(text) <= 20 and -(2**63) <= int(text) < 2**64:  # others fit into no record
        return int(text) if str(int(text)) == text else text
    if _NUMBER.fullmatch(text):
        return float(text) if str(float(text)) == text else text
    return text or None


def _rows_of_parquet(path: Path) -> Rows:
    from rollstream.metrics.parquet import read_parquet

    if not path.is_file():
        _text(path)  # raises
    try:
        return [(f"dataset {path} row {number}", row) for number, row in enumerate(read_parquet(path), 1)]
    except QueryError as error:
        raise ConfigError(f"dataset {error}") from error
