"""A topic that was deleted and made again is known by its id, by who conducts runs and by every service."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from aiokafka.admin import AIOKafkaAdminClient

from rollstream.eventlog.broker import EmbeddedBroker
from rollstream.harness.topic_identity import check_topics
from rollstream.schemas.errors import TruncatedError
from rollstream.schemas.topics import TOPICS


def test_ids_are_remembered_by_cluster_and_another_one_is_refused_until_the_file_is_removed(tmp_path: Path) -> None:
    folder = tmp_path / "workspace"
    check_topics(folder, "cluster", {"steps": "a"})
    check_topics(folder, "cluster", {"steps": "a", "tasks": "b"})
    check_topics(folder, "other", {"steps": "z"})
    check_topics(folder, "cluster", {})
    with pytest.raises(TruncatedError) as refused:
        check_topics(folder, "cluster", {"steps": "c", "tasks": "b"})
    assert str(refused.value).startswith("topic rollstream.steps.v1 was deleted and made again (id a, now c): ")
    assert str(folder / "topics.json") in str(refused.value)
    (folder / "topics.json").unlink()
    check_topics(folder, "cluster", {"steps": "c", "tasks": "b"})


@pytest.mark.kafka
@pytest.mark.slow
def test_a_service_does_not_start_on_a_topic_that_was_made_again(tmp_path: Path, workspace: Path) -> None:
    with EmbeddedBroker(tmp_path) as running:
        assert until_ready(running.bootstrap_servers, workspace) == 0
        asyncio.run(_delete(running.bootstrap_servers, "tasks"))
        serving = start(running.bootstrap_servers, workspace, tmp_path / "again.log")
        assert serving.wait(60) == 1
        told = (tmp_path / "again.log").read_text().splitlines()[-1]
    assert told.startswith(f"error: topic {TOPICS['tasks'].name} was deleted and made again (id ")


def start(bootstrap: str, workspace: Path, log: Path) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "rollstream.harness.cli", "serve", "metrics"]
    environ = os.environ | {
        "ROLLSTREAM_BOOTSTRAP_SERVERS": bootstrap,
        "ROLLSTREAM_WORKSPACE": str(workspace),
        "ROLLSTREAM_NUM_PARTITIONS": "2",
    }
    with log.open("wb") as output:
        return subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environ)


def until_ready(bootstrap: str, workspace: Path) -> int:
    """Exit status of a service that came up and was asked to end."""
    workspace.mkdir(parents=True)
    log = workspace / "first.log"
    serving = start(bootstrap, workspace, log)
    deadline = time.monotonic() + 60
    while b"ready" not in log.read_bytes():
        assert serving.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.1)
    serving.send_signal(signal.SIGTERM)
    return serving.wait(60)


async def _delete(bootstrap: str, topic: str) -> None:
    admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap)
    await admin.start()
    await admin.delete_topics([TOPICS[topic].name])
    await asyncio.sleep(1)
    await admin.close()
