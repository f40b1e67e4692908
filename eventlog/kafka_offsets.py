"""What consumer groups have committed, asked from outside of them."""

import asyncio

from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import KafkaError

from rollstream.eventlog.kafka_client import log_errors, our_partition
from rollstream.eventlog.log import TopicPartition
from rollstream.schemas.topics import BY_NAME

ATTEMPTS = 20
"""A broker that has just started looks for its coordinator first."""


async def committed_offsets(admin: AIOKafkaAdminClient, group: str) -> dict[TopicPartition, int]:
    """Next offset by partition of our topics; empty if the group never committed. Raises LogError."""
    with log_errors(f"read the committed offsets of group {group}"):
        for attempt in range(ATTEMPTS):
            try:
                found = await admin.list_consumer_group_offsets(group)
                break
            except KafkaError as error:
                if not error.retriable or attempt == ATTEMPTS - 1:
                    raise
                await asyncio.sleep(0.2)
        else:
            raise AssertionError("unreachable")
    return {our_partition(where): told.offset for where, told in found.items() if where.topic in BY_NAME}
