"""Rewards and metadata as components may leave them, at the start of a submission."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollstream.harness.components.submission import digest_of, with_plain_rewards
from rollstream.schemas.errors import ConfigError
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
            r"group 0, member 1: metadata\['seen'\] cannot be recorded: .*int64",
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
