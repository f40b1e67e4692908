"""Every field of a recorded run changed, one by one, compared with docs/replay.md."""

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from rollstream.eventlog import codec
from rollstream.eventlog.log import TopicPartition
from rollstream.schemas.errors import DecodeError, RollstreamError
from rollstream.schemas.events import KINDS
from tests.rigs.runs.recorded_run import RUN
from tests.rigs.runs.replay_rig import tampered

PAGE = Path(__file__).parents[3] / "docs" / "replay.md"


class Change(NamedTuple):
    """One field of one record with another value."""

    kind: str
    field: str
    where: TopicPartition
    number: int
    value: bytes


def finders() -> dict[tuple[str, str], str]:
    """Commands that find a change, by event and field, according to the page: `verify`, `train`, `verify, train` or
    `nothing`.
    """
    found: dict[tuple[str, str], str] = {}
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.removeprefix("|").removesuffix("|").split("|")]
        begins = re.match(r"(verify, train|verify|train|nothing)\b", cells[-1])
        if line.startswith("| ") and len(cells) == 3 and begins:
            found |= {(cells[0], field): begins[1] for field in re.findall(r"`(\w+)`", cells[1])}
    return found


def other(value: Any) -> Any:
    """A value of the same type; in a nested value, the first entry is changed."""
    match value:
        case bool():
            return not value
        case int() | float():
            return value + 1
        case str():
            return ("0" if value[:1] != "0" else "1") + value[1:]
        case dict():
            first = min(value, default="x")
            return {**value, first: other(value.get(first))}
        case list() if value:
            return [other(value[0]), *value[1:]]
        case _:
            return "x"


def changes(run: Any, *, decodes: bool = True) -> Iterator[Change]:
    """For every field of every kind: the first record in which it can be changed to another value that still decodes.

    Not `decodes`: to a value that does not; a part that repeats in a record's key has no other value, nor has an empty
    one.
    """
    done: set[tuple[str, str]] = set()
    for where, kept in run.log._store._partitions.items():
        for index, record in enumerate(kept.records):
            body = orjson.loads(record.value)
            kind = KINDS[body["kind"]].__name__
            for field, its in KINDS[body["kind"]].model_fields.items():
                if field in ("kind", "v", "run_id", "time_ms"):
                    continue
                before = body[field] if field in body else its.get_default(call_default_factory=True)
                value = orjson.dumps({**body, field: other(before)})
                if (kind, field) not in done and is_event(replace(record, value=value)) == decodes:
                    done.add((kind, field))
                    yield Change(kind, field, where, index, value)


def first_records(run: Any) -> Iterator[Change]:
    """The first record of every kind, unchanged."""
    done: set[str] = set()
    for where, kept in run.log._store._partitions.items():
        for index, record in enumerate(kept.records):
            kind = KINDS[orjson.loads(record.value)["kind"]].__name__
            if kind not in done:
                done.add(kind)
                yield Change(kind, "", where, index, record.value)


def is_event(record: Any) -> bool:
    try:
        codec.decode(record)
    except DecodeError:
        return False
    return True


def is_found(replay: Callable[[Any], Any], recorded: Any, change: Change, *, moved: bool = False) -> bool:
    """Whether a replay of the run with this change is refused, or not called equal. `moved`: to another run, too."""
    run = tampered(recorded)
    records = run.log._store._partitions[change.where].records
    record = replace(records[change.number], value=change.value)
    if moved:
        assert record.key is not None
        name, other_name = RUN.encode(), other(RUN).encode()
        record = replace(record, key=record.key.replace(name, other_name), value=change.value.replace(name, other_name))
    records[change.number] = record
    try:
        return replay(run).verdict != "equal"
    except RollstreamError:
        return True
