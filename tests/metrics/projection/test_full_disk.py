"""The projector on a disk that is full for a while."""

import asyncio
import logging
import os
from collections.abc import Callable
from typing import Any

import duckdb
import pytest

from rollstream.eventlog.disk_space import is_full
from rollstream.eventlog.log import TopicPartition
from rollstream.eventlog.memory.log import MemoryLog
from rollstream.metrics.projection.connection import MetricsFileError
from rollstream.metrics.projection.database import Database
from rollstream.metrics.projection.projector import Projector
from rollstream.schemas.events import RunEnded

pytestmark = pytest.mark.slow


def test_the_projector_goes_on_when_there_is_room_again(
    small_disk: Callable[[int], Any], caplog: pytest.LogCaptureFixture
) -> None:
    disk = small_disk(8)
    log = MemoryLog(num_partitions=1)
    database = Database(disk.folder / "metrics.duckdb")

    async def fill(first: int) -> None:
        for number in range(first, first + 500):
            message = os.urandom(400).hex()
            await log.send(RunEnded(run_id=f"r{number}", time_ms=1, cause="failed", message=message))

    async def scenario() -> None:
        projector = Projector(log, database)
        await fill(0)
        projecting = asyncio.create_task(projector.run())
        await projector.wait_for({TopicPartition("groups", 0): 500})
        disk.fill()
        await fill(500)
        while "waiting for free space" not in caplog.text:
            assert not projecting.done()
            await asyncio.sleep(0.01)
        disk.free()
        await projector.wait_for({TopicPartition("groups", 0): 1000})
        projector.stop()
        await projecting

    with caplog.at_level(logging.ERROR):
        asyncio.run(scenario())
    database.close()
    with duckdb.connect(str(disk.folder / "metrics.duckdb"), read_only=True) as connection:
        assert connection.execute("SELECT count(*), count(DISTINCT run_id) FROM log.run_ended").fetchone() == (
            1000,
            1000,
        )


def test_a_file_that_cannot_be_folded_together_is_whole_at_the_next_start(small_disk: Callable[[int], Any]) -> None:
    disk = small_disk(8)
    path = disk.folder / "metrics.duckdb"
    database = Database(path)
    rows = [
        {"run_id": f"r{n}", "cause": "failed", "message": os.urandom(400).hex(), "time_ms": 1, "recorded_ms": 1}
        | {"log_partition": 0, "log_offset": n}
        for n in range(1000)
    ]
    database.write({"run_ended": rows}, {TopicPartition("groups", 0): 1000})
    disk.fill()
    database.close()
    disk.free()
    database = Database(path)
    assert database.offsets() == {TopicPartition("groups", 0): 1000}
    assert database.cursor().execute("SELECT count(*) FROM log.run_ended").fetchone() == (1000,)
    database.close()


def rows_from(first: int, end: int) -> dict[str, list[dict[str, Any]]]:
    return {
        "run_ended": [
            {"run_id": f"r{n}", "cause": "failed", "message": os.urandom(400).hex(), "time_ms": 1, "recorded_ms": 1}
            | {"log_partition": 0, "log_offset": n}
            for n in range(first, end)
        ]
    }


@pytest.mark.parametrize("space_factor", [0, 4])
def test_a_checkpoint_that_is_due_on_a_full_disk_ends_the_use_of_the_file_for_as_long_as_it_is_full(
    small_disk: Callable[[int], Any], monkeypatch: pytest.MonkeyPatch, space_factor: int
) -> None:
    monkeypatch.setattr("rollstream.metrics.projection.database.CHECKPOINT_SPACE_FACTOR", space_factor)
    disk, groups = small_disk(8), TopicPartition("groups", 0)
    database = Database(disk.folder / "metrics.duckdb")
    database.write(rows_from(0, 400), {groups: 400})
    disk.fill()
    with (disk.folder / ".ballast").open("r+b") as ballast:
        ballast.truncate(os.fstat(ballast.fileno()).st_size - 40_000)
    monkeypatch.setattr("rollstream.metrics.projection.database.CHECKPOINT_BYTES", 200_000)
    for first in range(400, 403):
        try:
            database.write(rows_from(first, first + 1), {groups: first + 1})
        except MetricsFileError as error:
            assert is_full(error)  # noqa: PT017 -- whether there is room for the row is not what is tested
    disk.free()
    database.write(rows_from(400, 410), {groups: 410})
    assert database.offsets() == {groups: 410}
    database.close()
    with duckdb.connect(str(disk.folder / "metrics.duckdb"), read_only=True) as connection:
        assert connection.execute("SELECT count(*) FROM log.run_ended").fetchone() == (410,)
