"""`finetune` as a process on an embedded broker, its services external and absent: locks, signals, resume, stop."""

import asyncio
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from rollstream.eventlog.kafka.log import KafkaLog
from rollstream.harness.services.sole_use import sole_name
from rollstream.harness.services.workspace import Workspace, broker_of, embedded_broker
from rollstream.schemas import ids
from rollstream.schemas.events import RolloutFailed, WeightsPublished
from rollstream.schemas.kafka import KafkaSettings
from rollstream.schemas.settings import ArtifactRef
from tests.rigs.services import forked_commands
from tests.rigs.services.forked_commands import ForkedCommand

pytestmark = pytest.mark.kafka
CONSTANTS = {
    "rollstream.harness.services.live_line.PLAIN_INTERVAL_S": 0.5,
    "rollstream.harness.services.sole_use.PATIENCE_S": 1.0,
    "rollstream.harness.services.sole_use.MARGIN_S": 0.0,
}
"""Shorter intervals of the commands, whose defaults are 10 s, 10 s and 5 s."""


class Command:
    """`rollstream` with one workspace."""

    def __init__(self, folder: Path, config: Path) -> None:
        self.folder = folder
        self.workspace = folder / "w"
        self.config = config
        self.env = {name: value for name, value in os.environ.items() if not name.startswith("ROLLSTREAM_")}

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        given = [*arguments, "--workspace", str(self.workspace)]
        return forked_commands.run(given, 90, cwd=Path.cwd(), env=self.env, constants=CONSTANTS)

    def start(self, *arguments: str) -> ForkedCommand:
        given = ["finetune", "--config_file", str(self.config), *arguments, "--workspace", str(self.workspace)]
        output = self.folder / "out.txt"
        output.unlink(missing_ok=True)
        return forked_commands.start(given, output, cwd=Path.cwd(), env=self.env, constants=CONSTANTS)

    def output(self) -> str:
        return (self.folder / "out.txt").read_text()

    def wait_for(self, text: str, process: ForkedCommand) -> str:
        deadline = time.monotonic() + 60
        while text not in self.output():
            assert process.poll() is None, self.output()
            assert time.monotonic() < deadline, self.output()
            time.sleep(0.1)
        return self.output()


@pytest.fixture
def command(tmp_path: Path, written: dict[str, Any], write: Callable[[dict[str, Any]], Path]) -> Command:
    written["trajectory_builders"]["b"]["services"] = "external"
    written["trajectory_builders"]["b"]["environment_config"] = {"high": "${HIGH:-9}"}
    data = tmp_path / "data.jsonl"
    data.write_text('{"id": "a", "secret": 1}\n{"id": "b", "secret": 2}\n')
    written["eval"] = {"general": {"dataset": {"file_path": str(data)}}}
    return Command(tmp_path, write(written))


def lose_the_final_model(workspace: Path, run_id: str) -> None:
    """Let the log name versions whose artifact the store does not have."""

    async def publish(kafka: KafkaSettings) -> None:
        log = KafkaLog(kafka, client_id="test")
        await log.start()
        await log.send_all(
            [
                WeightsPublished(
                    run_id=run_id,
                    time_ms=1,
                    model_group=ids.model_group(run_id, ids.MODEL_GROUP),
                    job_id=ids.job_id(run_id, "rl"),
                    batch_id=None,
                    version=version,
                    parent=None,
                    term=0,
                    weights_sha256="a" * 64,
                    weights_format="full",
                    base_model="m",
                    artifact=ArtifactRef(uri=f"aa/{'a' * 64}.safetensors", sha256="a" * 64, size_bytes=1),
                )
                for version in range(2)
            ]
        )
        await log.close()

    with broker_of(Workspace(workspace)) as kafka:
        asyncio.run(publish(kafka))


def fail_a_rollout(workspace: Path, run_id: str, message: str) -> None:
    """Write what producers that run elsewhere would: a rollout that failed, in a group that goes on."""

    async def write(kafka: KafkaSettings) -> None:
        log = KafkaLog(kafka, client_id="test")
        await log.start()
        group_id = ids.group_id(run_id, "rl", 0, 0)
        rollout_id = ids.rollout_id(group_id, 0, 0)
        failed = RolloutFailed(
            run_id=run_id, time_ms=1, group_id=group_id, rollout_id=rollout_id, cause="environment_error",
            message=message, is_final=True,
        )  # fmt: skip
        await log.send(failed, partition=0)
        await log.close()

    with broker_of(Workspace(workspace)) as kafka:
        asyncio.run(write(kafka))


def test_a_run_is_locked_interrupted_resumed_and_stopped(command: Command) -> None:
    first = command.start("--name", "mine")
    try:
        run_id = command.wait_for("run mine-", first).split("run mine-")[1].split()[0]
        run_id = f"mine-{run_id}"
        command.wait_for("waiting for a learner", first)
        message = "KeyError: 'colour' (game.py, line 3, in play)"
        fail_a_rollout(command.workspace, run_id, message)
        command.wait_for(f"/m0/a0 failed: environment_error: {message}", first)
        collected = command.run("gc")
        assert collected.returncode == 1
        assert collected.stderr.startswith(f"error: workspace {command.workspace} is in use by finetune mine")
        listed = command.run("runs")
        assert run_id in listed.stdout
        assert " running " in listed.stdout
        children = psutil.Process(first.pid).children(recursive=True)
        first.send_signal(signal.SIGINT)
        assert first.wait(60) == 130, command.output()
        assert "Traceback" not in command.output()
        assert (
            f"run {run_id} stays open: `rollstream finetune --config_file FILE --resume {run_id}`" in command.output()
        )
        assert psutil.wait_procs(children, timeout=10)[1] == []
        result = command.folder / "result.json"
        resumed = command.start("--resume", run_id, "--result_json_path", str(result))
        command.wait_for("waiting for a learner", resumed)
        stopped = command.run("stop", run_id)
        assert stopped.returncode == 0, stopped.stderr
        assert resumed.wait(90) == 0, command.output()
        assert json.loads(result.read_text())["status"] == "stopped"
        result.unlink()
        arguments = ("finetune", "--config_file", str(command.config), "--resume", run_id)
        again = command.run(*arguments, "--result_json_path", str(result))
        assert again.returncode == 0, again.stderr
        assert json.loads(result.read_text())["status"] == "stopped"
        lose_the_final_model(command.workspace, run_id)
        failed = command.run(*arguments)
        assert failed.returncode == 1
        assert failed.stderr.startswith("error: artifact aa/")
        assert "stays open" not in failed.stderr
    finally:
        first.kill()
        first.wait()


def test_two_runs_share_external_services_but_a_run_has_one_process(command: Command) -> None:
    first = command.start("--name", "mine")
    try:
        run_id = "mine-" + command.wait_for("run mine-", first).split("run mine-")[1].split()[0]
        command.wait_for("waiting for a learner", first)
        other = Command(command.folder / "other", command.config)
        other.workspace = command.workspace
        other.folder.mkdir()
        second = other.start("--name", "beside", "-o", "finetuning.output_dir", str(other.folder / "output"))
        try:
            other.wait_for("waiting for a learner", second)
            again = command.run("finetune", "--config_file", str(command.config), "--resume", run_id)
            assert again.returncode == 1
            assert again.stderr.startswith(f"error: run {run_id} is conducted by another process; stop it ")
        finally:
            second.send_signal(signal.SIGTERM)
            assert second.wait(60) == 143, other.output()
        assert first.poll() is None, command.output()
    finally:
        first.send_signal(signal.SIGTERM)
        assert first.wait(60) == 143


def interrupted(command: Command) -> str:
    """Id of a run that was stopped while it waited for services."""
    first = command.start("--name", "mine")
    try:
        run_id = "mine-" + command.wait_for("run mine-", first).split("run mine-")[1].split()[0]
        command.wait_for("waiting for a learner", first)
    finally:
        first.send_signal(signal.SIGTERM)
        assert first.wait(60) == 143
    return run_id


@pytest.mark.slow
def test_served_services_are_noticed(
    command: Command, written: dict[str, Any], write: Callable[[dict[str, Any]], Path]
) -> None:
    """A managed run would be in their groups or have their names, and to gc their learner may be about to publish."""
    run_id = interrupted(command)
    written["trajectory_builders"]["b"] |= {"services": "managed", "environment_config": {}}
    managed = ("finetune", "--config_file", str(write(written)))

    async def with_a_learner() -> None:
        async with sole_name(command.workspace, "learner-1"):
            done = await asyncio.to_thread(command.run, *managed)
        assert done.returncode == 1
        assert f"another process named learner-1 serves workspace {command.workspace}" in done.stderr

    async def with_producers(kafka: KafkaSettings) -> None:
        async with KafkaLog(kafka, client_id="served-1") as log:
            group = kafka.group("producers")
            member = await log.group_reader(group, ["tasks"])
            running = asyncio.create_task(asyncio.to_thread(command.run, *managed))
            while not running.done():
                await member.poll(timeout_s=0.1)
            await member.close()
            done = running.result()
        assert done.returncode == 1
        assert f"consumer group {group} is in use by other services (served-1 at " in done.stderr

    with embedded_broker(Workspace(command.workspace)) as (kafka, _):
        collected = command.run("gc")
        assert collected.returncode == 1
        assert f"run {run_id} is open on {kafka.bootstrap_servers} and its learner may be " in collected.stderr
        asyncio.run(with_a_learner())
        asyncio.run(with_producers(kafka))
    assert command.run("gc").returncode == 0


def test_a_run_is_not_resumed_with_other_settings(command: Command) -> None:
    run_id = interrupted(command)
    arguments = ("finetune", "--config_file", str(command.config), "--resume")
    other = command.run(*arguments, run_id, "-o", "finetuning.num_epochs", "7")
    assert other.returncode == 1
    assert other.stderr.startswith(f"error: run {run_id} was started with another ")
    unknown = command.run(*arguments, "nobody-1")
    assert unknown.stderr.startswith("error: run nobody-1 does not exist")
    partitions = command.run(*arguments, run_id, "-o", "trajectory_builders.b.num_partitions", "5")
    assert partitions.stderr.startswith("error: topic rollstream.tasks.v1 has 2 partitions, expected 5")
