"""The run of a shared model group replays: folds and weights are equal, and a start that was cut off is completed."""

import asyncio
import logging

import orjson
import pytest

from rollstream.eventlog.artifacts import ArtifactStore
from rollstream.replay.completeness import compare_named
from rollstream.replay.report import Report, compare_log
from rollstream.replay.source import read_run
from rollstream.replay.training import train
from rollstream.replay.verify import verify
from rollstream.schemas.events import JobSubmitted, RunStarted, WeightsPublished
from rollstream.schemas.permissions import Permissions
from tests.rigs.runs.group_rig import RUN, WAIT_S, GroupRig, chat_rollout, sampled
from tests.rigs.runs.replay_changes import changes, finders, is_found

SFT = {"prover": [chat_rollout("1", "2"), chat_rollout("3")], "verifier": [chat_rollout("4"), chat_rollout("5")]}


async def replayed(rig: GroupRig, *, trains: bool = True) -> Report:
    events, artifacts, report = await read_run(rig.log, RUN), ArtifactStore(rig.artifact_uri), Report()
    compare_log(events, report)
    report.add(await verify(rig.log, events, artifacts, checkpoints=rig.folder / "checkpoints"))
    if trains:
        report.add(await train(rig.log, events, artifacts, permissions=Permissions.of(rig.allow, {})))
    compare_named(events, report)
    return report


def test_jobs_of_a_group_are_verified_and_trained_again_to_the_same_weights(rig: GroupRig) -> None:
    async def body() -> None:
        async with rig.services(), await rig.open(num_epochs=2) as group:
            await group.create_supervised_fine_tune_job(SFT)
            await group.wait_for_fine_tune_job(timeout=WAIT_S)
            await group.switch_to_next_model()
            await group.create_dpo_fine_tune_job(
                {"prover": [chat_rollout("1"), chat_rollout("2")]}, {"prover": [chat_rollout("3"), chat_rollout("4")]}
            )
            assert await group.wait_for_fine_tune_job(timeout=WAIT_S) == "succeeded", group.jobs
            await group.create_supervised_fine_tune_job({"prover": [chat_rollout("6"), chat_rollout("7")]})
            await group.cancel_fine_tune_job(cause="no longer wanted")
            await group.create_supervised_fine_tune_job({"prover": [chat_rollout("6")]})
            await group.end_run()
            report = await replayed(rig)
            assert [str(one) for one in report.differences] == []
            assert report.counts

    asyncio.run(body())


def test_rl_jobs_of_a_group_are_verified_and_trained_again_to_the_same_weights(rig: GroupRig) -> None:
    async def body() -> None:
        async with rig.services(), await rig.open(num_epochs=2, max_staleness=1) as group:
            groups = [[sampled(8, 9, reward=1.0), sampled(10, 11, reward=0.0)] for _ in range(2)]
            for agent in ("prover", "verifier"):
                await group.create_rl_fine_tune_job({agent: groups})
                assert await group.wait_for_fine_tune_job(timeout=WAIT_S) == "succeeded", group.jobs
                await group.switch_to_next_model()
            await group.end_run()
            report = await replayed(rig)
        published = await rig.events("weights", WeightsPublished)
        assert len({event.weights_sha256 for event in published}) == len(published) == 5
        assert [str(one) for one in report.differences] == []
        assert report.counts

    asyncio.run(body())


def test_every_row_is_true_of_skipped_jobs_and_switches(rig: GroupRig, caplog: pytest.LogCaptureFixture) -> None:
    """Rows of docs/replay.md; a change that does not decode is found in any case."""
    caplog.set_level(logging.CRITICAL)

    async def body() -> None:
        async with rig.services(), await rig.open() as group:
            await group.create_supervised_fine_tune_job(SFT)
            assert await group.wait_for_fine_tune_job(timeout=WAIT_S) == "succeeded", group.jobs
            await group.switch_to_next_model()
            await group.create_supervised_fine_tune_job({"prover": [chat_rollout("6")]})
            await group.switch_to_next_model()
            await group.end_run()

    asyncio.run(body())
    rows = {row: finder for row, finder in finders().items() if row[0] in ("JobSkipped", "ModelSwitched")}
    tried = {(one.kind, one.field): one for one in (*changes(rig, decodes=False), *changes(rig))}
    skipped = tried["JobSkipped", "version"]
    kind = {**orjson.loads(skipped.value), "version": 1, "job_kind": "dpo"}
    tried["JobSkipped", "job_kind"] = skipped._replace(value=orjson.dumps(kind))
    found = {row: is_found(lambda run: asyncio.run(replayed(run, trains=False)), rig, tried[row]) for row in rows}
    undecodable = {("JobSkipped", "cause")}  # it has one value
    assert {row for row, is_so in found.items() if is_so} - undecodable == {
        row for row, finder in rows.items() if finder != "nothing"
    }


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
