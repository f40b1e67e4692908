"""`rollstream finetune` on a file as NAT's own example of ART has it: only the path of the model is another."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from rollstream.learner.tiny_model import make_tiny_model

pytestmark = [pytest.mark.kafka, pytest.mark.slow]
PACKAGE = Path(__file__).with_name("nat_game.py")
FILE = Path(__file__).with_name("nat_workflow.yml")
BASE_MODEL = "trainer_adapters.openpipe_trainer_adapter.backend.base_model"


def test_nats_example_trains_from_its_own_file_but_for_the_path_of_the_model(project: Any) -> None:
    prepare(project, ["X", "O", "?", "Z"])
    validation = project.folder / "data" / "validation.json"
    validation.write_text(json.dumps([{"id": "v", "question": "X", "answer": "Win!"}]))
    given = ("-o", BASE_MODEL, str(project.model), "--validation_dataset", str(validation))
    done = finetune(project, *given)
    assert done.returncode == 0, done.stdout + done.stderr + project.logs()
    outcomes = project.rows("SELECT outcome, count(*) AS n FROM outcomes GROUP BY 1 ORDER BY 1")
    assert {row["outcome"]: row["n"] for row in outcomes}["trained"] == 2 * 3
    failed = project.rows(
        "SELECT DISTINCT r.message FROM rollouts r JOIN outcomes o USING (rollout_id) WHERE o.outcome = 'failed'"
    )
    assert ["no move was understood" in row["message"] for row in failed] == [True]
    assert project.rows("SELECT max(max_staleness) AS s FROM staleness") == [{"s": 0}]
    assert [row["version"] for row in project.rows("SELECT version FROM weight_versions ORDER BY 1")] == [0, 1, 2]
    counted = project.rows("SELECT count(*) AS n FROM steps WHERE event_type = 'CUSTOM_END' AND name = 'agent_move'")
    assert counted[0]["n"] >= 2 * 3 * 2
    output = project.folder / ".tmp" / "nat" / "finetuning" / "output"
    assert list(output.glob("*.safetensors"))
    history = json.loads((output / "validation_history.json").read_text())
    assert [(one["epoch"], one["num_examples"], "error" in one) for one in history] == [(0, 1, False)]
    (job,) = project.rows("SELECT settings FROM jobs")
    assert json.loads(job["settings"])["algorithm"]["temperature"] == 0.4
    verified = run(project, "replay", project.rows("SELECT run_id FROM runs")[0]["run_id"], "--verify")
    assert verified.returncode == 0, verified.stdout + verified.stderr


def prepare(project: Any, questions: list[str]) -> None:
    make_tiny_model(project.model, seed=0)
    packages = project.folder / "packages"
    metadata = packages / "nat_game-1.0.dist-info"
    metadata.mkdir(parents=True)
    (packages / "nat_game.py").write_text(PACKAGE.read_text())
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: nat-game\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[nat.components]\nnat_game = nat_game\n")
    (project.folder / "data").mkdir()
    rows = [{"id": f"x{number}", "question": sign, "answer": "Win!"} for number, sign in enumerate(questions)]
    (project.folder / "data" / "data.json").write_text(json.dumps(rows))
    (project.folder / "config.yml").write_text(FILE.read_text())


def finetune(project: Any, *options: str) -> "subprocess.CompletedProcess[str]":
    return run(project, "finetune", "--config_file", "config.yml", *options)


def run(project: Any, *arguments: str) -> "subprocess.CompletedProcess[str]":
    return project.run(*arguments, PYTHONPATH=str(project.folder / "packages"), NAT_TELEMETRY_ENABLED="false")
