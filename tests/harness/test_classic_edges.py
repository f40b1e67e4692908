"""What a run by components does where few come: what is written again, and what is sealed while a run is taken up."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from rollstream.harness import epochs
from rollstream.harness.backend import opened
from rollstream.harness.classic.submission import submitted_groups
from rollstream.schemas.errors import ConfigError, LogError
from rollstream.schemas.events import BatchPlanned, EpochSealed, SubmissionReceived, TrajectoryRejected
from rollstream.schemas.finetuning import (
    DPOItem,
    TrainingStatusEnum,
    Trajectory,
    TrajectoryCollection,
)

from .classic_rig import ClassicRig, answers_of, components_for, conducted, configuration, opened_rig


def shaped_evenly(group: list[Trajectory]) -> None:
    """Change what is trained on, so that the group is written to the log again."""
    for trajectory in group:
        trajectory.shaped_rewards = [0.25] * len(answers_of(trajectory))


def test_what_is_written_again_has_the_reward_that_it_came_with_and_is_not_scored_anew(tmp_path: Path) -> None:
    written = configuration(tmp_path, reward_function={"name": "has_digit"})
    written["eval"]["evaluators"] = {"has_digit": {"_type": "numeric_match", "answer_key": "secret"}}
    written["trajectory_builders"]["b"]["reward_weights"] = {"reward": 0.5, "has_digit": 2.0}

    async def scenario() -> None:
        rig = ClassicRig(tmp_path, written)
        async with opened_rig(rig) as (_, parts):
            await parts.trajectory_builder.start_run("mine", {"epoch": 0})
            collection = await parts.trajectory_builder.finalize("mine")
            changed = collection.trajectories[0]
            shaped_evenly(changed)
            for number, trajectory in enumerate(changed):
                trajectory.reward = number + 0.5
            ref = await parts.trainer_adapter.submit(TrajectoryCollection(trajectories=[changed], run_id="mine"))
            status = await parts.trainer_adapter.wait_until_complete(ref)
            assert status.status == TrainingStatusEnum.COMPLETED
        (batch,) = await rig.events("batches", BatchPlanned)
        assert [member.reward for member in batch.members] == pytest.approx([t.reward for t in changed])

    asyncio.run(scenario())


PAIR = DPOItem(prompt="?", chosen_response="yes", rejected_response="no")


@pytest.mark.parametrize(
    ("episode", "size", "message"),
    [
        ([], 700, r"3500 trajectories are submitted at once, more than the [23]\d\d\d "),
        ([PAIR], 500, r"5000 trajectories are submitted at once, more than the [23]\d\d\d "),
        ([], 769, "a group of 769 .* than the 768 "),
    ],
    ids=["trajectories", "pairs", "a group"],
)
def test_more_than_a_record_has_room_for_is_refused_before_anything_is_written(
    tmp_path: Path, episode: list[Any], size: int, message: str
) -> None:
    async def scenario() -> None:
        rig = ClassicRig(tmp_path, configuration(tmp_path))
        async with opened_rig(rig) as (_, parts):
            group = [Trajectory(episode=episode, reward=1.0)] * size
            num_groups = 1 if size > 768 else 5
            with pytest.raises(ConfigError, match=message):
                await parts.trainer_adapter.submit(
                    TrajectoryCollection(trajectories=[group] * num_groups, run_id="mine")
                )
        assert await rig.events("groups", SubmissionReceived) == []

    asyncio.run(scenario())


def test_an_answer_whose_text_was_changed_is_not_trained_on_by_the_tokens_of_another(tmp_path: Path) -> None:
    async def scenario() -> None:
        rig = ClassicRig(tmp_path, configuration(tmp_path))
        async with opened_rig(rig) as (_, parts):
            await parts.trajectory_builder.start_run("mine", {"epoch": 0})
            collection = await parts.trajectory_builder.finalize("mine")
            changed = collection.trajectories[0]
            for item in answers_of(changed[1]):
                item.content = f"{item.content}!"
            ref = await parts.trainer_adapter.submit(TrajectoryCollection(trajectories=[changed], run_id="mine"))
            await parts.trainer_adapter.wait_until_complete(ref)
        (batch,) = await rig.events("batches", BatchPlanned)
        rejected = await rig.events("batches", TrajectoryRejected)
        assert ["/m0/" in batch.members[0].rollout_id, "/m2/" in batch.members[1].rollout_id] == [True, True]
        again = [event for event in rejected if event.group_id == batch.members[0].group_id]
        assert [(event.cause, "/m1/" in event.rollout_id) for event in again] == [("no_token_ids", True)]

    asyncio.run(scenario())


def test_a_run_that_goes_on_waits_for_the_seal_of_what_was_submitted(tmp_path: Path) -> None:
    """The process was killed between a submission and its seal, which comes while the run is taken up again."""

    async def scenario() -> None:
        rig = ClassicRig(tmp_path, configuration(tmp_path, num_epochs=2, num_examples=2))
        async with opened_rig(rig) as (_, parts):
            await parts.trajectory_builder.start_run("mine", {"epoch": 0})
            collection = await parts.trajectory_builder.finalize("mine")
        async with await rig.backend(resume=True) as backend:  # no services: nothing answers
            groups = await submitted_groups(backend, 0, collection.trajectories)
            await epochs.submit(backend, 0, groups)
        parts = components_for(rig)
        start_run = parts.trajectory_builder.start_run

        async def late(run_id, meta=None):
            while not await rig.events("batches", EpochSealed):
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.05)
            await start_run(run_id, meta)

        parts.trajectory_builder.start_run = late
        async with asyncio.timeout(20):
            progress = await conducted(rig, resume=True, parts=parts)
        assert progress.job("run-1/rl").outcome == "succeeded"
        seals = await rig.events("batches", EpochSealed)
        assert [seal.epoch for seal in seals] == [0, 1]

    asyncio.run(scenario())


def test_a_run_whose_last_epoch_is_sealed_already_is_only_brought_to_its_end(tmp_path: Path) -> None:
    """It was ended early, and killed before that was written as the run's end."""

    async def scenario() -> None:
        rig = ClassicRig(tmp_path, configuration(tmp_path, num_epochs=4, num_examples=2))
        async with opened_rig(rig) as (backend, _):
            await backend.begin()
            await epochs.submit(backend, 0, (), is_last=True)
            await epochs.sealed(backend, 0)
        progress = await conducted(rig, resume=True)
        assert progress.job("run-1/rl").outcome == "succeeded"
        seals = await rig.events("batches", EpochSealed)
        assert [seal.epoch for seal in seals] == [0]

    asyncio.run(scenario())


def test_a_run_that_cannot_be_followed_leaves_its_workspace_to_the_next(tmp_path: Path) -> None:
    async def scenario() -> None:
        rig = ClassicRig(tmp_path, configuration(tmp_path))
        backend = await rig.backend()
        read, rig.log.reader = rig.log.reader, unreachable
        with pytest.raises(LogError, match="no broker"):
            await backend.start()
        assert opened(tmp_path) is None
        rig.log.reader = read
        async with await rig.backend("run-2") as other:
            assert opened(tmp_path) is other

    asyncio.run(scenario())


async def unreachable(*_: Any, **__: Any) -> Any:
    raise LogError("no broker")
