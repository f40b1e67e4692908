"""Topics in Kafka: created by the table, compared with it, and named when they differ."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from aiokafka.admin import AIOKafkaAdminClient, NewPartitions, NewTopic
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType

from rollstream.eventlog.broker.broker import EmbeddedBroker
from rollstream.eventlog.kafka.log import KafkaLog
from rollstream.eventlog.kafka.security import client_options
from rollstream.schemas.errors import LogError, TopicError
from rollstream.schemas.events import TaskCancelled
from rollstream.schemas.kafka import KafkaSettings
from rollstream.schemas.topics import NUM_PARTITIONS, TOPICS

pytestmark = pytest.mark.kafka


async def with_admin(kafka: KafkaSettings, work: Callable[[AIOKafkaAdminClient], Awaitable[object]]) -> None:
    admin = AIOKafkaAdminClient(**client_options(kafka))
    await admin.start()
    try:
        await work(admin)
    finally:
        await admin.close()


async def ensure(kafka: KafkaSettings, num_partitions: int | None) -> None:
    log = KafkaLog(kafka)
    await log.start()
    try:
        await log.ensure_topics(num_partitions=num_partitions)
    finally:
        await log.close()


async def set_up(kafka: KafkaSettings, topic: str, **settings: str) -> None:
    resource = ConfigResource(
        ConfigResourceType.TOPIC, f"rollstream.{topic}.v1", {n.replace("_", "."): v for n, v in settings.items()}
    )
    await with_admin(kafka, lambda admin: admin.alter_configs([resource]))


def test_topics_are_made_once_and_compared_ever_after(workspace: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def main(kafka: KafkaSettings) -> None:
        await asyncio.gather(*(ensure(kafka, 3) for _ in range(4)))
        await ensure(kafka, 3)
        await ensure(kafka, None)
        with pytest.raises(TopicError, match=r"rollstream\.tasks\.v1 has 3 partitions, expected 5; .* num_partitions"):
            await ensure(kafka, 5)
        await set_up(kafka, "weights", cleanup_policy="compact")
        with pytest.raises(TopicError, match=r"weights\.v1 has cleanup\.policy=compact, expected delete; alter it"):
            await ensure(kafka, 3)
        await set_up(kafka, "weights", message_timestamp_type="LogAppendTime")
        with pytest.raises(TopicError, match=r"message\.timestamp\.type=LogAppendTime, expected CreateTime"):
            await ensure(kafka, 3)
        await set_up(kafka, "weights", retention_ms="-1", max_message_bytes="1000")
        with pytest.raises(TopicError, match=r"max\.message\.bytes=1000, expected at least \d+; alter it"):
            await ensure(kafka, 3)
        await set_up(kafka, "weights", retention_ms="86400000", max_message_bytes="2000000")
        with caplog.at_level(logging.WARNING, "rollstream"):
            await ensure(kafka, 3)
        assert "rollstream.weights.v1 has retention.ms=86400000" in caplog.text

    with EmbeddedBroker(workspace) as broker:
        asyncio.run(main(broker.kafka))


def test_missing_topics_get_as_many_partitions_as_the_others_or_six_without_any(workspace: Path) -> None:
    async def main(kafka: KafkaSettings) -> None:
        await with_admin(kafka, lambda admin: admin.create_topics([NewTopic("rollstream.steps.v1", 2, 1)]))
        await ensure(kafka, None)
        other = kafka.model_copy(update={"topic_prefix": "other."})
        await ensure(other, None)
        async with KafkaLog(kafka) as log, KafkaLog(other) as beside:
            assert (await log.num_partitions("tasks"), await beside.num_partitions("tasks")) == (2, NUM_PARTITIONS)

    with EmbeddedBroker(workspace) as broker:
        asyncio.run(main(broker.kafka))


def test_a_topic_that_is_there_already_with_other_partitions_is_named(workspace: Path) -> None:
    async def main(kafka: KafkaSettings) -> None:
        await with_admin(kafka, lambda admin: admin.create_topics([NewTopic("rollstream.groups.v1", 2, 1)]))
        other = r"topic rollstream\.groups\.v1 has 2 partitions, expected 1; .* set another kafka\.topic_prefix"
        with pytest.raises(TopicError, match=other):
            await ensure(kafka, 3)
        await ensure(kafka.model_copy(update={"topic_prefix": "other."}), 3)

    with EmbeddedBroker(workspace) as broker:
        asyncio.run(main(broker.kafka))


def test_partitions_that_were_added_to_one_topic_alone_have_a_remedy_that_helps(workspace: Path) -> None:
    async def main(kafka: KafkaSettings) -> None:
        await ensure(kafka, 2)
        await with_admin(kafka, lambda admin: admin.create_partitions({"rollstream.steps.v1": NewPartitions(4)}))
        remedy = (
            r"topics rollstream\.tasks\.v1 \(2 partitions\), rollstream\.steps\.v1 \(4 partitions\), .* alter "
            r"rollstream\.tasks\.v1, rollstream\.trajectories\.v1 to 4 \(kafka-topics\.sh --alter --partitions 4; .*\)"
            r", and leave num_partitions out or set it to 4"
        )
        for num_partitions in (None, 2, 4):
            with pytest.raises(TopicError, match=remedy):
                await ensure(kafka, num_partitions)
        altered = {f"rollstream.{topic}.v1": NewPartitions(4) for topic in ("tasks", "trajectories")}
        await with_admin(kafka, lambda admin: admin.create_partitions(altered))
        for num_partitions in (None, 4):
            await ensure(kafka, num_partitions)

    with EmbeddedBroker(workspace) as broker:
        asyncio.run(main(broker.kafka))


def test_a_log_without_topics_names_the_one_it_needs(workspace: Path) -> None:
    async def main(kafka: KafkaSettings) -> None:
        log = KafkaLog(kafka)
        await log.start()
        try:
            with pytest.raises(TopicError, match=r"rollstream\.tasks\.v1 is not available"):
                await log.send(TaskCancelled(run_id="r", time_ms=1, group_id="r/g", cause="test"))
        finally:
            await log.close()

    with EmbeddedBroker(workspace) as broker:
        asyncio.run(main(broker.kafka))


def test_every_topic_has_its_name_from_the_table() -> None:
    assert {topic.name for topic in TOPICS.values()} == {f"rollstream.{short}.v1" for short in TOPICS}


@pytest.mark.parametrize("address", ["127.0.0.1:1", "no-such-host.invalid:9092"])
def test_an_address_where_nothing_answers_is_one_clear_error(address: str, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> float:
        began = asyncio.get_running_loop().time()
        log = KafkaLog(address)
        with pytest.raises(LogError, match=rf"cannot reach a Kafka broker at {address} .*bootstrap_servers"):
            await log.start()
        await log.close()
        return asyncio.get_running_loop().time() - began

    with caplog.at_level(logging.DEBUG, "rollstream"):
        assert asyncio.run(main()) < 9
    assert [found for found in caplog.records if found.levelno >= logging.WARNING] == []


def test_a_log_that_was_not_started_raises_an_error() -> None:
    with pytest.raises(LogError, match=r"await start\(\) first"):
        asyncio.run(KafkaLog("127.0.0.1:1").cluster_id())
