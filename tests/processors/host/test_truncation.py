"""Records that the log no longer holds: the host fails with topic, partition and range, and begins nowhere else
instead.
"""

import asyncio
import contextlib
import re
from types import SimpleNamespace

import pytest
from aiokafka import AIOKafkaConsumer
from aiokafka import TopicPartition as KafkaPartition
from aiokafka.admin import AIOKafkaAdminClient, RecordsToDelete
from aiokafka.structs import OffsetAndMetadata
from faust.types import TP

from rollstream.eventlog.kafka.log import KafkaLog
from rollstream.eventlog.kafka.security import client_options
from rollstream.processors.assemble.shell import AssembleShell
from rollstream.processors.host.consumer import Consumer
from rollstream.processors.host.host import create_host
from rollstream.schemas.errors import TruncatedError
from rollstream.schemas.topics import TOPICS
from tests.rigs.steps_rig import attempt, started

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(180)]
STEPS = TOPICS["steps"].name
PARTITIONS = 2


@contextlib.asynccontextmanager
async def connected(kafka):
    """A log with the topics, and an admin."""
    log, admin = KafkaLog(kafka), AIOKafkaAdminClient(**client_options(kafka))
    await log.start()
    await admin.start()
    await log.ensure_topics(num_partitions=PARTITIONS)
    try:
        yield SimpleNamespace(log=log, admin=admin, kafka=kafka)
    finally:
        await admin.close()
        await log.close()


async def write(log, partition, num_groups):
    """Closed groups of six records each; returns where the partition ends then."""
    for index in range(num_groups):
        for event in [started(index, size=1), *attempt(index)]:
            await log.send(event, partition=partition)
    return (await log.end_offsets("steps"))[partition]


async def commit(kafka, app_id, partition, offset):
    consumer = AIOKafkaConsumer(**client_options(kafka), group_id=app_id, enable_auto_commit=False)
    await consumer.start()
    where = KafkaPartition(STEPS, partition)
    consumer.assign([where])
    await consumer.commit({where: OffsetAndMetadata(offset, "")})
    await consumer.stop()


async def cut(lab, partition, before):
    await lab.admin.delete_records({KafkaPartition(STEPS, partition): RecordsToDelete(before_offset=before)})


@contextlib.asynccontextmanager
async def hosting(lab, app_id):
    shell = AssembleShell(lab.log, None, service="p")
    host = create_host(lab.kafka, [shell], client_id="p", app_id=app_id, session_timeout_s=6)
    await host.start()
    try:
        yield host, shell
    finally:
        await host.stop()


async def error_of(host):
    with pytest.raises(TruncatedError) as failed:
        await asyncio.wait_for(asyncio.shield(host.failed), 60)
    return str(failed.value)


async def reaches(shell, partition, offset):
    async with asyncio.timeout(60):
        while shell.position(partition) != offset:
            await asyncio.sleep(0.1)


def test_a_committed_offset_that_is_not_kept_fails_the_host_and_one_that_never_was_committed_does_not(own_broker):
    async def go():
        async with connected(own_broker) as lab:
            end = await write(lab.log, 0, 4)
            await cut(lab, 0, end - 6)
            for app_id, offset in {"below": end - 12, "zero": 0}.items():
                await commit(own_broker, app_id, 0, offset)
                async with hosting(lab, app_id) as (host, shell):
                    assert await error_of(host) == (
                        f"offset {offset} of topic steps partition 0 is not kept: it holds {end - 6} to {end - 1}"
                    )
                    assert shell.position(0) is None
            await commit(own_broker, "above", 0, end + 5)
            async with hosting(lab, "above") as (host, shell):
                assert (await error_of(host)).startswith(
                    f"offset {end + 5} of topic steps partition 0 is not kept: it holds {end - 6} to {end - 1}; "
                )
                assert shell.position(0) is None
            async with hosting(lab, "new") as (host, shell):
                await reaches(shell, 0, end)
                assert not host.failed.done()

    asyncio.run(go())


def test_records_that_are_removed_before_they_are_read_fail_the_host_in_mid_run(own_broker):
    async def go():
        async with connected(own_broker) as lab:
            end = await write(lab.log, 1, 2)
            async with hosting(lab, "mid") as (host, shell):
                await reaches(shell, 1, end)
                host.consumer.pause_partitions(host.consumer.assignment())  # as if it were slow
                newer = await write(lab.log, 1, 3)
                await cut(lab, 1, newer - 6)
                host.consumer.resume_partitions(host.consumer.assignment())
                message = re.fullmatch(r"offset (\d+) of (.*)", await error_of(host))
                assert message is not None
                assert message[2] == f"topic steps partition 1 is not kept: it holds {newer - 6} to {newer - 1}"
                assert end <= int(message[1]) < newer - 6

    asyncio.run(go())


def test_a_topic_that_is_deleted_and_made_again_in_mid_run_fails_the_host(own_broker):
    async def go():
        async with connected(own_broker) as lab:
            end = await write(lab.log, 0, 2)
            async with hosting(lab, "again") as (host, shell):
                await reaches(shell, 0, end)
                await lab.admin.delete_topics([STEPS])
                while STEPS in await lab.admin.list_topics():
                    await asyncio.sleep(0.1)
                await lab.log.ensure_topics(num_partitions=PARTITIONS)
                message = await error_of(host)
                assert " of topic steps partition " in message
                assert message.endswith(
                    "it is empty at 0; the topic was truncated at its end, or deleted and created again"
                )

    asyncio.run(go())


def test_the_furthest_offset_that_was_read_outlasts_an_assignment_that_reads_nothing():
    where, other = TP(STEPS, 0), TP(STEPS, 1)
    consumer = SimpleNamespace(reached={}, app=SimpleNamespace(next_generation=lambda: None))
    for wanted in ({where: 40}, {where: 10, other: 5}, {}):
        consumer.wanted = wanted
        Consumer._next_generation(consumer)  # pyright: ignore[reportArgumentType]
    assert consumer.reached == {where: 40, other: 5}
