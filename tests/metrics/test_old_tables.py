"""A metrics file whose tables another version of rollstream made."""

import asyncio
from pathlib import Path
from typing import Any

import duckdb
import pytest

from rollstream.eventlog.artifacts import ArtifactStore
from rollstream.eventlog.log import TopicPartition
from rollstream.eventlog.memory.log import MemoryLog
from rollstream.metrics.projection.connection import MetricsFileError
from rollstream.metrics.sql.client import query
from rollstream.replay.archive.export import export_run
from rollstream.replay.archive.log import ExportLog, rebuild_exported
from rollstream.schemas.errors import QueryError, TruncatedError
from tests.metrics.conftest import empty_file, grow
from tests.metrics.export_rig import log_of


def make_old(path: Path) -> None:
    """Let the tables be another version's: a column has another name there."""
    with duckdb.connect(str(path)) as connection:
        connection.execute("DROP VIEW tasks")
        connection.execute("CREATE VIEW tasks AS SELECT group_id AS group_name FROM log.task_requested")
        connection.execute("UPDATE log.meta SET value = 'old' WHERE name IN ('tables_sha256', 'views_sha256')")


def runs_in(path: Path) -> list[Any]:
    with duckdb.connect(str(path), read_only=True) as connection:
        return connection.execute("SELECT run_id FROM runs").fetchall()


def rows_of(path: Path) -> dict[str, list[Any]]:
    with duckdb.connect(str(path), read_only=True) as connection:
        names = connection.execute(
            "SELECT 'log.' || table_name FROM duckdb_tables() WHERE schema_name = 'log' "
            "UNION SELECT schema_name || '.' || view_name FROM duckdb_views() WHERE NOT internal"
        ).fetchall()
        return {name: sorted(map(repr, connection.execute(f"FROM {name}").fetchall())) for (name,) in names}


def test_tables_of_another_version_are_filled_again(tmp_path: Path, synthetic: Any) -> None:
    path = empty_file(tmp_path)
    log = log_of(synthetic)
    grow(log, path)
    before = rows_of(path)
    make_old(path)
    grow(log, path)
    assert rows_of(path) == before


def test_rows_that_the_log_has_lost_stay_when_the_tables_are_of_another_version(tmp_path: Path, new_run: Any) -> None:
    path = empty_file(tmp_path)
    log = log_of(new_run("one"))
    grow(log, path)
    log.truncate(TopicPartition("jobs", 0), 2)
    grow(log, path)
    make_old(path)
    before = path.read_bytes()
    end = asyncio.run(log.end_offsets("jobs"))[0]
    for _ in range(2):
        with pytest.raises(TruncatedError) as refused:
            grow(log, path)
        assert str(refused.value) == (
            f"offset 0 of topic jobs partition 0 is not kept: it holds 2 to {end - 1}; the metrics file {path} was "
            f"made by another version of rollstream and may have rows that the log lost: move it away to keep them, or "
            f"`rollstream rebuild --partial` replaces it"
        )
    assert len(path.read_bytes()) == len(before)
    assert runs_in(path) == [("one",)]


def test_rows_that_the_file_never_had_are_not_lost_when_the_tables_are_of_another_version(
    tmp_path: Path, new_run: Any
) -> None:
    path = empty_file(tmp_path)
    log = log_of(new_run("one"))
    log.truncate(TopicPartition("jobs", 0), 2)
    grow(log, path)
    before = rows_of(path)
    for _ in range(2):
        make_old(path)
        grow(log, path)
        assert rows_of(path) == before
    make_old(path)
    log.truncate(TopicPartition("jobs", 0), 3)
    with pytest.raises(TruncatedError, match="offset 2 of topic jobs partition 0 is not kept: it holds 3 to"):
        grow(log, path)


def test_tables_of_another_version_stay_when_the_topics_were_made_again(tmp_path: Path, synthetic: Any) -> None:
    path = empty_file(tmp_path)
    grow(log_of(synthetic), path)
    make_old(path)
    with pytest.raises(TruncatedError, match="deleted and created again; the metrics file"):
        grow(MemoryLog(num_partitions=2), path)
    assert runs_in(path) == [(synthetic.run_id,)]


def test_a_file_of_another_cluster_is_refused_when_the_tables_are_of_another_version(
    tmp_path: Path, synthetic: Any
) -> None:
    class Other(MemoryLog):
        async def cluster_id(self) -> str:
            return "other"

    path = empty_file(tmp_path)
    log = log_of(synthetic)
    grow(log, path)
    make_old(path)
    with pytest.raises(MetricsFileError, match=r"was made from cluster .*, not from other"):
        grow(Other(num_partitions=2), path)
    assert runs_in(path) == [(synthetic.run_id,)]
    grow(log, path)  # fills new tables, which belong to the same cluster
    with pytest.raises(MetricsFileError, match=r"was made from cluster .*, not from other"):
        grow(Other(num_partitions=2), path)


@pytest.mark.parametrize("goes_on", [False, True])
def test_a_file_of_an_export_is_not_emptied(
    tmp_path: Path, new_run: Any, store: ArtifactStore, *, goes_on: bool
) -> None:
    log, path = log_of(new_run("one"), new_run("two")), tmp_path / "metrics.duckdb"
    asyncio.run(export_run(log, "two", tmp_path / "export", artifacts=store))

    async def rebuild() -> None:
        async with ExportLog(tmp_path / "export") as exported:
            await rebuild_exported(exported, path)

    asyncio.run(rebuild())
    if goes_on:
        grow(MemoryLog(num_partitions=2), path)
    make_old(path)
    with pytest.raises(MetricsFileError, match="was made from an export by another version of rollstream, and its"):
        grow(MemoryLog(num_partitions=2), path)
    assert runs_in(path) == [("two",)]


def test_an_old_file_answers_and_explains_why_a_query_fails(tmp_path: Path, synthetic: Any) -> None:
    path = empty_file(tmp_path)
    grow(log_of(synthetic), path)
    make_old(path)
    assert query(tmp_path, "SELECT run_id FROM runs").rows == ((synthetic.run_id,),)
    assert query(tmp_path, "SELECT count(group_name) > 0 FROM tasks").rows == ((True,),)
    with pytest.raises(QueryError, match="was made by another version of rollstream, whose tables may differ: `roll"):
        query(tmp_path, "SELECT group_id FROM tasks")


def test_a_new_file_of_another_version_without_rows_is_filled(tmp_path: Path, synthetic: Any) -> None:
    path = empty_file(tmp_path)
    make_old(path)
    log = log_of(synthetic)
    grow(log, path)
    assert runs_in(path) == [(synthetic.run_id,)]
