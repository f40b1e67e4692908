"""The real `nat finetune` with rollstream's components: all three, ours with another's, another's with ours."""

import json
import re
import subprocess
from typing import Any

import pytest

from tests.end_to_end.nat.nat_cells import (
    configuration_of,
    dataset_of,
    nat_finetune,
    run_cell,
    with_nats_builder,
    write_json,
)

pytestmark = [pytest.mark.kafka, pytest.mark.slow]


def test_all_three_components_are_ours(project: Any) -> None:
    configuration = configuration_of(project)
    configuration["workflow"] = {"_type": "rollstream", "environment": "python:game.digits"}
    configuration["trainers"]["trainer"]["planning"] = "submitted"
    configuration["finetuning"]["curriculum_learning"] = {
        "enabled": True,
        "initial_percentile": 0.5,
        "min_reward_diff": 0.0,
    }
    validation = write_json(project, "validation.json", [{"id": "v0"}, {"id": "v1"}])
    done = nat_finetune(project, configuration, "--validation_dataset", validation, "--validation_interval", "1")
    assert done.returncode == 0, output_and_logs(project, done)
    assert_trained(project, num_versions=2)
    history = json.loads((project.folder / "output" / "validation_history.json").read_text())
    assert [entry["epoch"] for entry in history] == [0, 1]
    assert all(entry["num_examples"] == 2 and "error" not in entry for entry in history)
    lines = (project.folder / "output" / "training_metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["curriculum_percentile"] for line in lines] == [0.5, 0.5]


def test_our_trainer_and_adapter_train_what_nats_evaluation_played_on_our_endpoint(project: Any) -> None:
    done = nat_finetune(project, with_nats_builder(project), "--dataset", dataset_of(project))
    assert done.returncode == 0, output_and_logs(project, done)
    assert_trained(project, num_versions=2)
    assert_on_policy_and_exact(project)


def test_another_trainer_and_builder_train_by_our_adapter(project: Any) -> None:
    configuration = with_nats_builder(project)
    configuration["trainers"]["trainer"] = {"_type": "nat_example_trainer"}
    dataset = dataset_of(project)
    done = nat_finetune(project, configuration, "--dataset", dataset, "--validation_dataset", dataset)
    assert done.returncode == 0, output_and_logs(project, done)
    assert_trained(project, num_versions=2)
    assert_on_policy_and_exact(project)
    assert "'statuses': ['completed', 'completed']" in done.stderr + done.stdout
    assert re.search(r"validation .*'num_examples': 2", done.stdout), output_and_logs(project, done)


def test_an_llm_elsewhere_fails_the_run_and_the_command_whatever_the_trainer(project: Any) -> None:
    cell = run_cell(project, "another's trainer and builder", "an LLM elsewhere")
    assert cell is not None
    assert cell.disagreements == [], cell.output[-5000:] + project.logs()
    assert (cell.status, cell.state, cell.has_model) == (1, "failed", False)
    assert "12 trajectories rejected: no_token_ids" in cell.last_line


def test_a_last_epoch_of_another_trainer_that_submits_nothing_loses_no_model(project: Any) -> None:
    cell = run_cell(project, "another's trainer", "an empty last epoch")
    assert cell is not None
    assert cell.disagreements == [], cell.output[-5000:] + project.logs()
    assert (cell.status, cell.state, cell.versions, cell.has_model) == (0, "completed", 1, True)


def assert_trained(project: Any, *, num_versions: int) -> None:
    versions = project.rows("SELECT version, weights_sha256 FROM weight_versions ORDER BY version")
    assert [row["version"] for row in versions] == list(range(num_versions + 1))
    assert len({row["weights_sha256"] for row in versions}) == num_versions + 1
    assert (project.folder / "output" / "model.safetensors").exists()
    assert project.rows("SELECT state FROM jobs") == [{"state": "succeeded"}]


def assert_on_policy_and_exact(project: Any) -> None:
    """Every rollout was made with the weights that it was trained on, and nothing of it was tokenised again."""
    outcomes = project.rows("SELECT outcome, count(*) AS n FROM outcomes GROUP BY 1")
    assert outcomes == [{"outcome": "trained", "n": 2 * 2 * 3}]
    assert project.rows("SELECT max(max_staleness) AS s FROM staleness") == [{"s": 0}]


def output_and_logs(project: Any, done: "subprocess.CompletedProcess[str]") -> str:
    return done.stdout[-3000:] + done.stderr[-5000:] + project.logs()
