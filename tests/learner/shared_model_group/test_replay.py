"""The run of a shared model group replays: folds and weights are equal, and a start that was cut off is completed."""

import asyncio

from rollstream.eventlog.artifacts import ArtifactStore
from rollstream.replay.completeness import compare_named
from rollstream.replay.report import Report, compare_log
from rollstream.replay.source import read_run
from rollstream.replay.training import train
from rollstream.replay.verify import verify
from rollstream.schemas.events import JobSubmitted, RunStarted, WeightsPublished
from rollstream.schemas.permissions import Permissions
from tests.rigs.group_rig import RUN, WAIT_S, GroupRig, spoken

SFT = {"prover": [spoken("1", "2"), spoken("3")], "verifier": [spoken("4"), spoken("5")]}


def test_jobs_of_a_group_are_verified_and_trained_again_to_the_same_weights(rig: GroupRig) -> None:
    async def body() -> None:
        async with rig.services(), await rig.open(num_epochs=2) as group:
            await group.create_supervised_fine_tune_job(SFT)
            await group.wait_for_fine_tune_job(timeout=WAIT_S)
            await group.switch_to_next_model()
            await group.create_dpo_fine_tune_job(
                {"prover": [spoken("1"), spoken("2")]}, {"prover": [spoken("3"), spoken("4")]}
            )
            assert await group.wait_for_fine_tune_job(timeout=WAIT_S) == "succeeded", group.jobs
            await group.create_supervised_fine_tune_job({"prover": [spoken("6"), spoken("7")]})
            await group.cancel_fine_tune_job(cause="no longer wanted")
            await group.create_supervised_fine_tune_job({"prover": [spoken("6")]})
            await group.end_run()
            events, artifacts, report = await read_run(rig.log, RUN), ArtifactStore(rig.artifact_uri), Report()
            compare_log(events, report)
            report.add(await verify(rig.log, events, artifacts, checkpoints=rig.folder / "checkpoints"))
            report.add(await train(rig.log, events, artifacts, permissions=Permissions.of(rig.allow, {})))
            compare_named(events, report)
            assert [str(one) for one in report.differences] == []
            assert report.counts

    asyncio.run(body())


def test_a_job_of_which_only_the_submission_was_written_is_completed(rig: GroupRig) -> None:
    async def body() -> None:
        whole = GroupRig(rig.folder, rig.model)
        async with await whole.open() as group:
            job_id = await group.create_supervised_fine_tune_job(SFT)
        for event in await whole.events("groups", RunStarted) + await whole.events("jobs", JobSubmitted):
            await rig.log.send(event)
        async with rig.services(), await rig.open() as group:
            assert group.fine_tune_job_id == job_id
            assert await group.wait_for_fine_tune_job(timeout=WAIT_S) == "succeeded", group.jobs
        assert [event.version for event in await rig.events("weights", WeightsPublished)] == [0, 1]

    asyncio.run(body())
