"""The embedded broker as processes: quick to start, durable, one a workspace, and never an orphan."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from rollstream.eventlog.broker import broker, lock
from rollstream.eventlog.broker.broker import EmbeddedBroker, _ports, connection
from rollstream.eventlog.broker.install import jars
from rollstream.eventlog.broker.lock import find_running
from rollstream.eventlog.kafka.log import KafkaLog
from rollstream.schemas.errors import BrokerError
from rollstream.schemas.kafka import KafkaSettings
from tests.rigs.services.ended import is_gone

pytestmark = [pytest.mark.kafka, pytest.mark.slow]

PARENT = """
import signal, sys, time
from pathlib import Path
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts what it puts behind with SIGINT ignored
from rollstream.eventlog import broker
from rollstream.eventlog.broker.broker import EmbeddedBroker
with EmbeddedBroker(Path(sys.argv[1])) as broker:
    print(broker.bootstrap_servers, flush=True)
    time.sleep(300)
"""


@pytest.fixture
def parent(workspace: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the workspace's broker."""
    jars()
    process = subprocess.Popen([sys.executable, "-c", PARENT, str(workspace)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        assert process.stdout.readline().startswith("127.0.0.1:")
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def broker_json(workspace: Path) -> dict[str, int]:
    return json.loads((workspace / "broker" / "broker.json").read_text())


def await_end(pid: int, timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_gone(pid):
        assert time.monotonic() < deadline, f"process {pid} lives on"
        time.sleep(0.05)


async def send(kafka: KafkaSettings, value: bytes) -> str:
    log = KafkaLog(kafka)
    await log.start()
    await log.ensure_topics(num_partitions=2)
    await log.send_raw("dlq", key=None, value=value)
    cluster = await log.cluster_id()
    await log.close()
    return cluster


async def kept(kafka: KafkaSettings) -> tuple[str, int]:
    log = KafkaLog(kafka)
    await log.start()
    found = await log.cluster_id(), (await log.end_offsets("dlq"))[0]
    await log.close()
    return found


def test_a_broker_that_is_started_again_keeps_its_data_and_its_address(workspace: Path) -> None:
    jars()
    with EmbeddedBroker(workspace) as broker:
        address = broker.bootstrap_servers
        assert find_running(workspace) == address
        cluster = asyncio.run(send(broker.kafka, b"kept"))
        pid = broker_json(workspace)["broker_pid"]
    assert is_gone(pid)
    assert find_running(workspace) is None
    with EmbeddedBroker(workspace) as broker:
        assert broker.bootstrap_servers == address
        assert asyncio.run(kept(broker.kafka)) == (cluster, 1)


def test_a_workspace_may_lie_under_any_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LC_ALL", "C")
    workspace = tmp_path / "müller, 日本" / "a\\b: c=d#e"
    for count in (1, 2):
        with EmbeddedBroker(workspace) as broker:
            asyncio.run(send(broker.kafka, b"kept"))
            assert asyncio.run(kept(broker.kafka))[1] == count
    assert (workspace / "broker" / "data" / "rollstream.dlq.v1-0").is_dir()
    assert [path.name for path in tmp_path.iterdir()] == ["müller, 日本"]


def test_a_broker_listens_on_loopback_only(workspace: Path) -> None:
    with EmbeddedBroker(workspace):
        listening = {
            connection.laddr.ip.removeprefix("::ffff:")
            for connection in psutil.Process(broker_json(workspace)["broker_pid"]).net_connections()
            if connection.status == psutil.CONN_LISTEN
        }
    assert listening == {"127.0.0.1"}


def test_a_broker_is_a_process_group_in_the_session_of_its_parent(workspace: Path) -> None:
    """Ctrl-C does not reach it, and Linux schedules it with its parent."""
    with EmbeddedBroker(workspace):
        pid = broker_json(workspace)["broker_pid"]
        assert os.getpgid(pid) != os.getpgid(0)
        assert os.getsid(pid) == os.getsid(0)


def test_start_and_stop_may_be_repeated(workspace: Path) -> None:
    broker = EmbeddedBroker(workspace)
    broker.stop()
    address = broker.start()
    assert broker.start() == address
    broker.stop()
    broker.stop()
    assert find_running(workspace) is None


def test_a_second_broker_in_a_workspace_is_refused_with_the_remedy(
    parent: subprocess.Popen[str], workspace: Path
) -> None:
    address = find_running(workspace)
    with pytest.raises(BrokerError, match=rf"in use: .*process {parent.pid}; .*--workspace"):
        EmbeddedBroker(workspace).start()
    assert find_running(workspace) == address


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_broker_ends_with_its_parent_however_it_goes(
    how: signal.Signals, parent: subprocess.Popen[str], workspace: Path
) -> None:
    address = find_running(workspace)
    assert address is not None
    asyncio.run(send(connection(workspace / "broker", address), b"kept"))
    pid = broker_json(workspace)["broker_pid"]
    guard = psutil.Process(pid).ppid()
    parent.send_signal(how)
    parent.wait(60)
    await_end(pid)
    await_end(guard)
    with EmbeddedBroker(workspace) as again:
        assert asyncio.run(kept(again.kafka))[1] == 1


def test_a_broker_ends_even_if_its_guard_is_killed_too(parent: subprocess.Popen[str], workspace: Path) -> None:
    pid = broker_json(workspace)["broker_pid"]
    os.kill(psutil.Process(pid).ppid(), signal.SIGKILL)
    parent.kill()
    await_end(pid)


def test_a_start_right_after_the_holder_was_killed_waits_for_the_workspace(
    parent: subprocess.Popen[str], workspace: Path
) -> None:
    pid = broker_json(workspace)["broker_pid"]
    parent.kill()
    parent.wait()
    with EmbeddedBroker(workspace):
        assert is_gone(pid)


def test_a_port_that_another_took_meanwhile_is_replaced(workspace: Path) -> None:
    with EmbeddedBroker(workspace) as broker:
        address = broker.bootstrap_servers
    with socket.create_server(("127.0.0.1", int(address.split(":")[1]))), EmbeddedBroker(workspace) as broker:
        assert broker.bootstrap_servers != address
        assert asyncio.run(send(broker.kafka, b"x"))


def test_a_workspace_that_cannot_be_written_is_one_clear_error(workspace: Path) -> None:
    workspace.write_text("a file where the folder should be")
    with pytest.raises(BrokerError, match=r"workspace .* cannot start: "):
        EmbeddedBroker(workspace).start()


def test_a_damaged_storage_is_one_clear_error(workspace: Path) -> None:
    with EmbeddedBroker(workspace):
        pass
    (workspace / "broker" / "data" / "meta.properties").write_text("version=1\nnode.id=7\ncluster.id=other\n")
    with pytest.raises(BrokerError, match=r"exited at once: .*broker\.log"):
        EmbeddedBroker(workspace).start()
    assert find_running(workspace) is None


def test_a_full_disk_is_reported_although_the_brokers_log_is_empty(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (workspace / "broker").mkdir(parents=True)
    (workspace / "broker" / "broker.log").write_text("")
    assert EmbeddedBroker(workspace)._last_words().startswith("(no log output) (see ")
    monkeypatch.setattr(broker, "FULL_BYTES", sys.maxsize)
    assert EmbeddedBroker(workspace)._last_words().startswith("its disk is full (see ")


def test_a_broker_that_is_down_on_a_full_disk_is_reported_as_paused(
    parent: subprocess.Popen[str], workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "MIN_FREE_BYTES", sys.maxsize)
    with pytest.raises(BrokerError, match="is in use: "):  # it answers
        EmbeddedBroker(workspace).start()
    killed = broker_json(workspace)["broker_pid"]
    os.kill(killed, signal.SIGKILL)
    await_end(killed)
    with pytest.raises(BrokerError, match=rf"process {parent.pid} started, is paused: its disk is full, .* free space"):
        EmbeddedBroker(workspace).start()


def test_data_without_their_properties_are_not_made_another_clusters(workspace: Path) -> None:
    with EmbeddedBroker(workspace):
        pass
    properties = workspace / "broker" / "data" / "meta.properties"
    kept_text = properties.read_text()
    properties.unlink()
    with pytest.raises(BrokerError, match=r"lack meta\.properties, .*; restore that file, or give another --workspace"):
        EmbeddedBroker(workspace).start()
    properties.write_text(kept_text)
    (workspace / "broker" / "broker.json").write_text('{"port": 99999, "controller_port": null}')
    with EmbeddedBroker(workspace) as broker:
        assert find_running(workspace) == broker.bootstrap_servers


@pytest.mark.parametrize("text", ["", "[1]", "{}", '{"port": -1, "controller_port": 70000}', '{"port": "x"}'])
def test_a_damaged_note_of_the_address_is_passed_over(text: str, tmp_path: Path) -> None:
    (tmp_path / "broker.json").write_text(text)
    ports = _ports(tmp_path / "broker.json")
    assert all(1024 < port < 65536 for port in ports)
    assert ports[0] != ports[1]


def test_an_installation_that_cannot_be_made_names_folder_and_remedy(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    done = subprocess.run(
        [sys.executable, "-c", PARENT, str(tmp_path)],
        env={**os.environ, "ROLLSTREAM_CACHE": str(blocked)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "cannot be installed into" in done.stderr.splitlines()[-1]
    assert "ROLLSTREAM_CACHE" in done.stderr.splitlines()[-1]
