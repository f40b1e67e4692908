"""A streamed run with an evaluation gate: no task is played by a version that failed its validation."""

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from rollstream.harness.config import file as config_file
from rollstream.harness.config.jobs import jobs_of
from rollstream.harness.runs.conductor import Conductor
from rollstream.harness.runs.follower import follow
from rollstream.harness.runs.outcome import end, good_version
from rollstream.harness.runs.plan import RunPlan
from rollstream.harness.runs.progress import Progress
from rollstream.harness.runs.validation import validation_of
from rollstream.replay.source import read_run
from rollstream.replay.verify import verify
from rollstream.schemas.errors import ConfigError
from rollstream.schemas.events import (
    BatchPlanned,
    GroupClosed,
    RunEnded,
    TaskRequested,
    TrajectoryRejected,
    VersionJudged,
)
from tests.rigs.runs.epochwise_rig import EpochwiseRig, assert_every_attempt_has_one_outcome, configuration

BAD = (2, 4)


def script(_: str, rng: random.Random, version: int) -> tuple[str, float]:
    return ("9" if version in BAD else str(rng.randrange(2))), -0.7


def script_with_a_bad_end(prompt: str, rng: random.Random, version: int) -> tuple[str, float]:
    return ("9", -0.7) if version == 6 else script(prompt, rng, version)


def gated(folder: Path, **trainer: Any) -> dict[str, Any]:
    run = {"validation_dataset": str(folder / "valid.jsonl"), "validation_interval": 1}
    written = configuration(folder, num_epochs=4, run_configuration=run)
    written["trainers"]["t"] = {"_type": "rollstream", "evaluation_gate": {"min_reward": 0.5}, **trainer}
    written["trainer_adapters"]["a"] |= {"tasks_per_epoch": 2, "keep_last": 1}
    written["trajectory_builders"]["b"] |= {"drop_zero_variance": False}
    return written


async def conducted(rig: EpochwiseRig, *, resume: bool = False) -> tuple[Progress, RunPlan]:
    async with asyncio.timeout(300), rig.services():
        plan = await rig.plan(resume=resume)
        async with Conductor(rig.log, plan) as conductor:
            return await conductor.conduct(validation_of(rig.loaded.config, plan)), plan


def test_tasks_wait_for_the_version_that_replaces_one_that_failed(tmp_path: Path) -> None:
    async def scenario() -> None:
        rig = EpochwiseRig(tmp_path, gated(tmp_path), script=script)
        await conducted(rig)
        await conducted(rig, resume=True)
        judged = [(one.epoch, one.version, one.is_good) for one in await rig.events("batches", VersionJudged)]
        assert judged == [(0, 0, True), (1, 1, True), (2, 2, False), (3, 4, False)]
        adopted = [(one.yields_version, one.adopts) for one in await rig.events("batches", BatchPlanned) if one.adopts]
        assert adopted == [(3, 1), (5, 3)]
        tasks = [task for task in await rig.events("tasks", TaskRequested) if task.purpose == "train"]
        assert {(task.epoch, task.min_version) for task in tasks} == {(0, 0), (1, 1), (2, 3), (3, 5)}
        closed = await rig.events("groups", GroupClosed)
        trained_at = {m.min_version for group in closed if group.purpose == "train" for m in group.members}
        assert trained_at == {0, 1, 3, 5}
        rejected = {one.cause for one in await rig.events("batches", TrajectoryRejected)}
        assert rejected == {"validation"}
        await assert_every_attempt_has_one_outcome(rig)
        await rig.log.send(RunEnded(run_id="run-1", time_ms=1, cause="completed"))
        report = await verify(rig.log, await read_run(rig.log, "run-1"), rig.artifacts)
        assert report.differences == []

    asyncio.run(scenario())


@pytest.mark.parametrize(("played", "saved"), [(script, None), (script_with_a_bad_end, 3)])
def test_a_run_whose_last_version_failed_saves_the_last_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, played: Any, saved: int | None
) -> None:
    async def scenario() -> None:
        rig = EpochwiseRig(tmp_path, gated(tmp_path), script=played)
        progress, plan = await conducted(rig)
        (spec,) = plan.jobs
        newest = progress.weights
        assert newest is not None
        assert newest.version == 6
        good = await good_version(rig.log, rig.artifacts, progress, plan, spec, newest)
        assert (None if good is None else good.version) == saved
        if good is not None:
            monkeypatch.setattr("rollstream.harness.runs.outcome._export", lambda *_: None)
            ended = await end(rig.log, rig.artifacts, progress, plan, rig.loaded.config)
            remark = "version 6 of run-1/policy failed its last validation, so version 3 is saved"
            assert ended.message == remark
            follower = await follow(rig.log, "run-1")
            again = await follower.catch_up()
            await follower.close()
            assert again.ended is not None
            assert (await end(rig.log, rig.artifacts, again, plan, rig.loaded.config)).message == remark
            rig.artifacts.remove(good.artifact)
            assert await good_version(rig.log, rig.artifacts, progress, plan, spec, newest) is None

    asyncio.run(scenario())


def test_the_last_good_version_is_kept_as_long_as_a_validation_may_ask_for_it(tmp_path: Path) -> None:
    written = gated(tmp_path)
    written["finetuning"]["run_configuration"]["validation_interval"] = 3
    written["trainer_adapters"]["a"] |= {"batches_per_epoch": 2, "max_staleness": 2}
    (spec,) = jobs_of(config_file.resolve(written).config, "run-1")
    assert spec.job.keep_last == 7
    assert spec.plan.gate is not None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"planning": "submitted"}, "trainers.t.evaluation_gate: an epochwise run does not support this"),
        ({"evaluation_gate": {}}, "give min_reward, max_drop or both"),
        ({"evaluation_gate": {"max_drop": -0.5}}, "trainers.t"),
    ],
)
def test_a_gate_that_cannot_judge_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config_file.resolve(gated(tmp_path, **changes))


def test_a_gate_without_a_validation_is_refused(tmp_path: Path) -> None:
    written = gated(tmp_path)
    del written["finetuning"]["run_configuration"]
    with pytest.raises(ConfigError, match="the run has no validation to judge; give --validation_dataset"):
        config_file.resolve(written)
