"""A topic that was deleted and created again is known by its id, to commands that conduct runs and to services."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import TopicAuthorizationFailedError, UnknownTopicOrPartitionError

from rollstream.eventlog.broker.broker import EmbeddedBroker
from rollstream.eventlog.broker.credentials import environment
from rollstream.eventlog.kafka.security import client_options
from rollstream.eventlog.kafka.topic_ids import GONE_AFTER, ID_BYTES, check_topics, ids_in, watch_topics
from rollstream.harness.services.serving import run_until_stopped
from rollstream.schemas.errors import LogError, TruncatedError
from rollstream.schemas.kafka import KafkaSettings
from rollstream.schemas.services import ServiceSettings
from rollstream.schemas.topics import TOPICS
from tests.rigs.services.connections import counted


def test_a_full_disk_does_not_end_a_service_that_looks_at_topics(tmp_path: Path) -> None:
    lock = tmp_path / ".topics.json.lock"
    lock.mkdir()
    check_topics(tmp_path, "c", {"steps": "1"})
    lock.rmdir()
    check_topics(tmp_path, "c", {"steps": "2"})
    with pytest.raises(TruncatedError, match="steps was deleted and created again"):
        check_topics(tmp_path, "c", {"steps": "1"})


def test_ids_are_remembered_by_cluster_and_another_one_is_refused_until_the_file_is_removed(tmp_path: Path) -> None:
    folder = tmp_path / "workspace"
    check_topics(folder, "cluster", {"steps": "a"})
    check_topics(folder, "cluster", {"steps": "a", "tasks": "b"})
    check_topics(folder, "other", {"steps": "z"})
    check_topics(folder, "cluster", {})
    with pytest.raises(TruncatedError) as refused:
        check_topics(folder, "cluster", {"steps": "c", "tasks": "b"})
    assert str(refused.value).startswith("topic steps was deleted and created again (id a, now c): ")
    assert f"{folder / 'topics.json'}, metrics.duckdb and checkpoints/*.position.json" in str(refused.value)
    (folder / "topics.json").unlink()
    check_topics(folder, "cluster", {"steps": "c", "tasks": "b"})


@pytest.mark.kafka
@pytest.mark.slow
def test_a_service_does_not_start_on_a_topic_that_was_made_again(tmp_path: Path, workspace: Path) -> None:
    with EmbeddedBroker(tmp_path) as running:
        assert until_ready(running.kafka, workspace) == 0
        asyncio.run(_delete(running.kafka, "tasks"))
        serving = start(running.kafka, workspace, tmp_path / "again.log")
        assert serving.wait(60) == 1
        reported = (tmp_path / "again.log").read_text().splitlines()[-1]
    assert reported.startswith("error: topic tasks was deleted and created again (id ")


def test_a_topic_counts_as_deleted_when_it_is_missing_three_times_in_a_row(tmp_path: Path) -> None:
    answers = iter([{"steps": "a"}, {}, {"tasks": "b"}, {"tasks": "b"}, {"steps": "a"}, *[{"tasks": "b"}] * 3])
    check_topics(tmp_path, "cluster", {"steps": "a", "tasks": "b"})

    async def look_up() -> tuple[str, dict[str, str]]:
        found = next(answers)
        if not found:
            raise LogError("the broker does not answer")
        return "cluster", {"tasks": "b", **found}

    with pytest.raises(TruncatedError, match=r"^topic steps was deleted with its records"):
        asyncio.run(watch_topics(tmp_path, look_up, every_s=0))
    assert next(answers, None) is None


@pytest.mark.parametrize("found", [{}, None], ids=["no topic is left", "this Kafka has no topic ids"])
def test_all_topics_count_as_deleted_only_where_kafka_has_topic_ids(
    tmp_path: Path, found: dict[str, str] | None
) -> None:
    check_topics(tmp_path, "cluster", {"steps": "a", "tasks": "b"})
    answers = iter([found] * (GONE_AFTER + 1))

    async def look_up() -> tuple[str, dict[str, str] | None]:
        return "cluster", next(answers)

    reported = r"^topic steps was deleted with its records" if found is not None else "StopIteration"
    with pytest.raises(TruncatedError if found is not None else RuntimeError, match=reported):
        asyncio.run(watch_topics(tmp_path, look_up, every_s=0))


def test_no_topic_counts_as_deleted_where_none_may_be_described() -> None:
    kafka = KafkaSettings.of("localhost:1")
    names = [kafka.topic_name(short) for short in TOPICS]
    unknown, denied = UnknownTopicOrPartitionError.errno, TopicAuthorizationFailedError.errno
    assert ids_in([(unknown, name, b"") for name in names], kafka) == {}
    assert ids_in([(denied, name, b"") for name in names], kafka) is None
    assert ids_in([(0, name, b"x" * ID_BYTES) for name in names], kafka) == dict.fromkeys(
        TOPICS, "eHh4eHh4eHh4eHh4eHh4eA"
    )


@pytest.mark.kafka
def test_a_running_service_ends_in_order_when_a_topic_is_deleted(tmp_path: Path) -> None:
    reported: list[str] = []

    async def work(settings: ServiceSettings) -> None:
        reported.append("begun")
        try:
            await asyncio.sleep(60)
        finally:
            reported.append("ended in order")

    async def serve_and_delete(settings: ServiceSettings) -> None:
        serving = asyncio.create_task(run_until_stopped("service", settings, work, watch_s=0.2))
        while not reported:
            await asyncio.sleep(0.05)
        await _delete(settings.connection, "tasks")
        await serving

    with EmbeddedBroker(tmp_path) as running:
        settings = ServiceSettings(
            name="service-1",
            bootstrap_servers=running.bootstrap_servers,
            kafka=running.kafka.section,
            workspace=tmp_path / "workspace",
            artifact_uri=str(tmp_path / "artifacts"),
            num_partitions=2,
        )
        with pytest.raises(TruncatedError, match=r"^topic tasks was deleted with its records"):
            asyncio.run(serve_and_delete(settings))
    assert reported == ["begun", "ended in order"]


@pytest.mark.kafka
def test_a_service_looks_at_its_topics_by_one_client(tmp_path: Path, kafka: KafkaSettings) -> None:
    async def scenario() -> int:
        async with counted(kafka.bootstrap_servers) as way:
            settings = ServiceSettings(
                name="service-1",
                bootstrap_servers=way.address,
                kafka=kafka.section,
                workspace=tmp_path / "workspace",
                artifact_uri=str(tmp_path / "artifacts"),
                num_partitions=6,
            )

            async def work(settings: ServiceSettings) -> None:
                await asyncio.sleep(2)

            await run_until_stopped("service", settings, work, watch_s=0.05)
            return way.num_clients

    assert asyncio.run(scenario()) <= 2, "one client; as a Kafka client does, it may ask its bootstrap address twice"


def start(kafka: KafkaSettings, workspace: Path, log: Path) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "rollstream.harness.cli.main", "serve", "metrics"]
    env = os.environ | {
        **environment(kafka),
        "ROLLSTREAM_WORKSPACE": str(workspace),
        "ROLLSTREAM_NUM_PARTITIONS": "2",
    }
    with log.open("wb") as output:
        return subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=env)


def until_ready(kafka: KafkaSettings, workspace: Path) -> int:
    """Exit status of a service that came up and was asked to end."""
    workspace.mkdir(parents=True)
    log = workspace / "first.log"
    serving = start(kafka, workspace, log)
    deadline = time.monotonic() + 60
    while b"ready" not in log.read_bytes():
        assert serving.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.1)
    serving.send_signal(signal.SIGTERM)
    return serving.wait(60)


async def _delete(kafka: KafkaSettings, topic: str) -> None:
    admin = AIOKafkaAdminClient(**client_options(kafka))
    await admin.start()
    name = TOPICS[topic].name
    await admin.delete_topics([name])
    while name in await admin.list_topics():
        await asyncio.sleep(0.1)
    await admin.close()
