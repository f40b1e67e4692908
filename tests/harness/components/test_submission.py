"""Rewards and metadata as components may leave them, at the start of a submission."""

import asyncio
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollstream.harness.components.submission import digest_of, with_plain_rewards
from rollstream.harness.components.trainer import RollstreamTrainer
from rollstream.schemas.errors import ComponentError, ConfigError
from rollstream.schemas.events import BatchPlanned
from rollstream.schemas.finetuning import Trajectory, TrajectoryCollection
from tests.rigs.runs.epochwise_rig import EpochwiseRig, answers_of, configuration, opened_rig


def test_rewards_of_numpy_are_submitted_as_numbers(tmp_path: Path) -> None:
    async def scenario() -> None:
        rig = EpochwiseRig(tmp_path, configuration(tmp_path))
        async with opened_rig(rig) as (_, parts):
            await parts.trajectory_builder.start_run("mine", {"epoch": 0})
            collection = await parts.trajectory_builder.finalize("mine")
            group = collection.trajectories[0]
            given: list[Any] = [np.float32(0.5), np.bool_(True), np.array(2)]
            for trajectory, reward in zip(group, given, strict=True):
                trajectory.reward = reward
            shaped: Any = np.zeros(len(answers_of(group[0])))
            group[0].shaped_rewards = shaped
            ref = await parts.trainer_adapter.submit(TrajectoryCollection(trajectories=[group], run_id="mine"))
            await parts.trainer_adapter.wait_until_complete(ref)
        (batch,) = await rig.events("batches", BatchPlanned)
        assert [member.reward for member in batch.members] == [0.5, 1.0, 2.0]

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"reward": "high"}, "reward of group 0, member 1 is a str; expected a finite number"),
        ({"shaped_rewards": [None]}, r"reward shaped_rewards\[0\] of group 0, member 1 is None"),
        ({"shaped_rewards": 1.0}, "shaped_rewards of group 0, member 1 is 1.0; expected a list of numbers"),
        (
            {"metadata": {"id": 1, "seen": np.int64(3)}},
            r"group 0, member 1: metadata\['seen'\] cannot be recorded: Unable to serialize unknown type: .*int64",
        ),
    ],
)
def test_a_value_that_cannot_be_recorded_is_named_by_group_member_and_key(
    changed: dict[str, Any], message: str
) -> None:
    sound = Trajectory(episode=[], reward=0.0)
    group = [sound, sound.model_copy(update=changed)]
    collection = TrajectoryCollection.model_construct(trajectories=[group], run_id="mine")
    with pytest.raises(ConfigError, match=message):
        digest_of(with_plain_rewards(collection))


@pytest.mark.parametrize(
    ("rewards", "message"),
    [
        ((np.float32(0.5), np.bool_(True), np.array(2)), ""),
        ((0.0, np.float32("nan"), 1.0), "epoch 0: reward of group 0, member 1 is nan; expected a finite number"),
        ((0.0, "1", 1.0), "epoch 0: reward of group 0, member 1 is a str; expected a finite number"),
    ],
)
def test_the_trainer_takes_rewards_of_numpy_as_numbers_and_refuses_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rewards: tuple[Any, ...], message: str
) -> None:
    async def scenario() -> None:
        rig = EpochwiseRig(tmp_path, configuration(tmp_path, curriculum_learning={"enabled": True}))
        async with opened_rig(rig) as (_, parts):
            assert isinstance(parts.trainer, RollstreamTrainer)
            own = parts.trajectory_builder.finalize

            async def finalize(run_id: str, meta: Any = None) -> TrajectoryCollection:
                collection = await own(run_id, meta)
                for group in collection.trajectories:
                    for trajectory, reward in zip(group, rewards, strict=True):
                        trajectory.reward = reward
                return collection

            monkeypatch.setattr(parts.trajectory_builder, "finalize", finalize)
            with pytest.raises(ComponentError, match=message) if message else nullcontext():
                await parts.trainer.run_epoch(0, "run-1")
                (row,) = parts.trainer.reward_history
                assert (row["min_reward"], row["max_reward"]) == (0.5, 2.0)

    asyncio.run(scenario())
