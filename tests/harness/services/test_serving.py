"""Services as processes: signs of life, an orderly end, and clear errors."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollstream.eventlog.broker.broker import EmbeddedBroker
from rollstream.eventlog.broker.credentials import environment
from rollstream.eventlog.broker.lock import find_running
from rollstream.harness.services.liveness import beat, read_sign, read_signs
from rollstream.harness.services.serving import FROM_ENVIRONMENT, read_settings, recording, settings_of, workspace_of
from rollstream.schemas.errors import ConfigError
from rollstream.schemas.kafka import KafkaSettings
from rollstream.schemas.services import EndpointSettings, ProducerSettings

CLI = [sys.executable, "-m", "rollstream.harness.cli.main"]


def variables(kafka: KafkaSettings, workspace: Path, num_partitions: int = 6) -> dict[str, str]:
    return {
        **os.environ,
        **environment(kafka),
        "ROLLSTREAM_ARTIFACT_URI": str(workspace / "artifacts"),
        "ROLLSTREAM_WORKSPACE": str(workspace),
        "ROLLSTREAM_NUM_PARTITIONS": str(num_partitions),
        "OMP_NUM_THREADS": "1",
    }


def test_settings_given_win_over_the_environment() -> None:
    env = {"ROLLSTREAM_BOOTSTRAP_SERVERS": "a:1", "ROLLSTREAM_NUM_PARTITIONS": "3"}
    given = {"bootstrap_servers": "b:2", "engine": {"kind": "scripted"}}
    settings = settings_of("producers", "p-1", given, env)
    assert isinstance(settings, ProducerSettings)
    assert (settings.bootstrap_servers, settings.num_partitions, settings.name) == ("b:2", 3, "p-1")
    assert settings.engine.kind == "scripted"


def test_an_empty_variable_is_one_that_is_not_set() -> None:
    given = {"bootstrap_servers": "b:2", "model_group": "run-1/policy", "engine": {"kind": "scripted"}}
    empty = dict.fromkeys(FROM_ENVIRONMENT.values(), "")
    for service in ("processors", "endpoint", "producers"):
        block = given if service == "endpoint" else {"bootstrap_servers": "b:2"}
        assert settings_of(service, None, block, empty) == settings_of(service, None, block, {})
    with pytest.raises(ConfigError, match=r"serve metrics: bootstrap_servers: .*set ROLLSTREAM_BOOTSTRAP_SERVERS"):
        settings_of("metrics", None, {}, empty)
    with pytest.raises(ConfigError, match="serve metrics: workspace: is ''; give the path of a folder"):
        settings_of("metrics", None, {"workspace": ""}, {})
    assert workspace_of(empty) == ".rollstream"


def test_the_gateway_is_the_endpoint_under_either_name() -> None:
    given = {"bootstrap_servers": "b:2", "model_group": "run-1/policy", "engine": {"kind": "scripted"}}
    found = [settings_of(service, "g-1", given, {}) for service in ("gateway", "endpoint")]
    assert found[0] == found[1]
    assert isinstance(found[0], EndpointSettings)


@pytest.mark.parametrize(
    ("service", "given", "meant"),
    [
        ("gateway", {"model_group": "run-1/policy"}, "gateway"),
        ("gateway", {"gateway": {}}, "producers"),
        ("endpoint", {"model_group": "run-1/policy"}, "endpoint"),
        ("producers", {}, "producers"),
    ],
)
def test_a_gateway_with_a_section_of_its_own_is_a_producers_process(
    service: str, given: dict[str, Any], meant: str
) -> None:
    assert recording(service, given) == meant


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "serve gateway: set model_group to answer without recording, or gateway"),
        ({"gateway": {}, "model_group": "run-1/policy"}, "serve gateway: either model_group, or gateway"),
    ],
)
def test_the_error_of_a_gateway_of_neither_kind_names_the_key_to_set(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        recording("gateway", given)


@pytest.mark.parametrize(
    ("service", "given", "message"),
    [
        ("learner", {"thread": 1}, "serve learner: thread: unknown key; did you mean threads?"),
        ("gateway", {"model_grup": "r/p"}, "serve gateway: model_grup: unknown key; did you mean model_group?"),
        (
            "producers",
            {"engine": {"kind": "vllm", "base_url": 1}},
            "engine.base_url: unknown key; did you mean base_urls?",
        ),
        ("producers", {"workspace": 5}, "serve producers: workspace: is 5; give the path of a folder"),
        ("producers", {"engine": {"kind": "openai", "base_url": "FTP://X"}}, "engine.base_url: 'FTP://X' is not a URL"),
        ("metrics", {"port": True}, "serve metrics: port: is true; give a number"),
        ("producers", {"gateway": {"port": False}}, "serve producers: gateway.port: is false; give a number"),
        ("metrics", {"zzz": 1}, "serve metrics: zzz: unknown key; known keys: allow, artifact_uri, "),
    ],
)
def test_a_wrong_setting_is_named_with_the_one_that_is_meant(service: str, given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        settings_of(service, None, {"bootstrap_servers": "a:1", **given}, {})


def test_settings_that_are_nested_too_deeply_are_an_error_of_their_file(tmp_path: Path) -> None:
    path = tmp_path / "settings.json"
    path.write_text('{"engine": ' + "[" * 100_000)
    with pytest.raises(ConfigError, match=r"--settings .*settings\.json cannot be read as JSON: .*; correct it"):
        read_settings(str(path))


def test_a_sign_of_life_comes_and_goes(tmp_path: Path) -> None:
    async def scenario() -> None:
        beating = asyncio.create_task(beat(tmp_path, "learner", "learner-1"))
        await asyncio.sleep(0.05)
        sign = read_sign(tmp_path, "learner-1")
        assert sign is not None
        assert sign.is_alive
        assert [found.name for found in read_signs(tmp_path)] == ["learner-1"]
        beating.cancel()
        await asyncio.gather(beating, return_exceptions=True)
        assert read_sign(tmp_path, "learner-1") is None

    asyncio.run(scenario())


def test_an_old_sign_is_not_alive(tmp_path: Path) -> None:
    path = tmp_path / "learner-1.json"
    path.write_text(json.dumps({"service": "learner", "pid": 1}))
    os.utime(path, (time.time() - 100, time.time() - 100))
    sign = read_sign(tmp_path, "learner-1")
    assert sign is not None
    assert not sign.is_alive


BEATING = """
import asyncio, pathlib, sys
from rollstream.harness.services.liveness import beat
asyncio.run(beat(pathlib.Path(sys.argv[1]), "learner", "learner-1"))
"""


def test_a_service_that_was_killed_is_dead_as_soon_as_its_process_is_gone(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", BEATING, str(tmp_path)]) as process:
        while (sign := read_sign(tmp_path, "learner-1")) is None:
            time.sleep(0.01)
        assert (sign.pid, sign.state) == (process.pid, "alive")
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        for _ in ("not reaped", "reaped"):
            sign = read_sign(tmp_path, "learner-1")
            assert sign is not None
            assert (sign.state, sign.is_alive) == ("dead", False)
            process.wait()
    path = tmp_path / "learner-1.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"pids": "of another container"}))
    sign = read_sign(tmp_path, "learner-1")
    assert sign is not None
    assert sign.is_alive, "whether its process runs is not known"


def test_a_jump_of_the_wall_clock_makes_no_sign_old_or_young(tmp_path: Path) -> None:
    async def scenario() -> None:
        beating = asyncio.create_task(beat(tmp_path, "learner", "learner-1"))
        while (sign := read_sign(tmp_path, "learner-1")) is None:
            await asyncio.sleep(0.01)
        for jump_s in (-86_400, 86_400):
            os.utime(tmp_path / "learner-1.json", (time.time() + jump_s, time.time() + jump_s))
            sign = read_sign(tmp_path, "learner-1")
            assert sign is not None
            assert sign.is_alive
        beating.cancel()
        await asyncio.gather(beating, return_exceptions=True)

    asyncio.run(scenario())


def test_signs_of_life_go_on_after_one_that_could_not_be_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        folder = tmp_path / "health"
        folder.write_text("a file where the folder should be")
        beating = asyncio.create_task(beat(folder, "learner", "learner-1", interval_s=0.01))
        while not caplog.messages:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        folder.unlink()
        while read_sign(folder, "learner-1") is None:
            assert not beating.done()
            await asyncio.sleep(0.01)
        beating.cancel()
        await asyncio.gather(beating, return_exceptions=True)

    asyncio.run(scenario())
    assert len(caplog.messages) == 1, "logged once, however often it fails"
    assert "cannot write the heartbeat" in caplog.text


WILL_NOT_STOP = """
import asyncio, sys
from rollstream.harness.services.serving import leaving_nobody

async def will_not_stop():
    while True:
        try:
            await asyncio.sleep(0.05)
        except asyncio.CancelledError:
            pass

async def work():
    left_behind.append(asyncio.create_task(will_not_stop()))
    await asyncio.sleep(0.1)
    if sys.argv[1] == "fails":
        raise OSError("the log is gone")

left_behind = []
asyncio.run(leaving_nobody("producers", work(), within_s=0.2))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("how", "status"), [("fails", 1), ("ends", 0)])
def test_a_service_ends_although_a_task_that_it_leaves_behind_does_not(how: str, status: int) -> None:
    done = subprocess.run([sys.executable, "-c", WILL_NOT_STOP, how], capture_output=True, text=True, timeout=30)
    assert done.returncode == status
    assert "producers: exiting although a task or thread is still running" in done.stderr
    assert ("the log is gone" in done.stderr) == (how == "fails")


@pytest.mark.kafka
def test_a_service_is_healthy_while_it_runs_and_ends_in_order(kafka: KafkaSettings, tmp_path: Path) -> None:
    env = variables(kafka, tmp_path)
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen([*CLI, "serve", "metrics", "--name", "m-1"], env=env, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 40
        while not (tmp_path / "health" / "m-1.json").exists():
            assert process.poll() is None, (tmp_path / "log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert subprocess.run([*CLI, "health", "m-1"], env=env, capture_output=True).returncode == 0
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0, (tmp_path / "log").read_text()
    finally:
        process.kill()
        process.wait()
    assert "Traceback" not in (tmp_path / "log").read_text()
    assert subprocess.run([*CLI, "health", "m-1"], env=env, capture_output=True).returncode == 1


@pytest.mark.kafka
def test_topics_with_other_partition_counts_are_refused(kafka: KafkaSettings, tmp_path: Path) -> None:
    first = variables(kafka, tmp_path)
    process = subprocess.Popen([*CLI, "serve", "metrics", "--name", "m-1"], env=first, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 40
    while not (tmp_path / "health" / "m-1.json").exists():
        assert time.monotonic() < deadline
        time.sleep(0.1)
    process.terminate()
    process.wait(30)
    done = subprocess.run(
        [*CLI, "serve", "metrics"],
        env=variables(kafka, tmp_path, 7),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert "error: topic rollstream.tasks.v1 has" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.kafka
@pytest.mark.slow
@pytest.mark.kafka
def test_metrics_end_soon_although_the_broker_is_away(tmp_path: Path) -> None:
    workspace = tmp_path / "workspace"
    with EmbeddedBroker(tmp_path / "broker") as broker:
        env = variables(broker.kafka, workspace)
        with (tmp_path / "log").open("wb") as log:
            process = subprocess.Popen([*CLI, "serve", "metrics", "--name", "m-1"], env=env, stdout=log, stderr=log)
        try:
            deadline = time.monotonic() + 60
            while "ready (SQL on port" not in (tmp_path / "log").read_text():
                assert process.poll() is None, (tmp_path / "log").read_text()
                assert time.monotonic() < deadline
                time.sleep(0.1)
            time.sleep(3)  # until the projector reads
            os.kill(json.loads((tmp_path / "broker" / "broker" / "broker.json").read_text())["broker_pid"], 9)
            time.sleep(3)  # until the clients have noticed
            process.send_signal(signal.SIGTERM)
            began = time.monotonic()
            assert process.wait(30) == 0, (tmp_path / "log").read_text()
            took_s = time.monotonic() - began
        finally:
            process.kill()
            process.wait()
    assert took_s < 8, (tmp_path / "log").read_text()
    assert "the log does not answer" in (tmp_path / "log").read_text()


@pytest.mark.slow
def test_a_served_broker_that_dies_is_started_again_and_ends_in_order(tmp_path: Path) -> None:
    env = {**os.environ, "ROLLSTREAM_WORKSPACE": str(tmp_path)}
    with (tmp_path / "said.txt").open("w") as output:
        process = subprocess.Popen([*CLI, "serve", "broker"], env=env, stdout=output, stderr=output)

    def wait_until(claim: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 60
        while not claim():
            assert process.poll() is None, (tmp_path / "said.txt").read_text()
            assert time.monotonic() < deadline, (tmp_path / "said.txt").read_text()
            time.sleep(0.1)

    try:
        wait_until(lambda: find_running(tmp_path) is not None)
        address = find_running(tmp_path)
        first = json.loads((tmp_path / "broker" / "broker.json").read_text())["broker_pid"]
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: json.loads((tmp_path / "broker" / "broker.json").read_text())["broker_pid"] != first)
        assert find_running(tmp_path) == address
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0, (tmp_path / "said.txt").read_text()
    finally:
        process.kill()
        process.wait()
    text = (tmp_path / "said.txt").read_text()
    assert "Traceback" not in text
    assert f"services with this workspace: ROLLSTREAM_BOOTSTRAP_SERVERS={address}\n" in text
    assert find_running(tmp_path) is None
