"""The embedded broker answers only who knows the password of its workspace, which nobody but its owner can read."""

import asyncio
import os
import socket
import struct
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from rollstream.eventlog.broker import install as kafka_install
from rollstream.eventlog.broker.broker import EmbeddedBroker
from rollstream.eventlog.broker.credentials import HOST, password_file
from rollstream.eventlog.broker.lock import find_running
from rollstream.eventlog.broker.ports import answers, free_ports
from rollstream.eventlog.kafka.log import KafkaLog
from rollstream.harness.services.workspace import Workspace, broker_of
from rollstream.schemas.errors import RollstreamError
from rollstream.schemas.kafka import KafkaSettings

pytestmark = [pytest.mark.kafka, pytest.mark.slow]
PRODUCE, METADATA, API_VERSIONS, CREATE_TOPICS, DESCRIBE_QUORUM, ALTER_SCRAM, REGISTER = 0, 3, 18, 19, 55, 51, 62
NOBODY = 65534
BEFORE = f"""\
process.roles=broker,controller
node.id=1
controller.quorum.voters=1@{HOST}:{{controller_port}}
listeners=PLAINTEXT://{HOST}:{{port}},CONTROLLER://{HOST}:{{controller_port}}
advertised.listeners=PLAINTEXT://{HOST}:{{port}}
controller.listener.names=CONTROLLER
inter.broker.listener.name=PLAINTEXT
listener.security.protocol.map=PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT
log.dirs=data
offsets.topic.replication.factor=1
log.cleaner.dedupe.buffer.size={8 * 1024 * 1024}
"""
"""Configuration of a broker of before, which asked for no password."""


@pytest.fixture(scope="module")
def broker() -> Iterator[EmbeddedBroker]:
    """A broker in a folder that other users can enter, unlike pytest's own."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        with EmbeddedBroker(Path(folder) / ".rollstream") as running:
            yield running


def ports(broker: EmbeddedBroker) -> tuple[int, int]:
    listening = psutil.Process(_pid(broker)).net_connections()
    found = sorted({one.laddr.port for one in listening if one.status == psutil.CONN_LISTEN})
    assert len(found) == 2
    return found[0], found[1]


def _pid(broker: EmbeddedBroker) -> int:
    guard = broker._guard
    assert guard is not None
    return psutil.Process(guard.pid).children()[0].pid


def reply_to(port: int, api_key: int, version: int) -> bytes:
    """Reply to a request of a client that has not logged in; empty if the connection is closed."""
    request = struct.pack(">hhih", api_key, version, 1, -1) + b"\0" * 64
    with socket.create_connection((HOST, port), timeout=10) as client:
        client.sendall(struct.pack(">i", len(request)) + request)
        return client.recv(1000)


@pytest.mark.parametrize("api_key", [PRODUCE, METADATA, CREATE_TOPICS, DESCRIBE_QUORUM, ALTER_SCRAM, REGISTER])
def test_no_port_answers_a_client_that_has_not_logged_in(api_key: int, broker: EmbeddedBroker) -> None:
    for port in ports(broker):
        assert answers(port), "which versions it speaks, it says to everybody"
        assert reply_to(port, api_key, 0) == b""


async def _cluster_id(kafka: KafkaSettings) -> str:
    log = KafkaLog(kafka)
    try:
        await log.start()
        return await log.cluster_id()
    finally:
        await log.close()


def test_a_client_without_a_password_and_one_with_a_wrong_one_get_nothing(broker: EmbeddedBroker) -> None:
    address = broker.bootstrap_servers
    login = {"security_protocol": "SASL_PLAINTEXT", "username": "rollstream", "password": "0" * 64}
    for wrong in ({}, login, login | {"username": "root"}, login | {"sasl_mechanism": "PLAIN"}):
        with pytest.raises(RollstreamError):
            asyncio.run(_cluster_id(KafkaSettings.model_validate({"bootstrap_servers": address, **wrong})))
    assert asyncio.run(_cluster_id(broker.kafka))


def can_read(path: Path) -> bool:
    command = ["ls" if path.is_dir() else "cat", str(path)]
    return subprocess.run(command, user=NOBODY, group=NOBODY, extra_groups=[], capture_output=True).returncode == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can try as another user")
def test_another_user_learns_neither_password_nor_data(broker: EmbeddedBroker) -> None:
    workspace = broker.workspace
    (workspace / "artifacts").mkdir()
    (workspace / "logs").mkdir()
    secret = [workspace / "sql.token", workspace / "artifacts" / "weights.bin", workspace / "logs" / "learner-1.log"]
    for path in secret:
        path.write_text("secret")
    kept = [workspace / "broker" / name for name in ("password", "server.properties", "broker.log", "data")]
    assert can_read(workspace.parent)
    assert [path for path in (*secret, *kept) if can_read(path)] == []
    assert [path.stat().st_mode & 0o077 for path in kept] == [0, 0, 0, 0]


def test_the_password_is_in_no_command_line_and_no_environment(broker: EmbeddedBroker) -> None:
    password = password_file(broker.workspace / "broker").read_text().strip()
    process = psutil.Process(_pid(broker))
    for one in (process, process.parent()):
        assert one is not None
        assert password not in " ".join([*one.cmdline(), *one.environ().values()])
    assert password not in (broker.workspace / "broker" / "broker.log").read_text()
    assert password not in repr(broker.kafka)


async def _send(kafka: KafkaSettings, value: bytes) -> int:
    log = KafkaLog(kafka)
    try:
        await log.start()
        await log.ensure_topics(num_partitions=2)
        await log.send_raw("dlq", key=None, value=value)
        return (await log.end_offsets("dlq"))[0]
    finally:
        await log.close()


def test_a_workspace_of_before_gets_a_password_and_keeps_its_data(workspace: Path) -> None:
    before(workspace, b"of before")
    with EmbeddedBroker(workspace) as broker:
        assert asyncio.run(_send(broker.kafka, b"of now")) == 2
        with pytest.raises(RollstreamError):
            asyncio.run(_cluster_id(KafkaSettings(bootstrap_servers=broker.bootstrap_servers)))
    password = password_file(workspace / "broker")
    known = password.read_text()
    with EmbeddedBroker(workspace) as broker:
        assert asyncio.run(_send(broker.kafka, b"again")) == 3
    assert password.read_text() == known
    password.unlink()  # or a start that was killed before it was written
    with EmbeddedBroker(workspace) as broker:
        assert asyncio.run(_send(broker.kafka, b"with another password")) == 4
    assert password.read_text() != known


def before(workspace: Path, value: bytes) -> None:
    """A workspace as a version left it that asked for no password, with one record."""
    folder = workspace / "broker"
    folder.mkdir(parents=True)
    port, controller_port = free_ports(2)
    (folder / "server.properties").write_text(BEFORE.format(port=port, controller_port=controller_port))
    java = [str(kafka_install.java()), "-Xmx512m", "-cp", os.pathsep.join(map(str, kafka_install.jars()))]
    formatting = ["kafka.tools.StorageTool", "format", "--cluster-id", "RworkspaceOfBefore0000", "--config"]
    subprocess.run([*java, *formatting, "server.properties"], cwd=folder, check=True, capture_output=True)
    with (folder / "broker.log").open("wb") as log:
        running = subprocess.Popen([*java, "kafka.Kafka", "server.properties"], cwd=folder, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 90
        while not answers(port):
            assert running.poll() is None, (folder / "broker.log").read_text()
            assert time.monotonic() < deadline, (folder / "broker.log").read_text()
            time.sleep(0.1)
        assert asyncio.run(_send(KafkaSettings(bootstrap_servers=f"{HOST}:{port}"), value)) == 1
    finally:
        running.terminate()
        running.wait(60)


def test_a_command_of_the_workspace_needs_no_password_to_be_named(broker: EmbeddedBroker) -> None:
    assert find_running(broker.workspace) == broker.bootstrap_servers
    for address in (None, broker.bootstrap_servers):
        with broker_of(Workspace(broker.workspace), address) as kafka:
            assert kafka.password_file == password_file(broker.workspace.absolute() / "broker")
            assert asyncio.run(_cluster_id(kafka))
