"""A projector that is asked to end: it finishes what is left, but not a long catch-up."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import duckdb
import pytest

from rollstream.eventlog.log import TopicPartition
from rollstream.eventlog.memory.log import MemoryLog
from rollstream.metrics.projection.database import Database
from rollstream.metrics.projection.projector import BATCH_ROWS, POLL_RECORDS, Projector
from tests.metrics.conftest import empty_file

STEPS = TopicPartition("steps", 0)
LONG = 5 * BATCH_ROWS


@pytest.mark.parametrize(
    ("max_left", "is_whole"), [(None, True), (LONG, True), (1000, False)], ids=["all", "what is left", "too much left"]
)
def test_after_a_stop_in_a_long_catch_up_one_transaction_is_finished(
    tmp_path: Path, max_left: int | None, is_whole: bool
) -> None:
    """Records without rows count too: a quiet log has millions of them."""

    async def scenario() -> None:
        log = MemoryLog(num_partitions=1)
        for _ in range(LONG):
            await log.send_raw("steps", key=b"k", value=b"no event")
        projector = Projector(log, database)
        projecting = asyncio.create_task(projector.run())
        await projector.wait_for({STEPS: 1})
        projector.stop(max_left=max_left)
        await projecting

    database = Database(empty_file(tmp_path))
    try:
        asyncio.run(scenario())
        offset = database.offsets()[STEPS]
    finally:
        database.close()
    assert offset == LONG if is_whole else offset <= 2 * (BATCH_ROWS + POLL_RECORDS)


class SilentLog(MemoryLog):
    """A log that no longer answers, or has records that no longer come."""

    def __init__(self, *, ends: bool) -> None:
        super().__init__(num_partitions=1)
        self.is_silent = False
        self._has_ends = ends

    async def end_offsets(self, topic: str) -> dict[int, int]:
        found = await super().end_offsets(topic)
        if self.is_silent and not self._has_ends:
            await asyncio.Event().wait()
        return {partition: end + self.is_silent for partition, end in found.items()}


@pytest.mark.parametrize("ends", [False, True], ids=["no answer", "no records"])
def test_a_stop_waits_only_briefly_for_a_log_that_does_not_answer(
    tmp_path: Path, ends: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        log = SilentLog(ends=ends)
        await log.send_raw("steps", key=b"k", value=b"no event")
        projector = Projector(log, database)
        projecting = asyncio.create_task(projector.run())
        await projector.wait_for({STEPS: 1})
        log.is_silent = True
        projector.stop(max_left=100, silence_s=0.5)
        await asyncio.wait_for(projecting, 10)

    database = Database(empty_file(tmp_path))
    try:
        asyncio.run(scenario())
        assert database.offsets()[STEPS] == 1
    finally:
        database.close()
    assert "the log does not answer; the next start continues where this process ends" in caplog.text


def test_a_file_is_closed_only_once_another_thread_does_not_use_it_any_more(tmp_path: Path) -> None:
    """A transaction whose task was cancelled goes on in its thread."""
    database = Database(empty_file(tmp_path))
    is_in_use, is_over = threading.Event(), threading.Event()

    def use(connection: duckdb.DuckDBPyConnection) -> list[Any]:
        is_in_use.set()
        assert is_over.wait(20)
        return connection.execute("SELECT 7").fetchall()

    with ThreadPoolExecutor() as threads:
        using = threads.submit(database.fork, use)
        assert is_in_use.wait(20)
        closing = threads.submit(database.close)
        wait([closing], timeout=0.2)
        assert not closing.done()
        is_over.set()
        assert using.result(20) == [(7,)]
        closing.result(20)
