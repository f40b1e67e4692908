"""A commit that the broker refuses, and the membership in the group after it."""

import asyncio
from typing import Any

import pytest
from aiokafka import TopicPartition
from aiokafka.errors import CommitFailedError
from aiokafka.structs import OffsetAndMetadata

from rollstream.eventlog.kafka.client import new_consumer
from rollstream.eventlog.kafka.log import KafkaLog
from rollstream.schemas.topics import TOPICS

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(180)]


@pytest.mark.parametrize("has_joined_meanwhile", [True, False])
def test_a_refused_commit_of_an_earlier_generation_does_not_end_the_membership(kafka, has_joined_meanwhile):
    """As of one that was sent during a join, which the broker read after it; one of the generation at hand does."""

    async def go() -> None:
        async with KafkaLog(kafka) as log:
            await log.ensure_topics(num_partitions=6)
        options = {"max_wait_ms": 100, "group_id": f"refused-{has_joined_meanwhile}"}
        consumer = new_consumer(kafka, "refused", **options)
        await consumer.start()
        consumer.subscribe([TOPICS["groups"].name])
        async with asyncio.timeout(120):
            while not consumer.assignment():
                await asyncio.sleep(0.1)
        coordinator: Any = consumer._coordinator
        send, joined = coordinator._send_req, (coordinator.generation, coordinator.member_id)

        async def send_and_join(request: Any) -> Any:
            if has_joined_meanwhile:
                coordinator.generation = joined[0]
            return await send(request)

        coordinator.generation -= 1
        coordinator._send_req = send_and_join
        with pytest.raises(CommitFailedError):
            await consumer.commit({TopicPartition(TOPICS["groups"].name, 0): OffsetAndMetadata(0, "")})
        is_member = (coordinator.generation, coordinator.member_id) == joined
        coordinator._send_req = send
        await consumer.stop()
        assert is_member == has_joined_meanwhile

    asyncio.run(go())
