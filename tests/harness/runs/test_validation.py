"""Validation of streamed runs: when it is due, under which weights, and that a run waits for its last one."""

import asyncio
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rollstream.harness.components.interfaces import (
    EvaluationItem,
    EvaluationOutput,
    EvaluatorOutput,
    validation_metrics,
)
from rollstream.harness.components.trainer import should_stop_early
from rollstream.harness.config.dataset import Example
from rollstream.harness.runs.conductor import Conductor
from rollstream.harness.runs.driver import is_over
from rollstream.harness.runs.progress import Progress, ValidatedGroups, evolve
from rollstream.harness.runs.validation import Validation, validation_of
from rollstream.replay.source import read_run
from rollstream.replay.verify import verify
from rollstream.schemas.config import EarlyStopping
from rollstream.schemas.errors import EnvironmentRunError
from rollstream.schemas.events import (
    EpochSealed,
    GroupClosed,
    JobStarted,
    JobSubmitted,
    JobSucceeded,
    RunEnded,
    TaskRequested,
)
from tests.rigs.runs.epochwise_rig import EpochwiseRig, assert_every_attempt_has_one_outcome, configuration


def test_a_streamed_run_is_validated_at_every_so_many_epochs_and_after_the_last(tmp_path: Path) -> None:
    run = {"validation_dataset": str(tmp_path / "valid.jsonl"), "validation_interval": 2}
    written = configuration(tmp_path, num_epochs=3, run_configuration=run)
    del written["trainers"]["t"]["planning"]
    written["trainer_adapters"]["a"]["tasks_per_epoch"] = 2

    async def scenario() -> None:
        rig = EpochwiseRig(tmp_path, written)
        for resume in (False, True):
            async with asyncio.timeout(60), rig.services():
                plan = await rig.plan(resume=resume)
                async with Conductor(rig.log, plan) as conductor:
                    progress = await conductor.conduct(validation_of(rig.loaded.config, plan))
        assert progress.job("run-1/rl").outcome == "succeeded"
        tasks = await rig.events("tasks", TaskRequested)
        validated = Counter((task.epoch, task.min_version) for task in tasks if task.purpose == "validation")
        versions = [seal.next_batch_index for seal in await rig.events("batches", EpochSealed)]
        assert validated == {(0, 0): 2, (2, versions[1]): 2, (3, versions[2]): 2}
        groups = progress.job("run-1/rl").validated
        assert {epoch: len(closed) for epoch, closed in groups.items()} == {3: 2}  # earlier ones are over
        await assert_every_attempt_has_one_outcome(rig)
        await rig.log.send(RunEnded(run_id="run-1", time_ms=1, cause="completed"))
        report = await verify(rig.log, await read_run(rig.log, "run-1"), rig.artifacts)
        assert report.differences == []

    asyncio.run(scenario())


def test_closed_groups_of_a_validation_are_not_all_copied_with_each_further_one() -> None:
    names = [f"run-1/rl/v00002-abc/t{index * 37 % 64:05d}" for index in range(64)]
    events = [
        GroupClosed(
            run_id="run-1",
            time_ms=1,
            group_id=name,
            example_id="a",
            job_id="run-1/rl",
            epoch=2,
            index=0,
            purpose="validation",
            reason="complete",
            is_viable=True,
            size=1,
            members=(),
        )
        for name in names
    ]
    progress, before, num_copied = Progress("run-1"), ValidatedGroups(), 0
    for number, event in enumerate(events, 1):
        progress = evolve(progress, event)
        closed = progress.job("run-1/rl").validated[2]
        assert (set(closed), len(closed)) == (set(names[:number]), number)
        num_copied += sum(len(part) for part in closed.parts if part not in before.parts)
        before = closed
        assert evolve(progress, events[number // 3]) is progress, "a repeated closing"
    assert num_copied <= 7 * 64
    backwards = Progress("run-1")
    for event in reversed(events):
        backwards = evolve(backwards, event)
    assert backwards == progress


def test_a_validation_of_its_own_configuration_is_played_by_that(tmp_path: Path) -> None:
    import yaml

    own = configuration(tmp_path, num_epochs=1)
    own["trajectory_builders"]["b"]["sampling"] = {"temperature": 0.0}
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(own))
    run = {"validation_config_file": str(tmp_path / "own.yaml"), "validation_interval": 1}
    written = configuration(tmp_path, run_configuration=run)

    async def scenario() -> None:
        rig = EpochwiseRig(tmp_path, written)
        plan = await rig.plan()
        validation = validation_of(rig.loaded.config, plan)
        assert validation is not None
        assert [example.example_id for example in validation.examples] == [f"train-{number}" for number in range(4)]
        assert validation.settings.sampling.temperature == 0.0
        assert validation.settings.agents == {"agent": "run-1/policy"}

    asyncio.run(scenario())


@pytest.fixture
def validation(script: SimpleNamespace) -> Validation:
    spec = script.job_spec(num_epochs=4)
    return Validation(script.run_started(), spec, [Example("x", {}), Example("y", {})], spec.rollout, interval=3)


def test_the_due_validation_depends_on_the_log_alone(script: SimpleNamespace, validation: Validation) -> None:
    spec = validation.spec
    progress = Progress(script.run)
    assert validation.due_epoch(progress) is None
    ids = {"run_id": script.run, "time_ms": 1, "job_id": spec.job_id, "model_group": spec.model_group}
    progress = evolve(progress, JobSubmitted(**ids, base_version=0, settings=spec.job))
    progress = evolve(progress, JobStarted(**ids, base_version=0, plan=spec.plan, rollout=spec.rollout))
    due = [validation.due_epoch(progress)]
    for epoch in range(4):
        progress = evolve(progress, script.sealed(spec.job_id, epoch, is_last=epoch == 3))
        due.append(validation.due_epoch(progress))
    assert due == [0, 0, 0, 3, None]
    progress = evolve(progress, JobSucceeded(**ids, final_version=4))
    assert validation.due_epoch(progress) == 4
    assert not is_over(progress, [spec], validation)
    assert is_over(progress, [spec])
    tasks = validation.due_tasks(4, progress)
    assert [(task.example_id, task.min_version, task.num_rollouts) for task in tasks] == [("x", 4, 1), ("y", 4, 1)]
    assert len({task.group_id for epoch in (0, 3, 4) for task in validation.due_tasks(epoch, progress)}) == 6


def output(*items: tuple[Any, Any]) -> EvaluationOutput:
    found = tuple(EvaluationItem(str(number), score, error) for number, (score, error) in enumerate(items))
    return EvaluationOutput((("other", EvaluatorOutput(())), ("mine", EvaluatorOutput(found))))


def test_a_validation_is_the_mean_of_its_scores_and_never_counts_a_missing_one() -> None:
    metrics = validation_metrics(output((0.5, None), (1, None)), "mine")
    assert metrics == {"avg_reward": 0.75, "min_reward": 0.5, "max_reward": 1.0, "num_examples": 2}
    for missing in ((None, "timeout"), (float("nan"), None), ("good", None), (1.0, "evaluator raised")):
        with pytest.raises(EnvironmentRunError, match="1 of 2 examples have no score"):
            validation_metrics(output((0.5, None), missing), "mine")
    with pytest.raises(EnvironmentRunError, match="the validation evaluated no example"):
        validation_metrics(output(), "mine")


def test_early_stopping_needs_patience_validations_in_a_row_without_improvement() -> None:
    rule = EarlyStopping(patience=2, min_delta=0.1)
    assert not should_stop_early([], rule)
    assert not should_stop_early([0.1, 0.1], rule)
    assert should_stop_early([0.1, 0.1, 0.15], rule)
    assert not should_stop_early([0.1, 0.1, 0.3, 0.3], rule)
    assert should_stop_early([0.5, 0.1, 0.2], rule)
    assert not should_stop_early([0.5, 0.1, 0.2], None)
