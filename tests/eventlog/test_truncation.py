"""Kafka topics that are cut off, or deleted and made again: readers say so, and ids tell the new one from the old."""

import asyncio
import contextlib

import pytest
from aiokafka import TopicPartition as KafkaPartition
from aiokafka.admin import AIOKafkaAdminClient, RecordsToDelete

from rollstream.eventlog.kafka.log import KafkaLog
from rollstream.eventlog.kafka.security import client_options
from rollstream.eventlog.log import Position, TopicPartition
from rollstream.schemas.errors import TruncatedError
from rollstream.schemas.topics import TOPICS

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(120)]
BATCHES = TopicPartition("batches", 0)
NAME = TOPICS["batches"].name


@contextlib.asynccontextmanager
async def connected(kafka):
    log, admin = KafkaLog(kafka), AIOKafkaAdminClient(**client_options(kafka))
    await log.start()
    await admin.start()
    await log.ensure_topics(num_partitions=2)
    try:
        yield log, admin
    finally:
        await admin.close()
        await log.close()


async def write(log, count):
    """Records of any kind; returns where the partition ends then."""
    for number in range(count):
        await log.send_raw("batches", key=b"k", value=b"%d" % number)
    return (await log.end_offsets("batches"))[0]


async def cut(admin, before):
    await admin.delete_records({KafkaPartition(NAME, 0): RecordsToDelete(before_offset=before)})


async def make_again(log, admin):
    await admin.delete_topics([NAME])
    while NAME in await admin.list_topics():
        await asyncio.sleep(0.1)
    await log.ensure_topics(num_partitions=2)


async def error_of(reading):
    """Error of continued reading."""
    async with asyncio.timeout(60):
        while True:
            try:
                await reading()
            except TruncatedError as error:
                return str(error)


def test_a_member_whose_commit_is_cut_off_reads_nothing_from_elsewhere(own_broker):
    async def go():
        async with connected(own_broker) as (log, admin):
            end = await write(log, 6)
            member = await log.group_reader("behind", ["batches"])
            async with asyncio.timeout(60):
                while not member.assigned():
                    await member.poll(timeout_s=0.2)
            await member.commit({BATCHES: end - 4})
            await member.close()
            await cut(admin, end - 2)
            member = await log.group_reader("behind", ["batches"])
            assert await error_of(member.poll) == (
                f"offset {end - 4} of topic batches partition 0 is not kept: it holds {end - 2} to {end - 1}"
            )
            await member.close()

    asyncio.run(go())


def test_a_reader_and_a_fetch_find_a_topic_cut_off_in_mid_run(own_broker):
    async def go():
        async with connected(own_broker) as (log, admin):
            end = await write(log, 3)
            reader = await log.reader({BATCHES: end})
            assert await reader.poll(timeout_s=0.1) == []
            await cut(admin, end)
            reader.seek(BATCHES, end - 3)  # what it had not fetched when it was cut off
            reported = f"of topic batches partition 0 is not kept: it is empty at {end}"
            assert await error_of(reader.poll) == f"offset {end - 3} {reported}"
            await reader.close()
            with pytest.raises(TruncatedError, match=f"offset {end - 1} {reported}"):
                await log.fetch([Position("batches", 0, end - 1)])

    asyncio.run(go())


def test_a_topic_made_again_has_another_id_and_ends_its_readers(own_broker):
    async def go():
        async with connected(own_broker) as (log, admin):
            end = await write(log, 3)
            reader = await log.reader({BATCHES: end})
            before = await log.topic_ids()
            await make_again(log, admin)
            after = await log.topic_ids()
            assert before is not None
            assert after is not None
            assert before.keys() == after.keys() == TOPICS.keys()
            assert {topic for topic in TOPICS if before[topic] != after[topic]} == {"batches"}
            assert await error_of(reader.poll) == (
                f"offset {end} of topic batches partition 0 is not kept: it is empty at 0; "
                "the topic was truncated at its end, or deleted and created again"
            )
            await reader.close()

    asyncio.run(go())
