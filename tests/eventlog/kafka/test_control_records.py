"""Partitions into which another program writes transactions: their ends are control records, which no reader gets."""

import asyncio

import pytest

from rollstream.eventlog import codec
from rollstream.eventlog.log import TopicPartition
from rollstream.eventlog.reading import read_to_end
from rollstream.producers.clock import EventClock
from rollstream.producers.steps_writer import StepsWriter
from rollstream.producers.takeover import ForeignWrites, read
from rollstream.schemas.kafka import KafkaSettings
from tests.rigs import steps_rig
from tests.rigs.services.transactions import own_topics, write_transactions

pytestmark = pytest.mark.kafka
STEPS = TopicPartition("steps", 0)


def test_a_partition_that_ends_with_a_control_record_is_read_to_its_end(kafka: KafkaSettings) -> None:
    async def scenario() -> list[int]:
        async with own_topics(kafka) as log:
            await write_transactions(log, 2, 1)
            assert await log.end_offsets("steps") == {0: 5}
            async with asyncio.timeout(30):
                return [record.offset async for record in read_to_end(log, "steps")]

    assert asyncio.run(scenario()) == [0, 1, 3]


def test_the_position_of_a_reader_never_passes_a_record_that_it_holds(kafka: KafkaSettings) -> None:
    async def scenario() -> None:
        async with own_topics(kafka) as log:
            await write_transactions(log, 3)
            reader = await log.reader({STEPS: 0})
            positions = [reader.position(STEPS)]
            for _ in range(3):
                assert len(await reader.poll(max_records=1)) == 1
                positions.append(reader.position(STEPS))
            assert await reader.poll(timeout_s=0.2) == []
            positions.append(reader.position(STEPS))
            reader.seek(STEPS, 1)
            assert await reader.poll(timeout_s=0) == []
            assert reader.position(STEPS) == 1
            await reader.close()
            assert positions == [0, 1, 2, 3, 4]

    asyncio.run(scenario())


def test_an_owner_passes_over_the_end_of_a_transaction_and_finds_what_it_wrote(kafka: KafkaSettings) -> None:
    async def scenario() -> tuple[list[int], set[int]]:
        async with own_topics(kafka) as log:
            writer = StepsWriter(log, 0, EventClock(0), 0)
            foreign = ForeignWrites(log, writer, is_settled=lambda group_id: False)
            begun = codec.encode(steps_rig.attempt()[0])
            sent = [await writer.send(codec.encode(steps_rig.started(0, size=1)))]
            (group,) = (await read(log, 0, 0, 1)).groups.values()
            await write_transactions(log, 1)
            sent.append(await writer.send(codec.encode(steps_rig.tick(1))))
            assert await foreign.reopened(group) is None
            await write_transactions(log, 1, key=begun.key, value=begun.value)
            sent.append(await writer.send(codec.encode(steps_rig.tick(2))))
            found = await foreign.reopened(group)
            assert found is not None
            return sent, found.members[0].open_attempts

    assert asyncio.run(scenario()) == ([0, 3, 6], {0})
