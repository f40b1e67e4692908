"""A run whose rollouts an agent in a process of its own plays: with OpenAI's client and tools, and in Node."""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.end_to_end.conftest import ENVIRONMENT
from tests.rigs.services.service_processes import CLI

pytestmark = [pytest.mark.timeout(900)]
ROOT = Path(__file__).parents[3]
EPOCHS, TASKS, MEMBERS = 3, 2, 4
LEARNING = 15
"""Epochs of 64 rollouts in which the tiny model learns to say numbers."""
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


def with_paths(project: Any, configuration: dict[str, Any]) -> dict[str, Any]:
    """A configuration whose dataset is found from the project's folder, in which its model is saved."""
    dataset = configuration["eval"]["general"]["dataset"]
    dataset["file_path"] = str(ROOT / dataset["file_path"])
    configuration["finetuning"]["output_dir"] = str(project.folder / "output")
    return configuration


def example(project: Any, name: str) -> dict[str, Any]:
    """The example's configuration, made small."""
    configuration = with_paths(project, yaml.safe_load((ROOT / "examples/agents" / name).read_text()))
    builder, learner = configuration["trajectory_builders"]["rollouts"], configuration["trainer_adapters"]["learner"]
    builder |= {"num_generations": MEMBERS, "drop_zero_variance": False, "tick_interval_s": 0.2}
    builder["sampling"] = {"max_new_tokens": 8}
    learner["tasks_per_epoch"] = TASKS
    learner["model"]["path"] = str(project.model)
    configuration["finetuning"]["num_epochs"] = EPOCHS
    return configuration


def check(project: Any, *, is_claimed: bool = True) -> None:
    """Every rollout was played by the agent, rewarded and trained, each version by the rollouts of its epoch."""
    played = EPOCHS * TASKS * MEMBERS
    outcomes = project.rows("SELECT outcome, count(*) AS n FROM outcomes GROUP BY 1")
    assert outcomes == [{"outcome": "trained", "n": played}], project.logs()
    versions = project.rows("SELECT version FROM weight_versions ORDER BY version")
    assert [row["version"] for row in versions] == list(range(EPOCHS + 1))
    (steps,) = project.rows("SELECT count(*) AS n FROM steps WHERE name = 'gateway.claim'")
    assert steps["n"] == (played if is_claimed else 0)
    (rewards,) = project.rows("SELECT count(*) AS n, count(DISTINCT rollout_id) AS rollouts FROM rewards")
    assert (rewards["n"], rewards["rollouts"]) == (played, played)
    sampled = project.rows("SELECT DISTINCT max_version AS version FROM steps WHERE max_version >= 0 ORDER BY 1")
    assert [row["version"] for row in sampled] == list(range(EPOCHS))
    replayed = project.run("replay", RUN, "--verify", "--train")
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr


@pytest.mark.kafka
@pytest.mark.slow
def test_an_agent_with_openais_client_plays_a_run_that_is_trained_and_replayed(project: Any) -> None:
    config = project.write(example(project, "shop.yaml"))
    with agent(project):
        done = project.run("finetune", "--config_file", str(config), "--run_id", RUN, timeout=600)
        assert done.returncode == 0, done.stdout + done.stderr + project.logs()
    check(project)


@pytest.mark.vllm
@pytest.mark.kafka
def test_an_agent_with_openais_client_learns_on_vllm(project: Any) -> None:
    configuration = yaml.safe_load((ROOT / "examples/agents/shop_vllm.yaml").read_text())
    configuration["finetuning"]["num_epochs"] = LEARNING
    with agent(project):
        finetune_on_vllm(project, with_paths(project, configuration))
    rewards = [row["avg_reward"] for row in project.rows("SELECT avg_reward FROM epoch_summary ORDER BY epoch")]
    assert len(rewards) == LEARNING
    assert rewards[0] < 0.05
    assert sum(rewards[-2:]) / 2 > rewards[0] + 0.04, f"a number is worth 0.1, the right one 1: {rewards}"
    rollouts = project.rows("SELECT state, count(*) AS n, count(reward) AS rewarded FROM rollouts GROUP BY 1")
    assert rollouts == [{"state": "ended", "n": 64 * LEARNING, "rewarded": 64 * LEARNING}], project.logs()
    sampled = project.rows("SELECT DISTINCT max_version AS version FROM steps WHERE max_version >= 0 ORDER BY 1")
    assert [row["version"] for row in sampled] == list(range(len(sampled)))
    assert len(sampled) > 2
    replayed = project.run("replay", RUN, "--verify")
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr


@pytest.mark.vllm
@pytest.mark.kafka
@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_an_agent_in_node_plays_a_run_on_vllm(project: Any) -> None:
    program = f"command:node {ROOT / 'examples/agents/calculator.mjs'}"
    finetune_on_vllm(project, example(project, "calculator_vllm.yaml") | {"workflow": program})
    check(project, is_claimed=False)


def finetune_on_vllm(project: Any, configuration: dict[str, Any]) -> None:
    """Run an example with the model that its comment says to make."""
    from tests.rigs.services.vllm_server import ENVIRONMENT as VLLM

    model = project.folder / "tiny-128"
    subprocess.run([*CLI, "tiny-model", str(model), "--hidden-size", "128"], check=True, env=ENVIRONMENT)
    configuration["trainer_adapters"]["learner"]["model"]["path"] = str(model)
    config = project.write(configuration)
    done = project.run("finetune", "--config_file", str(config), "--run_id", RUN, timeout=600, **VLLM)
    assert done.returncode == 0, done.stdout + done.stderr + project.logs()
