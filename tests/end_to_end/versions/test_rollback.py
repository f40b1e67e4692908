"""A rollback of a run that goes on, by the command line: a new version with the old weights, and equal replays."""

import json
import time
from collections.abc import Callable
from typing import Any

import pytest

pytestmark = [pytest.mark.kafka, pytest.mark.slow]

PATIENCE_S = 240.0
VERSIONS = "SELECT version, adopts, weights_sha256 AS sha FROM weight_versions ORDER BY version"


def test_a_run_goes_on_from_an_earlier_version_and_replays_equal(project: Any) -> None:
    configuration = project.configuration(num_epochs=5000) | {"workflow": "python:game.digits"}
    configuration["trainer_adapters"]["learner"]["keep_last"] = 5000
    config = str(project.write(configuration))
    running = project.start("finetune", "--config_file", config, "--run_id", "demo")
    try:
        wait(lambda: len(versions(project)) > 3, project, running)
        refused = project.run("rollback", "demo@4999")
        assert refused.returncode == 1
        assert refused.stderr.startswith("error: demo/policy@4999: demo/policy has no version 4999; it has 0 to ")
        asked = project.run("rollback", "demo@2", "--reason", "worse")
        assert asked.returncode == 0, asked.stderr
        assert asked.stdout.startswith("requested: demo/policy returns to version 2 ")
        wait(lambda: any(row["adopts"] == 2 for row in versions(project)[:-1]), project, running)
        assert project.run("stop", "demo").returncode == 0
        assert running.wait(timeout=PATIENCE_S) == 0, project.output() + project.logs()
    finally:
        if running.poll() is None:
            running.terminate()
            running.wait()

    found = versions(project)
    assert [row["version"] for row in found] == list(range(len(found)))
    (adopted,) = (row for row in found if row["adopts"] is not None)
    assert adopted["sha"] == found[2]["sha"]
    assert found[adopted["version"] + 1]["sha"] not in {row["sha"] for row in found[: adopted["version"] + 1]}
    (rolled_back,) = project.rows("SELECT adopts, version, state, reason FROM rollbacks")
    assert rolled_back == {"adopts": 2, "version": adopted["version"], "state": "published", "reason": "worse"}
    sampled = project.rows(
        "SELECT min(t.min_version) AS oldest FROM trajectories t JOIN batch_members m USING (trajectory_id) "
        f"JOIN batches b USING (batch_id) WHERE b.version > {adopted['version']}"
    )
    assert sampled == [{"oldest": adopted["version"]}]
    for how in ("--verify", "--train"):
        replayed = project.run("replay", "demo", how)
        assert replayed.returncode == 0, replayed.stdout + replayed.stderr
    late = project.run("rollback", "demo@2")
    assert late.returncode == 1
    assert late.stderr == (
        "error: demo/policy@2: run demo has ended (stopped); begin a new run from it with "
        "`rollstream finetune --fork demo@2`\n"
    )


def versions(project: Any) -> list[dict[str, Any]]:
    asked = project.run("sql", VERSIONS, "--format", "json")
    if asked.returncode:  # the metrics file is not there yet
        return []
    return json.loads(asked.stdout)


def wait(holds: Callable[[], bool], project: Any, running: Any) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert running.poll() is None, project.output() + project.logs()
        assert time.monotonic() < deadline, project.output() + project.logs()
