"""Sending of records to Kafka: at once, and together with others that come meanwhile."""

import asyncio
from typing import Any

import cramjam
import pytest
from aiokafka.producer.message_accumulator import MessageBatch
from aiokafka.producer.sender import Sender

from rollstream.eventlog.kafka.log import LZ4_LEVEL, KafkaLog
from rollstream.eventlog.log import Position
from rollstream.schemas.events import RunEnded
from rollstream.schemas.kafka import KafkaSettings

pytestmark = pytest.mark.kafka


def test_records_do_not_wait_for_others_and_those_that_come_while_one_is_on_its_way_go_together(
    kafka: KafkaSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_records: list[int] = []
    request = Sender._send_produce_req

    async def counted(self: Any, node_id: int, batches: Any) -> None:
        num_records.append(sum(batch.record_count for batch in batches.values()))
        await request(self, node_id, batches)

    monkeypatch.setattr(Sender, "_send_produce_req", counted)

    async def scenario() -> None:
        async with KafkaLog(kafka) as log:
            await log.ensure_topics(num_partitions=6)
            await log.send_raw("dlq", key=b"a", value=b"the producer connects", partition=0)
            first = asyncio.create_task(log.send_raw("dlq", key=b"a", value=b"alone", partition=0))
            while len(num_records) < 2:
                await asyncio.sleep(0)
            assert not first.done()
            sends = (log.send_raw("dlq", key=b"a", value=b"%d" % one, partition=0) for one in range(50))
            sent = [await first, *await asyncio.gather(*sends)]
            assert [one.offset for one in sent] == list(range(sent[0].offset, sent[0].offset + len(sent)))
            assert num_records[1:] == [1, 50]

    asyncio.run(scenario())


def test_records_are_compressed_at_the_fast_level(kafka: KafkaSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    levels: list[int] = []
    compressor = cramjam.lz4.Compressor

    def noted(level: int, **options: Any) -> Any:
        levels.append(level)
        return compressor(level=level, **options)

    monkeypatch.setattr(cramjam.lz4, "Compressor", noted)

    async def scenario() -> None:
        async with KafkaLog(kafka) as log:
            await log.ensure_topics(num_partitions=6)
            await log.send_raw("dlq", key=b"a", value=b"x" * 1000)

    asyncio.run(scenario())
    assert levels == [LZ4_LEVEL]


def test_records_of_a_batch_that_kafka_had_already_and_forgot_have_no_offset(
    kafka: KafkaSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MessageBatch, "done", lambda batch, *offsets, done=MessageBatch.done: done(batch, -1))

    async def scenario() -> None:
        async with KafkaLog(kafka) as log:
            await log.ensure_topics(num_partitions=6)
            ended = [RunEnded(run_id="r", time_ms=index, cause="stopped") for index in range(3)]
            assert await log.send_all(ended, partition=0) == [Position("groups", 0, -1)] * 3

    asyncio.run(scenario())
