"""A version is written while the next batch is trained: to the same bits, in the same order, with the same errors."""

import asyncio
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from rollstream.eventlog import codec
from rollstream.eventlog.artifacts import ArtifactStore
from rollstream.learner.checkpoints.checkpoint import Checkpoint, CheckpointFolder, read
from rollstream.learner.checkpoints.checkpoint_files import checkpoints_in
from rollstream.learner.model.tensor_file import from_bytes
from rollstream.learner.trainer import JobTrainer
from rollstream.learner.version_writer import AbandonedError, StateInUse
from rollstream.schemas.errors import ArtifactError
from rollstream.schemas.events import (
    JobCancelled,
    JobFailed,
    JobProgressed,
    JobSucceeded,
    StepTrained,
    WeightsPublished,
)
from rollstream.schemas.settings import LoraSettings, ModelSettings, OptimizerSettings

SLOW_S = 0.3


def test_published_weights_replace_what_differs_from_them_and_not_what_is_more_exact(lab: Any) -> None:
    model = ModelSettings(path=str(lab.model), device="cpu", dtype="bfloat16", deterministic=False)
    trainer = JobTrainer(asyncio.run(lab.submit(model=model)), threads=1, permissions=lab.permissions)
    own = trainer.model.weights()
    for value in own.values():
        value.data.add_(torch.full_like(value, 1e-5))
    before = {name: value.detach().clone() for name, value in own.items()}
    published = {name: value.clone() for name, value in trainer.model.published().items()}
    name = min(published)
    assert not torch.equal(before[name], published[name].float()), "what is published is rounded"
    published[name].view(-1)[0] += 1
    trainer.take_over(published)
    after = trainer.model.weights()
    changed = {one: (after[one] != before[one]).sum().item() for one in before}
    assert {one: count for one, count in changed.items() if count} == {name: 1}
    assert all(torch.equal(value, published[one]) for one, value in trainer.model.published().items())


class Work:
    """Record of the work of a learner's threads, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, save: Callable[[], None] = lambda: time.sleep(SLOW_S)) -> None:
        """`save`: is called before each checkpoint is written."""
        self.done: list[str] = []
        self.threads: set[str] = set()
        written, trained = CheckpointFolder.save, JobTrainer.train

        def slowly(folder: CheckpointFolder, checkpoint: Checkpoint) -> Path:
            version = checkpoint.position.version
            self.done.append(f"save {version}")
            self.threads.add(threading.current_thread().name.split("_")[0])
            save()
            path = written(folder, checkpoint)
            self.done.append(f"saved {version}")
            return path

        def train(trainer: JobTrainer, planned: Any, *args: Any, before_step: Any = None, **options: Any) -> Any:
            version = planned.yields_version
            self.done.append(f"train {version}")

            def stepped() -> None:
                if before_step is not None:
                    before_step()
                self.done.append(f"step {version}")

            return trained(trainer, planned, *args, before_step=stepped, **options)

        monkeypatch.setattr(CheckpointFolder, "save", slowly)
        monkeypatch.setattr(JobTrainer, "train", train)


async def undisturbed(lab: Any, folder: Path, **settings: Any) -> tuple[Any, ...]:
    """Outcome of the same job where each manifest is planned once the version before is published."""
    other = type(lab)(folder, lab.model)
    job, previous = await other.submit(**settings), codec.EMPTY_SHA256
    working = asyncio.create_task(other.work(other.has(JobSucceeded)))
    for index in range(num := job.settings.num_versions):
        (planned,) = await other.plan(job, 1, first=index, previous=previous, seal=index + 1 == num)
        previous = codec.content_digest(planned)
        while not await other.has(WeightsPublished, "weights", index + 2)() and not working.done():
            await asyncio.sleep(0.01)
    await working
    return await other.outcome()


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"optimizer": OptimizerSettings(learning_rate=1e-2, kind="muon")},
        {"checkpoint_every": 2},
        {"lora": LoraSettings(rank=2)},
        {"dtype": "bfloat16"},
    ],
    ids=["full", "muon", "checkpoint_every", "lora", "rounded"],
)
def test_a_version_is_written_while_the_next_batch_is_trained_to_the_same_bits(
    lab: Any, tmp_path: Path, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = {name: settings.pop(name) for name in ("lora", "dtype") if name in settings}
    changes = {**settings, "model": ModelSettings(path=str(lab.model), device="cpu", **model), "keep_last": 9}

    async def scenario() -> None:
        expected = await undisturbed(lab, tmp_path / "undisturbed", num_versions=4, **changes)
        work = Work(monkeypatch)
        job = await lab.submit(num_versions=4, **changes)
        await lab.plan(job, 4)
        await lab.work(lab.has(JobSucceeded))
        assert await lab.outcome() == expected
        saved = range(2, 4, 2) if "checkpoint_every" in settings else range(1, 4)
        for version in saved:
            written, begun = work.done.index(f"saved {version}"), work.done.index(f"train {version + 1}")
            assert begun < written < work.done.index(f"step {version + 1}")
        assert work.threads == {"writing"}
        published = {one.version: one for one in await lab.events("weights", WeightsPublished)}
        found = dict(checkpoints_in(CheckpointFolder(lab.folder / "checkpoints", job.model_group).path))
        assert {*saved, 4} == found.keys()
        for version, path in found.items():
            checkpoint = read(path)
            assert checkpoint is not None
            weights = from_bytes(lab.artifacts.read(published[version].artifact), "artifact")
            for name, value in weights.items():
                assert torch.equal(checkpoint.tensors[f"weights/{name}"].to(value.dtype), value)

    asyncio.run(scenario())


def test_events_of_versions_stay_in_order_and_the_time_that_training_waited_is_a_phase(
    lab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        Work(monkeypatch)
        await lab.plan(await lab.submit())
        await lab.work(lab.has(JobSucceeded))
        events = [(type(one), one.version) for one in await lab.events("weights") if hasattr(one, "version")]
        later = [(kind, version) for version in (1, 2, 3) for kind in (StepTrained, WeightsPublished)]
        assert events == [(WeightsPublished, 0), *later]
        first, second, third = await lab.events("weights", StepTrained)
        assert "hold" not in first.seconds
        assert second.seconds["hold"] > SLOW_S / 3
        assert all(value >= 0 for step in (first, second, third) for value in step.seconds.values())
        assert "checkpoint" not in second.seconds
        assert third.seconds["checkpoint"] >= SLOW_S

    asyncio.run(scenario())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_phases_count_rounded_weights_and_a_store_that_takes_longer_than_the_next_batch(
    lab: Any, dtype: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = ArtifactStore.put_hashed

    def slowly(*args: Any) -> Any:
        time.sleep(SLOW_S)
        return put(*args)

    monkeypatch.setattr(ArtifactStore, "put_hashed", slowly)

    async def scenario() -> None:
        await lab.plan(await lab.submit(model=ModelSettings(path=str(lab.model), device="cpu", dtype=dtype)))
        await lab.work(lab.has(JobSucceeded))
        _, second, third = await lab.events("weights", StepTrained)
        assert ("hash" in second.seconds) == (dtype == "bfloat16")
        for step in (second, third):
            assert SLOW_S / 2 < step.seconds["hold"] < SLOW_S + 1

    asyncio.run(scenario())


def test_a_checkpoint_that_cannot_be_written_fails_the_job_and_the_batch_trained_meanwhile_does_not_count(
    lab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save() -> None:
        time.sleep(SLOW_S)
        raise ArtifactError("the disk is away")

    async def scenario() -> None:
        work = Work(monkeypatch, save)
        await lab.plan(await lab.submit())
        await lab.work(lab.has(JobFailed))
        (failed,) = await lab.events("jobs", JobFailed)
        assert "the disk is away" in failed.error
        assert [one.version for one in await lab.events("weights", WeightsPublished)] == [0]
        assert "train 2" in work.done
        assert "step 2" not in work.done

    asyncio.run(scenario())


def test_a_broken_chain_of_manifests_fails_the_job_after_the_version_before_is_published(lab: Any) -> None:
    async def scenario() -> None:
        job = await lab.submit()
        await lab.plan(job, 1, seal=False)
        await lab.plan(job, 1, first=1, previous="1" * 64)
        await lab.work(lab.has(JobFailed))
        assert [one.version for one in await lab.events("weights", WeightsPublished)] == [0, 1]
        assert len(await lab.events("weights", StepTrained)) == 1

    asyncio.run(scenario())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_job_cancelled_while_its_version_is_written_publishes_nothing_more(
    lab: Any, dtype: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        work = Work(monkeypatch)
        job = await lab.submit(model=ModelSettings(path=str(lab.model), device="cpu", dtype=dtype))
        await lab.plan(job)
        working = asyncio.create_task(lab.work(lab.has(JobSucceeded)))
        while "train 2" not in work.done:
            await asyncio.sleep(0.01)
        event = JobCancelled(run_id=job.run_id, time_ms=5, job_id=job.job_id, model_group=job.model_group)
        await lab.log.send(event)
        await asyncio.sleep(3 * SLOW_S)
        working.cancel()
        with suppress(asyncio.CancelledError):
            await working
        assert {one.version for one in await lab.events("weights", WeightsPublished)} <= {0, 1}
        assert not list(lab.folder.rglob("*.aside"))

    asyncio.run(scenario())


def test_a_learner_stopped_while_a_version_is_written_ends_and_the_next_one_goes_on(
    lab: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        expected = await undisturbed(lab, tmp_path / "undisturbed", num_versions=3)
        with monkeypatch.context() as patched:
            work = Work(patched)
            await lab.plan(await lab.submit())
            working = asyncio.create_task(lab.worker().run())
            while "train 2" not in work.done:
                await asyncio.sleep(0.01)
            working.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asyncio.wait_for(working, timeout=30)
            assert "step 2" not in work.done
        await lab.work(lab.has(JobSucceeded), lab.worker("other"))
        assert await lab.outcome() == expected

    asyncio.run(scenario())


def test_with_a_second_job_each_version_is_written_before_another_batch_is_trained(
    lab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other job's batch may take long, and its version is waited for."""

    async def scenario() -> None:
        work = Work(monkeypatch, lambda: None)
        for name in ("a", "b"):
            await lab.plan(await lab.submit(name, model_group=f"run-1/{name}", num_versions=2), 2, seal=name == "a")
        await lab.work(lab.has(JobProgressed, count=3))
        first = [one.removeprefix("save ") for one in work.done if one.startswith("save ")]
        assert first[:2] == ["1", "1"]
        assert work.done.index("saved 1") < work.done.index("train 1", 1)

    asyncio.run(scenario())


def test_an_optimizer_step_waits_until_the_state_is_released_and_is_refused_if_it_was_abandoned() -> None:
    released, abandoned, both = StateInUse(), StateInUse(), StateInUse()
    threading.Timer(0.05, released.release).start()
    released.wait()
    assert released.held_s >= 0.04
    abandoned.abandon()
    with pytest.raises(AbandonedError):
        abandoned.wait()
    both.release()
    both.abandon()
    both.wait()
