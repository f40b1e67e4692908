"""Topics in Kafka: created explicitly from the topic table, and checked against it."""

import asyncio
import logging
from typing import Any

from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.errors import NoError, TopicAlreadyExistsError, for_code

from rollstream.eventlog.kafka_client import log_errors
from rollstream.schemas.errors import TopicError
from rollstream.schemas.topics import TOPICS, Topic

PATIENCE_S = 5.0
"""How long a topic may take to show in the metadata after it was created."""
MAX_REPLICAS = 3
COMPRESSION_SLACK_BYTES = 64 * 1024
"""Kafka measures the compressed batch, and bytes that cannot be compressed grow a little."""

REMEDY = "alter it on the topic (kafka-configs.sh), or use another cluster"

logger = logging.getLogger(__name__)


async def create_missing(admin: AIOKafkaAdminClient, num_partitions: int) -> None:
    """Create the topics of the table that do not exist. Raises TopicError."""
    with log_errors("create topics"):
        there = set(await admin.list_topics())
        missing = [topic for topic in TOPICS.values() if topic.name not in there]
        if not missing:
            return
        num_replicas = min(MAX_REPLICAS, len((await admin.describe_cluster())["brokers"]))
        wanted = [
            NewTopic(
                topic.name,
                num_partitions if topic.scaled else 1,
                num_replicas,
                topic_configs=_settings(topic, num_replicas),
            )
            for topic in missing
        ]
        response: Any = await admin.create_topics(wanted, timeout_ms=15_000)
    for name, code, message, *_ in response.topic_errors:
        error = for_code(code)
        if error not in (NoError, TopicAlreadyExistsError):
            raise TopicError(f"topic {name} cannot be created: {message or error.__name__}")
    for topic in missing:
        await count_partitions(admin, topic)


async def check(admin: AIOKafkaAdminClient, num_partitions: int) -> None:
    """Compare every topic with the table. Raises TopicError naming topic, found and wanted."""
    for topic in TOPICS.values():
        found, wanted = await count_partitions(admin, topic), num_partitions if topic.scaled else 1
        if found != wanted:
            remedy = "set num_partitions to the count found, or use" if topic.scaled else "use"
            raise TopicError(
                f"topic {topic.name} has {found} partitions, wanted {wanted}: "
                f"partition counts are part of a run's identity, so {remedy} another cluster"
            )
    with log_errors("read the settings of topics"):
        resources = [ConfigResource(ConfigResourceType.TOPIC, topic.name) for topic in TOPICS.values()]
        responses: list[Any] = list(await admin.describe_configs(resources))
    for response in responses:
        for code, message, _, name, entries in response.resources:
            if for_code(code) is not NoError:
                raise TopicError(f"the settings of topic {name} cannot be read: {message}")
            _check_settings(name, {entry[0]: entry[1] for entry in entries})


async def count_partitions(admin: AIOKafkaAdminClient, topic: Topic) -> int:
    """Partition count of a topic. Raises TopicError if it does not show within PATIENCE_S."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + PATIENCE_S
    while True:
        with log_errors(f"look up topic {topic.name}"):
            (found,) = await admin.describe_topics([topic.name])
        partitions: list[dict[str, Any]] = found["partitions"]
        if for_code(found["error_code"]) is NoError and all(p["leader"] >= 0 for p in partitions):
            return len(partitions)
        if loop.time() > deadline:
            raise TopicError(
                f"topic {topic.name} is not available ({for_code(found['error_code']).__name__}): the first run on a "
                "broker makes its topics; start one, or name another broker"
            )
        await asyncio.sleep(0.1)


def _settings(topic: Topic, num_replicas: int) -> dict[str, str]:
    return {
        "cleanup.policy": "delete",
        "retention.ms": "-1",
        "retention.bytes": "-1",
        "max.message.bytes": str(topic.max_record_bytes + COMPRESSION_SLACK_BYTES),
        "message.timestamp.type": "CreateTime",
        "min.insync.replicas": "2" if num_replicas == MAX_REPLICAS else "1",
    }


def _check_settings(name: str, found: dict[str, str]) -> None:
    topic = next(topic for topic in TOPICS.values() if topic.name == name)
    for setting in ("cleanup.policy", "message.timestamp.type"):
        wanted = _settings(topic, 1)[setting]
        if found[setting] != wanted:
            raise TopicError(f"topic {name} has {setting}={found[setting]}, wanted {wanted}: {REMEDY}")
    wanted = _settings(topic, 1)["max.message.bytes"]
    if int(found["max.message.bytes"]) < int(wanted):
        raise TopicError(
            f"topic {name} has max.message.bytes={found['max.message.bytes']}, wanted at least {wanted}: {REMEDY}"
        )
    for setting in ("retention.ms", "retention.bytes"):
        if found[setting] != "-1":
            # A chosen limit is the operator's right; what it removes is named when a reader needs it.
            logger.warning("topic %s has %s=%s: what is older cannot be replayed", name, setting, found[setting])
