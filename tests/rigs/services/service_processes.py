"""The long-running services as local processes, and a configuration of two small steps for them."""

import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

import yaml

from rollstream.harness.services.supervisor import ChildSpec
from rollstream.schemas.kafka import KafkaSettings

NAMES = ("producers", "processors", "learner", "metrics")
CLI = [sys.executable, "-m", "rollstream.harness.cli.main"]
Running: TypeAlias = "dict[str, subprocess.Popen[bytes]]"


@contextmanager
def running_services(
    arguments: Mapping[str, list[str]], environments: Mapping[str, dict[str, str]], folder: Path
) -> Iterator[Running]:
    """Processes of the command line by service, their output in `folder`/NAME.log; stopped by SIGTERM at the end."""
    running: Running = {}
    try:
        for name in arguments:
            with (folder / f"{name}.log").open("wb") as log:
                running[name] = subprocess.Popen(
                    [*CLI, *arguments[name]], env=environments[name], stdout=log, stderr=log
                )
        yield running
    finally:
        for process in running.values():
            process.send_signal(signal.SIGTERM)
        for process in running.values():
            try:
                process.wait(40)
            except subprocess.TimeoutExpired:
                process.kill()


def write_config(path: Path, kafka: KafkaSettings, data: Path, model: Path) -> None:
    path.write_text(
        yaml.safe_dump(
            {
                "workflow": "guess_number",
                "trajectory_builders": {
                    "b": {
                        "_type": "rollstream",
                        "bootstrap_servers": kafka.bootstrap_servers,
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


def spec(name: str, code: str, stdin: bytes = b"", rank: int = 0) -> ChildSpec:
    return ChildSpec(name, [sys.executable, "-c", code], stdin, rank)
