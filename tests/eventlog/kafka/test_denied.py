"""Denied operations, against a real broker: one error that names user, operation and resource."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rollstream.eventlog.kafka.log import KafkaLog
from rollstream.eventlog.log import Position, TopicPartition
from rollstream.schemas.errors import AccessDeniedError, TopicError
from tests.rigs.services.secured_broker import SecuredBroker, secured_broker

pytestmark = pytest.mark.kafka
INSPECTION = "--operation Describe --operation DescribeConfigs"
PREFIXED = "--topic rollstream. --resource-pattern-type prefixed"
STEPS = TopicPartition("steps", 0)
Use = Callable[[KafkaLog], Awaitable[object]]


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredBroker]:
    """A broker with topics and one record."""
    with secured_broker(tmp_path_factory.mktemp("secured")) as running:
        asyncio.run(_fill(running))
        yield running


async def _fill(running: SecuredBroker) -> None:
    log = KafkaLog(running.settings("PLAINTEXT"))
    await log.start()
    try:
        await log.ensure_topics(num_partitions=2)
        await log.send_raw("steps", key=b"k", value=b"v", partition=0)
    finally:
        await log.close()


def denied(broker: SecuredBroker, user: str, rights: str, use: Use) -> str:
    """The error of a user who has these rights only (`kafka-acls` options, a line each)."""
    commands = "\n".join(
        f"kafka-acls --add --allow-principal User:{user} {line}" for line in rights.splitlines() if line.strip()
    )

    async def attempt() -> None:
        if commands:
            await broker.allow(commands)
        log = KafkaLog(broker.settings("SASL_PLAINTEXT", user))
        try:
            await log.start()
            async with asyncio.timeout(20):
                await use(log)
        finally:
            await log.close()

    with pytest.raises(AccessDeniedError) as caught:
        asyncio.run(attempt())
    message = str(caught.value)
    assert f"User:{user} lacks the right" in message
    assert "allow it with kafka-acls; docs/security.md" in message
    return message


async def ensure(log: KafkaLog) -> None:
    await log.ensure_topics(num_partitions=2)


async def read(log: KafkaLog) -> None:
    reader = await log.reader({STEPS: 0})
    try:
        await reader.poll(timeout_s=10)
    finally:
        await reader.close()


async def join(log: KafkaLog) -> None:
    member = await log.group_reader("rollstream-guests", ["steps"])
    try:
        while True:
            await member.poll(timeout_s=1)
    finally:
        await member.close()


def test_topics_that_may_not_be_seen_cannot_be_made_either(broker: SecuredBroker) -> None:
    message = denied(broker, "guest1", "", ensure)
    assert "lacks the right Create (Describe, if the topic exists) of topic rollstream." in message


def test_a_topic_that_may_not_be_described_is_named(broker: SecuredBroker) -> None:
    message = denied(
        broker, "guest2", f"{INSPECTION} --topic rollstream.tasks.v1", lambda log: log.end_offsets("steps")
    )
    assert "lacks the right Describe of topic rollstream.steps.v1" in message


def test_settings_that_may_not_be_read_are_named(broker: SecuredBroker) -> None:
    message = denied(broker, "guest3", f"--operation Describe {PREFIXED}", ensure)
    assert "lacks the right DescribeConfigs of topic rollstream." in message


def test_records_that_may_not_be_read_are_named(broker: SecuredBroker) -> None:
    message = denied(broker, "guest4", f"{INSPECTION} {PREFIXED}", read)
    assert "lacks the right Read of topic rollstream.steps.v1" in message
    message = denied(broker, "guest4", "", lambda log: log.fetch([Position("steps", 0, 0)]))
    assert "lacks the right Read of topic rollstream.steps.v1" in message


def test_records_that_may_not_be_written_are_named(broker: SecuredBroker) -> None:
    rights = f"{INSPECTION} {PREFIXED}\n--operation Write --topic rollstream.dlq.v1"
    message = denied(broker, "guest5", rights, lambda log: log.send_raw("steps", key=b"k", value=b"v"))
    assert "lacks the right Write of topic rollstream.steps.v1" in message


def test_a_user_without_the_right_to_write_gets_no_producer(broker: SecuredBroker) -> None:
    message = denied(
        broker, "guest6", f"{INSPECTION} {PREFIXED}", lambda log: log.send_raw("steps", key=b"k", value=b"v")
    )
    assert "lacks the right Write of a topic, or IdempotentWrite of the cluster" in message


def test_a_group_that_may_not_be_joined_is_named(broker: SecuredBroker) -> None:
    message = denied(broker, "guest7", f"{INSPECTION} --operation Read {PREFIXED}", join)
    assert "lacks the right Read of group rollstream-guests" in message


def test_offsets_that_may_not_be_looked_up_are_named(broker: SecuredBroker) -> None:
    message = denied(
        broker, "guest8", f"{INSPECTION} {PREFIXED}", lambda log: log.committed_offsets("rollstream-guests")
    )
    assert "of group rollstream-guests" in message


def test_a_group_member_without_the_right_to_read_a_topic_gets_an_error(broker: SecuredBroker) -> None:
    rights = f"{INSPECTION} {PREFIXED}\n--operation Read --group rollstream-guests"
    assert "lacks the right Read of topic rollstream.steps.v1" in denied(broker, "guest9", rights, join)


def test_a_topic_of_another_prefix_is_another_log(broker: SecuredBroker) -> None:
    async def use() -> None:
        other = KafkaLog(broker.settings("PLAINTEXT", topic_prefix="team-a."))
        usual = KafkaLog(broker.settings("PLAINTEXT"))
        try:
            await other.start()
            await usual.start()
            await other.ensure_topics(num_partitions=3)
            assert (await other.num_partitions("steps"), await usual.num_partitions("steps")) == (3, 2)
            sent = await other.send_raw("steps", key=b"k", value=b"other", partition=0)
            (record,) = await other.fetch([sent])
            assert (record.topic, record.value) == ("steps", b"other")
            assert await other.cluster_id() == f"{await usual.cluster_id()}/team-a."
            ids, usual_ids = await other.topic_ids() or {}, await usual.topic_ids() or {}
            assert set(ids.values()).isdisjoint(usual_ids.values())
        finally:
            await other.close()
            await usual.close()

    asyncio.run(use())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"replication_factor": 2},
            "topic rollstream.tasks.v1 has 1 replicas .*kafka.replication_factor is 2; add replicas .*reassign",
        ),
        (
            {"replication_factor": 2, "topic_prefix": "new."},
            "topic new.tasks.v1 cannot be created: .*replication factor.* 2",
        ),
        (
            {"min_insync_replicas": 2},
            "topic rollstream.tasks.v1 has min.insync.replicas=1, but kafka.min_insync_replicas is 2",
        ),
    ],
)
def test_topics_with_fewer_replicas_than_configured_are_found(
    broker: SecuredBroker, changes: dict[str, Any], message: str
) -> None:
    async def attempt() -> None:
        log = KafkaLog(broker.settings("PLAINTEXT", **changes))
        try:
            await log.start()
            await log.ensure_topics(num_partitions=2)
        finally:
            await log.close()

    with pytest.raises(TopicError, match=message):
        asyncio.run(attempt())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("user", "rights", "message"),
    [
        ("guest10", f"--operation Read {PREFIXED}", "Read of group rollstream-processors"),
        ("guest11", "--operation Read --group rollstream-processors", "Read of topic rollstream.steps.v1"),
    ],
)
def test_the_processors_end_with_what_they_may_not_do(
    broker: SecuredBroker, tmp_path: Path, user: str, rights: str, message: str
) -> None:
    asyncio.run(
        broker.allow(
            "".join(
                f"kafka-acls --add --allow-principal User:{user} {line}\n"
                for line in (
                    f"{INSPECTION} {PREFIXED}",
                    "--operation Read --topic rollstream.groups.v1 --topic rollstream.dlq.v1",
                    rights,
                )
            )
        )
    )
    done = subprocess.run(
        [sys.executable, "-m", "rollstream.harness.cli.main", "serve", "processors"],
        env={
            **os.environ,
            "ROLLSTREAM_BOOTSTRAP_SERVERS": f"127.0.0.1:{broker.ports['SASL_PLAINTEXT']}",
            "ROLLSTREAM_KAFKA_SECURITY_PROTOCOL": "SASL_PLAINTEXT",
            "ROLLSTREAM_KAFKA_USERNAME": user,
            "ROLLSTREAM_KAFKA_PASSWORD": f"{user}-secret",
            "ROLLSTREAM_WORKSPACE": str(tmp_path),
            "ROLLSTREAM_NUM_PARTITIONS": "2",
        },
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 1, done.stderr[-3000:]
    (text,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert f"User:{user} lacks the right {message}" in text
    assert f"{user}-secret" not in done.stderr
