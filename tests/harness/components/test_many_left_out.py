"""An epoch that leaves out more than one record could name."""

import asyncio
from collections import Counter
from pathlib import Path

import pytest

from rollstream.harness.components import epochs
from rollstream.harness.components.epoch_events import submission
from rollstream.harness.runs.run_handle import RunHandle
from rollstream.schemas import ids
from rollstream.schemas.events import GroupClosed, SubmissionReceived, TrajectoryRejected
from rollstream.schemas.events.training import MemberRef
from tests.rigs.runs.epochwise_rig import EpochwiseRig, configuration, opened_rig

NUM_GROUPS, SIZE = 700, 24
CURRICULUM = {"enabled": True, "initial_percentile": 0.5, "min_reward_diff": 0.0}


def closed(job_id: str, index: int) -> GroupClosed:
    run_id, name = job_id.split("/")
    group = ids.group_id(run_id, name, 0, index)
    rollouts = [ids.rollout_id(group, member, 0) for member in range(SIZE)]
    members = tuple(
        MemberRef(
            trajectory_id=ids.trajectory_id(rollout, "player"),
            rollout_id=rollout,
            agent="player",
            member=member,
            digest="0" * 64,
            reward=float(member % 2),
            num_tokens=2,
            num_completion_tokens=1,
            min_version=0,
            max_version=0,
        )
        for member, rollout in enumerate(rollouts)
    )
    return GroupClosed(
        run_id=run_id,
        time_ms=1,
        group_id=group,
        example_id=str(index),
        job_id=job_id,
        epoch=0,
        index=index,
        reason="complete",
        is_viable=True,
        size=SIZE,
        members=members,
    )


def names(job_id: str) -> list[str]:
    return [member.trajectory_id for index in range(NUM_GROUPS) for member in closed(job_id, index).members]


async def causes_of(rig: EpochwiseRig, handle: RunHandle) -> Counter[str]:
    """Every second member is left out by the curriculum, the others by the builder."""
    await handle.begin()
    groups = [closed(handle.spec.job_id, index) for index in range(NUM_GROUPS)]
    await rig.log.send_all(groups)
    await epochs.closed(handle, [group.group_id for group in groups])
    by_curriculum = frozenset(names(handle.spec.job_id)[::2])
    handle.left_out[0] = by_curriculum
    await epochs.submit(handle, 0, ())
    await epochs.sealed(handle, 0)
    rejected = await rig.events("batches", TrajectoryRejected)
    assert {event.trajectory_id for event in rejected if event.cause == "curriculum"} <= by_curriculum
    return Counter(event.cause for event in rejected)


@pytest.mark.parametrize("name", ["run-1", "r" * ids.MAX_NAME])
def test_each_of_many_that_are_left_out_has_its_true_reason(tmp_path: Path, name: str) -> None:
    async def scenario() -> None:
        rig = EpochwiseRig(tmp_path, configuration(tmp_path, num_epochs=1, curriculum_learning=CURRICULUM))
        async with opened_rig(rig, run_id=name) as (handle, _):
            causes = await causes_of(rig, handle)
            assert handle.job.submitted.keys() == {0}
        half = NUM_GROUPS * SIZE // 2
        assert causes == {"not_submitted": half, "curriculum": half}
        assert len(await rig.events("groups", SubmissionReceived)) > 1

    asyncio.run(scenario())


def test_a_submission_whose_parts_are_written_again_after_a_kill_counts_as_it_was_last(tmp_path: Path) -> None:
    """Killed before the submission itself: a builder that draws leaves out others when the epoch is done again."""

    async def scenario() -> None:
        rig = EpochwiseRig(tmp_path, configuration(tmp_path, num_epochs=1, curriculum_learning=CURRICULUM))
        async with opened_rig(rig) as (handle, _):
            await handle.begin()
            spec, run_id = handle.spec, handle.run.started.run_id
            others = [f"{name}/x{number}" for name in names(spec.job_id) for number in range(3)]
            killed = submission(spec, run_id, 0, (), time_ms=1, not_offered=others)
            assert len(killed) > 3
            await rig.log.send_all(killed[:-1])
            assert not handle.job.submitted
            causes = await causes_of(rig, handle)
        half = NUM_GROUPS * SIZE // 2
        assert causes == {"not_submitted": half, "curriculum": half}

    asyncio.run(scenario())
