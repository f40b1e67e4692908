"""A run's examples: read from a file or asked of the environment, and put into the one form that runs refer to."""

import fnmatch
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from rollstream.harness.dataset_files import SUFFIXES, rows_of
from rollstream.schemas.dataset import DatasetFilter, DatasetSection, DatasetStructure
from rollstream.schemas.errors import ConfigError

MAX_INPUT_BYTES = 512 * 1024
"""Of one example as JSON; a task carries it, and a record of `tasks` has at most 1 MiB."""


class Example(NamedTuple):
    """One example: its id, unique in its dataset, and the inputs of its environment."""

    example_id: str
    inputs: dict[str, Any]


def read_dataset(section: DatasetSection) -> list[Example]:
    """Examples of a file, in its order, filtered. Raises ConfigError naming file and line."""
    path = section.file_path
    rows = rows_of(path, section.type)
    if not rows:
        raise ConfigError(f"dataset {path}: is empty")
    kept = [(place, row) for place, row in rows if _is_wanted(row, section.filter)]
    if not kept:
        raise ConfigError(f"dataset {path}: eval.general.dataset.filter leaves none of its {len(rows)} rows")
    examples = [_example(row, place, section.id_key) for place, row in kept]
    standard = [
        example._replace(inputs=_with_standard_names(example.inputs, place, section.structure))
        for (place, _), example in zip(kept, examples, strict=True)
    ]
    return _unique(standard, f"dataset {path}")


def section_of(path: Path, section: DatasetSection | None) -> DatasetSection:
    """The dataset section with another file, its type told by the suffix (.json, .csv, .parquet; else JSON lines)."""
    kind = SUFFIXES.get(path.suffix.lower(), "jsonl")
    return (section or DatasetSection(file_path=path)).model_copy(update={"file_path": path, "type": kind})


def _is_wanted(row: Any, chosen: DatasetFilter | None) -> bool:
    """Whether a row passes the filter; a column that it has not does not count, what is no row is told of later."""
    if chosen is None or not isinstance(row, dict):
        return True
    allowed = chosen.allowlist.field if chosen.allowlist else {}
    denied = chosen.denylist.field if chosen.denylist else {}
    is_allowed = all(_fits(row[column], patterns) for column, patterns in allowed.items() if column in row)
    return is_allowed and not any(_fits(row[column], patterns) for column, patterns in denied.items() if column in row)


def _fits(value: Any, patterns: Iterable[Any]) -> bool:
    return any(fnmatch.fnmatch(str(value), str(pattern)) for pattern in patterns)


def _with_standard_names(inputs: dict[str, Any], place: str, structure: DatasetStructure) -> dict[str, Any]:
    """Inputs, in which what `structure` names stands under its standard name too. Raises ConfigError."""
    if structure.disable:
        return {**inputs, "question": json.dumps(inputs)}
    if "question_key" in structure.model_fields_set and structure.question_key not in inputs:
        raise ConfigError(
            f"{place}: has no {structure.question_key!r}; "
            "name the key of its question by eval.general.dataset.structure.question_key"
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


def examples_of(inputs: Iterable[Mapping[str, Any]], place: str) -> list[Example]:
    """Examples that an environment made: an `id` of its own, else numbered. Raises ConfigError."""
    return _unique(
        [_example(dict(row), f"{place}, example {n}", "id", number=n) for n, row in enumerate(inputs)], place
    )


def to_json_lines(examples: Iterable[Example]) -> bytes:
    """The dataset artifact's bytes: JSON lines of {"example_id", "inputs"}."""
    return b"".join(orjson.dumps(example._asdict(), option=orjson.OPT_APPEND_NEWLINE) for example in examples)


def _example(row: Any, place: str, id_key: str, number: int | None = None) -> Example:
    if not isinstance(row, dict):
        raise ConfigError(f"{place}: must be an object")
    if row.get(id_key) is None and number is None:
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
