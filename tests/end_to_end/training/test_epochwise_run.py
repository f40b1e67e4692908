"""A run by components from the command line: killed in mid-run, resumed, asked, and replayed equal."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.killing import wait_versions

pytestmark = [pytest.mark.kafka, pytest.mark.slow, pytest.mark.timeout(600)]

EPOCHS = 3


def epochwise(project: Any) -> dict[str, Any]:
    """All examples in every epoch, a curriculum, validation before every second epoch."""
    folder: Path = project.folder
    for name, count in (("train", 4), ("valid", 2)):
        (folder / f"{name}.jsonl").write_text("".join(f'{{"id": "{name}-{n}"}}\n' for n in range(count)))
    configuration = project.configuration(num_epochs=EPOCHS, environment="python:game.digits", modules=["game"])
    configuration["trainers"]["trainer"]["planning"] = "submitted"
    configuration["eval"] = {"general": {"dataset": {"_type": "jsonl", "file_path": str(folder / "train.jsonl")}}}
    configuration["finetuning"]["curriculum_learning"] = {
        "enabled": True,
        "initial_percentile": 0.5,
        "min_reward_diff": 0.001,
    }
    return configuration


def test_a_epochwise_run_goes_on_after_a_kill_and_leaves_its_files(project: Any) -> None:
    config = str(project.write(epochwise(project)))
    options = ["--validation_dataset", str(project.folder / "valid.jsonl"), "--validation_interval", "2"]
    command = project.start("finetune", "--config_file", config, "--run_id", "epochwise", *options)
    wait_versions(project, command, 1)
    os.kill(command.pid, signal.SIGKILL)
    command.wait(timeout=60)
    result = ["--result_json_path", str(project.result)]
    done = project.run("finetune", "--config_file", config, "--resume", "epochwise", *options, *result)
    assert done.returncode == 0, done.stdout + done.stderr + project.logs()
    reported = json.loads(project.result.read_text())
    assert (reported["status"], reported["num_epochs"]) == ("completed", EPOCHS)
    assert_files(project.folder / "output")
    assert_log(project, reported["version"])
    replayed = project.run("replay", "epochwise", "--verify", "--train")
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr
    assert "task records that the harness wrote" in replayed.stdout


def assert_files(output: Path) -> None:
    rows = [json.loads(line) for line in (output / "training_metrics.jsonl").read_text().splitlines()]
    assert [(row["epoch"], row["run_id"], row["num_groups"]) for row in rows] == [(n, "epochwise", 4) for n in range(3)]
    assert [row["epoch"] for row in json.loads((output / "reward_history.json").read_text())] == [0, 1, 2]
    validations = json.loads((output / "validation_history.json").read_text())
    assert [(row["epoch"], row["num_examples"]) for row in validations] == [(0, 2), (2, 2)]
    assert json.loads((output / "curriculum_state.json").read_text())["current_percentile"] == 0.5
    assert (output / "reward_plot.png").read_bytes().startswith(b"\x89PNG")
    assert (output / "model.safetensors").exists()


def assert_log(project: Any, version: int) -> None:
    versions = project.rows("SELECT version, weights_sha256 FROM weight_versions ORDER BY version")
    assert [row["version"] for row in versions] == list(range(version + 1))
    assert len({row["weights_sha256"] for row in versions}) == len(versions) > 1, "weights changed"
    epochs = project.rows("SELECT epoch, groups, curriculum_percentile FROM epoch_summary ORDER BY epoch")
    assert [(row["epoch"], row["groups"], row["curriculum_percentile"]) for row in epochs] == [
        (number, 4, 0.5) for number in range(EPOCHS)
    ]
    outcomes = project.rows("SELECT count(*) AS n, count(DISTINCT rollout_id) AS d, count(outcome) AS o FROM outcomes")
    assert outcomes[0]["n"] == outcomes[0]["d"] == outcomes[0]["o"]
    members = project.rows("SELECT count(*) AS n FROM outcomes WHERE outcome IN ('trained', 'rejected')")
    assert members[0]["n"] == EPOCHS * 4 * 4 + 2 * 2
    validations = project.rows("SELECT epoch, groups FROM validations ORDER BY epoch")
    assert [(row["epoch"], row["groups"]) for row in validations] == [(0, 2), (2, 2)]
