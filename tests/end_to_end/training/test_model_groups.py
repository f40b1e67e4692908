"""A run of three agents with a model group each, one of them frozen, from the command line to its replay."""

from typing import Any

import pytest

from rollstream.learner.tiny_model import make_tiny_model
from tests.end_to_end.killing import kill_at

pytestmark = [pytest.mark.kafka, pytest.mark.slow, pytest.mark.timeout(600)]
GAME = '''
from zlib import crc32

from rollstream.producers.rollout.session import Session


async def trio(session: Session) -> None:
    """Each agent answers the one before it, and is rewarded by its own words."""
    said = "?"
    for agent in session.agents:
        said = (await session.chat([{"role": "user", "content": said}], agent=agent)).text
        await session.reward(crc32(said.encode()) / 2**32, agent=agent)
'''
RUN, EPOCHS = "trio-1", 5


def configured(project: Any) -> str:
    (project.folder / "trio.py").write_text(GAME)
    make_tiny_model(project.folder / "other", seed=1)
    agents = {"first": "one", "second": "two", "third": "three"}
    written = project.configuration(num_epochs=EPOCHS, agents=agents, engine={"threads": 1, "deterministic": True})
    adapter = written["trainer_adapters"]["learner"]
    adapter["model_groups"] = {
        "two": {
            "optimizer": {"learning_rate": "5e-3"},
            "model": {"path": str(project.folder / "other")},
            "algorithm": {"name": "grpo", "advantage": "rae", "rae_decay": 0.5},
        },
        "three": {"frozen": True},
    }
    return str(project.write(written | {"workflow": "python:trio.trio"}))


def test_two_model_groups_are_trained_beside_a_frozen_one_and_replay_is_equal_after_a_kill(project: Any) -> None:
    command = project.start("finetune", "--config_file", configured(project), "--run_id", RUN)
    try:
        kill_at(project, command, 3, "learner-1")  # one version of each model group, and one that was trained
        assert command.wait(300) == 0, project.output() + project.logs()
    finally:
        command.kill()
        command.wait()
    for name in ("one", "two"):
        assert (project.folder / "output" / name / "model.safetensors").is_file()
    assert not (project.folder / "output" / "three").exists()
    versions = project.rows("SELECT model_group, max(version) AS v FROM weight_versions GROUP BY 1 ORDER BY 1")
    assert {row["model_group"]: row["v"] for row in versions} == {
        f"{RUN}/one": EPOCHS,
        f"{RUN}/three": 0,
        f"{RUN}/two": EPOCHS,
    }
    jobs = project.rows("SELECT job_id, kind, state, settings FROM jobs ORDER BY job_id")
    assert [(row["job_id"], row["kind"], row["state"]) for row in jobs] == [
        (f"{RUN}/frozen-three", "frozen", "succeeded"),
        (f"{RUN}/rl", "rl", "succeeded"),
        (f"{RUN}/rl-two", "rl", "succeeded"),
    ]
    trained = project.rows(
        "SELECT DISTINCT t.agent, t.model_group, b.job_id FROM batch_members m "
        "JOIN trajectories t USING (trajectory_id) JOIN batches b USING (batch_id) ORDER BY 1"
    )
    assert [(row["agent"], row["model_group"], row["job_id"]) for row in trained] == [
        ("first", f"{RUN}/one", f"{RUN}/rl"),
        ("second", f"{RUN}/two", f"{RUN}/rl-two"),
    ]
    averages = project.rows("SELECT count(*) AS n FROM training_steps WHERE metrics['baseline/second'] > 0")
    assert averages[0]["n"] == EPOCHS
    mismatch = project.rows("SELECT max(mismatch_kl) AS most, bool_or(is_alarming) AS alarm FROM engine_mismatch")
    assert 0 <= mismatch[0]["most"] < 1e-6
    assert mismatch[0]["alarm"] is False
    causes = project.rows("SELECT agent, cause FROM rejections JOIN trajectories USING (trajectory_id) GROUP BY ALL")
    assert [(row["agent"], row["cause"]) for row in causes] == [("third", "frozen")]
    for how in ("--verify", "--train"):
        replayed = project.run("replay", RUN, how)
        assert replayed.returncode == 0, replayed.stdout + replayed.stderr
        assert f"equal: run {RUN}" in replayed.stdout
