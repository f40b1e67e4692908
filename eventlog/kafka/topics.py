"""Topics in Kafka: created explicitly from the topic table and checked against it."""

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.errors import (
    ClusterAuthorizationFailedError,
    NoError,
    TopicAlreadyExistsError,
    TopicAuthorizationFailedError,
    for_code,
)

from rollstream.eventlog.kafka.client import log_errors
from rollstream.schemas.errors import TopicError
from rollstream.schemas.kafka import KafkaSettings
from rollstream.schemas.topics import NUM_PARTITIONS, TOPICS, Topic

PATIENCE_S = 5.0
"""Maximum seconds for a new topic to appear in the metadata."""
MAX_REPLICAS = 3
COMPRESSION_SLACK_BYTES = 64 * 1024
"""Kafka measures the compressed batch, and bytes that cannot be compressed grow a little."""

REMEDY = "alter it on the topic (kafka-configs.sh), or use another cluster"

logger = logging.getLogger(__name__)


async def create_missing(admin: AIOKafkaAdminClient, kafka: KafkaSettings, num_partitions: int) -> None:
    """Create the topics of the table that do not exist. Raises TopicError, AccessDeniedError."""
    with log_errors("create topics", kafka, "Create"):
        there = set(await admin.list_topics())
        missing = [topic for topic in TOPICS.values() if kafka.topic_name(topic.short) not in there]
        if not missing:
            return
        num_brokers = len((await admin.describe_cluster())["brokers"])
        num_replicas = kafka.replication_factor or min(MAX_REPLICAS, num_brokers)
        wanted = [
            NewTopic(
                kafka.topic_name(topic.short),
                num_partitions if topic.scaled else 1,
                num_replicas,
                topic_configs=_settings(topic, num_replicas, kafka.min_insync_replicas),
            )
            for topic in missing
        ]
        response: Any = await admin.create_topics(wanted, timeout_ms=15_000)
    for name, code, message, *_ in response.topic_errors:
        error = for_code(code)
        with log_errors(f"create topic {name}", kafka, "Create (Describe, if the topic exists)"):
            if error in (TopicAuthorizationFailedError, ClusterAuthorizationFailedError):
                raise TopicAuthorizationFailedError(name)
        if error not in (NoError, TopicAlreadyExistsError):
            raise TopicError(
                f"topic {name} cannot be created: {message or error.__name__}; correct "
                "kafka.replication_factor or the user's permissions, or create it"
            )
    for topic in missing:
        await count_partitions(admin, kafka, topic.short)


async def scaled_count(admin: AIOKafkaAdminClient, kafka: KafkaSettings) -> int:
    """Number of partitions of the scaled topics that exist; `NUM_PARTITIONS` if there are none. Raises TopicError."""
    with log_errors("list topics", kafka, "Describe"):
        there = set(await admin.list_topics())
    first = next((one.short for one in TOPICS.values() if one.scaled and kafka.topic_name(one.short) in there), None)
    return NUM_PARTITIONS if first is None else await count_partitions(admin, kafka, first)


async def check(admin: AIOKafkaAdminClient, kafka: KafkaSettings, num_partitions: int) -> None:
    """Compare every topic with the table and the settings. Raises TopicError naming topic, found and wanted."""
    found = {topic: await _partitions(admin, kafka, topic.short) for topic in TOPICS.values()}
    _check_counts(kafka, {topic: len(partitions) for topic, partitions in found.items()}, num_partitions)
    replicas = {
        kafka.topic_name(topic.short): min(len(partition["replicas"]) for partition in partitions)
        for topic, partitions in found.items()
    }
    await _check_replicas(admin, kafka, replicas)
    with log_errors("read the settings of topics", kafka, "DescribeConfigs"):
        resources = [ConfigResource(ConfigResourceType.TOPIC, name) for name in replicas]
        responses: list[Any] = list(await admin.describe_configs(resources))
    for response in responses:
        for code, message, _, name, entries in response.resources:
            error = for_code(code)
            with log_errors("read the settings of topics", kafka, "DescribeConfigs"):
                if error is TopicAuthorizationFailedError:
                    raise error(name)
            if error is not NoError:
                raise TopicError(
                    f"the settings of topic {name} cannot be read: {message}; allow the user DescribeConfigs on it"
                )
            short = kafka.short_name(name)
            assert short is not None
            values = {entry[0]: entry[1] for entry in entries}
            _check_settings(TOPICS[short], name, values)
            _check_min_insync(kafka, name, int(values["min.insync.replicas"]), replicas[name])


def _check_counts(kafka: KafkaSettings, counts: Mapping[Topic, int], num_partitions: int) -> None:
    """Raises TopicError with the remedy: Kafka can add partitions to a topic, but not remove any."""
    scaled = {kafka.topic_name(topic.short): count for topic, count in counts.items() if topic.scaled}
    most = max(scaled.values())
    fewer = [name for name, count in scaled.items() if count < most]
    for topic, count in counts.items():
        name, wanted = kafka.topic_name(topic.short), num_partitions if topic.scaled else 1
        if not topic.scaled and count != wanted:
            raise TopicError(
                f"topic {name} has {count} partitions, expected 1; Kafka cannot remove partitions, so set another "
                "kafka.topic_prefix, for which topics are created, or use another cluster"
            )
        if topic.scaled and fewer:
            raise TopicError(
                f"topics {', '.join(f'{one} ({number} partitions)' for one, number in scaled.items())} must have "
                f"equally many partitions, and Kafka cannot remove any; alter {', '.join(fewer)} to {most} "
                f"(kafka-topics.sh --alter --partitions {most}; runs that began before cannot be resumed), and leave "
                f"num_partitions out or set it to {most}, or set another kafka.topic_prefix"
            )
        if count != wanted:
            raise TopicError(
                f"topic {name} has {count} partitions, expected {wanted}; partition counts cannot change during a "
                "run, so leave num_partitions out, set it to the count found, or use another cluster"
            )


async def count_partitions(admin: AIOKafkaAdminClient, kafka: KafkaSettings, topic: str) -> int:
    """Partition count of a topic.

    Raises TopicError if the topic does not appear within PATIENCE_S, AccessDeniedError.
    """
    return len(await _partitions(admin, kafka, topic))


async def _partitions(admin: AIOKafkaAdminClient, kafka: KafkaSettings, topic: str) -> list[dict[str, Any]]:
    name = kafka.topic_name(topic)
    loop = asyncio.get_running_loop()
    deadline = loop.time() + PATIENCE_S
    while True:
        with log_errors(f"look up topic {name}", kafka, "Describe"):
            (found,) = await admin.describe_topics([name])
            error = for_code(found["error_code"])
            if error is TopicAuthorizationFailedError:
                raise error(name)
        partitions: list[dict[str, Any]] = found["partitions"]
        if error is NoError and all(p["leader"] >= 0 for p in partitions):
            return partitions
        if loop.time() > deadline:
            raise _without_leader(name, partitions) if error is NoError else _not_available(name, error)
        await asyncio.sleep(0.1)


def _not_available(name: str, error: type[Exception]) -> TopicError:
    return TopicError(
        f"topic {name} is not available ({error.__name__}): the first run on a broker creates its topics; "
        f"start a run, or name another broker"
    )


def _without_leader(name: str, partitions: list[dict[str, Any]]) -> TopicError:
    leaderless = [found for found in partitions if found["leader"] < 0]
    brokers = sorted({broker for found in leaderless for broker in found["replicas"]})
    return TopicError(
        f"topic {name} has no leader for partition {', '.join(str(found['partition']) for found in leaderless)}: the "
        f"brokers of its replicas are down ({', '.join(map(str, brokers))}), or a leader is being elected; start them "
        f"(kafka-topics.sh --describe shows the state), and try again"
    )


async def _check_replicas(admin: AIOKafkaAdminClient, kafka: KafkaSettings, found: dict[str, int]) -> None:
    """Raises TopicError for fewer replicas than configured; without a setting, warns of fewer than the brokers
    allow."""
    if kafka.replication_factor is not None:
        for name, number in found.items():
            if number < kafka.replication_factor:
                raise TopicError(
                    f"topic {name} has {number} replicas of a partition, but kafka.replication_factor is "
                    f"{kafka.replication_factor}; add replicas (kafka-reassign-partitions.sh), or set "
                    f"replication_factor to {number}"
                )
        return
    with log_errors("look up the brokers", kafka, "Describe"):
        possible = min(MAX_REPLICAS, len((await admin.describe_cluster())["brokers"]))
    few = sorted(name for name, number in found.items() if number < possible)
    if few:
        logger.warning(
            "topic %s has %d replicas, but the cluster has %d brokers; the loss of a broker could lose runs, so add "
            "replicas (kafka-reassign-partitions.sh), or set kafka.replication_factor",
            few[0],
            found[few[0]],
            possible,
        )


def _check_min_insync(kafka: KafkaSettings, name: str, found: int, num_replicas: int) -> None:
    wanted = kafka.min_insync_replicas
    if wanted is not None and found < wanted:
        raise TopicError(
            f"topic {name} has min.insync.replicas={found}, but kafka.min_insync_replicas is {wanted}; {REMEDY}"
        )
    if found > num_replicas:
        raise TopicError(
            f"topic {name} has min.insync.replicas={found} and {num_replicas} replicas, so records cannot be "
            f"written; {REMEDY}"
        )


def _settings(topic: Topic, num_replicas: int, min_insync: int | None = None) -> dict[str, str]:
    return {
        "cleanup.policy": "delete",
        "retention.ms": "-1",
        "retention.bytes": "-1",
        "max.message.bytes": str(topic.max_record_bytes + COMPRESSION_SLACK_BYTES),
        "message.timestamp.type": "CreateTime",
        "min.insync.replicas": str(min_insync or (2 if num_replicas >= MAX_REPLICAS else 1)),
    }


def _check_settings(topic: Topic, name: str, found: dict[str, str]) -> None:
    for setting in ("cleanup.policy", "message.timestamp.type"):
        wanted = _settings(topic, 1)[setting]
        if found[setting] != wanted:
            raise TopicError(f"topic {name} has {setting}={found[setting]}, expected {wanted}; {REMEDY}")
    wanted = _settings(topic, 1)["max.message.bytes"]
    if int(found["max.message.bytes"]) < int(wanted):
        raise TopicError(
            f"topic {name} has max.message.bytes={found['max.message.bytes']}, expected at least {wanted}; {REMEDY}"
        )
    for setting in ("retention.ms", "retention.bytes"):
        if found[setting] != "-1":
            # Retention is the operator's choice; a reader that needs removed records reports them.
            logger.warning("topic %s has %s=%s: older records cannot be replayed", name, setting, found[setting])
