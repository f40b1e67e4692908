"""The metrics file made again is, row for row, the one that grew."""

import asyncio
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import pytest

from rollstream.eventlog.artifacts import ArtifactStore
from rollstream.eventlog.dead_letters import send_dead_letter
from rollstream.eventlog.disk_space import is_full
from rollstream.eventlog.log import Record, TopicPartition, partition_of
from rollstream.eventlog.memory.log import MemoryLog
from rollstream.eventlog.reading import read_to_end
from rollstream.metrics.projection.connection import MetricsFileError
from rollstream.metrics.rebuild import rebuild
from rollstream.replay.archive.export import export_run
from rollstream.replay.archive.log import ExportLog, rebuild_exported
from rollstream.schemas.errors import DecodeError, TruncatedError
from rollstream.schemas.topics import TOPICS
from tests.metrics.conftest import empty_file, grow


def log_of(*runs: Any) -> MemoryLog:
    """Runs in one log, each event twice, with dead letters."""
    log = MemoryLog(num_partitions=2)

    async def fill() -> None:
        for number, run in enumerate(runs):
            await log.send_all([event for event in run.all_events() for _ in range(2)])
            letter = Record("steps", 0, number, f"{run.run_id}/g".encode(), b"{", (), 0)
            await send_dead_letter(log, letter, service="s", stage="decode", error=DecodeError("no"))

    asyncio.run(fill())
    return log


def rows_of(path: Path, run_id: str | None = None) -> dict[str, list[Any]]:
    """Every row of every table, or of those of one run; of offsets all but the clock time; and what the views are."""
    with duckdb.connect(str(path), read_only=True) as connection:
        tables = connection.execute(
            "SELECT schema_name, table_name, list_contains(list(column_name), 'run_id') FROM duckdb_columns() "
            "WHERE table_oid IN (SELECT table_oid FROM duckdb_tables()) GROUP BY ALL ORDER BY ALL"
        ).fetchall()
        sql = "SELECT schema_name, view_name, sql FROM duckdb_views() WHERE NOT internal ORDER BY ALL"
        found = {"views": connection.execute(sql).fetchall()}
        for schema, name, has_run in tables:
            if run_id is None or has_run:
                where = "" if run_id is None else f"WHERE run_id = '{run_id}'"
                without = "EXCLUDE (updated_at)" if name == "offsets" else ""
                sql = f'SELECT * {without} FROM {schema}."{name}" {where} ORDER BY ALL'
                found[f"{schema}.{name}"] = connection.execute(sql).fetchall()
    return found


def damage(path: Path) -> None:
    with duckdb.connect(str(path)) as connection:
        connection.execute("DELETE FROM log.step_recorded WHERE step_index = 1")


def test_a_file_rebuilt_from_the_topics_equals_the_one_that_grew(tmp_path: Path, new_run: Any) -> None:
    path = empty_file(tmp_path)
    log = log_of(new_run("one"), new_run("two"))
    grow(log, path)
    before = rows_of(path)
    assert sum(map(len, before.values())) > 500
    damage(path)
    assert rows_of(path) != before
    lines: list[int] = []
    asyncio.run(rebuild(log, path, report=lines.append))
    after = rows_of(path)
    assert {name: after[name] == rows for name, rows in before.items()} == dict.fromkeys(before, True)
    assert after.keys() == before.keys()
    assert lines[-1] >= sum(len(rows) for name, rows in after.items() if name.startswith("log.") and name != "log.meta")
    assert [file.name for file in tmp_path.glob("metrics*")] == ["metrics.duckdb"]


def test_a_file_rebuilt_from_an_export_of_all_that_there_was_equals_the_one_that_grew(
    tmp_path: Path, new_run: Any, store: ArtifactStore
) -> None:
    log = log_of(new_run("one"))
    grow(log, tmp_path / "grown.duckdb")
    asyncio.run(export_run(log, "one", tmp_path / "export", artifacts=store))
    path = tmp_path / "deep" / "rebuilt.duckdb"
    asyncio.run(from_export(tmp_path / "export", path))
    before, after = rows_of(tmp_path / "grown.duckdb"), rows_of(path)
    assert {name: after[name] == rows for name, rows in before.items()} == dict.fromkeys(before, True)


def test_rows_of_runs_are_kept_when_partitions_were_added(tmp_path: Path, new_run: Any) -> None:
    old = log_of(new_run("one"))
    grow(old, tmp_path / "grown.duckdb")
    altered = MemoryLog(num_partitions=5)

    async def copy() -> None:
        for topic in TOPICS:
            async for record in read_to_end(old, topic):
                where = {"key": record.key, "value": record.value, "headers": record.headers}
                await altered.send_raw(topic, **where, partition=record.partition)
        step = next(event for event in new_run("two").all_events() if event.kind == "step_recorded")
        await altered.send(step, partition=(partition_of(step.key, 5) + 1) % 5)  # no run has it there

    asyncio.run(copy())
    asyncio.run(rebuild(altered, tmp_path / "rebuilt.duckdb"))
    before, after = (
        {name: len(rows) for name, rows in rows_of(tmp_path / file).items() if "offset" not in name}
        for file in ("grown.duckdb", "rebuilt.duckdb")
    )
    assert after == before
    assert before["log.step_recorded"] > 10


async def from_export(folder: Path, path: Path) -> None:
    log = ExportLog(folder)
    await log.start()
    try:
        await rebuild_exported(log, path)
    finally:
        await log.close()


def test_a_file_rebuilt_from_an_export_has_the_rows_of_its_run_and_grows_to_the_whole_log(
    tmp_path: Path, new_run: Any, store: ArtifactStore
) -> None:
    log = log_of(new_run("one"), new_run("two"), new_run("three"))
    grow(log, tmp_path / "grown.duckdb")
    asyncio.run(export_run(log, "two", tmp_path / "export", artifacts=store))
    path = tmp_path / "rebuilt.duckdb"
    asyncio.run(from_export(tmp_path / "export", path))
    assert rows_of(path, "two") == rows_of(tmp_path / "grown.duckdb", "two")
    assert rows_of(path)["main.offsets"] == []  # the file does not say that it holds the other runs too
    with duckdb.connect(str(path), read_only=True) as connection:
        assert connection.execute("SELECT run_id FROM runs").fetchall() == [("two",)]
    grow(log, path)
    grown = rows_of(path)
    grown["log.meta"].remove(("export", "part"))  # this stays: another log need not have the run
    assert grown == rows_of(tmp_path / "grown.duckdb")


def test_a_failed_rebuild_leaves_the_old_file(tmp_path: Path, new_run: Any) -> None:
    path = empty_file(tmp_path)
    log = log_of(new_run("one"))
    grow(log, path)
    before = path.read_bytes()
    asyncio.run(log.send_raw("groups", key=b"", value=b""))

    class Dying(MemoryLog):
        async def cluster_id(self) -> str:
            raise DecodeError("gone")

    with pytest.raises(DecodeError, match="gone"):
        asyncio.run(rebuild(Dying(num_partitions=2), path))
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir() if file.name != "store"] == ["metrics.duckdb"]


@pytest.mark.slow
def test_the_write_ahead_log_of_an_old_file_is_not_played_into_the_new_one(tmp_path: Path, new_run: Any) -> None:
    path = empty_file(tmp_path)
    log = log_of(new_run("one"))
    grow(log, path)
    before = rows_of(path)
    killed = (
        "import duckdb, os, sys; c = duckdb.connect(sys.argv[1]); c.execute('DELETE FROM log.run_started'); os._exit(0)"
    )
    subprocess.run([sys.executable, "-c", killed, str(path)], check=True)
    assert path.with_name("metrics.duckdb.wal").exists()
    asyncio.run(rebuild(log, path))
    assert rows_of(path) == before


HOLD = "import duckdb, sys; c = duckdb.connect(sys.argv[1]); print('held', flush=True); sys.stdin.read()"


@pytest.mark.slow
def test_a_file_that_another_process_holds_is_left_alone(tmp_path: Path, new_run: Any) -> None:
    path = empty_file(tmp_path)
    log = log_of(new_run("one"))
    grow(log, path)
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(MetricsFileError, match="is in use by another process; stop the run"):
            asyncio.run(rebuild(log, path))
        asyncio.run(rebuild(log, tmp_path / "other.duckdb"))
        holder.communicate()
    assert rows_of(tmp_path / "other.duckdb") == rows_of(path)


def test_a_full_disk_is_named_by_the_file_to_be_made(small_disk: Callable[[int], Any]) -> None:
    disk = small_disk(1)
    disk.fill()
    with pytest.raises(
        MetricsFileError, match=r"metrics\.duckdb cannot be written, because its disk is full"
    ) as raised:
        asyncio.run(rebuild(MemoryLog(num_partitions=2), disk.folder / "metrics.duckdb"))
    assert is_full(raised.value)
    assert [path.name for path in disk.folder.iterdir()] == [".ballast"]


def test_a_file_of_another_kind_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("what I must not forget")
    with pytest.raises(MetricsFileError, match=r"notes\.txt is not a DuckDB file"):
        asyncio.run(rebuild(MemoryLog(num_partitions=2), path))
    assert path.read_text() == "what I must not forget"


def test_a_log_that_lost_its_beginning_is_projected_only_if_that_is_asked_for(tmp_path: Path, new_run: Any) -> None:
    path = empty_file(tmp_path)
    log = log_of(new_run("one"))
    grow(log, path)
    before = rows_of(path)
    log.truncate(TopicPartition("jobs", 0), 2)
    with pytest.raises(TruncatedError, match="offset 0 of topic jobs partition 0 is not kept: it holds 2 to"):
        asyncio.run(rebuild(log, path))
    assert rows_of(path) == before
    asyncio.run(rebuild(log, path, is_partial=True))
    assert rows_of(path) != before
