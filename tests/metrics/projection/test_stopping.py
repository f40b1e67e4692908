"""A projector that is asked to end: it finishes what is left, but not a long catch-up."""

import asyncio
from pathlib import Path

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
