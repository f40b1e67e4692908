"""The contract of reading a log (`LogReader`, offsets, `fetch`), on every log: those that are written to, and exports.

The first two hold the same run as the export was made of. In each, offsets that are not there have their error.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from rollstream.eventlog.artifacts import ArtifactStore
from rollstream.eventlog.log import LogReader, Position, ReadableLog, Record, TopicPartition
from rollstream.eventlog.memory.log import MemoryLog
from rollstream.replay.archive.export import export_run
from rollstream.replay.archive.log import open_export
from rollstream.schemas.errors import TopicError, TruncatedError
from rollstream.schemas.kafka import KafkaSettings
from tests.metrics.conftest import new_run, store

__all__ = ["new_run", "store"]
NUM_PARTITIONS = 6
Opened = Callable[[], Any]


@pytest.fixture(params=["memory", "export", pytest.param("kafka", marks=pytest.mark.kafka)])
def opened(request: pytest.FixtureRequest, tmp_path: Path, new_run: Any, store: ArtifactStore) -> Opened:
    """Opens a log that holds a run."""
    events = list(new_run("one").all_events())

    @asynccontextmanager
    async def memory() -> AsyncIterator[ReadableLog]:
        log = MemoryLog(num_partitions=2)
        await log.send_all(events)
        yield log

    @asynccontextmanager
    async def export() -> AsyncIterator[ReadableLog]:
        async with memory() as log:
            await export_run(log, "one", tmp_path / "export", artifacts=store)
        async with open_export(tmp_path / "export") as (exported, _):
            yield exported

    @asynccontextmanager
    async def on_kafka() -> AsyncIterator[ReadableLog]:
        from rollstream.eventlog.kafka.log import KafkaLog

        kafka: KafkaSettings = request.getfixturevalue("kafka")
        async with KafkaLog(kafka) as log:
            await log.ensure_topics(num_partitions=NUM_PARTITIONS)
            await log.send_all(events)
            yield log

    return {"memory": memory, "export": export, "kafka": on_kafka}[request.param]


def on(opened: Opened, scenario: Callable[[ReadableLog], Awaitable[None]]) -> None:
    async def run() -> None:
        async with opened() as log:
            await asyncio.wait_for(scenario(log), 240)

    asyncio.run(run())


async def partitions(log: ReadableLog, topic: str) -> list[TopicPartition]:
    return [TopicPartition(topic, number) for number in range(await log.num_partitions(topic))]


async def read_for_ever(reader: LogReader) -> None:
    while True:
        await reader.poll(timeout_s=0.1)


async def read_all(log: ReadableLog, topic: str, *, max_records: int = 50) -> list[Record]:
    ends = await log.end_offsets(topic)
    reader = await log.reader(dict.fromkeys(await partitions(log, topic), -1))
    found: list[Record] = []
    while any(reader.position(where) < ends[where.partition] for where in await partitions(log, topic)):
        records = await reader.poll(timeout_s=0.1, max_records=max_records)
        assert len(records) <= max_records
        found += records
    await reader.close()
    return found


def test_records_are_read_in_order_between_the_offsets(opened: Opened) -> None:
    async def scenario(log: ReadableLog) -> None:
        assert await log.cluster_id()
        for topic in ("tasks", "steps", "groups", "weights"):
            begins, ends = await log.begin_offsets(topic), await log.end_offsets(topic)
            assert set(begins) == set(ends) == {where.partition for where in await partitions(log, topic)}
            found = await read_all(log, topic)
            assert found, topic
            for number in begins:
                offsets = [record.offset for record in found if record.partition == number]
                assert offsets == sorted(set(offsets))
                assert all(begins[number] <= offset < ends[number] for offset in offsets)

    on(opened, scenario)


def test_records_are_fetched_in_the_order_asked_for(opened: Opened) -> None:
    async def scenario(log: ReadableLog) -> None:
        found = (await read_all(log, "steps"))[-40:]
        asked = [record.position for record in reversed(found)] + [found[0].position] * 2
        assert [record.position for record in await log.fetch(asked)] == asked
        assert await log.fetch([found[3].position]) == [found[3]]
        assert await log.fetch([]) == []

    on(opened, scenario)


def test_a_reader_can_be_sent_back_and_is_empty_at_the_end(opened: Opened) -> None:
    async def scenario(log: ReadableLog) -> None:
        found = await read_all(log, "weights")
        where = TopicPartition("weights", 0)
        reader: LogReader = await log.reader({where: found[0].offset})
        first = await reader.poll(timeout_s=5.0, max_records=1)
        assert first == found[:1]
        reader.seek(where, found[0].offset)
        again: list[Record] = []
        while len(again) < len(found):
            again += await reader.poll(timeout_s=5.0)
        assert again == found
        assert reader.position(where) == (await log.end_offsets("weights"))[0]
        assert await reader.poll(timeout_s=0.05) == []
        await reader.close()

    on(opened, scenario)


def test_a_missing_topic_partition_or_offset_is_named_in_the_error(opened: Opened) -> None:
    async def scenario(log: ReadableLog) -> None:
        far = 10_000_000
        with pytest.raises(TruncatedError, match=rf"{far}.*steps.*partition 0"):
            await log.fetch([Position("steps", 0, far)])
        reader = await log.reader({TopicPartition("steps", 0): far})
        with pytest.raises(TruncatedError, match=rf"{far}.*steps.*partition 0"):
            await read_for_ever(reader)
        await reader.close()
        count = await log.num_partitions("steps")
        with pytest.raises(TopicError, match=rf"partition steps/{count} does not exist"):
            await log.fetch([Position("steps", count, 0)])
        with pytest.raises(TopicError, match="nonsense"):
            await log.num_partitions("nonsense")

    on(opened, scenario)
