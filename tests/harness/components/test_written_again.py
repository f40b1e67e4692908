"""Trajectories of our builder that a component changed, as they are written to the log again."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from rollstream.schemas.errors import ConfigError
from rollstream.schemas.events import BatchPlanned, GroupClosed, RolloutFailed, SubmissionReceived, TrajectoryAssembled
from rollstream.schemas.finetuning import (
    EpisodeItem,
    EpisodeItemRole,
    TrainingStatusEnum,
    Trajectory,
    TrajectoryCollection,
)
from tests.rigs.runs.epochwise_rig import EpochwiseRig, answers_of, configuration, opened_rig, scored_configuration


def of_two_agents(folder: Path) -> dict[str, Any]:
    written = configuration(folder)
    written["workflow"] = "bit_proof"
    written["trajectory_builders"]["b"]["agents"] = ["prover", "verifier"]
    return written


def agent_of(trajectory: Trajectory) -> Any:
    return (trajectory.metadata or {})["agent"]


async def first_group(parts: Any) -> list[Trajectory]:
    await parts.trajectory_builder.start_run("mine", {"epoch": 0})
    collection = await parts.trajectory_builder.finalize("mine")
    return collection.trajectories[0]


def test_a_changed_trajectory_stays_its_agents(tmp_path: Path) -> None:
    async def scenario() -> None:
        rig = EpochwiseRig(tmp_path, of_two_agents(tmp_path))
        async with opened_rig(rig) as (_, parts):
            changed = await first_group(parts)
            for number, trajectory in enumerate(changed):
                trajectory.shaped_rewards = [0.25] * len(answers_of(trajectory))
                trajectory.reward = float(number)
            ref = await parts.trainer_adapter.submit(TrajectoryCollection(trajectories=[changed], run_id="mine"))
            status = await parts.trainer_adapter.wait_until_complete(ref)
            assert status.status == TrainingStatusEnum.COMPLETED
        (batch,) = await rig.events("batches", BatchPlanned)
        closed = {one.group_id: one for one in await rig.events("groups", GroupClosed)}[batch.members[0].group_id]
        assert {member.trajectory_id for member in batch.members} == {one.trajectory_id for one in closed.members}
        found = [(member.agent, member.reward) for member in closed.members]
        assert sorted(found) == sorted((agent_of(each), each.reward) for each in changed)
        assert {agent for agent, _ in found} == {"prover", "verifier"}

    asyncio.run(scenario())


def test_one_agents_trajectory_without_tokens_does_not_lack_the_rewards_of_others(tmp_path: Path) -> None:
    async def scenario() -> None:
        rig = EpochwiseRig(tmp_path, of_two_agents(tmp_path))
        async with opened_rig(rig) as (_, parts):
            changed = await first_group(parts)
            for answer in answers_of(changed[0]):
                answer.content += "!"
            ref = await parts.trainer_adapter.submit(TrajectoryCollection(trajectories=[changed], run_id="mine"))
            await parts.trainer_adapter.wait_until_complete(ref)
        assert await rig.events("steps", RolloutFailed) == []

    asyncio.run(scenario())


def test_a_changed_trajectory_that_names_none_of_several_agents_is_refused(tmp_path: Path) -> None:
    async def scenario() -> None:
        rig = EpochwiseRig(tmp_path, of_two_agents(tmp_path))
        async with opened_rig(rig) as (_, parts):
            changed = await first_group(parts)
            changed[0].metadata = {"id": "train-0"}
            with pytest.raises(ConfigError, match=r"has the agent None; the run has several \(prover, verifier\)"):
                await parts.trainer_adapter.submit(TrajectoryCollection(trajectories=[changed], run_id="mine"))
        assert await rig.events("groups", SubmissionReceived) == []

    asyncio.run(scenario())


def test_rewards_keep_their_names_and_weights(tmp_path: Path) -> None:
    written = scored_configuration(tmp_path)

    async def scenario() -> None:
        rig = EpochwiseRig(tmp_path, written)
        async with opened_rig(rig) as (_, parts):
            changed = await first_group(parts)
            for trajectory in changed:
                task = EpisodeItem(role=EpisodeItemRole.SYSTEM, content="guess")
                trajectory.episode = [task, *answers_of(trajectory)]
            ref = await parts.trainer_adapter.submit(TrajectoryCollection(trajectories=[changed], run_id="mine"))
            await parts.trainer_adapter.wait_until_complete(ref)
        (batch,) = await rig.events("batches", BatchPlanned)
        ids = {member.trajectory_id for member in batch.members}
        assert not ids & {(each.metadata or {})["trajectory_id"] for each in changed}
        found = {one.trajectory_id: one for one in await rig.events("trajectories", TrajectoryAssembled)}
        assert sorted((found[one].rewards["has_digit"], found[one].reward) for one in ids) == sorted(
            ((each.metadata or {})["rewards"]["has_digit"], pytest.approx(each.reward)) for each in changed
        )

    asyncio.run(scenario())


def test_groups_that_share_recorded_trajectories_stay_apart_with_their_rewards(tmp_path: Path) -> None:
    async def scenario() -> None:
        rig = EpochwiseRig(tmp_path, configuration(tmp_path))
        async with opened_rig(rig) as (_, parts):
            first, second, third = await first_group(parts)
            others = [each.model_copy(update={"reward": each.reward + 1}) for each in (first, second)]
            groups = [[first, second], [third], others]
            ref = await parts.trainer_adapter.submit(TrajectoryCollection(trajectories=groups, run_id="mine"))
            await parts.trainer_adapter.wait_until_complete(ref)
        (batch,) = await rig.events("batches", BatchPlanned)
        found: dict[str, list[float]] = {}
        for member in batch.members:
            found.setdefault(member.group_id, []).append(member.reward)
        assert list(found.values()) == [pytest.approx([each.reward for each in group]) for group in groups]
        assert next(iter(found)) == (first.metadata or {})["group_id"]

    asyncio.run(scenario())
