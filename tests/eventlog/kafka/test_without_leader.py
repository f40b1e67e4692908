"""Topics and groups whose partitions have no leader for the moment: errors of ours that name cause and remedy."""

import asyncio
from typing import Any, cast

import pytest
from aiokafka import TopicPartition as KafkaPartition
from aiokafka.errors import KafkaTimeoutError, NoError, UnknownTopicOrPartitionError

from rollstream.eventlog.kafka import topics
from rollstream.eventlog.kafka.group import KafkaGroupReader
from rollstream.eventlog.rebalance import Callbacks
from rollstream.schemas.errors import LogError, TopicError
from rollstream.schemas.kafka import KafkaSettings

KAFKA = KafkaSettings.of("localhost:1")


class Admin:
    def __init__(self, error_code: int, leaders: tuple[int, ...]) -> None:
        self._found = {
            "error_code": error_code,
            "partitions": [
                {"partition": index, "leader": leader, "replicas": [index, 7]} for index, leader in enumerate(leaders)
            ],
        }

    async def describe_topics(self, names: list[str]) -> list[dict[str, Any]]:
        return [self._found]


def count(admin: Admin) -> int:
    return asyncio.run(topics.count_partitions(cast(Any, admin), KAFKA, "steps"))


def test_a_partition_without_a_leader_is_named_with_the_brokers_that_may_lead_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(topics, "PATIENCE_S", 0.0)
    assert count(Admin(NoError.errno, (0, 1))) == 2
    expected = r"topic rollstream\.steps\.v1 has no leader for partition 1, 2: .* are down \(1, 2, 7\), .* start them"
    with pytest.raises(TopicError, match=expected):
        count(Admin(NoError.errno, (0, -1, -1)))
    with pytest.raises(TopicError, match=r"not available \(UnknownTopic.*the first run on a broker creates its topics"):
        count(Admin(UnknownTopicOrPartitionError.errno, ()))


class Consumer:
    """A consumer whose coordinator is away as partitions are assigned."""

    def subscribe(self, names: list[str], listener: object) -> None:
        pass

    async def committed(self, where: KafkaPartition) -> None:
        raise KafkaTimeoutError("the coordinator is away")


def test_the_error_of_an_assignment_is_one_of_the_log() -> None:
    async def go() -> None:
        reader = KafkaGroupReader(
            cast(Any, Consumer()), cast(Any, None), KAFKA, "producers", ("steps",), Callbacks(None, None)
        )
        await reader.on_partitions_assigned([KafkaPartition("rollstream.steps.v1", 0)])
        with pytest.raises(LogError, match=r"cannot look up the start offsets of group producers: .*is away"):
            await reader.poll(timeout_s=0)

    asyncio.run(go())
