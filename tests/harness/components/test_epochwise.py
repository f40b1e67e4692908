"""Runs that the three components conduct on a log in memory: real producers and folds, a script in place of a model."""

import asyncio
import contextlib
import json
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from rollstream.harness.components.adapter import NOTHING_TRAINED
from rollstream.harness.components.builder import RollstreamTrajectoryBuilder
from rollstream.harness.config.components import RollstreamTrajectoryBuilderConfig
from rollstream.harness.config.jobs import jobs_of
from rollstream.replay.source import read_run
from rollstream.replay.verify import verify
from rollstream.replay.what_if.plan import check, replan
from rollstream.schemas.errors import ConfigError
from rollstream.schemas.events import (
    BatchPlanned,
    EpochSealed,
    EpochStarted,
    GroupClosed,
    JobStarted,
    RunEnded,
    SubmissionReceived,
    TaskRequested,
    TrajectoryRejected,
)
from rollstream.schemas.finetuning import TrainingStatusEnum, TrajectoryCollection
from tests.rigs.runs.epochwise_rig import (
    EpochwiseRig,
    Interrupting,
    answers_of,
    assert_every_attempt_has_one_outcome,
    components_for,
    conducted,
    configuration,
    interrupted,
    opened_rig,
    submitting,
)

COMPLETED, FAILED = TrainingStatusEnum.COMPLETED, TrainingStatusEnum.FAILED


def test_a_run_is_conducted_epoch_by_epoch_with_validation_curriculum_and_files(tmp_path: Path) -> None:
    written = configuration(
        tmp_path,
        curriculum_learning={"enabled": True, "initial_percentile": 0.5},
        run_configuration={"validation_dataset": str(tmp_path / "valid.jsonl"), "validation_interval": 2},
    )

    async def scenario() -> None:
        rig = EpochwiseRig(tmp_path, written)
        progress = await conducted(rig)
        assert progress.job("run-1/rl").outcome == "succeeded"
        assert progress.version == 3
        seals = await rig.events("batches", EpochSealed)
        assert [(seal.epoch, seal.num_groups, seal.num_batches, seal.is_last) for seal in seals] == [
            (0, 4, 1, False),
            (1, 4, 1, False),
            (2, 4, 1, True),
        ]
        assert {seal.curriculum_percentile for seal in seals} == {0.5}
        assert [event.num_tasks for event in await rig.events("groups", EpochStarted)] == [4, 4, 4]
        tasks = await rig.events("tasks", TaskRequested)
        assert Counter((task.purpose, task.epoch, task.min_version) for task in tasks) == {
            ("validation", 0, 0): 2,
            ("train", 0, 0): 4,
            ("train", 1, 1): 4,
            ("validation", 2, 2): 2,
            ("train", 2, 2): 4,
        }
        assert {task.num_rollouts for task in tasks if task.purpose == "validation"} == {1}
        await assert_every_attempt_has_one_outcome(rig)
        report = await verify(rig.log, await read_run(rig.log, "run-1"), rig.artifacts)
        assert report.differences == []
        assert report.counts["task records that the harness wrote"] == 16
        await assert_what_ifs_keep_what_was_submitted(rig)

    asyncio.run(scenario())
    output = tmp_path / "output"
    rows = [json.loads(line) for line in (output / "training_metrics.jsonl").read_text().splitlines()]
    assert [row["epoch"] for row in rows] == [0, 1, 2]
    keys = {"avg_reward", "min_reward", "max_reward", "num_trajectories", "num_groups"}
    keys |= {"filtered_trajectories", "filtered_groups", "filtered_avg_reward", "filtered_min_reward"}
    keys |= {"filtered_max_reward", "curriculum_percentile", "epoch", "timestamp", "run_id", "curriculum_state"}
    assert rows[0].keys() == keys
    assert (rows[0]["num_trajectories"], rows[0]["num_groups"]) == (12, 4)
    history = json.loads((output / "reward_history.json").read_text())
    assert all({"filtered_avg_reward", "curriculum_percentile"} <= row.keys() for row in history)
    validations = json.loads((output / "validation_history.json").read_text())
    assert [(row["epoch"], row["num_examples"]) for row in validations] == [(0, 2), (2, 2)]
    assert json.loads((output / "curriculum_state.json").read_text())["current_percentile"] == 0.5
    assert (output / "reward_plot.png").read_bytes().startswith(b"\x89PNG")


async def assert_what_ifs_keep_what_was_submitted(rig: EpochwiseRig) -> None:
    events = await read_run(rig.log, "run-1")
    records = events.by_topic["groups"]
    (recorded,) = [one.event for one in records if isinstance(one.event, JobStarted)]
    (spec,) = jobs_of(rig.loaded.config, "run-1")
    (batch, *_) = await rig.events("batches", BatchPlanned)
    changed = batch.members[0].trajectory_id
    found = replan(records, recorded, spec, "other", {changed: 0.125}, {})
    assert found.num_batches == 3
    (first, *_) = [event for event in found.events if isinstance(event, BatchPlanned)]
    assert [member.trajectory_id for member in first.members] == [member.trajectory_id for member in batch.members]
    assert first.members[0].reward == 0.125
    opened = recorded.plan.curriculum.model_copy(update={"initial_percentile": 1.0})
    with pytest.raises(ConfigError, match="curriculum_learning cannot change in a what-if of submitted epochs"):
        check(recorded, spec._replace(plan=spec.plan.model_copy(update={"curriculum": opened})))


def test_an_interrupted_run_goes_on_at_the_epoch_after_the_last_sealed_one(tmp_path: Path) -> None:
    async def scenario(folder: Path, cut: int) -> list[str]:
        rig = EpochwiseRig(folder, configuration(folder, num_epochs=2, num_examples=2))
        interrupt = Interrupting(cut, rig)
        parts = components_for(rig)
        for part, names in ((parts[1], ("start_run", "finalize")), (parts[2], ("submit", "wait_until_complete"))):
            for name in names:
                setattr(part, name, interrupted(getattr(part, name), interrupt))
        with contextlib.suppress(InterruptedError):
            await conducted(rig, parts=parts)
            return []
        progress = await conducted(rig, resume=True)
        assert progress.version == 2
        assert progress.job("run-1/rl").outcome == "succeeded"
        await assert_every_attempt_has_one_outcome(rig)
        seals = await rig.events("batches", EpochSealed)
        assert [seal.epoch for seal in seals] == [0, 1]
        rows = (folder / "output" / "training_metrics.jsonl").read_text().splitlines()
        assert [json.loads(row)["epoch"] for row in rows] == [0, 1]
        report = await verify(rig.log, await read_run(rig.log, "run-1"), rig.artifacts)
        assert report.differences == []
        return [event.event_id for event in await rig.events("groups", SubmissionReceived)]

    found = []
    for cut in range(2, 17, 3):
        folder = tmp_path / str(cut)
        folder.mkdir()
        found.append(tuple(asyncio.run(scenario(folder, cut))))
    assert len(set(filter(None, found))) == 1, "what is submitted does not depend on where a run was interrupted"
    assert len(list(filter(None, found))) >= 3


def test_a_builder_knows_which_epochs_are_in_progress(tmp_path: Path) -> None:
    async def scenario() -> None:
        rig = EpochwiseRig(tmp_path, configuration(tmp_path))
        async with opened_rig(rig) as (_, parts):
            builder = parts.trajectory_builder
            with pytest.raises(ValueError, match="start_run first"):
                await builder.finalize("mine")
            await builder.start_run("mine", {"epoch": 0})
            with pytest.raises(ValueError, match="already in progress"):
                await builder.start_run("mine", {"epoch": 0})
            collection = await builder.finalize("mine")
            assert collection.run_id == "mine"
            assert [len(group) for group in collection.trajectories] == [3] * 4
            assert_is_token_exact(collection)

    asyncio.run(scenario())
    builder = RollstreamTrajectoryBuilder(RollstreamTrajectoryBuilderConfig(workspace=tmp_path / "nobody"))
    with pytest.raises(ConfigError, match="no run is open in workspace"):
        asyncio.run(builder.start_run("mine"))


def assert_is_token_exact(collection: TrajectoryCollection) -> None:
    for group in collection.trajectories:
        for trajectory in group:
            metadata = trajectory.metadata or {}
            assert {"id", "group_id", "trajectory_id", "digest", "locator", "generation", "run_id"} <= metadata.keys()
            items: list[Any] = trajectory.episode
            assert [item.role.value for item in items[:3]] in (["user", "assistant", "tool"], ["user", "assistant"])
            recorded: list[Any] = answers_of(trajectory)
            for item in recorded:
                tokens = item.logprobs
                assert len(tokens["token_ids"]) == len(tokens["logprobs"]) > 0
                assert tokens["prompt_token_ids"]
            longer = [item.logprobs["prompt_token_ids"] for item in recorded]
            assert all(len(one) < len(other) for one, other in pairwise(longer))


def test_a_submission_is_the_same_however_often_and_is_answered_after_a_restart(tmp_path: Path) -> None:
    async def scenario() -> None:
        rig = EpochwiseRig(tmp_path, configuration(tmp_path))
        async with opened_rig(rig) as (_, parts):
            adapter = parts.trainer_adapter
            assert await adapter.is_healthy()
            await parts.trajectory_builder.start_run("mine", {"epoch": 0})
            collection = await parts.trajectory_builder.finalize("mine")
            with pytest.raises(ValueError, match="no trajectories to submit"):
                await adapter.submit(TrajectoryCollection(trajectories=[[]], run_id="mine"))
            ref = await adapter.submit(collection)
            assert await adapter.submit(collection) == ref
            assert (ref.run_id, ref.backend) == ("mine", "rollstream")
            assert ref.metadata is not None
            assert (ref.metadata["epoch"], ref.metadata["batch_index"]) == (0, 0)
            began = time.monotonic()
            status = await adapter.wait_until_complete(ref, poll_interval=1000)
            assert time.monotonic() - began < 500, "it polled"
            assert (status.status, status.progress) == (COMPLETED, 100.0)
        async with opened_rig(rig, resume=True) as (_, parts):
            assert (await parts.trainer_adapter.status(ref)).status == COMPLETED
            assert (await parts.trainer_adapter.submit(collection)).metadata == ref.metadata
            assert parts.trainer._first_epoch == 1  # pyright: ignore[reportAttributeAccessIssue]
        assert len(await rig.events("groups", SubmissionReceived)) == 1

    asyncio.run(scenario())


def test_changed_rewards_travel_in_the_submission_and_changed_content_is_written_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        rig = EpochwiseRig(tmp_path, configuration(tmp_path))
        async with opened_rig(rig) as (_, parts):
            await parts.trajectory_builder.start_run("mine", {"epoch": 0})
            collection = await parts.trajectory_builder.finalize("mine")
            rewarded, shaped, dropped, kept = collection.trajectories
            for number, trajectory in enumerate(rewarded):
                trajectory.reward = number / 4
            for number, trajectory in enumerate(shaped):
                num_turns = len(answers_of(trajectory))
                trajectory.shaped_rewards = [0.25] * num_turns
                trajectory.reward = 0.25 * num_turns + number
            ref = await parts.trainer_adapter.submit(
                TrajectoryCollection(trajectories=[rewarded, shaped, kept], run_id="mine")
            )
            assert (await parts.trainer_adapter.wait_until_complete(ref)).status == COMPLETED
        (batch,) = await rig.events("batches", BatchPlanned)
        by_group: dict[str, list[float]] = {}
        for member in batch.members:
            by_group.setdefault(member.group_id, []).append(member.reward)
        first, again, last = by_group
        assert first == (rewarded[0].metadata or {})["group_id"]
        assert by_group[first] == [0.0, 0.25, 0.5]
        assert again.startswith("run-1/rl-"), "a group of its own"
        assert by_group[again] == pytest.approx([trajectory.reward for trajectory in shaped])
        assert last == (kept[0].metadata or {})["group_id"]
        causes = Counter(event.group_id for event in await rig.events("batches", TrajectoryRejected))
        assert causes == {(group[0].metadata or {})["group_id"]: 3 for group in (shaped, dropped)}
        await assert_every_attempt_has_one_outcome(rig)

    asyncio.run(scenario())


def test_a_job_that_fails_ends_the_run_with_its_reason(tmp_path: Path) -> None:
    async def scenario() -> None:
        rig = EpochwiseRig(tmp_path, configuration(tmp_path), fails_at=2)
        parts = components_for(rig)
        progress = await conducted(rig, parts=parts)
        assert progress.ended is not None
        assert progress.ended.cause == "failed"
        assert "out of memory" in progress.ended.message
        metrics = await parts.trainer.get_metrics("run-1")
        assert [job["status"]["status"] for job in metrics["jobs"]] == ["completed", "failed"]
        assert metrics["jobs"][1]["message"] == "out of memory"
        await assert_every_attempt_has_one_outcome(rig)

    asyncio.run(scenario())


def test_a_job_that_fails_while_the_next_epoch_is_rolled_out_ends_the_run_too(tmp_path: Path) -> None:
    written = configuration(tmp_path, num_epochs=4)
    written["trainer_adapters"]["a"]["max_staleness"] = 1

    async def scenario() -> None:
        rig = submitting(EpochwiseRig(tmp_path, written, fails_at=1))
        progress = await conducted(rig)
        assert progress.job("run-1/rl").error == "out of memory"
        assert progress.version == 0

    asyncio.run(scenario())


def test_a_run_that_is_stopped_is_over_without_an_error(tmp_path: Path) -> None:
    async def scenario() -> None:
        rig = EpochwiseRig(tmp_path, configuration(tmp_path, num_epochs=50))

        async def stop(planned: BatchPlanned) -> None:
            if planned.index == 1:
                await rig.log.send(RunEnded(run_id="run-1", time_ms=1, cause="stopped"))
                await asyncio.sleep(3600)

        rig.trains_slowly = stop
        progress = await conducted(rig)
        assert progress.ended is not None
        assert progress.ended.cause == "stopped"
        assert progress.version == 1

    asyncio.run(scenario())


def test_with_a_staleness_bound_the_next_epochs_are_rolled_out_while_one_is_trained(tmp_path: Path) -> None:
    written = configuration(tmp_path, num_epochs=4)
    written["trainer_adapters"]["a"]["max_staleness"] = 2

    async def scenario() -> None:
        rig = submitting(EpochwiseRig(tmp_path, written))
        begun: list[int] = []

        async def wait_for_two_more(planned: BatchPlanned) -> None:
            while planned.index == 0 and len(begun) < 3:
                begun[:] = [event.epoch for event in await rig.events("groups", EpochStarted)]
                await asyncio.sleep(0.01)

        rig.trains_slowly = wait_for_two_more
        progress = await conducted(rig)
        assert progress.version == 4
        batches = await rig.events("batches", BatchPlanned)
        assert max(member.staleness for batch in batches for member in batch.members) in (1, 2)
        tasks = await rig.events("tasks", TaskRequested)
        assert sorted({(task.epoch, task.min_version) for task in tasks}) == [(0, 0), (1, 0), (2, 0), (3, 1)]

    asyncio.run(scenario())


def test_a_validation_that_fails_is_noted_with_its_reason_and_ends_a_run_only_if_it_is_required(tmp_path: Path) -> None:
    def scenario(folder: Path, **trainer: Any) -> tuple[Any, list[dict[str, Any]]]:
        folder.mkdir()
        run = {"validation_dataset": str(folder / "valid.jsonl"), "validation_interval": 1}
        written = configuration(folder, num_epochs=1, run_configuration=run)
        (folder / "valid.jsonl").write_text('{"id": "broken", "secret": "no number"}\n{"id": "whole", "secret": 1}\n')
        written["trainers"]["t"] |= trainer
        progress = asyncio.run(conducted(EpochwiseRig(folder, written)))
        return progress, json.loads((folder / "output" / "validation_history.json").read_text())

    progress, history = scenario(tmp_path / "noted")
    assert progress.job("run-1/rl").outcome == "succeeded"
    (row,) = history
    assert "1 of 2 examples have no score (broken:" in row["error"]
    assert "avg_reward" not in row
    progress, _ = scenario(tmp_path / "required", validation_required=True)
    assert progress.ended.cause == "failed"
    assert "validation before epoch 0 failed: 1 of 2 examples" in progress.ended.message


def test_a_run_ends_early_in_order_when_validation_no_longer_gets_better(tmp_path: Path) -> None:
    run = {"validation_dataset": str(tmp_path / "valid.jsonl"), "validation_interval": 1}
    written = configuration(tmp_path, num_epochs=9, run_configuration=run)
    written["trainers"]["t"]["early_stopping"] = {"patience": 2, "min_delta": 5.0}

    async def scenario() -> None:
        rig = EpochwiseRig(tmp_path, written)
        progress = await conducted(rig)
        assert progress.job("run-1/rl").outcome == "succeeded"
        seals = await rig.events("batches", EpochSealed)
        assert [(seal.num_batches, seal.is_last) for seal in seals] == [(1, False), (1, False), (0, True)]

    asyncio.run(scenario())


def test_an_epoch_that_the_curriculum_leaves_empty_is_sealed_without_batches(tmp_path: Path) -> None:
    curriculum = {"enabled": True, "min_reward_diff": 2.0}
    run = {"validation_dataset": str(tmp_path / "valid.jsonl"), "validation_interval": 1}

    async def scenario() -> None:
        written = configuration(tmp_path, num_epochs=2, curriculum_learning=curriculum, run_configuration=run)
        rig = EpochwiseRig(tmp_path, written)
        parts = components_for(rig)
        progress = await conducted(rig, parts=parts)
        assert progress.job("run-1/rl").outcome == "succeeded"
        assert progress.version == 0
        jobs = (await parts.trainer.get_metrics("run-1"))["jobs"]
        assert [(job["status"]["status"], job["message"]) for job in jobs] == [("completed", NOTHING_TRAINED)] * 2
        seals = await rig.events("batches", EpochSealed)
        assert [(seal.num_groups, seal.num_batches) for seal in seals] == [(4, 0), (4, 0)]
        validated = [group for group in await rig.events("groups", GroupClosed) if group.purpose == "validation"]
        assert {group.epoch for group in validated} == {0, 1}, "rolled out again before each epoch"
        await assert_every_attempt_has_one_outcome(rig)

    asyncio.run(scenario())
