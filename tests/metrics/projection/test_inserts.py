"""Rows go into their tables as one JSON text, and come out as they were."""

import asyncio
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollstream.eventlog.codec import encode
from rollstream.eventlog.log import Record
from rollstream.eventlog.memory.log import MemoryLog
from rollstream.metrics.projection.columns import read_sql
from rollstream.metrics.projection.connection import connect
from rollstream.metrics.projection.database import Database
from rollstream.metrics.projection.inserts import ROWS_AT_ONCE, inserts_into
from rollstream.metrics.projection.projector import project, project_to_end
from rollstream.schemas.base import Event
from rollstream.schemas.events import ReferenceScored, StepRecorded, StepTrained, TrajectoryRejected
from rollstream.schemas.events.rollouts import LLMCall, Prefix
from rollstream.schemas.events.weights import Scorer
from rollstream.schemas.tokens import encode_floats, encode_ids

INTS = st.none() | st.integers(-(2**63), 2**63 - 1)
TEXTS = st.none() | st.text()
REWARD: dict[str, st.SearchStrategy[Any]] = {
    "rollout_id": st.uuids().map(str), "reward_index": st.integers(0, 2**63 - 1), "run_id": TEXTS, "group_id": TEXTS,
    "name": TEXTS, "value": st.none() | st.floats(), "step_index": INTS, "agent": TEXTS,
    "is_score": st.none() | st.booleans(), "time_ms": INTS, "log_partition": INTS, "log_offset": INTS,
}  # fmt: skip


@pytest.fixture(scope="module")
def inserted() -> Callable[[str, list[dict[str, Any]]], list[dict[str, Any]]]:
    """Inserts rows into an empty table and returns what it holds."""
    tables, _ = read_sql()
    connection = duckdb.connect(":memory:", config={"threads": "1"})
    connection.execute(tables)

    def through(table: str, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        insert = inserts_into(tables)[table]
        connection.execute("BEGIN TRANSACTION")
        for text in insert.texts(rows):
            connection.execute(insert.statement, [text])
        found = connection.execute(f'SELECT * FROM log."{table}"').fetchall()
        connection.execute("ROLLBACK")
        return [dict(zip(insert.columns, row, strict=True)) for row in found]

    return through


@given(rows=st.lists(st.fixed_dictionaries(REWARD), min_size=1, max_size=5, unique_by=lambda row: row["rollout_id"]))
def test_a_row_comes_out_as_it_was(inserted: Any, rows: list[dict[str, Any]]) -> None:
    for row, found in zip(rows, inserted("reward_recorded", rows), strict=True):
        if row["value"] is not None and math.isnan(row["value"]):
            assert math.isnan(found.pop("value"))
            row = {name: value for name, value in row.items() if name != "value"}
        assert found == row


@given(metrics=st.dictionaries(st.text(), st.floats(allow_nan=False, allow_infinity=False)), value=st.text())
def test_json_and_maps_come_out_as_they_were(inserted: Any, metrics: dict[str, float], value: str) -> None:
    tables, _ = read_sql()
    empty = dict.fromkeys(inserts_into(tables)["step_trained"].columns)
    keys = {"batch_id": "b", "job_id": "j", "model_group": "g", "term": 1, "version": 1}
    text = orjson.dumps(metrics).decode()
    (row,) = inserted("step_trained", [{**empty, **keys, "metrics": text, "seconds": "{}"}])
    assert (row["metrics"], row["seconds"]) == (metrics, {})
    step = dict.fromkeys(inserts_into(tables)["step_recorded"].columns)
    usage = orjson.dumps({"text": value}).decode()
    (row,) = inserted("step_recorded", [{**step, "rollout_id": "r", "step_index": 0, "usage": usage}])
    assert row["usage"] == usage


def test_rows_beyond_those_of_one_statement_go_in_too(inserted: Any) -> None:
    tables, _ = read_sql()
    step = dict.fromkeys(inserts_into(tables)["step_recorded"].columns)
    rows = [{**step, "rollout_id": "r", "step_index": index} for index in range(ROWS_AT_ONCE + 1)]
    assert inserted("step_recorded", rows) == rows


@pytest.mark.parametrize("value", [2**63, -(2**63) - 1])
def test_a_number_that_no_column_holds_is_an_error(inserted: Any, value: int) -> None:
    tables, _ = read_sql()
    row = {**dict.fromkeys(inserts_into(tables)["step_recorded"].columns), "rollout_id": "r", "step_index": value}
    with pytest.raises((duckdb.Error, TypeError)):
        inserted("step_recorded", [row])


def test_an_integer_that_no_column_can_hold_is_the_largest_and_stops_no_projection(tmp_path: Path) -> None:
    rejected = {
        "run_id": "r", "job_id": "r/rl", "epoch": 0, "group_id": "r/rl/e00000/t00000", "cause": "stale",
        "rollout_id": "r/rl/e00000/t00000/m0/a0",
    }  # fmt: skip
    events = [
        TrajectoryRejected(**rejected, time_ms=time_ms, trajectory_id=name, num_tokens=num_tokens)
        for name, time_ms, num_tokens in (("a", 1, 2**62), ("b", 2**53 - 1, 2**62), ("c", 3, 2**64 - 1))
    ]
    records = [
        Record("batches", 0, offset, encoded.key, encoded.value, encoded.headers, 0)
        for offset, encoded in enumerate(map(encode, events))
    ]
    headers = (("__connect.errors.topic", b"jobs"), ("__connect.errors.offset", b"9" * 5000))
    records.append(Record("dlq", 0, 0, b"r", b"", headers, 0))
    found: list[Any] = []
    for name, cuts in (("together", [records]), ("apart", [[record] for record in records])):
        database = Database(tmp_path / f"{name}.duckdb")
        for part in cuts:
            database.write(project(part), {})
        cursor = database.cursor()
        asked = ("SELECT time_ms, num_tokens FROM log.trajectory_rejected ORDER BY log_offset",
                 "SELECT rejected_tokens FROM log.attempt", 'SELECT "offset" FROM log.dead_letter')  # fmt: skip
        found.append([cursor.execute(query).fetchall() for query in asked])
        database.close()
    most = 2**63 - 1
    assert found == 2 * [[[(1, 2**62), (2**53 - 1, 2**62), (3, most)], [(most,)], [(None,)]]]


def enlarged(event: Event) -> Event:
    """The event as a foreign run's, with counts that no column or sum can hold."""
    text = event.model_dump_json().replace("demo-000001", "foreign")
    for name in ("num_tokens", "num_completion_tokens", "num_dead_tokens", "num_without_logprobs"):
        text = re.sub(rf'"{name}":\d+', f'"{name}":{2**63 - 1}', text)
    changed = type(event).model_validate_json(text)
    if isinstance(changed, StepTrained):
        changed = changed.model_copy(update={"metrics": {**changed.metrics, "staleness/tokens_0": 1e300}})
    return changed


def test_one_record_with_huge_counts_fails_no_view_for_other_runs(tmp_path: Path, synthetic: Any) -> None:
    found: list[Event] = list(synthetic.all_events())
    base = {"run_id": "foreign", "time_ms": 1, "group_id": "foreign/rl/e00000/t00000", "uuid": "u", "agent": "a"}
    lengths = (2**64 - 1, 2**63 - 2, 3)
    for index, length in enumerate(lengths, 1):
        prefix = Prefix(step_index=index - 1, length=length, sha256="s")
        call = LLMCall(prompt_ids=encode_ids([0]), completion_ids=encode_ids([0]), prefix=prefix)
        rollout_id = "foreign/rl/e00000/t00000/m9/a0"
        found.append(StepRecorded(**base, rollout_id=rollout_id, step_index=index, event_type="LLM_END", llm=call))
    log = MemoryLog(num_partitions=2)
    asyncio.run(log.send_all([*found, *map(enlarged, found)]))
    asyncio.run(project_to_end(log, tmp_path / "metrics.duckdb"))
    with connect(tmp_path / "metrics.duckdb", read_only=True) as connection:
        asked = "SELECT view_name FROM duckdb_views() WHERE NOT internal AND schema_name = 'main'"
        views = [name for (name,) in connection.execute(asked).fetchall()]
        for view in views:
            connection.execute(f"SELECT * FROM {view}").fetchall()
        totals = dict(connection.execute("SELECT run_id, max(num_tokens) FROM groups GROUP BY run_id").fetchall())
        prompts = connection.execute("SELECT num_prompt_tokens FROM prompts WHERE run_id = 'foreign'").fetchall()
    assert len(views) > 20
    assert totals["foreign"] == 2**63 - 1
    assert 0 < totals["demo-000001"] < 1000
    assert {(2**63 - 1,), (4,)} <= set(prompts)


def test_scores_with_a_part_that_has_no_mean_have_none(tmp_path: Path) -> None:
    common = {
        "run_id": "r", "time_ms": 1, "model_group": "r/policy", "job_id": "r/rl", "batch_id": "b", "version": 1,
        "term": 1, "trajectory_id": "t", "trajectory_sha256": "s", "scorer": Scorer(role="reference"), "num_parts": 2,
    }  # fmt: skip
    parts = [[-2.0, -2.0], [float("-inf"), -2.0]]
    scores = [ReferenceScored(**common, part=n, logprobs=encode_floats(part)) for n, part in enumerate(parts)]
    database = Database(tmp_path / "metrics.duckdb")
    for offset, encoded in enumerate(map(encode, scores)):
        record = Record("weights", 0, offset, encoded.key, encoded.value, encoded.headers, 0)
        database.write(project([record]), {})
    found = database.cursor().execute("SELECT num_tokens, mean_logprob FROM reference_scores").fetchall()
    database.close()
    assert found == [(4, None)]
