"""A run whose learner is several processes (`ranks`), which torchrun starts: killed, interrupted, resumed."""

import os
import signal
import time
from typing import Any

import psutil
import pytest

from tests.end_to_end.killing import wait_versions
from tests.rigs.services.forked_commands import Command
from tests.rigs.services.process_group import rank_of

pytestmark = [pytest.mark.kafka, pytest.mark.slow]
EPOCHS = 10
TIMEOUT_S = 300.0


def ranks_of(command: Command) -> dict[int, psutil.Process]:
    """The learner's processes by rank, once there are two."""
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        children = psutil.Process(command.pid).children(recursive=True)
        found = {rank: one for one in children if (rank := rank_of(one)) is not None}
        if len(found) == 2:
            return found
        time.sleep(0.1)
    raise AssertionError("the learner has no two processes")


@pytest.mark.timeout(1500)
def test_a_run_with_ranks_goes_on_after_a_killed_rank_and_leaves_no_process(project: Any) -> None:
    configuration = project.configuration(num_epochs=EPOCHS) | {"workflow": "python:game.digits"}
    configuration["trainer_adapters"]["learner"]["ranks"] = 2
    config = project.write(configuration)
    command = project.start("finetune", "--config_file", str(config), "--name", "two")
    try:
        wait_versions(project, command, 2, timeout_s=TIMEOUT_S)
        killed = ranks_of(command)[1]
        killed.kill()
        wait_versions(project, command, 5, timeout_s=TIMEOUT_S)
        assert killed.pid != ranks_of(command)[1].pid
        interrupted = psutil.Process(command.pid).children(recursive=True)
        command.send_signal(signal.SIGINT)
        assert command.wait(60) == 130, project.output() + project.logs()
        assert psutil.wait_procs(interrupted, timeout=10)[1] == []

        (run_id,) = [row["run_id"] for row in project.rows("SELECT run_id FROM runs")]
        log = project.workspace / "logs" / "learner-1.log"
        assert "process 1 of 2 ended with status -9" in log.read_text()
        resume = ("finetune", "--config_file", str(config), "--resume", run_id)
        command = project.start(*resume)
        wait_versions(project, command, 8, timeout_s=TIMEOUT_S)
        left = [*ranks_of(command).values(), *psutil.Process(command.pid).children(recursive=True)]
        os.kill(command.pid, signal.SIGKILL)
        command.wait(30)
        assert psutil.wait_procs(left, timeout=30)[1] == []
    finally:
        command.kill()
        command.wait()
    resumed = project.run(*resume)
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr + project.logs()
    versions = project.rows("SELECT version FROM weight_versions ORDER BY version")
    assert [row["version"] for row in versions] == list(range(EPOCHS + 1))
    verified = project.run("replay", run_id, "--verify")
    assert verified.returncode == 0, verified.stdout + verified.stderr
    trained = project.run("replay", run_id, "--train")
    assert trained.returncode == 1
    assert "was trained by 2 processes together; this replay trains in one process" in trained.stderr
    assert "; give --ranks 2, or leave --train out" in trained.stderr
    more = project.run("replay", run_id, "--train", "--ranks", "3")
    assert more.returncode == 1
    assert "this replay trains in 3 processes together" in more.stderr
    for steps in (("--verify",), ("--steps", f"{EPOCHS - 2}:")):
        equal = project.run("replay", run_id, "--train", "--ranks", "2", *steps)
        assert equal.returncode == 0, equal.stdout + equal.stderr
        assert equal.stdout.count(f"equal: run {run_id}: ") == 1
