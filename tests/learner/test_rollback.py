"""A rollback: a manifest without members, whose version has the weights and the optimizer state of an earlier one."""

import asyncio
import itertools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rollstream.eventlog import codec
from rollstream.learner.checkpoints.checkpoint import CheckpointFolder
from rollstream.learner.model.memory import MicroBatchBudget
from rollstream.learner.model.step import adopted
from rollstream.learner.progress import LogState, Manifest, evolve
from rollstream.learner.publisher import difference
from rollstream.learner.retrain import RecordedJob, Retraining
from rollstream.learner.trainer import JobTrainer
from rollstream.schemas import ids
from rollstream.schemas.algorithms import GrpoSettings
from rollstream.schemas.events import (
    BatchPlanned,
    JobFailed,
    JobProgressed,
    JobSubmitted,
    JobSucceeded,
    StepTrained,
    WeightsCollected,
    WeightsPublished,
)
from rollstream.schemas.settings import ModelSettings, OptimizerSettings
from tests.learner.checkpoints.restart_rig import Crash, Fuse, adopt, fused_worker, num_before
from tests.learner.conftest import GROUP, RUN
from tests.rigs.runs.retrained import assert_retrained, steps_of

LINEAR = OptimizerSettings(learning_rate=1e-2, schedule="linear")


async def plan(
    lab: Any, job: JobSubmitted, adoptions: dict[int, int], count: int, *, counts: bool = True
) -> list[BatchPlanned]:
    """`count` manifests; `adoptions`: the version adopted by index. `counts`: as plans since revision 3."""
    planned: list[BatchPlanned] = []
    for index in range(count):
        if index in adoptions:
            planned = await adopt(lab, job, planned, adoptions[index], counts=counts)
            continue
        previous = codec.content_digest(planned[-1]) if planned else "0" * 64
        how = {"first": index, "previous": previous, "num_adopted": num_before(planned) if counts else 0}
        planned += await lab.plan(job, 1, seal=False, **how)
    await lab.seal(job, count)
    return planned


async def hashes(lab: Any) -> dict[int, str]:
    return {step.version: step.weights_sha256 for step in await lab.events("weights", StepTrained)}


async def undisturbed(lab: Any, folder: Path, adoptions: dict[int, int], count: int, **settings: Any) -> Any:
    other = type(lab)(folder, lab.model)
    await plan(other, await other.submit(**settings), adoptions, count)
    await other.work(other.has(JobSucceeded))
    return await other.outcome()


@pytest.mark.parametrize("adopted", [0, 1])
def test_a_rollback_publishes_a_new_version_with_the_weights_of_an_earlier_one(lab: Any, adopted: int) -> None:
    async def scenario() -> None:
        job = await lab.submit(num_versions=5)
        await plan(lab, job, {3: adopted}, 5)
        await lab.work(lab.has(JobSucceeded))
        published = {one.version: one for one in await lab.events("weights", WeightsPublished)}
        assert [published[version].parent for version in range(1, 6)] == [0, 1, 2, 3, 4]
        assert published[4].adopts == adopted
        assert published[4].weights_sha256 == published[adopted].weights_sha256
        assert published[4].artifact == published[adopted].artifact
        assert published[4].batch_id == ids.batch_id(job.job_id, 3)
        steps = {step.version: step for step in await lab.events("weights", StepTrained)}
        assert (steps[4].num_optimizer_steps, steps[4].adopts, steps[4].metrics) == (0, adopted, {})
        assert (steps[4].threads, steps[4].ranks, steps[4].device) == (1, 1, "cpu")
        assert published[5].adopts is None
        assert published[5].weights_sha256 != published[4].weights_sha256

    asyncio.run(scenario())


def test_micro_batches_that_did_not_fit_are_not_tried_again_after_a_rollback_to_the_base_version(
    lab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused: list[int] = []
    run = MicroBatchBudget.run

    def limited(self: MicroBatchBudget, work: Callable[[int], Any], num_units: int) -> Any:
        def bounded(tokens: int) -> Any:
            if tokens > 16:
                refused.append(tokens)
                raise MemoryError
            return work(tokens)

        return run(self, bounded, num_units)

    async def scenario() -> None:
        monkeypatch.setattr(MicroBatchBudget, "run", limited)
        job = await lab.submit(num_versions=3, algorithm=GrpoSettings(max_tokens_per_micro_batch=64))
        await plan(lab, job, {1: 0}, 3)
        await lab.work(lab.has(JobSucceeded))
        given = [step.micro_batch_tokens for step in await lab.events("weights", StepTrained)]
        assert given == [(16,), (), (16,)]
        assert refused == [64, 32]

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("counts", "rates", "percents", "checkpoints"),
    [(True, [3, 2, 1], [100, 100, 200, 200, 300], [2, 4, 5]), (False, [3, 1, 0], [100, 100, 300, 300, 300], [2, 3, 4])],
    ids=["counted", "not counted"],
)
def test_schedule_percentage_and_last_checkpoint_count_trained_batches_alone(
    lab: Any, counts: bool, rates: list[float], percents: list[float], checkpoints: list[int]
) -> None:
    """Three batches are trained, with a rollback after the first and the second; a plan of old counts rollbacks too."""

    async def scenario() -> None:
        job = await lab.submit(num_versions=3, optimizer=LINEAR, checkpoint_every=100)
        await plan(lab, job, {1: 0, 3: 2}, 5, counts=counts)
        await lab.work(lab.has(WeightsPublished, "weights", 3))
        await lab.work(lab.has(JobSucceeded))
        steps = await steps_of(lab)
        found = [step.metrics["optimizer/learning_rate"] for step in steps.values() if step.adopts is None]
        assert found == pytest.approx([rate / 3 * LINEAR.learning_rate for rate in rates])
        progress = [one.percent for one in await lab.events("jobs", JobProgressed)]
        assert progress == pytest.approx([percent / 3 for percent in percents])
        assert CheckpointFolder(lab.folder / "checkpoints", GROUP).versions() == checkpoints
        await assert_retrained(lab, job, steps)

    asyncio.run(scenario())


def test_a_rollback_by_several_processes_is_recorded_as_such() -> None:
    model: Any = SimpleNamespace(device=torch.device("cpu"), ranks=SimpleNamespace(num=2))
    result = adopted(model, {"restore": 1.0})
    assert (result.ranks, result.device, result.num_optimizer_steps) == (2, "cpu", 0)


def test_a_rollback_recorded_without_a_device_names_no_number_of_processes_where_its_hash_differs(lab: Any) -> None:
    common: dict[str, Any] = {"run_id": RUN, "time_ms": 1, "model_group": GROUP, "job_id": "j", "batch_id": "b"}
    common |= {"epoch": 0, "term": 0, "weights_sha256": "0" * 64, "num_optimizer_steps": 0, "metrics": {}}
    of_two: dict[str, Any] = {"ranks": 2, "device": "cpu"}
    steps = [
        StepTrained(version=1, **common, **of_two),
        StepTrained(version=2, **common, adopts=1),
        StepTrained(version=3, **common, **of_two, adopts=1),
    ]

    async def scenario() -> list[str]:
        state = LogState()
        await lab.log.send_all(steps)
        for received in await lab.received("weights"):
            evolve(state, received)
        return [difference(state.group(GROUP).step_of(one.version), 3) for one in steps]

    trained, before, now = asyncio.run(scenario())
    assert "trained by 2 process(es)" in trained
    assert "trained by" not in before
    assert "trained by 2 process(es)" in now


@pytest.mark.slow
def test_training_goes_on_from_the_optimizer_state_of_the_adopted_version(lab: Any, tmp_path: Path) -> None:
    """The manifest after a rollback trains what the same manifest trains right after the adopted version."""

    async def scenario() -> None:
        job = await lab.submit(num_versions=9)
        await plan(lab, job, {2: 1}, 4)
        await lab.work(lab.has(JobSucceeded))
        other = type(lab)(tmp_path / "other", lab.model)
        job = await other.submit(num_versions=9)
        first = await other.plan(job, 1, seal=False)
        digest = codec.content_digest(first[0])
        members, locators = await other._members(job, 3, with_logprobs=True)
        batch = first[0].model_copy(
            update={
                "batch_id": ids.batch_id(job.job_id, 1),
                "index": 1,
                "trains_at_version": 1,
                "yields_version": 2,
                "members": tuple(members),
                "locators": tuple(locators),
                "seed": 3,
                "previous_sha256": digest,
            }
        )
        await other.log.send(batch)
        await other.seal(job, 2)
        await other.work(other.has(JobSucceeded))
        assert (await hashes(lab))[4] == (await hashes(other))[2]

    asyncio.run(scenario())


@pytest.mark.slow
@pytest.mark.parametrize("keep_last", [1, 8])
@pytest.mark.parametrize("checkpoint_every", [1, 3])
def test_a_rollback_to_a_version_without_a_checkpoint_gives_the_same_bits(
    lab: Any, tmp_path: Path, keep_last: int, checkpoint_every: int
) -> None:
    async def scenario() -> None:
        adoptions = {4: 2, 6: 5, 7: 1}
        expected = await undisturbed(lab, tmp_path / "whole", adoptions, 9, num_versions=9, optimizer=LINEAR)
        how = {"keep_last": keep_last, "keep_every": 100, "checkpoint_every": checkpoint_every}
        job = await lab.submit(num_versions=9, optimizer=LINEAR, **how)
        planned: list[BatchPlanned] = []
        for index in range(9):  # one by one: the learner has pruned before it sees that a version is wanted again
            if index in adoptions:
                planned = await adopt(lab, job, planned, adoptions[index])
            else:
                previous = codec.content_digest(planned[-1]) if planned else "0" * 64
                how = {"first": index, "previous": previous, "num_adopted": num_before(planned)}
                planned += await lab.plan(job, 1, seal=False, **how)
            await lab.work(lab.has(WeightsPublished, "weights", index + 2))
        await lab.seal(job, 9)
        await lab.work(lab.has(JobSucceeded))
        steps, published, *_ = await lab.outcome()
        assert (steps, published) == expected[:2]
        if keep_last == 1:
            assert await lab.events("weights", WeightsCollected)

    asyncio.run(scenario())


def test_a_planned_rollback_keeps_its_checkpoint(lab: Any) -> None:
    async def scenario() -> None:
        job = await lab.submit(num_versions=9, keep_last=1, keep_every=100)
        await plan(lab, job, {4: 1}, 5)
        await lab.work(lab.has(WeightsPublished, "weights", 4))
        if len(await lab.events("weights", WeightsPublished)) == 4:  # the learner was stopped before the rollback
            assert 1 in CheckpointFolder(lab.folder / "checkpoints", GROUP).versions()
        await lab.work(lab.has(JobSucceeded))
        assert (await hashes(lab))[5] == (await hashes(lab))[1]

    asyncio.run(scenario())


@pytest.mark.slow
@pytest.mark.parametrize("is_before", [True, False], ids=["before", "after"])
def test_a_crash_at_any_write_changes_nothing_of_a_rollback(lab: Any, tmp_path: Path, is_before: bool) -> None:
    async def scenario() -> None:
        expected = await undisturbed(lab, tmp_path / "undisturbed", {2: 1}, 4, num_versions=4)
        for at in range(100):
            each = type(lab)(tmp_path / f"crash-{at}", lab.model)
            await plan(each, await each.submit(num_versions=4), {2: 1}, 4)
            fuse = Fuse(at, is_before=is_before)
            try:
                await each.work(each.has(JobSucceeded), fused_worker(each, fuse))
            except Crash:
                await each.work(each.has(JobSucceeded))
            assert await each.outcome() == expected, f"crash at write {at}"
            if fuse.left >= 0:
                assert at > 12
                return
        raise AssertionError("the fuse burnt at every write")

    asyncio.run(scenario())


@pytest.mark.slow
@pytest.mark.parametrize("first", [1, 3, 4, 6])
def test_training_again_from_any_version_gives_the_same_steps(lab: Any, first: int) -> None:
    async def scenario() -> None:
        job = await lab.submit(num_versions=7)
        await plan(lab, job, {3: 1, 5: 4}, 7)
        await lab.work(lab.has(JobSucceeded))
        batches = {
            received.event.index: received
            for received in await lab.received("batches")
            if isinstance(received.event, BatchPlanned)
        }
        manifests = {index: Manifest(one.event, one.digest, one.position.offset) for index, one in batches.items()}
        steps = {step.version: step for step in await lab.events("weights", StepTrained)}
        base = next(one for one in await lab.events("weights", WeightsPublished) if one.version == 0)
        recorded = RecordedJob(job, base, manifests, steps)
        retraining = Retraining(recorded, threads=1, permissions=lab.permissions)
        began = retraining.begin(lab.artifacts, lab.folder / "checkpoints", version=first - 1, until=7)
        assert began <= (1 if first <= 4 else 4)
        compared = [
            (codec.content_digest(before), codec.content_digest(after))
            async for before, after in retraining.steps(lab.log, until=7)
        ]
        assert len(compared) == 7 - began
        assert all(before == after for before, after in compared)

    asyncio.run(scenario())


def test_a_job_that_begins_with_the_weights_of_the_models_folder_trains_again_to_the_same_bits(lab: Any) -> None:
    """They are published as bfloat16, and trained as the float32 that is loaded from the folder."""

    async def scenario() -> None:
        model = ModelSettings(path=str(lab.model), device="cpu", dtype="bfloat16")
        await plan(lab, await lab.submit("first", model=model, num_versions=2), {1: 0}, 2)
        await lab.work(lab.has(JobSucceeded))
        second = await lab.submit("second", base_version=2, model=model, num_versions=1)
        await lab.plan(second, 1)
        await lab.work(lab.has(JobSucceeded, count=2))
        published = await lab.events("weights", WeightsPublished)
        assert published[2].weights_sha256 == published[0].weights_sha256
        steps = {version: step for version, step in (await steps_of(lab)).items() if step.job_id == second.job_id}
        await assert_retrained(lab, second, steps, first=3)

    asyncio.run(scenario())


@pytest.mark.parametrize(("adoptions", "every"), [({4: 2}, 3), ({2: 1, 7: 5}, 6)], ids=["planned", "passed"])
def test_without_determinism_a_rollback_finds_the_weights_that_its_way_needs(
    lab: Any, monkeypatch: pytest.MonkeyPatch, adoptions: dict[int, int], every: int
) -> None:
    """The way back from the base version is trained to other bits, also of versions that are collected by then."""
    train, noise = JobTrainer.train, itertools.count(1)

    def to_other_bits(trainer: JobTrainer, *given: Any, **options: Any) -> Any:
        result = train(trainer, *given, **options)
        factor = 1 + next(noise) * 1e-4
        trainer.model.load_weights({name: tensor * factor for name, tensor in trainer.model.published().items()})
        return result

    monkeypatch.setattr(JobTrainer, "train", to_other_bits)

    async def scenario() -> None:
        model = ModelSettings(path=str(lab.model), device="cpu", deterministic=False)
        how = {"keep_last": 1, "keep_every": 100, "checkpoint_every": every}
        count = max(adoptions) + 1
        job = await lab.submit(num_versions=count + 1, model=model, **how)
        await plan(lab, job, adoptions, count)

        async def is_over() -> bool:
            return bool(await lab.events("jobs", JobSucceeded) or await lab.events("jobs", JobFailed))

        await lab.work(is_over)
        assert await lab.events("jobs", JobFailed) == []
        found = await hashes(lab)
        assert [found[index + 1] for index in adoptions] == [found[version] for version in adoptions.values()]
        assert await lab.events("weights", WeightsCollected)

    asyncio.run(scenario())


def test_a_rollback_to_a_version_that_never_existed_fails_the_job_with_its_number(lab: Any) -> None:
    async def scenario() -> None:
        job = await lab.submit(num_versions=9)
        await plan(lab, job, {2: 7}, 3)
        await lab.work(lab.has(JobFailed))
        failed = await lab.events("jobs", JobFailed)
        assert failed[0].error == (
            "manifest run-1/rl/b000002 adopts version 7; versions 0 to 2 of the job come before it; "
            "begin a new run with `rollstream finetune --fork`"
        )

    asyncio.run(scenario())
