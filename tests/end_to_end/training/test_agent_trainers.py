"""Prover and verifier by expert iteration and by MALT from the command line: killed in between, and replayed equal."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.end_to_end.killing import kill_at

pytestmark = [pytest.mark.kafka, pytest.mark.slow, pytest.mark.timeout(600)]

EXAMPLES = Path(__file__).parents[3] / "examples"
EPOCHS = 4
WARM_EPOCHS = 2


def example(project: Any, name: str) -> dict[str, Any]:
    """An example of the repository, made small."""
    configuration = yaml.safe_load((EXAMPLES / f"{name}.yaml").read_text())
    builder, learner = configuration["trajectory_builders"]["rollouts"], configuration["trainer_adapters"]["learner"]
    builder |= {"engine": {"threads": 1, "deterministic": True}, "session_timeout_s": 6, "tick_interval_s": 0.2}
    learner["model"] = {"path": str(project.model)}
    learner["algorithm"]["mini_batches"] = 2
    learner["warm_start"] |= {"num_epochs": WARM_EPOCHS, "mini_batches": 4}
    learner |= {"tasks_per_epoch": 8, "checkpoint_every": 2}
    configuration["finetuning"] |= {"num_epochs": EPOCHS, "output_dir": str(project.folder / "output")}
    return configuration


@pytest.mark.parametrize("name", ["bit_proof_ei", "bit_proof_malt"])
def test_a_run_goes_on_after_a_kill_of_its_learner_and_replays_equal(project: Any, name: str) -> None:
    config = project.write(example(project, name))
    run_id = name.replace("_", "-")
    command = project.start("finetune", "--config_file", str(config), "--run_id", run_id)
    try:
        kill_at(project, command, WARM_EPOCHS + 2, "learner-1")
        assert command.wait(240) == 0, project.output() + project.logs()
    finally:
        command.kill()
        command.wait()
    versions = [row["version"] for row in project.rows("SELECT version FROM weight_versions ORDER BY version")]
    assert versions == list(range(WARM_EPOCHS + EPOCHS + 1))
    agents = project.rows("SELECT DISTINCT agent FROM trajectories ORDER BY agent")
    assert [row["agent"] for row in agents] == ["prover", "verifier"]
    assert {row["state"] for row in project.rows("SELECT state FROM jobs")} == {"succeeded"}
    replayed = project.run("replay", run_id, "--verify", "--train")
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr
    assert replayed.stdout.startswith(f"equal: run {run_id}: ")
