"""A query changes no file but what it spills, in whatever state the write-ahead log is; and how its process may end."""

import asyncio
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import duckdb
import pytest

from rollstream.eventlog.log import TopicPartition
from rollstream.metrics.projection.database import Database
from rollstream.metrics.sql.client import query
from rollstream.metrics.sql.lanes import QueryLanes
from rollstream.metrics.sql.query import Limits, QueryProcess
from rollstream.metrics.sql.result import result_of
from rollstream.schemas.errors import QueryError
from tests.metrics.sql.query_rig import (
    CHECKPOINTS,
    WAIT_S,
    ask,
    assert_outlives_a_kill,
    files,
    in_state,
    left_by_kill,
    started,
    try_each,
)

ROOT = Path(__file__).resolve().parents[3]


STATES = ["open", "folded", "left"]


@pytest.mark.parametrize("state", STATES)
def test_no_select_writes_a_checkpoint(state: str, tmp_path: Path) -> None:
    database = in_state(state, tmp_path)
    try_each(database, CHECKPOINTS)
    assert_outlives_a_kill(database, tmp_path / "killed")
    database.close()


@pytest.mark.parametrize("sql", CHECKPOINTS)
def test_no_select_on_the_file_itself_writes_a_checkpoint(sql: str, tmp_path: Path) -> None:
    path = left_by_kill(tmp_path / "before", tmp_path / "now")
    before = files(path.parent)
    with suppress(QueryError):
        query(path.parent, sql)
    assert files(path.parent) == before


def calls_of_table_functions() -> list[str]:
    """A call of each, as it can be called, and a call by its name from within another function."""
    sql = (
        "SELECT function_name, min(len(parameters)) FROM duckdb_functions() "
        "WHERE function_type IN ('table', 'pragma') GROUP BY 1 ORDER BY 1"
    )
    found = duckdb.connect().execute(sql).fetchall()
    direct = [f"{name}({', '.join(['?'] * count)})".replace("?", "'metrics'") for name, count in found]
    return [*direct, *(f"destroy_external_resource('{name}', 'metrics')" for name, _ in found)]


@pytest.mark.slow
@pytest.mark.parametrize("state", ["folded", "left"])
def test_no_table_function_changes_a_file(state: str, tmp_path: Path) -> None:
    database = in_state(state, tmp_path)
    try_each(database, [f"SELECT * FROM {call}" for call in calls_of_table_functions()])
    assert_outlives_a_kill(database, tmp_path / "killed")
    database.close()


@pytest.mark.slow
def test_no_select_appends_to_a_log_that_the_service_could_not_open_for_writing(
    small_disk: Callable[[int], Any], tmp_path: Path
) -> None:
    disk = small_disk(8)
    path = disk.folder / left_by_kill(tmp_path / "before", disk.folder).name
    disk.fill()
    database = Database(path)
    disk.free()
    try_each(database, CHECKPOINTS)
    assert_outlives_a_kill(database, tmp_path / "killed")
    database.close()


SPILLING = "SELECT count(*) FROM (SELECT DISTINCT md5(range::VARCHAR) FROM range(3000000))"
WITHOUT_LANDLOCK = """
import os, pathlib, sys
from rollstream.metrics.sql.landlock import write_only_below
folder = pathlib.Path(sys.argv[1])
while write_only_below(folder):  # the kernel takes no more than 16 such layers
    pass
from tests.metrics.sql import query_rig as rig
database = rig.in_state("left", folder)
rig.try_each(database, rig.CHECKPOINTS)
assert rig.ask(database, "SELECT 1").rows == ((1,),)
try:
    rig.ask(database, sys.argv[2], memory_bytes=300_000_000)
except rig.QueryError as error:
    print(error)
rig.assert_outlives_a_kill(database, folder / "killed")
database.close()
"""


@pytest.mark.slow
def test_where_a_query_cannot_be_confined_it_changes_no_file_and_spills_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WITHOUT_LANDLOCK, str(tmp_path), SPILLING]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=WAIT_S, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "needed more than 0.3 GB of memory and was stopped" in done.stdout


LONG = "SELECT sum(range) FROM range(100000000000)"


@contextmanager
def running_query(database: Database, sql: str) -> Iterator[QueryProcess]:
    asked = started(database, sql, Limits(1_000_000, WAIT_S))
    try:
        yield asked
    finally:
        asked.close()
        database.fork_ended()


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    found = Database(tmp_path / "metrics.duckdb")
    yield found
    found.close()


@pytest.mark.parametrize(
    ("number", "reported"),
    [
        (signal.SIGSEGV, r"the query's process crashed \(SIGSEGV\)"),
        (signal.SIGABRT, r"the query's process crashed \(SIGABRT\)"),
        (signal.SIGXCPU, "took longer than 120 s and was stopped"),
        (signal.SIGKILL, "was killed .* this machine is out of memory"),
    ],
)
def test_a_crashed_or_killed_query_is_an_error_with_the_cause(database: Database, number: int, reported: str) -> None:
    with running_query(database, LONG) as asked:
        os.kill(asked.pid, number)
        assert asked.wait(WAIT_S)
        with pytest.raises(QueryError, match=reported):
            asked.answer()
    assert ask(database, "SELECT 1").rows == ((1,),)


def test_half_an_answer_is_none(database: Database) -> None:
    with running_query(database, "SELECT repeat('x', 1000) FROM range(10000)") as asked:
        assert select.select([asked._reading], [], [], WAIT_S)[0]
        os.kill(asked.pid, signal.SIGKILL)
        assert asked.wait(WAIT_S)
        with pytest.raises(QueryError, match="was killed"):
            asked.answer()


def test_spilled_files_of_a_killed_service_are_removed_at_the_next_start(tmp_path: Path) -> None:
    left, of_another = tmp_path / "metrics.duckdb.sql-left", tmp_path / "metrics.duckdb.aside.sql-other"
    for folder in (left, of_another):
        folder.mkdir()
        (folder / "spilled.tmp").write_bytes(b"rows")
    Database(tmp_path / "metrics.duckdb").close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.duckdb", of_another.name]


def test_waiting_for_a_checkpoint_counts_against_the_limit_of_time(tmp_path: Path) -> None:
    database = Database(tmp_path / "metrics.duckdb", max_wal_bytes=1)
    database.write({}, {TopicPartition("steps", 0): 5})
    lanes = QueryLanes(database)
    with running_query(database, LONG), pytest.raises(QueryError, match=r"did not start within 0\.3 s"):
        asyncio.run(lanes.run("SELECT 1", Limits(10, 0.3)))
    assert result_of(json.loads(asyncio.run(lanes.run("SELECT 1", Limits(10, WAIT_S))))).rows == ((1,),)
    database.close()


ZONE_PROGRAM = """
import sys
from pathlib import Path

import duckdb

from rollstream.metrics.projection.database import Database
from rollstream.metrics.sql.client import query
from rollstream.metrics.sql.formats import to_parquet

assert duckdb.sql("SELECT current_setting('TimeZone')").fetchall() == [("Asia/Tokyo",)]
path = Path(sys.argv[1]) / "metrics.duckdb"
Database(path).close()
found = query(path.parent, sys.argv[2])
print(found.rows[0])
path.with_name("result.parquet").write_bytes(to_parquet(found))
"""


def test_now_and_dates_are_those_of_utc_whatever_the_time_zone_of_the_machine(tmp_path: Path) -> None:
    sql = (
        "SELECT round(epoch(now()::TIMESTAMP) - epoch(now())) = 0 AS is_now, current_date = now()::DATE AS today, "
        "epoch_ms(0) = TIMESTAMPTZ '1970-01-01 00:00:00+00' AS began, TIMESTAMPTZ '1970-01-01 00:00:00+00' AS at"
    )
    environment = os.environ | {"TZ": "Asia/Tokyo", "HOME": str(tmp_path)}
    child = subprocess.run(
        [sys.executable, "-c", ZONE_PROGRAM, str(tmp_path), sql], env=environment, capture_output=True, text=True
    )
    assert child.returncode == 0, child.stderr
    assert child.stdout.strip() == "(True, True, True, '1970-01-01 00:00:00+00:00')"
    with duckdb.connect() as connection:
        written = connection.execute(f"SELECT epoch(\"at\") FROM '{tmp_path / 'result.parquet'}'").fetchall()
    assert written == [(0.0,)]
    assert not (tmp_path / ".duckdb").exists(), "an extension was fetched"
