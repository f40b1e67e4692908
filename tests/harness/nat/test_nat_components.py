"""Our trainer with components of another package: NAT's models go out to them, and what failed fails the command."""

import asyncio

import pytest
from nat.data_models import finetuning as nats
from nat.data_models.config import Config
from nat.finetuning.interfaces.trainer_adapter import TrainerAdapter
from nat.finetuning.interfaces.trajectory_builder import TrajectoryBuilder

from rollstream.harness.nat import register  # noqa: F401  (the types of FILE)
from rollstream.harness.nat.components import NatTrainer
from rollstream.harness.nat.configs import NatTrainerConfig
from rollstream.schemas.errors import RunFailedError

FILE = {
    "trajectory_builders": {"rollouts": {"_type": "rollstream"}},
    "trainer_adapters": {"learner": {"_type": "rollstream", "model": {"path": "none"}}},
    "trainers": {"trainer": {"_type": "rollstream"}},
    "workflow": {"_type": "rollstream", "environment": "guess_number"},
    "finetuning": {
        "enabled": True,
        "trainer": "trainer",
        "trajectory_builder": "rollouts",
        "trainer_adapter": "learner",
        "curriculum_learning": {"enabled": True, "initial_percentile": 0.5, "min_reward_diff": 0.1},
    },
}


class Builder(TrajectoryBuilder):
    """Two groups an epoch, whose rewards differ."""

    async def start_run(self, run_id, meta=None):
        self.started = (run_id, (meta or {})["epoch"])

    async def finalize(self, run_id, meta=None):
        groups = [
            [_conversation(name, reward) for reward in rewards] for name, rewards in (("a", (0, 1)), ("b", (0, 0.5)))
        ]
        return nats.TrajectoryCollection(trajectories=groups, run_id=run_id)

    def log_progress(self, run_id, metrics, output_dir=None):
        pass


class Adapter(TrainerAdapter):
    """Takes NAT's models only; what is waited for ends as told."""

    def __init__(self, *ends):
        super().__init__(nats.TrainerAdapterConfig())
        self.ends = list(ends)
        self.submitted = []

    async def is_healthy(self):
        return True

    async def submit(self, trajectories):
        assert type(trajectories) is nats.TrajectoryCollection
        self.submitted.append(trajectories)
        return nats.TrainingJobRef(run_id=trajectories.run_id, backend="other")

    async def status(self, ref):
        raise NotImplementedError

    async def wait_until_complete(self, ref, poll_interval=10.0):
        assert type(ref) is nats.TrainingJobRef
        return nats.TrainingJobStatus(run_id=ref.run_id, backend="other", status=self.ends.pop(0), message="as told")

    def log_progress(self, ref, metrics, output_dir=None):
        pass


def _conversation(name, reward):
    episode = [
        nats.EpisodeItem(role=nats.EpisodeItemRole.USER, content="?"),
        nats.EpisodeItem(role=nats.EpisodeItemRole.ASSISTANT, content="1", logprobs={"content": []}),
    ]
    return nats.Trajectory(episode=episode, reward=reward, metadata={"id": name})


class EmptyBuilder(Builder):
    """Nothing of it is complete."""

    async def finalize(self, run_id, meta=None):
        return nats.TrajectoryCollection(trajectories=[], run_id=run_id)


def run(folder, *ends, builder=Builder):
    """The trainer, what it was bound to, and what it said of two epochs."""
    config = Config.model_validate(FILE)
    finetune = config.finetuning
    finetune.output_dir = folder
    finetune.run_configuration = nats.FinetuneRunConfig(config_file=config)
    trainer, adapter = NatTrainer(NatTrainerConfig()), Adapter(*ends)

    async def conduct():
        await trainer.bind_components(builder(nats.TrajectoryBuilderConfig()), adapter)
        await trainer.initialize(finetune)
        try:
            return await trainer.run(2)
        finally:
            await trainer.cleanup()

    return adapter, asyncio.run(conduct())


def test_models_are_nats_outside_and_the_curriculum_chooses_among_them(tmp_path):
    adapter, statuses = run(tmp_path, "completed", "completed")
    assert all(type(status) is nats.TrainingJobStatus for status in statuses)
    assert [status.status for status in statuses] == ["completed", "completed"]
    assert [[group[0].metadata["id"] for group in sent.trajectories] for sent in adapter.submitted] == [["a"], ["a"]]
    assert (tmp_path / "reward_history.json").exists()


@pytest.mark.parametrize("end", ["failed", "canceled"])
def test_a_job_that_failed_fails_the_command(tmp_path, end):
    with pytest.raises(RunFailedError, match=f"{end}: as told"):
        run(tmp_path, "completed", end)


def test_a_run_without_any_trajectories_fails_the_command(tmp_path):
    with pytest.raises(RunFailedError, match="the rollouts of its 2 epochs produced no trajectories"):
        run(tmp_path, builder=EmptyBuilder)
