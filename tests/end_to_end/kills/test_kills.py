"""A service or the whole command is killed with SIGKILL in mid-run: the run goes on, nothing is lost or doubled."""

import contextlib
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from rollstream.harness.services import fork_server
from tests.end_to_end.killing import child, kill_at, versions_loaded, wait_versions
from tests.rigs.services.forked_commands import Command

pytestmark = [pytest.mark.kafka, pytest.mark.slow]

EPOCHS = 26
SESSION_TIMEOUT_S = 6
SERVICES = ("producers-1", "processors-1", "learner-1", "metrics-1")
ATTEMPTS = EPOCHS * 4 * 4


def game(project: Any, **builder: Any) -> dict[str, Any]:
    """A run that trains something in every epoch."""
    configuration = project.configuration(num_epochs=EPOCHS, session_timeout_s=SESSION_TIMEOUT_S, **builder)
    return configuration | {"workflow": "python:game.digits"}


def assert_whole(project: Any) -> None:
    """Every epoch sealed once, every member of every group decided once, every trained trajectory trained once."""
    epochs = project.rows("SELECT epoch FROM epoch_summary ORDER BY epoch")
    assert [row["epoch"] for row in epochs] == list(range(EPOCHS))
    groups = project.rows("SELECT count(*) AS n, count(DISTINCT group_id) AS d FROM groups")[0]
    assert groups["n"] == groups["d"] == EPOCHS * 4
    members = project.rows("SELECT count(*) AS n, count(DISTINCT trajectory_id) AS d FROM batch_members")[0]
    assert members["n"] == members["d"]
    started = project.rows("SELECT count(*) AS n FROM rollouts")[0]["n"]
    outcomes = project.rows("SELECT outcome, count(*) AS n FROM outcomes GROUP BY 1")
    assert sum(row["n"] for row in outcomes) == started >= ATTEMPTS
    complete = sum(row["n"] for row in outcomes if row["outcome"] in ("trained", "rejected"))
    assert complete == ATTEMPTS
    versions = project.rows("SELECT version FROM weight_versions ORDER BY version")
    assert [row["version"] for row in versions] == list(range(len(versions)))


@contextlib.contextmanager
def completed(project: Any, config: Path) -> Iterator[Command]:
    """A run in the hands of the test, which then must come to its end with nothing lost or doubled."""
    command = project.start("finetune", "--config_file", str(config), "--result_json_path", str(project.result))
    try:
        yield command
        assert command.wait(240) == 0, project.output() + project.logs()
    finally:
        command.kill()
        command.wait()
    assert json.loads(project.result.read_text())["status"] == "completed"
    assert_whole(project)


@pytest.mark.parametrize(
    "victims",
    [("producers-1", "learner-1"), ("processors-1", "metrics-1"), ("kafka.Kafka",)],
    ids=lambda victims: "+".join(victims),
)
def test_killed_processes_are_started_again_and_nothing_is_lost(project: Any, victims: tuple[str, ...]) -> None:
    config = project.write(game(project))
    with completed(project, config) as command:
        for number, name in enumerate(victims):
            kill_at(project, command, 4 + 20 * number, name)


@pytest.mark.chaos
@pytest.mark.timeout(900)
def test_every_process_is_killed_three_times_after_a_fifth_of_the_run(project: Any) -> None:
    config = project.write(game(project))
    victims = [*SERVICES, "kafka.Kafka"] * 3
    with completed(project, config) as command:
        for number, name in enumerate(victims):
            wait_versions(project, command, EPOCHS // 5 + number)
            victim = child(command, (name,))
            assert victim is not None, name
            seen, began = versions_loaded(project), time.monotonic()
            victim.kill()
            wait_versions(project, command, seen)
            print(f"{name}: the next version after {time.monotonic() - began:.1f} s")


def test_zombies_change_nothing(project: Any) -> None:
    """A producer and a processor stop for longer than their session and then go on as if nothing had been."""
    config = project.write(game(project, num_producers=2, num_processors=2))
    with completed(project, config) as command:
        wait_versions(project, command, 4)
        zombies = [child(command, (name,)) for name in ("producers-1", "processors-1")]
        for zombie in zombies:
            assert zombie is not None
            zombie.send_signal(signal.SIGSTOP)
        time.sleep(SESSION_TIMEOUT_S * 2)
        for zombie in zombies:
            if zombie is not None and zombie.is_running():
                zombie.send_signal(signal.SIGCONT)


def test_a_killed_command_leaves_no_process_and_is_resumed(project: Any) -> None:
    config = project.write(game(project))
    path = str(project.folder)  # given, the command starts alone
    command = project.start("finetune", "--config_file", str(config), "--name", "killed", PYTHONPATH=path)
    wait_versions(project, command, 4)
    learner = child(command, ("learner-1",))
    assert learner is not None
    assert (fork_server.__name__ in " ".join(psutil.Process(learner.ppid()).cmdline())) == fork_server.IS_POSSIBLE
    children = psutil.Process(command.pid).children(recursive=True)
    assert len(children) >= 5
    os.kill(command.pid, signal.SIGKILL)
    command.wait(30)
    gone, alive = psutil.wait_procs(children, timeout=30)
    assert alive == [], [process.cmdline() for process in alive]
    assert gone
    run_id = next(row["run_id"] for row in project.rows("SELECT run_id FROM runs"))
    resumed = project.run("finetune", "--config_file", str(config), "--resume", run_id)
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr + project.logs()
    assert_whole(project)
    # as after a kill between RunEnded and the command's end
    (project.workspace / "metrics.duckdb").unlink()
    result = config.with_name("result.json")
    again = project.run("finetune", "--config_file", str(config), "--resume", run_id, "--result_json_path", str(result))
    assert again.returncode == 0, again.stdout + again.stderr
    assert json.loads(result.read_text())["status"] == "completed"
    assert_whole(project)


def test_an_interrupted_command_ends_in_order_and_is_resumed(project: Any) -> None:
    config = project.write(game(project))
    command = project.start("finetune", "--config_file", str(config))
    wait_versions(project, command, 3)
    children = psutil.Process(command.pid).children(recursive=True)
    command.send_signal(signal.SIGINT)
    assert command.wait(60) == 130, project.output()
    _, alive = psutil.wait_procs(children, timeout=10)
    assert alive == []
    run_id = project.rows("SELECT run_id FROM runs")[0]["run_id"]
    resumed = project.run("finetune", "--config_file", str(config), "--resume", run_id)
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr + project.logs()
    assert_whole(project)
