"""One small run from the command line to its end, and what can be asked of it afterwards."""

import json
from typing import Any

import pytest

pytestmark = [pytest.mark.kafka, pytest.mark.slow]


def test_a_run_trains_and_can_be_asked(workplace: Any) -> None:
    config = workplace.write(workplace.configuration(num_epochs=3))
    done = workplace.run("finetune", "--config_file", str(config), "--result_json_path", str(workplace.result))
    assert done.returncode == 0, done.stdout + done.stderr + workplace.logs()
    result = json.loads(workplace.result.read_text())
    assert result["status"] == "completed"
    epochs = workplace.rows("SELECT epoch, avg_reward, trained_groups FROM epoch_summary ORDER BY epoch")
    assert [row["epoch"] for row in epochs] == [0, 1, 2]
    assert (workplace.folder / "output" / "config.json").exists()
    assert (workplace.folder / "output" / "model.safetensors").exists()
    picture = workplace.folder / "plot.png"
    plotted = workplace.run("plot", result["run_id"], "-o", str(picture))
    assert plotted.returncode == 0, plotted.stderr
    assert picture.read_bytes().startswith(b"\x89PNG")
    runs = workplace.run("runs")
    assert result["run_id"] in runs.stdout


def test_every_attempt_has_exactly_one_outcome(workplace: Any) -> None:
    config = workplace.write(workplace.configuration(num_epochs=3))
    done = workplace.run("finetune", "--config_file", str(config))
    assert done.returncode == 0, done.stdout + done.stderr + workplace.logs()
    started = workplace.rows("SELECT count(DISTINCT rollout_id) AS n FROM rollouts")[0]["n"]
    outcomes = workplace.rows("SELECT outcome, count(*) AS n, count(DISTINCT rollout_id) AS d FROM outcomes GROUP BY 1")
    assert started == sum(row["n"] for row in outcomes) == sum(row["d"] for row in outcomes) == 3 * 4 * 4
    assert {row["outcome"] for row in outcomes} <= {"trained", "rejected"}


def test_two_runs_share_a_workspace_one_after_the_other(workplace: Any) -> None:
    config = workplace.write(workplace.configuration(num_epochs=1))
    for _ in range(2):
        done = workplace.run("finetune", "--config_file", str(config))
        assert done.returncode == 0, done.stdout + done.stderr + workplace.logs()
    rows = workplace.rows("SELECT run_id, count(*) AS n FROM epochs GROUP BY 1")
    assert [row["n"] for row in rows] == [1, 1]


def test_a_warm_start_is_followed_by_reinforcement(workplace: Any) -> None:
    configuration = workplace.configuration(num_epochs=2)
    configuration["trainer_adapters"]["learner"]["warm_start"] = {"num_epochs": 2, "tasks_per_epoch": 2}
    config = workplace.write(configuration)
    done = workplace.run("finetune", "--config_file", str(config))
    assert done.returncode == 0, done.stdout + done.stderr + workplace.logs()
    jobs = workplace.rows("SELECT job_id, state FROM jobs ORDER BY job_id")
    assert [(row["job_id"].rsplit("/", 1)[1], row["state"]) for row in jobs] == [
        ("rl", "succeeded"),
        ("sft", "succeeded"),
    ]
    versions = workplace.rows("SELECT max(version) AS v FROM weight_versions")
    assert versions[0]["v"] >= 2
