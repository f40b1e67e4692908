"""Runs that end badly: exit status, last line of the terminal, and the states of run and job agree."""

from typing import Any

import pytest

pytestmark = [pytest.mark.kafka, pytest.mark.slow]

MODULE = """
import sys

from rollstream.producers.rollout.session import Session

if "{refused}" in sys.argv:
    raise ImportError("there is no licence here")


async def wins(session: Session) -> None:
    await session.chat([{{"role": "user", "content": "?"}}])
    await session.reward(1.0)
"""
DIES = """
import sys
if "learner" in sys.orig_argv or "rollstream.harness.services.fork_server" in sys.orig_argv:
    raise SystemExit(3)
"""


def game(project: Any, refused: str = "no command", **builder: Any) -> dict[str, Any]:
    """A run of one epoch whose groups are flat; `refused`: a word of the commands that cannot import its game."""
    (project.folder / "bad.py").write_text(MODULE.format(refused=refused))
    return project.configuration(num_epochs=1, max_attempts=1, **builder) | {"workflow": "python:bad.wins"}


def failure(project: Any, configuration: dict[str, Any]) -> str:
    """The message of a run that fails: the terminal, SQL and the commands agree on it, and on its job's failure."""
    done = project.run("finetune", "--config_file", str(project.write(configuration)))
    assert done.returncode == 1, done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    (run,) = project.rows("SELECT run_id, state, message FROM runs")
    (job,) = project.rows("SELECT job_id, state, error FROM jobs")
    assert (run["state"], job["state"]) == ("failed", "failed")
    assert run["message"] == f"job {job['job_id']} failed: {job['error']}"
    assert done.stderr.splitlines()[-1] == f"error: run {run['run_id']} failed: {run['message']}"
    for words in (("jobs",), ("runs",), ("jobs", "show", job["job_id"])):
        listed = project.run(*words).stdout
        assert "failed" in listed
        assert "succeeded" not in listed
    return run["message"]


def test_a_run_whose_groups_are_all_flat_has_failed_and_its_job_too(project: Any) -> None:
    message = failure(project, game(project, drop_zero_variance=True))
    assert "nothing was trained (16 trajectories rejected: zero_variance)" in message


def test_a_run_whose_environment_the_producers_cannot_import_has_failed_and_its_job_too(project: Any) -> None:
    assert "(16 rollouts failed: environment_error)" in failure(project, game(project, refused="serve"))


def test_a_loss_that_is_not_finite_fails_the_run_and_its_job(project: Any) -> None:
    configuration = project.configuration() | {"workflow": "python:game.digits"}
    learner = configuration["trainer_adapters"]["learner"]
    learner["algorithm"] = {"name": "grpo", "kl_coefficient": 1e39}
    learner["optimizer"] = {"max_skipped_steps": 0}
    assert "the gradient's norm is nan" in failure(project, configuration)


def test_a_run_whose_learner_cannot_be_started_stays_open_and_its_job_too(project: Any) -> None:
    (project.folder / "sitecustomize.py").write_text(DIES)
    config = str(project.write(game(project)))
    done = project.run("finetune", "--config_file", config, PYTHONPATH=str(project.folder))
    assert done.returncode == 1, done.stdout + done.stderr
    (run,) = project.rows("SELECT run_id, state, message FROM runs")
    assert (run["state"], run["message"]) == ("running", None)
    assert f"run {run['run_id']} stays open: " in done.stderr.splitlines()[-1]
    assert project.rows("SELECT state, error FROM jobs") == [{"state": "submitted", "error": None}]
    assert "  submitted  " in project.run("jobs").stdout
