"""A run whose rollouts an agent in a process of its own plays, with OpenAI's client and tools."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.end_to_end.conftest import ENVIRONMENT

pytestmark = [pytest.mark.timeout(900)]
ROOT = Path(__file__).parents[3]
EPOCHS, TASKS, MEMBERS = 3, 2, 4
RUN = "shop-1"


@contextmanager
def agent(project: Any) -> Iterator[None]:
    """The example, playing what it can claim."""
    output = project.folder / "agent.txt"
    command = [sys.executable, str(ROOT / "examples/agents/shop.py"), "--workspace", str(project.workspace)]
    environment = {**ENVIRONMENT, "PYTHONPATH": str(ROOT)}
    with output.open("wb") as log:
        playing = subprocess.Popen([*command, "--players", "4"], stdout=log, stderr=log, env=environment)
    try:
        yield
        assert playing.poll() is None, output.read_text()
    finally:
        playing.kill()
        playing.wait()


def example(project: Any, model: Path) -> dict[str, Any]:
    """The example's configuration, made small."""
    configuration = yaml.safe_load((ROOT / "examples/agents/shop.yaml").read_text())
    configuration["eval"]["general"]["dataset"]["file_path"] = str(ROOT / "examples/data/shop.jsonl")
    builder, learner = configuration["trajectory_builders"]["rollouts"], configuration["trainer_adapters"]["learner"]
    builder |= {"num_generations": MEMBERS, "drop_zero_variance": False, "tick_interval_s": 0.2}
    builder["sampling"] = {"max_new_tokens": 8}
    learner |= {"tasks_per_epoch": TASKS, "model": {"path": str(model), "device": "cpu"}}
    configuration["finetuning"] |= {"num_epochs": EPOCHS, "output_dir": str(project.folder / "output")}
    return configuration


def check(project: Any) -> None:
    """Every rollout was played by the agent and trained, each version by the rollouts of its epoch."""
    outcomes = project.rows("SELECT outcome, count(*) AS n FROM outcomes GROUP BY 1")
    assert outcomes == [{"outcome": "trained", "n": EPOCHS * TASKS * MEMBERS}], project.logs()
    versions = project.rows("SELECT version FROM weight_versions ORDER BY version")
    assert [row["version"] for row in versions] == list(range(EPOCHS + 1))
    (steps,) = project.rows("SELECT count(*) AS n FROM steps WHERE name = 'gateway.claim'")
    assert steps["n"] == EPOCHS * TASKS * MEMBERS
    replayed = project.run("replay", RUN, "--verify", "--train")
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr


@pytest.mark.kafka
@pytest.mark.slow
def test_an_agent_with_openais_client_plays_a_run_that_is_trained_and_replayed(project: Any) -> None:
    config = project.write(example(project, project.model))
    with agent(project):
        done = project.run("finetune", "--config_file", str(config), "--run_id", RUN, timeout=600)
        assert done.returncode == 0, done.stdout + done.stderr + project.logs()
    check(project)


@pytest.mark.vllm
def test_an_agent_with_openais_client_plays_a_run_on_vllm(project: Any) -> None:
    from tests.rigs.services.vllm_server import ENVIRONMENT as VLLM
    from tests.rigs.services.vllm_server import WHOLE_PROMPTS, executable, tiny_base

    configuration = example(project, tiny_base(project.folder / "base"))
    engine = {"kind": "vllm", "executable": executable(), "arguments": list(WHOLE_PROMPTS), "dtype": "float32"}
    configuration["trajectory_builders"]["rollouts"] |= {
        "engine": engine | {"max_lora_rank": 8},
        "group_timeout_s": 600,
    }
    configuration["trajectory_builders"]["rollouts"]["rollout_timeout_s"] = 300
    configuration["trainer_adapters"]["learner"]["model"]["lora"] = {"rank": 8}
    config = project.write(configuration)
    with agent(project):
        done = project.run("finetune", "--config_file", str(config), "--run_id", RUN, timeout=600, **VLLM)
        assert done.returncode == 0, done.stdout + done.stderr + project.logs()
    check(project)
