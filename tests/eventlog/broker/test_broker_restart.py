"""Restarts of a broker that died: at its own address and with its own data, or not at all."""

import asyncio
import json
import os
import shutil
import signal
import socket
import threading
import time
from pathlib import Path

import pytest

from rollstream.eventlog.broker.broker import EmbeddedBroker
from rollstream.eventlog.kafka.log import KafkaLog
from rollstream.schemas.errors import BrokerError, BrokerLostError

pytestmark = [pytest.mark.kafka, pytest.mark.slow]


def kill(broker: EmbeddedBroker) -> None:
    os.kill(json.loads((broker.workspace / "broker" / "broker.json").read_text())["broker_pid"], signal.SIGKILL)
    deadline = time.monotonic() + 30
    while broker.is_running:
        assert time.monotonic() < deadline
        time.sleep(0.02)


async def _cluster_of(broker: EmbeddedBroker) -> str:
    async with KafkaLog(broker.kafka) as log:
        await log.ensure_topics(num_partitions=1)
        await log.send_raw("dlq", key=None, value=b"kept")
        return await log.cluster_id()


def cluster_of(broker: EmbeddedBroker) -> str:
    """The cluster of a broker, which has taken a record."""
    return asyncio.run(_cluster_of(broker))


@pytest.mark.parametrize("removed", [".", "broker", "broker/data", "broker/password"])
def test_a_broker_whose_files_were_removed_is_not_replaced_by_an_empty_one(workspace: Path, removed: str) -> None:
    with EmbeddedBroker(workspace) as broker:
        address = broker.bootstrap_servers
        kill(broker)
        path = workspace / removed
        path.unlink() if path.is_file() else shutil.rmtree(path)
        with pytest.raises(BrokerLostError, match=rf"workspace {workspace} cannot be restarted: .* was removed "):
            broker.restart()
        assert broker.bootstrap_servers == address
        assert not broker.is_running


def test_a_broker_whose_controller_port_was_taken_keeps_the_address_that_clients_know(workspace: Path) -> None:
    with EmbeddedBroker(workspace) as broker:
        address, cluster = broker.bootstrap_servers, cluster_of(broker)
        kill(broker)
        folder = workspace / "broker"
        ports, last_words = json.loads((folder / "broker.json").read_text()), (folder / "broker.log").read_text()
        with socket.create_server(("127.0.0.1", ports["controller_port"])):
            broker.restart()
            assert (broker.bootstrap_servers, cluster_of(broker)) == (address, cluster)
        assert (folder / "broker.log.1").read_text() == last_words != ""


def test_a_restart_that_is_called_off_ends_soon_and_the_broker_can_be_stopped_and_started(workspace: Path) -> None:
    errors: list[BrokerError] = []

    def restart() -> None:
        try:
            broker.restart()
        except BrokerError as error:
            errors.append(error)

    with EmbeddedBroker(workspace) as broker:
        cluster = cluster_of(broker)
        kill(broker)
        with socket.create_server(("127.0.0.1", int(broker.bootstrap_servers.rpartition(":")[2]))):
            restarting = threading.Thread(target=restart)
            restarting.start()
            time.sleep(0.2)
            assert restarting.is_alive(), "it waits for its port"
            began = time.monotonic()
            broker.stop()
            assert not restarting.is_alive()
            assert time.monotonic() - began < 5
        assert ["is being stopped" in str(error) for error in errors] == [True]
        broker.start()
        assert cluster_of(broker) == cluster


def test_a_workspace_whose_data_were_removed_while_its_broker_was_stopped_can_be_used_again(workspace: Path) -> None:
    with EmbeddedBroker(workspace) as broker:
        cluster = cluster_of(broker)
    shutil.rmtree(workspace / "broker" / "data")
    for _ in range(2):
        with EmbeddedBroker(workspace) as broker:
            assert cluster_of(broker) != cluster
