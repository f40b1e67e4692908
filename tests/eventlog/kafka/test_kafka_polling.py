"""Polls of a Kafka reader: a fetch that brings many records is handed on in pieces."""

import asyncio
import uuid

import pytest

from rollstream.eventlog.kafka.log import KafkaLog
from rollstream.eventlog.log import TopicPartition
from rollstream.schemas.kafka import KafkaSettings

NUM_RECORDS, PIECE = 3000, 100


@pytest.mark.kafka
def test_a_poll_takes_no_more_of_a_fetch_than_it_was_asked_for(kafka: KafkaSettings) -> None:
    """All at once would hold the event loop for seconds in a long catch-up, signals included."""

    async def scenario() -> None:
        log = KafkaLog(kafka.model_copy(update={"topic_prefix": f"polling-{uuid.uuid4().hex[:8]}."}))
        await log.start()
        await log.ensure_topics(num_partitions=1)
        where = TopicPartition("steps", 0)
        await asyncio.gather(*(log.send_raw("steps", key=b"k", value=b"v") for _ in range(NUM_RECORDS)))
        reader = await log.reader({where: 0})
        num_read = 0
        while num_read < NUM_RECORDS:
            records = await reader.poll(max_records=PIECE)
            assert len(records) <= PIECE
            assert not reader._polling._held
            assert [record.offset for record in records] == list(range(num_read, num_read + len(records)))
            num_read += len(records)
        await reader.close()
        await log.close()

    asyncio.run(scenario())
