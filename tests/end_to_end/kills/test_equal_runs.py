"""With a deterministic engine and no staleness, a run that was killed again and again ends with the same weights."""

import signal
from typing import Any

import psutil
import pytest

from tests.end_to_end.killing import kill_at, wait_versions

pytestmark = [pytest.mark.kafka, pytest.mark.slow]

EPOCHS = 10
RUN_ID = "made-again"


def game(project: Any) -> dict[str, Any]:
    """A run that is a function of its configuration, its id and its seed."""
    engine = {"threads": 1, "deterministic": True}
    configuration = project.configuration(num_epochs=EPOCHS, session_timeout_s=6, engine=engine)
    return configuration | {"workflow": "python:game.digits"}


def results_of(project: Any) -> dict[str, list[dict[str, Any]]]:
    """Versions by hash, and what was trained in which order, attempts aside."""
    queries = {
        "versions": "SELECT version, weights_sha256 FROM weight_versions ORDER BY version",
        "trained": """
            SELECT m.batch_id, m.position, t.group_id, t.member, m.reward, m.staleness, t.num_tokens
            FROM batch_members m JOIN trajectories t USING (trajectory_id) ORDER BY m.batch_id, m.position
        """,
        "rewards": "SELECT group_id, mean_reward FROM groups ORDER BY group_id",
    }
    return {name: project.rows(query) for name, query in queries.items()}


def test_a_run_that_is_killed_at_every_place_equals_one_that_is_not(two_projects: Any) -> None:
    calm, killed = two_projects
    config = calm.write(game(calm))
    done = calm.run("finetune", "--config_file", str(config), "--run_id", RUN_ID)
    assert done.returncode == 0, done.stdout + done.stderr + calm.logs()
    config = killed.write(game(killed))
    command = killed.start("finetune", "--config_file", str(config), "--run_id", RUN_ID)
    try:
        for count, name in ((1, "producers-1"), (3, "learner-1"), (5, "processors-1")):
            kill_at(killed, command, count, name)
        wait_versions(killed, command, 7)
        children = psutil.Process(command.pid).children(recursive=True)
        command.send_signal(signal.SIGKILL)
        command.wait(30)
        assert psutil.wait_procs(children, timeout=30)[1] == []
    finally:
        command.kill()
        command.wait()
    resumed = killed.run("finetune", "--config_file", str(config), "--resume", RUN_ID)
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr + killed.logs()
    expected = results_of(calm)
    assert len(expected["versions"]) > EPOCHS // 2
    assert results_of(killed) == expected
