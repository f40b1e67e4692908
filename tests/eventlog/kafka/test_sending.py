"""When records leave for Kafka: at once, or together with others."""

import asyncio
import time

import pytest

from rollstream.eventlog.kafka import log as kafka_log
from rollstream.eventlog.kafka.log import KafkaLog
from rollstream.schemas.kafka import KafkaSettings

pytestmark = pytest.mark.kafka


def test_a_record_that_is_alone_does_not_wait_for_others_and_one_that_follows_it_does(
    kafka: KafkaSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kafka_log, "LINGER_MS", 2_000)

    async def seconds_of(log: KafkaLog, *values: bytes) -> float:
        begun = time.perf_counter()
        sent = await asyncio.gather(*(log.send_raw("dlq", key=b"a", value=one, partition=0) for one in values))
        assert [one.offset for one in sent] == list(range(sent[0].offset, sent[0].offset + len(values)))
        return time.perf_counter() - begun

    async def scenario() -> None:
        async with KafkaLog(kafka) as log:
            await log.ensure_topics(num_partitions=6)
            await seconds_of(log, b"first: the producer connects")
            await asyncio.sleep(2.1)
            assert await seconds_of(log, b"alone") < 1.5
            assert await seconds_of(log, b"b", b"c", b"d") > 1.5

    asyncio.run(scenario())
