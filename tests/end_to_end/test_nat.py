"""The real `nat finetune` with rollstream's components: all three, ours with another's, another's with ours."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.kafka, pytest.mark.slow]
PACKAGE = Path(__file__).with_name("nat_example.py")
NAT = str(Path(sys.executable).with_name("nat"))
ENVIRONMENT = {
    **os.environ,
    "NAT_TELEMETRY_ENABLED": "false",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
DATASET = [{"id": f"x{number}", "question": sign, "answer": "1"} for number, sign in enumerate("?!")]


def test_all_three_components_are_ours(workplace: Any) -> None:
    configuration = configuration_of(workplace)
    configuration["workflow"] = {"_type": "rollstream", "environment": "python:game.digits"}
    configuration["trainers"]["trainer"]["planning"] = "submitted"
    configuration["finetuning"]["curriculum_learning"] = {
        "enabled": True,
        "initial_percentile": 0.5,
        "min_reward_diff": 0.0,
    }
    validation = write_json(workplace, "validation.json", [{"id": "v0"}, {"id": "v1"}])
    done = nat_finetune(workplace, configuration, "--validation_dataset", validation, "--validation_interval", "1")
    assert done.returncode == 0, told(workplace, done)
    assert_trained(workplace, num_versions=2)
    history = json.loads((workplace.folder / "output" / "validation_history.json").read_text())
    assert [entry["epoch"] for entry in history] == [0, 1]
    assert all(entry["num_examples"] == 2 and "error" not in entry for entry in history)
    lines = (workplace.folder / "output" / "training_metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["curriculum_percentile"] for line in lines] == [0.5, 0.5]


def test_our_trainer_and_adapter_train_what_nats_evaluation_played_on_our_endpoint(workplace: Any) -> None:
    done = nat_finetune(workplace, with_nats_builder(workplace), "--dataset", dataset_of(workplace))
    assert done.returncode == 0, told(workplace, done)
    assert_trained(workplace, num_versions=2)
    assert_on_policy_and_exact(workplace)


def test_another_trainer_and_builder_train_by_our_adapter(workplace: Any) -> None:
    configuration = with_nats_builder(workplace)
    configuration["trainers"]["trainer"] = {"_type": "nat_example_trainer"}
    dataset = dataset_of(workplace)
    done = nat_finetune(workplace, configuration, "--dataset", dataset, "--validation_dataset", dataset)
    assert done.returncode == 0, told(workplace, done)
    assert_trained(workplace, num_versions=2)
    assert_on_policy_and_exact(workplace)
    assert "'statuses': ['completed', 'completed']" in done.stderr + done.stdout
    assert re.search(r"validation .*'num_examples': 2", done.stdout), told(workplace, done)


def configuration_of(workplace: Any) -> dict[str, Any]:
    configuration = workplace.configuration(num_epochs=2)
    del configuration["workflow"]
    configuration["finetuning"]["enabled"] = True
    configuration["trajectory_builders"]["rollouts"]["workspace"] = str(workplace.workspace)
    configuration["trainer_adapters"]["learner"] |= {"workspace": str(workplace.workspace), "tasks_per_epoch": 2}
    return configuration


def with_nats_builder(workplace: Any) -> dict[str, Any]:
    configuration = configuration_of(workplace)
    port = free_port()
    configuration["trajectory_builders"] = {"rollouts": {"_type": "nat_example_builder", "num_generations": 3}}
    configuration["trainer_adapters"]["learner"]["endpoint"] = {"port": port, "engine": {"threads": 1}}
    configuration["llms"] = {
        "policy": {
            "_type": "openai",
            "base_url": f"http://127.0.0.1:{port}/v1",
            "api_key": "none",
            "model_name": "policy",
            "max_tokens": 4,
            "logprobs": True,
        }
    }
    configuration["workflow"] = {"_type": "nat_example_digits", "llm_name": "policy"}
    configuration["eval"] = {
        "general": {"output_dir": str(workplace.folder / "eval"), "dataset": {"_type": "json", "file_path": "none"}},
        "evaluators": {"share": {"_type": "nat_example_share"}},
    }
    configuration["finetuning"]["reward_function"] = {"name": "share"}
    return configuration


def nat_finetune(workplace: Any, configuration: dict[str, Any], *options: str) -> "subprocess.CompletedProcess[str]":
    packages = workplace.folder / "packages"
    metadata = packages / "nat_example-1.0.dist-info"
    metadata.mkdir(parents=True)
    shutil.copy(PACKAGE, packages)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: nat-example\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[nat.components]\nnat_example = nat_example\n")
    return subprocess.run(
        [NAT, "finetune", "--config_file", str(workplace.write(configuration)), *options],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=workplace.folder,
        env={**ENVIRONMENT, "PYTHONPATH": f"{packages}:{workplace.folder}"},
    )


def assert_trained(workplace: Any, *, num_versions: int) -> None:
    versions = workplace.rows("SELECT version, weights_sha256 FROM weight_versions ORDER BY version")
    assert [row["version"] for row in versions] == list(range(num_versions + 1))
    assert len({row["weights_sha256"] for row in versions}) == num_versions + 1
    assert (workplace.folder / "output" / "model.safetensors").exists()
    assert workplace.rows("SELECT state FROM jobs") == [{"state": "succeeded"}]


def assert_on_policy_and_exact(workplace: Any) -> None:
    """Every rollout was made with the weights that it was trained on, and nothing of it was tokenised again."""
    outcomes = workplace.rows("SELECT outcome, count(*) AS n FROM outcomes GROUP BY 1")
    assert outcomes == [{"outcome": "trained", "n": 2 * 2 * 3}]
    assert workplace.rows("SELECT max(max_staleness) AS s FROM staleness") == [{"s": 0}]


def dataset_of(workplace: Any) -> str:
    return write_json(workplace, "dataset.json", DATASET)


def write_json(workplace: Any, name: str, value: Any) -> str:
    path = workplace.folder / name
    path.write_text(json.dumps(value))
    return str(path)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def told(workplace: Any, done: "subprocess.CompletedProcess[str]") -> str:
    return done.stdout[-3000:] + done.stderr[-5000:] + workplace.logs()
