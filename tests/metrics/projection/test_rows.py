"""Rows of events: what a table has a column for, and nothing else."""

import json
from pathlib import Path
from typing import Any

import orjson
import pytest

from rollstream.eventlog.codec import decode
from rollstream.eventlog.log import Record
from rollstream.metrics.projection.columns import read_sql
from rollstream.metrics.projection.inserts import inserts_into
from rollstream.metrics.projection.rows import BUILDERS, COPIED, rows_of
from rollstream.schemas.events import KINDS

GOLDEN = Path(__file__).parents[2] / "golden"
WITHOUT_ROW = {"tick", "group_extended", "run_continued"}


def golden_rows(name: str) -> list[tuple[str, dict[str, Any]]]:
    kept = json.loads((GOLDEN / name).read_text(encoding="utf-8"))
    value = orjson.dumps(kept["value"])
    return list(rows_of(decode(Record(kept["topic"], 0, 7, kept["key"].encode(), value, (), 1))))


@pytest.mark.parametrize("name", sorted(path.name for path in GOLDEN.glob("*.json")))
def test_a_row_has_every_column_of_its_table_and_values_that_a_column_can_hold(name: str) -> None:
    for table, row in golden_rows(name):
        assert row.keys() == set(inserts_into(read_sql()[0])[table].columns), table
        assert {type(value) for value in row.values()} <= {str, int, float, bool, type(None)}


def test_every_kind_is_copied_or_built_or_leaves_no_row() -> None:
    assert COPIED.isdisjoint(BUILDERS)
    assert KINDS.keys() - COPIED - BUILDERS.keys() == WITHOUT_ROW


def test_scores_under_a_teacher_leave_their_number_and_mean() -> None:
    ((_, row),) = golden_rows("reference_scored.v1.json")
    assert {name: row[name] for name in ("role", "model", "part", "num_tokens", "mean_logprob")} == {
        "role": "teacher", "model": "models/teacher", "part": 1, "num_tokens": 2, "mean_logprob": -0.875,
    }  # fmt: skip


@pytest.mark.parametrize("kind", sorted(COPIED))
def test_a_copied_row_has_the_values_of_the_fields(kind: str) -> None:
    value = json.loads((GOLDEN / f"{kind}.v1.json").read_text(encoding="utf-8"))["value"]
    ((table, row),) = golden_rows(f"{kind}.v1.json")
    assert table == kind
    assert {name: row[name] for name in value.keys() & row.keys()} == {
        name: value[name] for name in row if name in value
    }


def test_a_step_keeps_what_an_agent_asked_of_the_gateway_and_no_other_programs_metadata() -> None:
    kept = json.loads((GOLDEN / "step_recorded.v1.json").read_text(encoding="utf-8"))
    for metadata, expected in (
        (
            {"gateway": {"asked": {"temperature": 0}}, "tools_schema": ["long"]},
            {"gateway": {"asked": {"temperature": 0}}},
        ),
        ({"tools_schema": ["long"]}, None),
    ):
        value = orjson.dumps(kept["value"] | {"metadata": metadata})
        ((_, row),) = rows_of(decode(Record(kept["topic"], 0, 7, kept["key"].encode(), value, (), 1)))
        assert (row["metadata"] and json.loads(row["metadata"])) == expected


def test_a_step_took_the_time_between_its_timestamps_if_its_beginning_was_measured() -> None:
    kept = json.loads((GOLDEN / "step_recorded.v1.json").read_text(encoding="utf-8"))
    cases = ((10.0, 12.5, 2.5), (12.5, 12.5, None), (12.5, 10.0, None), (None, 12.5, None), (10.0, None, None))
    for began, ended, seconds in cases:
        times = {"span_event_timestamp": began, "event_timestamp": ended}
        value = orjson.dumps(kept["value"] | times)
        ((_, row),) = rows_of(decode(Record(kept["topic"], 0, 7, kept["key"].encode(), value, (), 1)))
        assert row["seconds"] == seconds


@pytest.mark.parametrize(
    ("inputs", "expected"),
    [
        ({"question": "x" * 985}, {"question": "x" * 985}),
        ({"question": "x" * 2000, "answer": 7}, {"question": "x" * 400, "answer": 7}),
        ({"texts": ["y" * 900] * 5, "n": {"z": "y" * 500}}, {"texts": ["y" * 100] * 5, "n": {"z": "y" * 100}}),
        ({"numbers": list(range(1000))}, None),
    ],
)
def test_inputs_of_a_task_are_json_whatever_their_length(inputs: dict[str, Any], expected: Any) -> None:
    kept = json.loads((GOLDEN / "task_requested.v1.json").read_text(encoding="utf-8"))
    value = orjson.dumps(kept["value"] | {"inputs": inputs})
    ((_, row),) = rows_of(decode(Record(kept["topic"], 0, 7, kept["key"].encode(), value, (), 1)))
    assert (row["inputs"] and json.loads(row["inputs"])) == expected
