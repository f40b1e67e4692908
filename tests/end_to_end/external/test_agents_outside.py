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
from tests.end_to_end.killing import kill_at
from tests.rigs.services.service_processes import CLI

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
        playing = subprocess.Popen([*command, "--players", "16"], stdout=log, stderr=log, env=environment)
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


def small(project: Any) -> dict[str, Any]:
    """The configuration of the example without vLLM, made small."""
    configuration = with_paths(project, yaml.safe_load((ROOT / "examples/agents/shop.yaml").read_text()))
    builder, learner = configuration["trajectory_builders"]["rollouts"], configuration["trainer_adapters"]["learner"]
    builder |= {"num_generations": MEMBERS, "drop_zero_variance": False, "tick_interval_s": 0.2}
    builder["sampling"] = {"max_new_tokens": 8}
    learner["tasks_per_epoch"] = TASKS
    learner["model"]["path"] = str(project.model)
    configuration["finetuning"]["num_epochs"] = EPOCHS
    return configuration


def check(project: Any) -> None:
    """Every rollout was played by the agent, rewarded and trained, each version by the rollouts of its epoch."""
    played = EPOCHS * TASKS * MEMBERS
    outcomes = project.rows("SELECT outcome, count(*) AS n FROM outcomes GROUP BY 1")
    assert outcomes == [{"outcome": "trained", "n": played}], project.logs()
    versions = project.rows("SELECT version FROM weight_versions ORDER BY version")
    assert [row["version"] for row in versions] == list(range(EPOCHS + 1))
    (steps,) = project.rows("SELECT count(*) AS n FROM steps WHERE name = 'gateway.claim'")
    assert steps["n"] == played
    (rewards,) = project.rows("SELECT count(*) AS n, count(DISTINCT rollout_id) AS rollouts FROM rewards")
    assert (rewards["n"], rewards["rollouts"]) == (played, played)
    sampled = project.rows("SELECT DISTINCT max_version AS version FROM steps WHERE max_version >= 0 ORDER BY 1")
    assert [row["version"] for row in sampled] == list(range(EPOCHS))
    replayed = project.run("replay", RUN, "--verify", "--train")
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr


@pytest.mark.kafka
@pytest.mark.slow
def test_an_agent_with_openais_client_plays_a_run_that_is_trained_and_replayed(project: Any) -> None:
    config = project.write(small(project))
    with agent(project):
        done = project.run("finetune", "--config_file", str(config), "--run_id", RUN, timeout=600)
        assert done.returncode == 0, done.stdout + done.stderr + project.logs()
    check(project)


@pytest.mark.kafka
@pytest.mark.slow
def test_producers_killed_under_an_agent_lose_no_demonstration_and_no_rollout(project: Any) -> None:
    configuration, warm_epochs = small(project), 8
    rollouts = configuration["trajectory_builders"]["rollouts"]
    rollouts["environment_config"] = {"demonstrator": "python:examples.agents.demonstrations.shop"}
    rollouts["session_timeout_s"] = 6
    configuration["eval"]["general"]["dataset"]["file_path"] = str(ROOT / "examples/data/shop_tables.jsonl")
    warm_start = {"num_epochs": warm_epochs, "tasks_per_epoch": TASKS, "num_generations": MEMBERS}
    configuration["trainer_adapters"]["learner"]["warm_start"] = warm_start
    started = ("finetune", "--config_file", str(project.write(configuration)), "--run_id", RUN)
    with agent(project):
        command = project.start(*started, PYTHONPATH=str(ROOT))
        try:
            for versions in (1, warm_epochs):
                kill_at(project, command, versions, "producers-1")
            assert command.wait(300) == 0, project.output() + project.logs()
        finally:
            command.kill()
            command.wait()
    job = "split_part(rollout_id, '/', 2)"
    outcomes = project.rows(f"SELECT {job} AS job, outcome, count(*) AS n FROM outcomes GROUP BY ALL ORDER BY n")
    assert outcomes == [
        {"job": "rl", "outcome": "trained", "n": EPOCHS * TASKS * MEMBERS},
        {"job": "sft", "outcome": "trained", "n": warm_epochs * TASKS * MEMBERS},
    ]
    (trained,) = project.rows("SELECT count(*) AS n, count(DISTINCT trajectory_id) AS distinct_ids FROM batch_members")
    assert trained["n"] == trained["distinct_ids"] == (EPOCHS + warm_epochs) * TASKS * MEMBERS


CALLED = """
SELECT rollout_id, bool_or(contains(input, '"role":"tool"')) AS is_called,
       bool_or(contains(output, '<tool_call>') AND finish_reason = 'stop') AS is_written,
       max(max_version) AS version
FROM steps WHERE max_version >= 0 AND rollout_id LIKE '%/rl/%' GROUP BY 1
"""
"""Rollouts of the model: whether an answer has a tool call, and a later prompt the result of one."""


@pytest.mark.vllm
@pytest.mark.kafka
def test_a_model_calls_the_tools_of_an_agent_with_openais_client_on_vllm(project: Any) -> None:
    with agent(project):
        configuration = short(project, "shop_vllm.yaml", warm_epochs=14, tasks=10)
        finetune_on_vllm(project, configuration)
    check_calls(project, num_rollouts=EPOCHS * 10 * 8)


@pytest.mark.vllm
@pytest.mark.kafka
@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_a_model_calls_the_tool_of_an_agent_in_node_on_vllm(project: Any) -> None:
    program = f"command:node {ROOT / 'examples/agents/calculator.mjs'}"
    configuration = short(project, "calculator_vllm.yaml", warm_epochs=8, tasks=4)
    finetune_on_vllm(project, configuration | {"workflow": program})
    check_calls(project, num_rollouts=EPOCHS * 4 * 8)


def short(project: Any, name: str, *, warm_epochs: int, tasks: int) -> dict[str, Any]:
    """An example with fewer epochs and rollouts: the model learns to call tools, and not yet to call them well."""
    configuration = with_paths(project, yaml.safe_load((ROOT / "examples/agents" / name).read_text()))
    learner = configuration["trainer_adapters"]["learner"]
    learner["tasks_per_epoch"] = tasks
    learner["warm_start"]["num_epochs"] = warm_epochs
    configuration["finetuning"]["num_epochs"] = EPOCHS
    return configuration


def check_calls(project: Any, *, num_rollouts: int) -> None:
    """No rollout is lost, the model's answers have tool calls, and the results are in the prompts that follow."""
    rollouts = project.rows(
        "SELECT state, count(*) AS n, count(reward) AS rewarded FROM rollouts WHERE rollout_id LIKE '%/rl/%' GROUP BY 1"
    )
    assert rollouts == [{"state": "ended", "n": num_rollouts, "rewarded": num_rollouts}], project.logs()
    (lost,) = project.rows("SELECT count(*) AS n FROM rollouts WHERE state <> 'ended'")
    assert lost["n"] == 0, project.logs()
    played = project.rows(CALLED)
    assert len(played) == num_rollouts
    called = [row for row in played if row["is_called"]]
    assert len(called) > num_rollouts / 5, f"{len(called)} of {num_rollouts}"
    assert all(row["is_written"] for row in called)
    versions = sorted({row["version"] for row in called})
    assert len(versions) > 1, f"calls were sampled from versions {versions} alone"
    replayed = project.run("replay", RUN, "--verify")
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr


def finetune_on_vllm(project: Any, configuration: dict[str, Any]) -> None:
    """Run an example with the model that its comment says to make, from the root of the checkout."""
    from tests.rigs.services.vllm_server import ENVIRONMENT as VLLM

    model = project.folder / "tiny-untied"
    made = ["tiny-model", str(model), "--hidden-size", "128", "--untied"]
    subprocess.run([*CLI, *made], check=True, env=ENVIRONMENT)
    configuration["trainer_adapters"]["learner"]["model"]["path"] = str(model)
    config, paths = project.write(configuration), {"PYTHONPATH": str(ROOT)}
    done = project.run("finetune", "--config_file", str(config), "--run_id", RUN, timeout=600, **VLLM, **paths)
    assert done.returncode == 0, done.stdout + done.stderr + project.logs()
