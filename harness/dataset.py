"""A run's examples: read from a file or asked of the environment, and put into the one form that runs refer to."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from rollstream.schemas.config import DatasetSection
from rollstream.schemas.errors import ConfigError

MAX_INPUT_BYTES = 512 * 1024
"""Of one example as JSON; a task carries it, and a record of `tasks` has at most 1 MiB."""


class Example(NamedTuple):
    """One example: its id, unique in its dataset, and the inputs of its environment."""

    example_id: str
    inputs: dict[str, Any]


def read_dataset(section: DatasetSection) -> list[Example]:
    """Examples of a file. Raises ConfigError naming file and line."""
    path = section.file_path
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"dataset {path}: cannot be read: {error}") from error
    rows = _rows_of_list(text, path) if section.type == "json" else _rows_of_lines(text, path)
    return _unique([_example(row, place, section.id_key) for place, row in rows], str(path))


def section_of(path: Path, section: DatasetSection | None) -> DatasetSection:
    """The dataset section with another file, its type told by the suffix (`.json`, else JSON lines)."""
    kind = "json" if path.suffix == ".json" else "jsonl"
    return (section or DatasetSection(file_path=path)).model_copy(update={"file_path": path, "type": kind})


def examples_of(inputs: Iterable[Mapping[str, Any]], place: str) -> list[Example]:
    """Examples that an environment made: an `id` of its own, else numbered. Raises ConfigError."""
    return _unique(
        [_example(dict(row), f"{place}, example {n}", "id", number=n) for n, row in enumerate(inputs)], place
    )


def to_json_lines(examples: Iterable[Example]) -> bytes:
    """The dataset artifact's bytes: JSON lines of {"example_id", "inputs"}."""
    return b"".join(orjson.dumps(example._asdict(), option=orjson.OPT_APPEND_NEWLINE) for example in examples)


def _rows_of_lines(text: str, path: Path) -> list[tuple[str, Any]]:
    rows: list[tuple[str, Any]] = []
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            place = f"dataset {path} line {number}"
            try:
                rows.append((place, json.loads(line)))
            except ValueError as error:
                raise ConfigError(f"{place}: not valid JSON: {error}") from error
    return rows


def _rows_of_list(text: str, path: Path) -> list[tuple[str, Any]]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"dataset {path}: not valid JSON: {error}") from error
    if not isinstance(found, list):
        raise ConfigError(f"dataset {path}: must be a JSON list of objects (for JSON lines: _type: jsonl)")
    return [(f"dataset {path} item {number}", row) for number, row in enumerate(found, 1)]


def _example(row: Any, place: str, id_key: str, number: int | None = None) -> Example:
    if not isinstance(row, dict):
        raise ConfigError(f"{place}: must be an object")
    if id_key not in row and number is None:
        raise ConfigError(f"{place}: has no {id_key!r}; name the key of its id by eval.general.dataset.id_key")
    inputs = {key: value for key, value in row.items() if key != id_key}
    return Example(str(row.get(id_key, number)), inputs)


def _unique(examples: list[Example], place: str) -> list[Example]:
    if not examples:
        raise ConfigError(f"{place}: has no examples")
    seen: set[str] = set()
    for example in examples:
        if example.example_id in seen:
            raise ConfigError(f"{place}: the id {example.example_id!r} stands twice")
        seen.add(example.example_id)
        size = len(orjson.dumps(example.inputs))
        if size > MAX_INPUT_BYTES:
            raise ConfigError(
                f"{place}: example {example.example_id!r} has {size} bytes of inputs, more than {MAX_INPUT_BYTES}: "
                "put what is large into a file and name it"
            )
    return examples
