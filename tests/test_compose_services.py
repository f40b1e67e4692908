"""Every service of docker-compose.yml as a local process: its own command, its own environment, two steps trained."""

import asyncio
import json
import os
import signal
import subprocess
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml

from rollstream.eventlog.broker.broker import EmbeddedBroker
from rollstream.eventlog.broker.credentials import environment
from rollstream.eventlog.codec import kind_of
from rollstream.eventlog.kafka.log import KafkaLog
from rollstream.eventlog.reading import read_to_end
from rollstream.learner.tiny_model import make_tiny_model
from rollstream.schemas.kafka import KafkaSettings
from rollstream.schemas.variables import expand
from tests.rigs.services.service_processes import CLI, NAMES, running_services, write_config

ROOT = Path(__file__).resolve().parents[1]
SERVICES: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]


def environment_of(name: str, kafka: KafkaSettings, data: Path) -> dict[str, str]:
    """The service's environment with the broker's address and the volume in their local places."""
    given = {key: str(value) for key, value in SERVICES[name]["environment"].items()}
    local = {
        key: str(expand(value, {})).replace("kafka:19092", kafka.bootstrap_servers).replace("/data/", f"{data}/")
        for key, value in given.items()
    }
    return {**os.environ, **local, **environment(kafka), "OMP_NUM_THREADS": "1"}


def is_healthy(name: str, kafka: KafkaSettings, data: Path) -> bool:
    """Result of the service's own health check."""
    test = SERVICES[name]["healthcheck"]["test"]
    assert test[:2] == ["CMD", "rollstream"]
    checked = subprocess.run([*CLI, *test[2:]], env=environment_of(name, kafka, data), capture_output=True, timeout=60)
    return checked.returncode == 0


def wait_healthy(kafka: KafkaSettings, data: Path) -> None:
    for name in NAMES:
        deadline = time.monotonic() + 90
        while not is_healthy(name, kafka, data):
            assert time.monotonic() < deadline, (data / f"{name}.log").read_text()[-3000:]
            time.sleep(0.5)


@pytest.mark.kafka
@pytest.mark.slow
def test_the_composed_services_train_two_steps(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    model = make_tiny_model(data / "models" / "tiny", seed=0)
    config, result = tmp_path / "run.yaml", tmp_path / "result.json"
    commands = {name: SERVICES[name]["command"] for name in NAMES}
    with ExitStack() as stack:
        broker = stack.enter_context(EmbeddedBroker(tmp_path / "broker"))
        environments = {name: environment_of(name, broker.kafka, data) for name in NAMES}
        running = stack.enter_context(running_services(commands, environments, data))
        wait_healthy(broker.kafka, data)
        write_config(config, broker.kafka, data, model)
        finetuned = subprocess.run(
            [
                *CLI,
                "finetune",
                "--config_file",
                str(config),
                "--result_json_path",
                str(result),
                "--workspace",
                str(data / "workspace"),
            ],
            env={**os.environ, **environment(broker.kafka)},
            capture_output=True,
            text=True,
            timeout=240,
        )
        logs = "\n".join((data / f"{name}.log").read_text()[-1500:] for name in NAMES)
        assert finetuned.returncode == 0, finetuned.stdout + finetuned.stderr + logs
        assert all(process.poll() is None for process in running.values()), logs
    assert json.loads(result.read_text())["version"] >= 1
    assert (data / "output" / "config.json").exists()


HALTS = """
import asyncio


async def halts(session):
    if session.member == 0:
        raise RuntimeError("the board is broken")
    await asyncio.sleep(3600)
"""


async def closed_groups(kafka: KafkaSettings) -> list[Any]:
    log = KafkaLog(kafka, client_id="test")
    await log.start()
    try:
        return [record async for record in read_to_end(log, "groups") if kind_of(record) == "group_closed"]
    finally:
        await log.close()


@pytest.mark.kafka
@pytest.mark.slow
def test_a_failure_in_a_producers_process_is_shown_while_its_group_is_open(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    model = make_tiny_model(data / "models" / "tiny", seed=0)
    (data / "board.py").write_text(HALTS)
    config, output = tmp_path / "run.yaml", tmp_path / "finetune.log"
    commands = {name: SERVICES[name]["command"] for name in NAMES}
    with ExitStack() as stack:
        broker = stack.enter_context(EmbeddedBroker(tmp_path / "broker"))
        environments = {name: environment_of(name, broker.kafka, data) for name in NAMES}
        for environment_variables in environments.values():
            environment_variables["PYTHONPATH"] = str(data)
            environment_variables["ROLLSTREAM_ALLOW"] += ",python:board.halts"
        stack.enter_context(running_services(commands, environments, data))
        wait_healthy(broker.kafka, data)
        write_config(config, broker.kafka, data, model)
        config.write_text(config.read_text().replace("workflow: guess_number", "workflow: python:board.halts"))
        command = [*CLI, "finetune", "--config_file", str(config), "--workspace", str(data / "workspace")]
        with output.open("w") as out:
            finetune = subprocess.Popen(
                command,
                stdout=out,
                stderr=out,
                env={**os.environ, **environment(broker.kafka), "PYTHONPATH": str(data)},
            )
        try:
            deadline = time.monotonic() + 90
            while "the board is broken" not in output.read_text():
                logs = "\n".join((data / f"{name}.log").read_text()[-1500:] for name in NAMES)
                assert finetune.poll() is None, output.read_text() + logs
                assert time.monotonic() < deadline, output.read_text() + logs
                time.sleep(0.2)
            assert asyncio.run(closed_groups(broker.kafka)) == []
        finally:
            finetune.send_signal(signal.SIGINT)
            finetune.wait(60)
        assert output.read_text().count("the board is broken") == 1


def test_every_service_names_itself_to_its_health_check() -> None:
    for name in (*NAMES, "learner-gpu"):
        command, test = SERVICES[name]["command"], SERVICES[name]["healthcheck"]["test"]
        assert command[command.index("--name") + 1] == test[-1]
