"""Transactions that another program writes into topics of the log; each leaves a control record at its end."""

import asyncio
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiokafka import AIOKafkaProducer

from rollstream.eventlog.kafka.log import KafkaLog
from rollstream.eventlog.kafka.security import client_options
from rollstream.schemas.kafka import KafkaSettings


@asynccontextmanager
async def own_topics(kafka: KafkaSettings) -> AsyncIterator[KafkaLog]:
    """A log of its own on a shared broker, with one partition a topic."""
    names = {"topic_prefix": f"control-{uuid.uuid4().hex[:8]}."}
    async with KafkaLog(kafka.model_copy(update=names)) as log:
        await log.ensure_topics(num_partitions=1)
        yield log


async def write_transactions(log: KafkaLog, *num_records: int, key: bytes = b"k", value: bytes = b"foreign") -> None:
    """Write transactions of so many records to partition 0 of `steps`, one after the other.

    The broker may answer a commit before it has written the control record, so this waits for the last one.
    """
    end = (await log.end_offsets("steps"))[0] + sum(num_records) + len(num_records)
    producer = AIOKafkaProducer(**client_options(log.kafka), transactional_id=uuid.uuid4().hex)
    await producer.start()
    try:
        for count in num_records:
            async with producer.transaction():
                for _ in range(count):
                    await producer.send_and_wait(log.kafka.topic_name("steps"), value=value, key=key, partition=0)
    finally:
        await producer.stop()
    async with asyncio.timeout(30):
        while (await log.end_offsets("steps"))[0] < end:
            await asyncio.sleep(0.02)
