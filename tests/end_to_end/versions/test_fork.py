"""A run branches from a version of another one: it begins with those weights, and the parent stays as it was."""

import json
from typing import Any

import pytest

pytestmark = [pytest.mark.kafka, pytest.mark.slow]

VERSIONS = "SELECT version, weights_sha256 AS sha FROM weight_versions WHERE run_id = '{}' ORDER BY version"


def test_a_fork_begins_with_the_weights_of_its_parents_version(project: Any) -> None:
    configuration = project.configuration(num_epochs=2) | {"workflow": "python:game.digits"}
    configuration["trainer_adapters"]["learner"]["warm_start"] = {"num_epochs": 1, "tasks_per_epoch": 2}
    without = project.configuration(num_epochs=2) | {"workflow": "python:game.digits"}
    parent = finished(project, without)
    before = project.rows(VERSIONS.format(parent))
    assert [row["version"] for row in before] == [0, 1, 2]
    child = finished(project, configuration, "--fork", f"{parent}@1")
    versions = project.rows(VERSIONS.format(child))
    assert [row["version"] for row in versions] == [0, 1, 2], "its own numbers, and no warm start"
    assert versions[0]["sha"] == before[1]["sha"]
    assert versions[1]["sha"] != before[2]["sha"]
    assert project.rows(VERSIONS.format(parent)) == before
    assert_the_lineage_is_reported(project, parent, child)
    assert_wrong_forks_are_refused(project, without, parent)


def finished(project: Any, configuration: dict[str, Any], *options: str) -> str:
    """Run id of a run that was completed."""
    config = project.write(configuration)
    reported = ("--config_file", str(config), "--result_json_path", str(project.result))
    done = project.run("finetune", *reported, *options)
    assert done.returncode == 0, done.stdout + done.stderr + project.logs()
    return json.loads(project.result.read_text())["run_id"]


def assert_the_lineage_is_reported(project: Any, parent: str, child: str) -> None:
    listed = {line.split()[0]: line for line in project.run("runs").stdout.splitlines()}
    assert listed[child].endswith(f"{parent}@1")
    assert f"{parent}@" not in listed[parent]
    runs = project.rows("SELECT run_id, parent_run_id, parent_version FROM runs ORDER BY started_at")
    assert runs == [
        {"run_id": parent, "parent_run_id": None, "parent_version": None},
        {"run_id": child, "parent_run_id": parent, "parent_version": 1},
    ]
    steps = project.rows(
        "SELECT DISTINCT l.run_id, split_part(l.batch_id, '/', 1) AS trained_in, w.run_id AS published_in, l.version "
        "FROM lineage l JOIN weight_versions w USING (version, weights_sha256) WHERE w.run_id = l.run_id "
        "ORDER BY l.run_id = '" + child + "', l.version"
    )
    assert [tuple(row.values()) for row in steps] == [(run, run, run, v) for run in (parent, child) for v in (1, 2)]


def assert_wrong_forks_are_refused(project: Any, configuration: dict[str, Any], parent: str) -> None:
    config = str(project.write(configuration))
    for fork, reported in {
        "nowhere@0": f"run nowhere does not exist; known runs: {parent}, ",
        f"{parent}@9": f"run {parent} has no version 9; choose one of 0 to 2",
        parent: "give a run and a version as RUN@VERSION",
    }.items():
        refused = project.run("finetune", "--config_file", config, "--fork", fork)
        assert refused.returncode == 1
        assert reported in refused.stderr
        assert refused.stderr.startswith("error: --fork")
        assert len(refused.stderr.splitlines()) == 1
