"""`rollstream finetune` with an adapter for another training backend, a folder here: what is on the log after it."""

from typing import Any

import pytest

pytestmark = [pytest.mark.kafka, pytest.mark.slow]
COMPONENTS = """
from pathlib import Path
from rollstream.harness import TrainerAdapter, TrajectoryBuilder, register_trainer_adapter, register_trajectory_builder
from rollstream.schemas.finetuning import (
    EpisodeItem, TrainerAdapterConfig, TrainingJobRef, TrainingJobStatus, Trajectory, TrajectoryBuilderConfig,
    TrajectoryCollection,
)


class SaidConfig(TrajectoryBuilderConfig, name="said"):
    pass


class Said(TrajectoryBuilder):
    async def start_run(self, run_id, meta=None):
        pass

    async def finalize(self, run_id, meta=None):
        asked = EpisodeItem(role="user", content="1+3=")
        group = [
            Trajectory(
                episode=[asked, EpisodeItem(role="assistant", content=said, logprobs={})],
                reward=float(said == "4"),
                metadata={"id": "sum"},
            )
            for said in "45"
        ]
        return TrajectoryCollection(trajectories=[group], run_id=run_id)

    def log_progress(self, run_id, metrics, output_dir=None):
        pass


@register_trajectory_builder(config_type=SaidConfig)
async def build_answers(config, builder):
    yield Said(config)


class FolderConfig(TrainerAdapterConfig, name="folder_backend"):
    folder: Path
    status: str = "completed"


class Folder(TrainerAdapter):
    async def is_healthy(self):
        return self.adapter_config.folder.is_dir()

    async def submit(self, trajectories):
        number = len(list(self.adapter_config.folder.iterdir()))
        (self.adapter_config.folder / f"{number}.json").write_text(trajectories.model_dump_json())
        return TrainingJobRef(run_id=trajectories.run_id, backend="folder", metadata={"number": number})

    async def status(self, ref):
        said = self.adapter_config.status
        return TrainingJobStatus(run_id=ref.run_id, backend="folder", status=said, message=f"the folder says {said}")

    async def wait_until_complete(self, ref, poll_interval=10.0):
        return await self.status(ref)

    def log_progress(self, ref, metrics, output_dir=None):
        pass


@register_trainer_adapter(config_type=FolderConfig)
async def build_folder(config, builder):
    yield Folder(config)
"""


def configuration(project: Any, **adapter: Any) -> dict[str, Any]:
    (project.folder / "other_backend.py").write_text(COMPONENTS)
    (project.folder / "jobs").mkdir(exist_ok=True)
    return {
        "trajectory_builders": {"b": {"_type": "python:other_backend.SaidConfig"}},
        "trainer_adapters": {
            "a": {"_type": "python:other_backend.FolderConfig", "folder": str(project.folder / "jobs"), **adapter}
        },
        "trainers": {"t": {"_type": "rollstream"}},
        "workflow": {"_type": "their_agent"},
        "finetuning": {
            "trainer": "t",
            "trajectory_builder": "b",
            "trainer_adapter": "a",
            "num_epochs": 2,
            "output_dir": str(project.folder / "output"),
        },
    }


def test_its_runs_are_recorded_asked_verified_and_exported_as_any_other(project: Any) -> None:
    file = str(project.write(configuration(project)))
    done = project.run("finetune", "--config_file", file, "--run_id", "elsewhere")
    assert done.returncode == 0, done.stdout + done.stderr + project.logs()
    assert "run elsewhere completed after" in done.stdout
    assert len(list((project.folder / "jobs").iterdir())) == 2
    outcomes = project.rows("SELECT outcome, cause, count(*) AS n FROM outcomes GROUP BY ALL")
    assert outcomes == [{"outcome": "rejected", "cause": "handed_over", "n": 4}]
    assert project.rows("SELECT count(*) AS n FROM wasted_tokens") == [{"n": 0}]
    assert project.rows("SELECT kind, state FROM jobs") == [{"kind": "external", "state": "succeeded"}]
    assert project.rows("SELECT epoch, avg_reward, trained_groups FROM epoch_summary ORDER BY 1") == [
        {"epoch": epoch, "avg_reward": 0.5, "trained_groups": 1} for epoch in (0, 1)
    ]
    for command in (["replay", "elsewhere", "--verify"], ["export", "elsewhere"]):
        asked = project.run(*command)
        assert asked.returncode == 0, (command, asked.stdout + asked.stderr)
    trained = project.run("replay", "elsewhere", "--train")
    assert (trained.returncode, "run elsewhere has trained nothing" in trained.stderr) == (1, True), trained.stderr
    exported = str(project.folder / "elsewhere-export")
    assert project.run("replay", "elsewhere", "--verify", "--export", exported).returncode == 0
    failing = project.write(configuration(project, status="failed"), "failing.yaml")
    done = project.run("finetune", "--config_file", str(failing), "--run_id", "failing")
    assert done.returncode == 1
    assert "the folder says failed" in done.stderr
    states = project.rows("SELECT run_id, state FROM jobs ORDER BY 1")
    assert [row["state"] for row in states] == ["succeeded", "failed"]
