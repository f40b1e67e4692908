"""Bad input of any kind from the command line: one clear line, no traceback, a non-zero exit, nothing lost."""

import re
import subprocess
import time
from pathlib import Path
from typing import Any

import duckdb
import psutil
import pytest

from rollstream.metrics.projection.connection import metrics_file
from rollstream.metrics.projection.database import Database

pytestmark = [pytest.mark.slow]

BAD_ENVIRONMENTS = """
import asyncio

from rollstream.producers import Environment
from rollstream.producers.rollout.session import Session


async def raises(session: Session) -> None:
    raise RuntimeError("the board is broken")


async def hangs(session: Session) -> None:
    await asyncio.sleep(3600)


async def plays(session: Session, note: str = "") -> None:
    await session.chat([{"role": "user", "content": "?"}])
    await session.reward(1.0)


def nan(rollout: object) -> float:
    return float("nan")


def looks_in_vain(rollout: object) -> float:
    raise KeyError("no such key")


class Maze(Environment):
    async def run(self, session: Session) -> None:
        await session.chat([{"role": "user", "content": "?"}])
        self.step("north")

    def step(self, move: str) -> None:
        self.place = neighbour(move)


def neighbour(move: str) -> str:
    return looked_up({"south": "hall"}, move)


def looked_up(rooms: dict[str, str], move: str) -> str:
    return rooms[move]
"""
FAILURES = "SELECT cause, message, count(*) FROM rollouts GROUP BY ALL"
"""The query that docs/extending.md names for failed rollouts."""


def assert_one_clear_line(done: subprocess.CompletedProcess[str], *words: str) -> None:
    """A single error line with the words in it, and nothing of Python's."""
    assert done.returncode not in (0, 130), done.stdout
    assert "Traceback" not in done.stderr + done.stdout
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, done.stderr
    for word in words:
        assert word in lines[0], lines[0]


def finetune(project: Any, configuration: dict[str, Any], **environment: str) -> subprocess.CompletedProcess[str]:
    return project.run("finetune", "--config_file", str(project.write(configuration)), **environment)


def test_an_unknown_key_is_named_with_the_nearest_known_one(project: Any) -> None:
    assert_one_clear_line(
        finetune(project, project.configuration(num_generation=3)), "num_generation", "num_generations"
    )


def test_a_value_of_the_wrong_type_is_named(project: Any) -> None:
    assert_one_clear_line(finetune(project, project.configuration(max_turns="many")), "max_turns")


def test_a_missing_model_folder_is_named_before_anything_starts(project: Any) -> None:
    configuration = project.configuration()
    configuration["trainer_adapters"]["learner"]["model"]["path"] = "/no/such/model"
    assert_one_clear_line(finetune(project, configuration), "/no/such/model")


def test_a_broker_that_cannot_be_reached_is_named_and_not_kept_in_mind(project: Any) -> None:
    assert_one_clear_line(finetune(project, project.configuration(bootstrap_servers="127.0.0.1:9")), "127.0.0.1:9")
    assert_one_clear_line(project.run("runs"), "has no runs yet")


def test_a_workspace_that_cannot_be_written_is_named(project: Any) -> None:
    project.workspace.write_text("a file where the folder should be")
    assert_one_clear_line(finetune(project, project.configuration()), str(project.workspace))


def test_an_unknown_environment_is_named(project: Any) -> None:
    configuration = project.configuration() | {"workflow": "guess_nummer"}
    assert_one_clear_line(finetune(project, configuration), "guess_nummer", "guess_number")


def test_a_missing_configuration_file_is_named(project: Any) -> None:
    assert_one_clear_line(project.run("finetune", "--config_file", "none.yaml"), "none.yaml")


def test_sql_without_a_database_is_one_clear_error(project: Any) -> None:
    assert_one_clear_line(project.run("sql", "SELECT 1"), str(project.workspace))


@pytest.mark.kafka
@pytest.mark.parametrize("name", ["raises", "hangs"])
def test_an_environment_that_fails_is_data_and_a_run_of_nothing_else_failed(project: Any, name: str) -> None:
    (project.folder / "bad.py").write_text(BAD_ENVIRONMENTS)
    configuration = project.configuration(num_epochs=1, rollout_timeout_s=1, max_attempts=2)
    configuration["workflow"] = f"python:bad.{name}"
    done = finetune(project, configuration)
    assert "Traceback" not in done.stdout + done.stderr
    assert done.returncode == 1
    assert "none of its 4 groups had enough complete rollouts" in done.stderr
    causes = project.rows("SELECT outcome, cause, count(*) AS n FROM outcomes GROUP BY 1, 2")
    expected = "environment_error" if name == "raises" else "timeout"
    assert [(row["outcome"], row["cause"], row["n"]) for row in causes] == [("failed", expected, 4 * 4 * 2)]
    sealed = project.rows("SELECT epoch, trained_groups FROM epoch_summary")
    assert [(row["epoch"], row["trained_groups"]) for row in sealed] == [(0, 0)]


@pytest.mark.kafka
def test_a_reward_that_is_not_a_number_fails_its_rollouts_and_the_run_ends(project: Any) -> None:
    (project.folder / "bad.py").write_text(BAD_ENVIRONMENTS)
    configuration = project.configuration(num_epochs=1, max_attempts=1, rewards=["python:bad.nan"])
    configuration["workflow"] = "python:bad.plays"
    finetune(project, configuration)
    causes = project.rows("SELECT outcome, cause, count(*) AS n FROM outcomes GROUP BY 1, 2")
    assert [(row["outcome"], row["cause"], row["n"]) for row in causes] == [("failed", "reward_error", 4 * 4)]


@pytest.mark.kafka
def test_a_second_finetune_on_the_same_embedded_workspace_is_refused(project: Any) -> None:
    config = project.write(project.configuration(num_epochs=200))
    first = project.start("finetune", "--config_file", str(config))
    try:
        deadline = time.monotonic() + 60
        while "broker" not in project.output().lower() and time.monotonic() < deadline:
            time.sleep(0.2)
        time.sleep(2)
        second = project.run("finetune", "--config_file", str(config))
        assert_one_clear_line(second, str(project.workspace))
        assert first.poll() is None, project.output()
    finally:
        children = psutil.Process(first.pid).children(recursive=True)
        first.terminate()
        first.wait(60)
        psutil.wait_procs(children, timeout=20)


@pytest.mark.kafka
def test_a_secret_is_in_no_topic_file_or_log(project: Any) -> None:
    secret = "s3cr3t-" + "x" * 24
    (project.folder / "bad.py").write_text(BAD_ENVIRONMENTS)
    configuration = project.configuration(num_epochs=1, environment_config={"note": "${JUDGE_KEY}"})
    configuration["workflow"] = "python:bad.plays"
    done = finetune(project, configuration, JUDGE_KEY=secret)
    assert secret not in done.stdout + done.stderr
    found = [
        str(path) for path in project.workspace.rglob("*") if path.is_file() and secret.encode() in path.read_bytes()
    ]
    assert found == []


def test_a_database_that_another_process_holds_is_named(project: Any) -> None:
    project.workspace.mkdir()
    with duckdb.connect(str(project.workspace / "metrics.duckdb")):
        assert_one_clear_line(project.run("sql", "SELECT 1"), "metrics.duckdb")


@pytest.mark.kafka
def test_metrics_of_another_cluster_are_named_before_the_run(project: Any) -> None:
    project.workspace.mkdir()
    database = Database(metrics_file(project.workspace))
    database.claim_cluster("other")
    database.close()
    assert_one_clear_line(finetune(project, project.configuration()), "was made from cluster other", "move it away")


def test_runs_of_an_empty_workspace_are_none(project: Any) -> None:
    done = project.run("runs")
    assert "Traceback" not in done.stdout + done.stderr


@pytest.mark.kafka
def test_an_evaluator_that_raises_is_reported_by_its_path_while_the_run_continues(project: Any) -> None:
    (project.folder / "bad.py").write_text(BAD_ENVIRONMENTS)
    configuration = project.configuration(num_epochs=1, max_attempts=1)
    configuration["workflow"] = "python:bad.plays"
    configuration["eval"] = {"evaluators": {"mine": {"_type": "python", "function": "bad.looks_in_vain"}}}
    configuration["finetuning"]["reward_function"] = {"name": "mine"}
    done = finetune(project, configuration)
    assert "Traceback" not in done.stdout + done.stderr
    message = [line for line in (done.stdout + done.stderr).splitlines() if "eval.evaluators.mine" in line]
    assert len(message) == 2, done.stdout + done.stderr
    raised = r"reward eval\.evaluators\.mine raised KeyError \(bad\.py line \d+, in looks_in_vain\): 'no such key'$"
    for line, where in zip(message, ("16 of 16 rollouts failed, most often by reward_error: ", ""), strict=True):
        assert re.search(where + raised, line)
    log = (project.workspace / "logs" / "producers-1.log").read_text()
    assert "looks_in_vain" in log.split("Traceback", 1)[1], "the traceback is in the log"
    causes = project.rows("SELECT outcome, cause, count(*) AS n FROM outcomes GROUP BY 1, 2")
    assert [(row["outcome"], row["cause"], row["n"]) for row in causes] == [("failed", "reward_error", 4 * 4)]


@pytest.mark.kafka
def test_a_key_error_two_calls_deep_is_found_at_once_and_by_the_documented_query(project: Any) -> None:
    (project.folder / "bad.py").write_text(BAD_ENVIRONMENTS)
    configuration = project.configuration(num_epochs=1, max_attempts=1)
    configuration["workflow"] = "python:bad.Maze"
    running = project.start("finetune", "--config_file", str(project.write(configuration)))
    line = BAD_ENVIRONMENTS.splitlines().index("    return rooms[move]") + 1
    message = f"environment python:bad.Maze: KeyError (bad.py line {line}, in looked_up): 'north'"
    try:
        deadline = time.monotonic() + 120
        while message not in project.output() and running.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        assert running.poll() is None, f"reported before the run's end: {project.output()}"
        assert running.wait(120) == 1, project.output()
    finally:
        running.terminate()
        running.wait(60)
    output = project.output()
    assert "Traceback" not in output
    assert output.index(f"ERROR: producers-1: {message}\n") < output.index("\nerror: run "), output
    log = (project.workspace / "logs" / "producers-1.log").read_text()
    frames = log.split("Traceback", 1)[1].split("KeyError: 'north'", 1)[0]
    assert [frames.count(f", in {name}\n") for name in ("run", "step", "neighbour", "looked_up")] == [1, 1, 1, 1], (
        frames
    )
    assert f'bad.py", line {line}, in looked_up' in frames
    documents = Path(__file__).resolve().parents[2] / "docs"
    assert FAILURES.replace(" ", "") in "".join((documents / "extending.md").read_text().split())
    (found,) = project.rows(FAILURES)
    assert list(found.values()) == ["environment_error", message, 4 * 4]
    named = output.partition("\nerror: run ")[2].partition('rollstream sql --format json "')[2].partition('"')[0]
    (found,) = project.rows(named)
    assert list(found.values()) == ["failed", "environment_error", message, 4 * 4]
