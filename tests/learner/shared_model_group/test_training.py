"""Jobs of a shared model group trained by the real services: SFT, DPO and RL, restarts in between, one queue."""

import asyncio
from pathlib import Path

import pytest

from rollstream.learner.shared_model_group import SharedModelGroup
from rollstream.schemas.events import BatchPlanned, JobSubmitted, JobSucceeded, StepTrained, WeightsPublished
from tests.rigs.runs.group_rig import GROUP, WAIT_S, GroupRig, chat_rollout, sampled

SFT = {"prover": [chat_rollout("1", "2"), chat_rollout("3")], "verifier": [chat_rollout("4"), chat_rollout("5")]}


async def weights(rig: GroupRig) -> dict[int, str]:
    return {event.version: event.weights_sha256 for event in await rig.events("weights", WeightsPublished)}


def test_every_agent_is_imitated_by_the_one_model(rig: GroupRig) -> None:
    async def body() -> None:
        async with rig.services(), await rig.open() as group:
            job_id = await group.create_supervised_fine_tune_job(SFT, job_name="run_iter_0_players")
            assert await group.wait_for_fine_tune_job(timeout=WAIT_S) == "succeeded", group.jobs
            assert group.model_name == str(rig.model)
            assert await group.switch_to_next_model() == f"{GROUP}@1"
            assert [agent.model_name for agent in group.agents.values()] == [f"{GROUP}@1"] * 2
            (batch,) = await rig.events("batches", BatchPlanned)
            agents = [member.trajectory_id.rpartition("/")[2] for member in batch.members]
            assert (batch.job_id, agents) == (job_id, ["prover", "prover", "verifier", "verifier"])
            assert [event.version for event in await rig.events("weights", WeightsPublished)] == [0, 1]

    asyncio.run(body())


def test_pairs_and_groups_are_trained_after_each_other(rig: GroupRig) -> None:
    async def body() -> None:
        async with rig.services(), await rig.open() as group:
            dpo = await group.create_dpo_fine_tune_job(
                {"prover": [chat_rollout("1"), chat_rollout("2")]}, {"prover": [chat_rollout("3"), chat_rollout("4")]}
            )
            assert await group.wait_for_fine_tune_job(dpo, WAIT_S) == "succeeded", group.jobs
            await group.switch_to_next_model()
            groups = [[sampled(8, 9, reward=1.0), sampled(10, 11, reward=0.0)] for _ in range(2)]
            await group.create_rl_fine_tune_job({"verifier": groups})
            assert await group.wait_for_fine_tune_job(timeout=WAIT_S) == "succeeded", group.jobs
            first, second = await rig.events("weights", StepTrained)
            assert (first.version, second.version) == (1, 2)
            assert first.metrics["dpo/pairs"] == 2
            submitted = await rig.events("jobs", JobSubmitted)
            assert [job.base_version for job in submitted] == [0, 1]
            assert await group.switch_to_next_model() == f"{GROUP}@2"

    asyncio.run(body())


def test_jobs_wait_in_a_queue_and_build_on_each_other(rig: GroupRig) -> None:
    async def body() -> None:
        async with await rig.open() as group:
            first = await group.create_supervised_fine_tune_job(SFT)
            second = await group.create_supervised_fine_tune_job({"prover": SFT["prover"]})
            assert await group.create_supervised_fine_tune_job(SFT) == first
            assert [job.job_id for job in group.jobs] == [first, second]
            async with rig.services():
                for job in (first, second):
                    assert await group.wait_for_fine_tune_job(job, WAIT_S) == "succeeded", group.jobs
        assert [job.base_version for job in await rig.events("jobs", JobSubmitted)] == [0, 1]
        assert [event.version for event in await rig.events("weights", StepTrained)] == [1, 2]

    asyncio.run(body())


def test_passes_and_batches_yield_a_version_each(rig: GroupRig) -> None:
    async def body() -> None:
        async with rig.services(), await rig.open(num_epochs=2, batch_size=3) as group:
            await group.create_supervised_fine_tune_job(SFT)
            assert await group.wait_for_fine_tune_job(timeout=WAIT_S) == "succeeded", group.jobs
            assert await group.switch_to_next_model() == f"{GROUP}@4"
            batches = await rig.events("batches", BatchPlanned)
            assert [len(batch.members) for batch in batches] == [3, 1, 3, 1]

    asyncio.run(body())


def test_a_group_that_is_opened_again_goes_on_with_what_was_left(rig: GroupRig) -> None:
    """The process ends before the examples are assembled; another one submits them."""

    async def body() -> None:
        async with await rig.open() as group:
            job_id = await group.create_supervised_fine_tune_job(SFT)
        async with rig.services(), await rig.open() as group:
            assert group.fine_tune_job_id == job_id
            assert await group.wait_for_fine_tune_job(timeout=WAIT_S) == "succeeded", group.jobs
            assert await group.switch_to_next_model() == f"{GROUP}@1"
        async with await rig.open() as group:
            assert group.model_name == f"{GROUP}@1"

    asyncio.run(body())


def test_a_retry_goes_on_with_the_batches_that_are_left(rig: GroupRig) -> None:
    async def body() -> None:
        async with await rig.open(batch_size=2) as group:
            await group.create_supervised_fine_tune_job(SFT)
            await group.cancel_fine_tune_job()
            assert await group.fine_tune_job_failed()
            assert await group.get_fine_tune_job_error_repr() == "cancelled: cancelled by its group"
            again = await group.retry_fine_tune_job()
            assert again.endswith("-r1")
            async with rig.services():
                assert await group.wait_for_fine_tune_job(timeout=WAIT_S) == "succeeded", group.jobs
            assert await group.switch_to_next_model() == f"{GROUP}@2"

    asyncio.run(body())


def test_a_skipped_job_is_submitted_once_its_examples_suffice(rig: GroupRig) -> None:
    async def body() -> None:
        async with await rig.open(min_examples=10) as group:
            skipped = await group.create_supervised_fine_tune_job(SFT)
        async with await rig.open() as group:
            job_id = await group.create_supervised_fine_tune_job(SFT)
            assert (job_id, group.fine_tune_job_id) == (f"{skipped}-r1", job_id)
            assert await group.create_supervised_fine_tune_job(SFT) == job_id
            async with rig.services():
                assert await group.wait_for_fine_tune_job(timeout=WAIT_S) == "succeeded", group.jobs
            assert await group.switch_to_next_model() == f"{GROUP}@1"

    asyncio.run(body())


def test_a_retry_has_the_deadline_of_the_present_options(rig: GroupRig) -> None:
    async def body() -> None:
        async with await rig.open(deadline_s=1.0) as group:
            await group.create_supervised_fine_tune_job(SFT)
            rig.now_ms += 2000
            assert await group.get_fine_tune_job_status() == "cancelled"
        async with await rig.open(deadline_s=60.0) as group:
            await group.retry_fine_tune_job()
        assert [job.fine_tune.deadline_s for job in await rig.events("jobs", JobSubmitted)] == [1.0, 60.0]

    asyncio.run(body())


def test_a_retry_before_a_waiting_job_has_a_base_version_that_exists(rig: GroupRig) -> None:
    """The waiting job builds on the one that was cancelled, which published nothing, so it fails."""

    async def body() -> None:
        async with await rig.open(batch_size=2) as group:
            first = await group.create_supervised_fine_tune_job(SFT)
            waiting = await group.create_supervised_fine_tune_job({"prover": SFT["prover"]})
            await group.cancel_fine_tune_job(first)
            again = await group.retry_fine_tune_job(first)
            async with rig.services():
                assert await group.wait_for_fine_tune_job(waiting, WAIT_S) == "failed", group.jobs
                assert f"version 2 of {GROUP} is not published" in await group.get_fine_tune_job_error_repr(waiting)
                assert await group.wait_for_fine_tune_job(again, WAIT_S) == "succeeded", group.jobs
            assert await group.switch_to_next_model() == f"{GROUP}@2"

    asyncio.run(body())


def test_a_learner_that_is_killed_in_the_middle_ends_with_the_same_weights(rig: GroupRig, tmp_path: Path) -> None:
    """Its task is cancelled after the first version, a new one goes on from what is on disk and on the log."""

    async def body() -> None:
        undisturbed = GroupRig(tmp_path / "undisturbed", rig.model)
        for one in (undisturbed, rig):
            async with await one.open(num_epochs=3) as group:
                await group.create_supervised_fine_tune_job(SFT)
                if one is rig:
                    async with one.services():
                        while not await one.events("weights", StepTrained):
                            await group.get_fine_tune_job_status()
                            await asyncio.sleep(0.01)
                async with one.services():
                    assert await group.wait_for_fine_tune_job(timeout=WAIT_S) == "succeeded", group.jobs
                await group.switch_to_next_model()
                assert group.version == 3
        assert (await weights(rig)).keys() == {0, 1, 2, 3}
        assert await weights(rig) == await weights(undisturbed)
        assert len(await rig.events("jobs", JobSucceeded)) == 1

    asyncio.run(body())


@pytest.mark.parametrize("kind", ["sft", "dpo", "rl"])
def test_every_kind_of_job_ends_once_however_often_its_services_are_restarted(
    rig: GroupRig, tmp_path: Path, kind: str
) -> None:
    """The services stop after every new record of the job; the weights are those of an undisturbed job."""

    async def body() -> None:
        undisturbed = GroupRig(tmp_path / "undisturbed", rig.model)
        for one in (undisturbed, rig):
            async with await one.open(num_epochs=3, max_staleness=3) as group:
                await create(group, kind)
                while one is rig and not group.jobs[0].is_over:
                    async with one.services():
                        await changed(one, group)
                async with one.services():
                    assert await group.wait_for_fine_tune_job(timeout=WAIT_S) == "succeeded", group.jobs
        assert await weights(rig) == await weights(undisturbed)
        assert (await weights(rig)).keys() == {0, 1, 2, 3}
        assert len(await rig.events("jobs", JobSucceeded)) == 1

    asyncio.run(body())


async def create(group: SharedModelGroup, kind: str) -> None:
    if kind == "sft":
        await group.create_supervised_fine_tune_job(SFT)
    elif kind == "dpo":
        sides = [chat_rollout("1"), chat_rollout("2")], [chat_rollout("3"), chat_rollout("4")]
        await group.create_dpo_fine_tune_job({"prover": sides[0]}, {"prover": sides[1]})
    else:
        groups = [[sampled(8, 9, reward=1.0), sampled(10, 11, reward=0.0)] for _ in range(2)]
        await group.create_rl_fine_tune_job({"verifier": groups})


async def changed(rig: GroupRig, group: SharedModelGroup) -> None:
    """Wait for one more record of the learner's, or for the job's end."""
    async with asyncio.timeout(WAIT_S):
        before = await num_records(rig)
        while await group.get_fine_tune_job_status() != "succeeded" and await num_records(rig) == before:
            await asyncio.sleep(0.005)


async def num_records(rig: GroupRig) -> int:
    return len(await rig.events("jobs")) + len(await rig.events("weights", StepTrained, WeightsPublished))
