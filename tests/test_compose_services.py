"""Every service of docker-compose.yml as a local process: its own command, its own environment, two steps trained."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from rollstream.eventlog.broker import EmbeddedBroker
from rollstream.harness.tiny_model import make_tiny_model

ROOT = Path(__file__).resolve().parents[1]
SERVICES: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
NAMES = ("producers", "processors", "learner", "metrics")
CLI = [sys.executable, "-m", "rollstream.harness.cli"]


def environment_of(name: str, bootstrap_servers: str, data: Path) -> dict[str, str]:
    """The service's environment with the broker's address and the volume in their local places."""
    given = {key: str(value) for key, value in SERVICES[name]["environment"].items()}
    local = {
        key: value.replace("kafka:19092", bootstrap_servers).replace("/data/", f"{data}/")
        for key, value in given.items()
    }
    return {**os.environ, **local, "OMP_NUM_THREADS": "1"}


@contextmanager
def services(bootstrap_servers: str, data: Path) -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    """All services, started as compose would start them and stopped by SIGTERM."""
    running: dict[str, subprocess.Popen[bytes]] = {}
    try:
        for name in NAMES:
            with (data / f"{name}.log").open("wb") as log:
                running[name] = subprocess.Popen(
                    [*CLI, *SERVICES[name]["command"]],
                    env=environment_of(name, bootstrap_servers, data),
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
        yield running
    finally:
        for process in running.values():
            process.send_signal(signal.SIGTERM)
        for process in running.values():
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()


def is_healthy(name: str, bootstrap_servers: str, data: Path) -> bool:
    """What the service's own health check says."""
    test = SERVICES[name]["healthcheck"]["test"]
    assert test[:2] == ["CMD", "rollstream"]
    checked = subprocess.run(
        [*CLI, *test[2:]], env=environment_of(name, bootstrap_servers, data), capture_output=True, timeout=60
    )
    return checked.returncode == 0


def wait_healthy(bootstrap_servers: str, data: Path) -> None:
    for name in NAMES:
        deadline = time.monotonic() + 90
        while not is_healthy(name, bootstrap_servers, data):
            assert time.monotonic() < deadline, (data / f"{name}.log").read_text()[-3000:]
            time.sleep(0.5)


def write_config(path: Path, bootstrap_servers: str, data: Path, model: Path) -> None:
    path.write_text(
        yaml.safe_dump(
            {
                "workflow": "guess_number",
                "trajectory_builders": {
                    "b": {
                        "_type": "rollstream",
                        "bootstrap_servers": bootstrap_servers,
                        "services": "external",
                        "num_generations": 4,
                        "max_turns": 3,
                        "drop_zero_variance": False,
                        "sampling": {"max_new_tokens": 2},
                    }
                },
                "trainer_adapters": {
                    "a": {
                        "_type": "rollstream",
                        "model": {"path": str(model)},
                        "artifact_uri": str(data / "artifacts"),
                        "tasks_per_epoch": 4,
                    }
                },
                "trainers": {"t": {"_type": "rollstream"}},
                "finetuning": {
                    "trainer": "t",
                    "trajectory_builder": "b",
                    "trainer_adapter": "a",
                    "num_epochs": 2,
                    "output_dir": str(data / "output"),
                },
            }
        )
    )


@pytest.mark.kafka
@pytest.mark.slow
def test_the_composed_services_train_two_steps(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    model = make_tiny_model(data / "model", seed=0)
    config, result = tmp_path / "run.yaml", tmp_path / "result.json"
    with EmbeddedBroker(tmp_path / "broker") as broker, services(broker.bootstrap_servers, data) as running:
        bootstrap_servers = broker.bootstrap_servers
        wait_healthy(bootstrap_servers, data)
        write_config(config, bootstrap_servers, data, model)
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
            capture_output=True,
            text=True,
            timeout=240,
        )
        logs = "\n".join((data / f"{name}.log").read_text()[-1500:] for name in NAMES)
        assert finetuned.returncode == 0, finetuned.stdout + finetuned.stderr + logs
        assert all(process.poll() is None for process in running.values()), logs
    assert json.loads(result.read_text())["version"] >= 1
    assert (data / "output" / "config.json").exists()


def test_every_service_names_itself_to_its_health_check() -> None:
    for name in (*NAMES, "learner-gpu"):
        command, test = SERVICES[name]["command"], SERVICES[name]["healthcheck"]["test"]
        assert command[command.index("--name") + 1] == test[-1]
