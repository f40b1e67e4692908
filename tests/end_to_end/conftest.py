"""Whole runs by the command line: a project with a tiny model, a configuration, and the commands."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from rollstream.learner.tiny_model import make_tiny_model
from tests.rigs.services import forked_command, forked_commands
from tests.rigs.services.forked_commands import Command

CLI = [sys.executable, "-m", "rollstream.harness.cli.main"]

GAME = '''
from zlib import crc32

from rollstream.producers.rollout.session import Session


async def digits(session: Session) -> None:
    """Two turns; the reward is the share of digits in the answers, and a little by its words, so that none tie."""
    text = ""
    messages = [{"role": "user", "content": "?"}]
    for _ in range(2):
        reply = await session.chat(messages)
        text += reply.text
        messages += [{"role": "assistant", "content": reply.text}, {"role": "user", "content": "+"}]
    share = sum(character.isdigit() for character in text) / max(1, len(text))
    await session.reward(share + crc32(text.encode()) / 2**40)
'''
ENVIRONMENT = {**os.environ, **forked_command.AT_IMPORT}


@dataclass(frozen=True)
class Project:
    """A user's folder: a tiny model, an environment, configurations and a workspace."""

    folder: Path

    @property
    def workspace(self) -> Path:
        return self.folder / ".rollstream"

    @property
    def model(self) -> Path:
        return self.folder / "model"

    @property
    def result(self) -> Path:
        return self.folder / "result.json"

    def configuration(self, *, num_epochs: int = 3, **builder: Any) -> dict[str, Any]:
        """A small guess_number run; `builder` adds to the trajectory builder's block."""
        return {
            "workflow": "guess_number",
            "trajectory_builders": {
                "rollouts": {
                    "_type": "rollstream",
                    "bootstrap_servers": "embedded",
                    "num_generations": 4,
                    "max_turns": 4,
                    "sampling": {"max_new_tokens": 3},
                    "num_partitions": 2,
                    "drop_zero_variance": False,
                    "tick_interval_s": 0.2,
                    "engine": {"threads": 1},
                    **builder,
                }
            },
            "trainer_adapters": {
                "learner": {
                    "_type": "rollstream",
                    "model": {"path": str(self.model)},
                    "tasks_per_epoch": 4,
                    "threads": 1,
                    "optimizer": {"learning_rate": "1e-3"},
                }
            },
            "trainers": {"trainer": {"_type": "rollstream"}},
            "finetuning": {
                "trainer": "trainer",
                "trajectory_builder": "rollouts",
                "trainer_adapter": "learner",
                "num_epochs": num_epochs,
                "output_dir": str(self.folder / "output"),
            },
        }

    def write(self, configuration: dict[str, Any], name: str = "run.yaml") -> Path:
        """The configuration as a file."""
        path = self.folder / name
        path.write_text(yaml.safe_dump(configuration))
        return path

    def command(self, *arguments: str) -> list[str]:
        return [*CLI, *arguments, "--workspace", str(self.workspace)]

    def run(self, *arguments: str, timeout: float = 240, **environment: str) -> subprocess.CompletedProcess[str]:
        """One command to its end."""
        command, env = self.command(*arguments), self._environment(environment)
        if not environment:
            return forked_commands.run(command[len(CLI) :], timeout, cwd=self.folder, env=env)
        return subprocess.run(command, capture_output=True, text=True, timeout=timeout, cwd=self.folder, env=env)

    def start(self, *arguments: str, **environment: str) -> Command:
        """One command that goes on."""
        command, env, path = self.command(*arguments), self._environment(environment), self.folder / "out.txt"
        if not environment:
            return forked_commands.start(command[len(CLI) :], path, cwd=self.folder, env=env)
        with path.open("a") as out:
            return subprocess.Popen(command, stdout=out, stderr=out, text=True, cwd=self.folder, env=env)

    def _environment(self, more: Mapping[str, str]) -> dict[str, str]:
        """Variables of a command. One with variables of its own starts alone: libraries may read them when imported."""
        return {**ENVIRONMENT, "PYTHONPATH": str(self.folder), **more}

    def output(self) -> str:
        """Output of the started commands."""
        return (self.folder / "out.txt").read_text()

    def logs(self) -> str:
        """The ends of the services' logs."""
        files = sorted((self.workspace / "logs").glob("*.log"))
        return "\n".join(f"--- {file.name}\n{file.read_text()[-2000:]}" for file in files)

    def rows(self, sql: str) -> list[dict[str, Any]]:
        """Answer of `rollstream sql`."""
        asked = self.run("sql", sql, "--format", "json")
        assert asked.returncode == 0, asked.stderr
        return json.loads(asked.stdout)


@pytest.fixture
def project(tmp_path: Path) -> Project:
    """A fresh project."""
    return project_in(tmp_path)


def project_in(folder: Path) -> Project:
    """A project in a folder."""
    made = Project(folder)
    make_tiny_model(made.model, seed=0)
    (folder / "game.py").write_text(GAME)
    return made


@pytest.fixture
def two_projects(tmp_path: Path) -> tuple[Project, Project]:
    """Two that are alike."""
    return project_in(tmp_path / "one"), project_in(tmp_path / "two")
