"""One embedded broker for all commands that use a workspace at the same time."""

import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from rollstream.eventlog.broker import lock
from rollstream.eventlog.broker.broker import EmbeddedBroker
from rollstream.eventlog.broker.lock import find_running
from rollstream.eventlog.broker.ports import answers
from rollstream.harness.cli.main import rollstream
from rollstream.harness.services.workspace import AttachedBroker, Workspace, embedded_broker
from rollstream.schemas.errors import BrokerError, ConfigError
from rollstream.schemas.kafka import KafkaSettings

pytestmark = pytest.mark.kafka


def port_of(kafka: KafkaSettings) -> int:
    return int(kafka.bootstrap_servers.rpartition(":")[2])


def test_the_command_that_started_a_broker_stops_it_after_the_last_user(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    workspace = Workspace(tmp_path)
    with ThreadPoolExecutor(1) as pool:
        is_in, may_leave = threading.Event(), threading.Event()

        def own() -> None:
            with embedded_broker(workspace) as (_, broker):
                assert isinstance(broker, EmbeddedBroker)
                is_in.set()
                may_leave.wait()

        owner = pool.submit(own)
        assert is_in.wait(60)
        with embedded_broker(workspace) as (kafka, broker):
            assert isinstance(broker, AttachedBroker)
            may_leave.set()
            with pytest.raises(TimeoutError):
                owner.result(timeout=1.0)
            assert answers(port_of(kafka))
        owner.result(timeout=60)
    assert find_running(tmp_path) is None
    assert "waiting for other commands" in capsys.readouterr().err


def test_a_command_that_started_a_broker_and_failed_leaves_it_to_the_others(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    with ThreadPoolExecutor(1) as pool:
        is_in, may_leave = threading.Event(), threading.Event()

        def own() -> None:
            with embedded_broker(workspace):
                is_in.set()
                may_leave.wait()
                raise ConfigError("no such run")

        owner = pool.submit(own)
        assert is_in.wait(60)
        with embedded_broker(workspace) as (kafka, _):
            may_leave.set()
            with pytest.raises(TimeoutError):
                owner.result(timeout=1.0)
            assert answers(port_of(kafka))
        with pytest.raises(ConfigError, match="no such run"):
            owner.result(timeout=60)
    assert find_running(tmp_path) is None


OWNER = """
import pathlib, signal, sys
from rollstream.harness.services.workspace import Workspace, embedded_broker
signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever runs the tests may ignore it
with embedded_broker(Workspace(pathlib.Path(sys.argv[1]))):
    print("ready", flush=True)
    sys.stdin.readline()
print("ended as it would have")
"""


def test_ctrl_c_while_a_command_waits_for_others_stops_the_broker_and_changes_nothing_else(tmp_path: Path) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert owner.stdin is not None
    assert owner.stdout is not None
    assert owner.stderr is not None
    with owner:
        assert owner.stdout.readline() == "ready\n"
        with embedded_broker(Workspace(tmp_path)):
            owner.stdin.write("\n")
            owner.stdin.flush()
            assert "waiting for other commands" in owner.stderr.readline()
            owner.send_signal(signal.SIGINT)
            reported, complaints = owner.communicate(timeout=60)
        assert (reported, complaints, owner.returncode) == ("ended as it would have\n", "", 0)
    assert find_running(tmp_path) is None


INTERRUPTED = """
import asyncio, pathlib, signal, sys
from rollstream.harness.services.workspace import Workspace, on_log
signal.signal(signal.SIGINT, signal.default_int_handler)
async def work(log):
    print("ready", flush=True)
    await asyncio.Event().wait()
on_log(Workspace(pathlib.Path(sys.argv[1])), None, "interrupted", work)
"""


def test_an_interrupted_command_leaves_its_broker_to_the_others_until_a_second_ctrl_c(tmp_path: Path) -> None:
    (tmp_path / "broker").mkdir()
    with subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED, str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        assert owner.stderr is not None
        assert owner.stdout.readline() == "ready\n"
        with embedded_broker(Workspace(tmp_path)) as (kafka, _):
            owner.send_signal(signal.SIGINT)
            assert owner.stderr.readline().startswith("this command has ended early; waiting for other commands")
            assert answers(port_of(kafka))
            owner.send_signal(signal.SIGINT)
            _, complaints = owner.communicate(timeout=60)
            assert not answers(port_of(kafka))
        assert complaints.endswith("\nKeyboardInterrupt\n")
        assert owner.returncode == -signal.SIGINT
    assert find_running(tmp_path) is None


RUN = """
import asyncio, logging, pathlib, sys
from rollstream.eventlog.broker import lock
from rollstream.eventlog.broker.watch import keep_running
from rollstream.harness.services.workspace import Workspace, embedded_broker
async def run(broker):
    watching = asyncio.create_task(keep_running(broker, lambda _: None))
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    watching.cancel()
    await asyncio.wait({watching})
logging.disable()
lock.RETURN_S = float(sys.argv[2])
with embedded_broker(Workspace(pathlib.Path(sys.argv[1]))) as (_, broker):
    asyncio.run(run(broker))
"""


def start_run(workspace: Path, *, return_s: float = lock.RETURN_S) -> "subprocess.Popen[str]":
    command, pipe = [sys.executable, "-c", RUN, str(workspace), str(return_s)], subprocess.PIPE
    run = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
    assert run.stdout is not None
    assert run.stdout.readline() == "ready\n"
    return run


def status(workspace: Path) -> dict[str, Any]:
    return json.loads((workspace / "broker" / "broker.json").read_text())


def status_of(workspace: Path, *pids: int) -> dict[str, Any]:
    """Wait until one of the processes has started the broker."""
    deadline = time.monotonic() + 60
    while (now := status(workspace))["pid"] not in pids:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return now


def test_a_broker_whose_command_was_killed_is_taken_over_by_one_of_the_runs_that_use_it(tmp_path: Path) -> None:
    owner = start_run(tmp_path)
    runs, before = {run.pid: run for run in (start_run(tmp_path), start_run(tmp_path))}, status(tmp_path)
    with owner:
        owner.kill()
    now = status_of(tmp_path, *runs)
    assert now["bootstrap_servers"] == before["bootstrap_servers"] == find_running(tmp_path)
    assert now["broker_pid"] != before["broker_pid"]

    with runs.pop(now["pid"]) as heir, next(iter(runs.values())) as other:
        assert heir.stdin is not None
        assert heir.stderr is not None
        heir.stdin.write("\n")
        heir.stdin.flush()
        assert heir.stderr.readline().startswith("waiting for other commands")
        assert find_running(tmp_path) == now["bootstrap_servers"]
        assert other.communicate("\n", timeout=60) == ("", "")
        assert heir.communicate(timeout=60) == ("", "")
    assert (heir.returncode, other.returncode) == (0, 0)
    assert find_running(tmp_path) is None


def serve_broker(workspace: Path) -> "subprocess.Popen[str]":
    """A `serve broker` that has printed that its broker is ready."""
    command = [sys.executable, "-m", "rollstream.harness.cli.main", "serve", "broker"]
    env = {**os.environ, "ROLLSTREAM_WORKSPACE": str(workspace), "ROLLSTREAM_LOG_LEVEL": "ERROR"}
    served = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert served.stdout is not None
    assert served.stdout.readline().endswith(" ready\n")
    return served


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_served_broker_that_is_restarted_under_a_run_is_not_taken_over(tmp_path: Path, number: int) -> None:
    with serve_broker(tmp_path) as first:
        run, before = start_run(tmp_path), status(tmp_path)
        first.send_signal(number)
    time.sleep(3)  # more than the run waits before it restarts a broker that died
    assert not answers(before["port"])
    with serve_broker(tmp_path) as second, run:
        assert status(tmp_path)["pid"] == second.pid
        assert find_running(tmp_path) == before["bootstrap_servers"]
        assert run.communicate("\n", timeout=60) == ("", "")
        second.terminate()
        assert second.wait(60) == 0


@pytest.mark.slow
def test_a_served_broker_that_comes_back_late_goes_on_with_the_broker_after_the_run_that_took_it_over(
    tmp_path: Path,
) -> None:
    with serve_broker(tmp_path) as first:
        run, before = start_run(tmp_path, return_s=0.5), status(tmp_path)
        first.kill()
    now = status_of(tmp_path, run.pid)
    with serve_broker(tmp_path) as second, run:
        assert second.stdout is not None
        assert f"a run (process {run.pid}) took it over" in second.stdout.readline()
        assert status(tmp_path) == now
        assert run.communicate("\n", timeout=60) == ("", ""), "it does not wait for `serve broker`"
        assert status_of(tmp_path, second.pid)["bootstrap_servers"] == before["bootstrap_servers"]
        assert find_running(tmp_path) == before["bootstrap_servers"]
        second.terminate()
        assert second.wait(60) == 0
    assert find_running(tmp_path) is None


@pytest.mark.parametrize("how", [lock.SERVED, lock.STARTED])
def test_a_take_over_that_is_called_off_ends_soon(tmp_path: Path, how: str) -> None:
    """While it waits for `serve broker` to come back, and for the broker of a killed command to end."""
    folder = tmp_path / "broker"
    (folder / "data").mkdir(parents=True)
    for name in ("data/meta.properties", "password"):
        (folder / name).touch()
    (folder / "lock").write_text(f"{2**30} {how}\n")
    attached = AttachedBroker(EmbeddedBroker(tmp_path), "127.0.0.1:9")
    with (folder / "lock").open() as of_ending_broker, ThreadPoolExecutor(1) as pool:
        if how == lock.STARTED:
            fcntl.flock(of_ending_broker, fcntl.LOCK_EX)
        taking_over = pool.submit(attached.restart)
        with pytest.raises(TimeoutError):
            taking_over.result(timeout=1.0)
        attached.call_off_restart()
        with contextlib.nullcontext() if how == lock.STARTED else pytest.raises(BrokerError, match="is being stopped"):
            taking_over.result(timeout=2.0)


def test_a_broker_that_a_run_has_not_started_yet_is_not_reported_as_taken_over(tmp_path: Path) -> None:
    folder = tmp_path / "broker"
    folder.mkdir()
    (folder / "lock").write_text(f"{os.getpid()} {lock.TAKEN_OVER}\n")
    with (folder / "lock").open() as of_run:
        fcntl.flock(of_run, fcntl.LOCK_EX)
        assert lock.taken_over(tmp_path) is None
        (folder / "broker.json").write_text('{"bootstrap_servers": "127.0.0.1:9"}')
        assert lock.taken_over(tmp_path) == ("127.0.0.1:9", str(os.getpid()))


def test_commands_that_begin_at_the_same_moment_share_one_broker(tmp_path: Path) -> None:
    workspace, both_in = Workspace(tmp_path), threading.Barrier(3)

    def use(_: int) -> tuple[KafkaSettings, bool]:
        with embedded_broker(workspace) as (kafka, broker):
            both_in.wait(60)
            return kafka, isinstance(broker, EmbeddedBroker)

    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(use, range(3)))
    assert len({kafka.bootstrap_servers for kafka, _ in found}) == 1
    assert sorted(is_owner for _, is_owner in found) == [False, False, True]


def test_commands_that_check_one_workspace_at_the_same_time_can_all_write_it(tmp_path: Path) -> None:
    workspace, both_in = Workspace(tmp_path), threading.Barrier(2)

    def check(_: int) -> None:
        both_in.wait(60)
        for _ in range(500):
            workspace.create()

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(check, range(2))) == [None, None]


@pytest.mark.parametrize(
    "uri", ["s3://bucket/artifacts", "memory://artifacts", "${STORES}/artifacts", "/unmounted/artifacts", "~/artifacts"]
)
def test_a_configured_store_is_the_workspaces_whatever_its_name(uri: str, tmp_path: Path) -> None:
    (tmp_path / "artifacts").mkdir()  # of an earlier run without a configured store
    Workspace(tmp_path).remember_broker("embedded", artifact_uri=uri)
    assert Workspace(tmp_path).artifact_uri() == uri


def test_a_relative_store_is_found_from_every_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        if name == "first":
            Workspace(tmp_path).remember_broker("embedded", artifact_uri="store")
    assert Workspace(tmp_path).artifact_uri() == str(tmp_path / "first" / "store")


def test_a_relative_store_beside_the_workspace_is_found_after_both_were_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "project" / "workspace").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "project")
    Workspace(Path("workspace")).remember_broker("embedded", artifact_uri="stores/one")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "project").rename(tmp_path / "moved")
    assert Workspace(tmp_path / "moved" / "workspace").artifact_uri() == str(tmp_path / "moved" / "stores" / "one")


def test_gc_refuses_a_configured_store_that_does_not_exist(tmp_path: Path) -> None:
    Workspace(tmp_path).remember_broker("embedded", artifact_uri=str(tmp_path / "gone"))
    asked = ["gc", "--dry-run", "-w"]
    with pytest.raises(ConfigError, match=r"artifact store .*gone does not exist; correct"):
        raise CliRunner().invoke(rollstream, [*asked, str(tmp_path)]).exception or AssertionError
    with pytest.raises(ConfigError, match="has no runs yet"):  # with its own store, which is made when needed
        raise CliRunner().invoke(rollstream, [*asked, str(tmp_path / "new")]).exception or AssertionError


@pytest.mark.parametrize("is_configured", [True, False])
def test_a_copy_or_a_moved_workspace_has_artifacts_of_its_own(is_configured: bool, tmp_path: Path) -> None:
    """Also one whose own folder was remembered, as by earlier versions."""
    original, copy, moved = (tmp_path / name for name in ("original", "copy", "moved"))
    (original / "artifacts").mkdir(parents=True)
    store = tmp_path / "store" if is_configured else original / "artifacts"
    if is_configured:
        Workspace(original).remember_broker("embedded", artifact_uri=str(store))
    else:
        (original / "workspace.json").write_text(json.dumps({"artifact_uri": str(store)}))
    shutil.copytree(original, copy)
    assert Workspace(original).artifact_uri() == str(store)
    assert Workspace(copy).artifact_uri() == str(store if is_configured else copy / "artifacts")
    original.rename(moved)
    assert Workspace(moved).artifact_uri() == str(store if is_configured else moved / "artifacts")
