"""An environment and a reward of an installed package: by its entry point alone, in the command and in producers."""

import os
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.kafka, pytest.mark.slow]
PACKAGE = """
from rollstream.harness import register_environment, register_reward


@register_environment("installed_digits")
async def digits(session):
    reply = await session.chat([{"role": "user", "content": str(session.inputs.get("question", "?"))}])
    await session.reward(100.0)
    await session.reward(-7.0, "length")


@register_reward("installed_share")
def share(rollout):
    said = str(rollout.steps[-1].data["output"])
    return sum(character.isdigit() for character in said) / max(1, len(said))
"""


def test_a_run_is_played_and_rewarded_by_what_a_package_registers(project: Any, tmp_path_factory: Any) -> None:
    packages: Path = tmp_path_factory.mktemp("packages")
    (packages / "installed_game.py").write_text(PACKAGE)
    metadata = packages / "installed_game-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: installed-game\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[rollstream.components]\ninstalled_game = installed_game\n")
    configuration = project.configuration(num_epochs=1)
    configuration["workflow"] = "installed_digits"
    configuration["finetuning"]["reward_function"] = {"name": "installed_share"}
    path = os.pathsep.join([str(packages), str(project.folder)])
    done = project.run("finetune", "--config_file", str(project.write(configuration)), PYTHONPATH=path)
    assert done.returncode == 0, done.stdout + done.stderr + project.logs()
    names = project.rows("SELECT DISTINCT name FROM rewards ORDER BY 1")
    assert [row["name"] for row in names] == ["installed_share", "length", "reward"]
    trained = project.rows(
        "SELECT m.reward, r.value FROM batch_members m JOIN trajectories t USING (trajectory_id) "
        "JOIN rewards r ON r.rollout_id = t.rollout_id AND r.name = 'installed_share'"
    )
    assert len(trained) == 16
    assert all(row["reward"] == pytest.approx(row["value"]) for row in trained)
