"""The example of docs/extending.md as its one command runs it: every component of one's own leaves its mark."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.kafka, pytest.mark.slow]
ROOT = Path(__file__).resolve().parents[3]
PRICE, MAX_TOKENS, LOWEST, HIGHEST = 0.02, 5, 0.0, 1.0
"""Values of examples/custom/run.yaml."""
OVERRIDES = {
    "trainers.trainer.enough": "-1",
    "trainers.trainer.num_epochs_in_a_row": "2",
    "finetuning.num_epochs": "5",
    "trainer_adapters.learner.warm_start.num_epochs": "2",
    "trainer_adapters.learner.warm_start.mini_batches": "4",
}


def test_components_of_ones_own_train_and_leave_their_marks(project: Any) -> None:
    done = finetune(project)
    assert done.returncode == 0, done.stdout + done.stderr + project.logs()
    assert_the_trainer_ended_the_run(project, done.stdout)
    assert_the_builder_priced_and_the_adapter_bounded(project)
    assert_the_builder_left_out_what_is_too_long(project)
    rewards = project.rows("SELECT name, count(*) AS n FROM rewards WHERE run_id LIKE 'run-%' GROUP BY 1 ORDER BY 1")
    assert [row["name"] for row in rewards] == ["digit_share", "reward"]


def finetune(project: Any) -> "subprocess.CompletedProcess[str]":
    """The command of the guide, started at the root of the checkout, with a workspace of the test's own."""
    overrides = OVERRIDES | {
        "trainer_adapters.learner.model.path": str(project.model),
        "finetuning.output_dir": str(project.folder / "output"),
    }
    given = [word for key, value in overrides.items() for word in ("-o", key, value)]
    script = str(Path(sys.executable).with_name("rollstream"))
    command = [script, "finetune", "--config_file", "examples/custom/run.yaml", "--workspace", str(project.workspace)]
    return subprocess.run([*command, *given], capture_output=True, text=True, timeout=280, cwd=ROOT)


def assert_the_trainer_ended_the_run(project: Any, reported: str) -> None:
    epochs = project.rows("SELECT epoch, num_batches, avg_reward FROM epoch_summary WHERE num_batches > 0")
    assert [row["epoch"] for row in epochs] == [0, 1]
    history = json.loads((project.folder / "output" / "reward_history.json").read_text())
    assert [row["epoch"] for row in history] == [0, 1]
    assert "the mean reward was at least -1 for 2 epochs" in (project.workspace / "logs/finetune.log").read_text()
    assert "completed at version 4" in reported


def assert_the_builder_priced_and_the_adapter_bounded(project: Any) -> None:
    """The trained reward is the recorded reward less its price, within the bounds; the file agrees with the log."""
    lines = (project.folder / "output" / "submissions.jsonl").read_text().splitlines()
    submissions = [json.loads(line) for line in lines]
    assert [one["epoch"] for one in submissions] == [0, 1]
    noted = {name: reward for one in submissions for name, reward in one["rewards"].items()}
    members = project.rows(
        "SELECT m.trajectory_id, m.reward AS trained, t.reward AS recorded, t.num_completion_tokens AS said "
        "FROM batch_members m JOIN trajectories t USING (trajectory_id) JOIN batches b ON b.batch_id = m.batch_id "
        "WHERE b.job_id LIKE '%/rl'"
    )
    assert {row["trajectory_id"]: row["trained"] for row in members} == noted
    for row in members:
        wanted = min(max(row["recorded"] - PRICE * row["said"], LOWEST), HIGHEST)
        assert row["trained"] == pytest.approx(wanted)
        assert row["said"] <= MAX_TOKENS
    assert any(row["recorded"] - PRICE * row["said"] < LOWEST for row in members)


def assert_the_builder_left_out_what_is_too_long(project: Any) -> None:
    """It stays on the log, and in the ledger with a cause."""
    left_out = project.rows(
        "SELECT r.cause, t.num_completion_tokens AS said FROM rejections r JOIN trajectories t USING (trajectory_id)"
    )
    assert left_out
    assert {row["cause"] for row in left_out} == {"not_submitted"}
    assert any(row["said"] > MAX_TOKENS for row in left_out)
    started = project.rows("SELECT count(DISTINCT rollout_id) AS n FROM rollouts")[0]["n"]
    assert project.rows("SELECT count(*) AS n FROM outcomes") == [{"n": started}]
