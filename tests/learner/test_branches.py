"""Model groups beside each other: a fork of another run's version, and several learners over one run's topics."""

import asyncio
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from rollstream.eventlog import codec
from rollstream.eventlog.artifacts import ArtifactStore
from rollstream.eventlog.files import HashedFile, base_sha256
from rollstream.eventlog.log import TopicPartition
from rollstream.learner.model.export import export_merged
from rollstream.learner.worker import Worker
from rollstream.schemas.events import (
    BatchPlanned,
    EpochSealed,
    JobFailed,
    JobSubmitted,
    JobSucceeded,
    LearnerClaimed,
    StepTrained,
    WeightsPublished,
)
from rollstream.schemas.events.training import ForkPoint
from rollstream.schemas.settings import ArtifactRef, LoraSettings, ModelSettings


async def published(lab: Any, group: str) -> list[WeightsPublished]:
    return [event for event in await lab.events("weights", WeightsPublished) if event.model_group == group]


async def submit(lab: Any, run_id: str, name: str, group: str, **more: Any) -> JobSubmitted:
    settings = lab.settings(**more.pop("settings", {}))
    ids = {"run_id": run_id, "job_id": f"{run_id}/{name}", "model_group": f"{run_id}/{group}"}
    job = JobSubmitted(**ids, time_ms=1, base_version=0, settings=settings, **more)
    await lab.log.send(job)
    return job


async def plan_from(lab: Any, job: JobSubmitted, planned: list[BatchPlanned]) -> None:
    """The same trajectories, at the same places, in manifests of another job."""
    previous = "0" * 64
    for batch in planned:
        changes = {"run_id": job.run_id, "job_id": job.job_id, "model_group": job.model_group}
        changes |= {"batch_id": f"{job.job_id}/b{batch.index}", "previous_sha256": previous, "seed": 77}
        batch = batch.model_copy(update=changes)
        previous = codec.content_digest(batch)
        await lab.log.send(batch)
    seal = (await lab.events("batches", EpochSealed))[0]
    await lab.log.send(seal.model_copy(update={"run_id": job.run_id, "job_id": job.job_id}))


def test_a_fork_begins_at_version_0_with_its_parents_weights_and_leaves_the_parent_alone(lab: Any) -> None:
    async def scenario() -> None:
        parent = await lab.submit()
        planned = await lab.plan(parent)
        await lab.work(lab.has(JobSucceeded))
        before = await lab.received("weights")
        newest = (await published(lab, "run-1/main"))[-1]
        fork = ForkPoint(run_id="run-1", version=newest.version)
        child = await submit(lab, "run-2", "rl", "main", fork=fork)
        await plan_from(lab, child, planned)
        await lab.work(lab.has(JobSucceeded, count=2))
        versions = await published(lab, "run-2/main")
        assert [(one.version, one.parent) for one in versions] == [(0, None), (1, 0), (2, 1), (3, 2)]
        assert versions[0].weights_sha256 == newest.weights_sha256
        assert versions[1].weights_sha256 != newest.weights_sha256
        after = await lab.received("weights")
        assert after[: len(before)] == before
        assert {one.event.run_id for one in after[len(before) :]} == {"run-2"}

    asyncio.run(scenario())


def test_a_frozen_model_group_publishes_one_version_and_ends(lab: Any) -> None:
    async def scenario() -> None:
        parent = await lab.submit()
        await lab.plan(parent)
        await lab.work(lab.has(JobSucceeded))
        point = ForkPoint(run_id="run-1", version=2, model_group="main")
        settings = {"kind": "frozen"}
        await submit(lab, "run-2", "frozen-old", "old", settings=settings, fork=point)
        await submit(lab, "run-2", "frozen-base", "base", settings=settings)
        await lab.work(lab.has(JobSucceeded, count=3))
        trained = await published(lab, "run-1/main")
        for group, version in (("old", 2), ("base", 0)):
            (only,) = await published(lab, f"run-2/{group}")
            assert (only.version, only.weights_sha256) == (0, trained[version].weights_sha256)
        assert {step.run_id for step in await lab.events("weights", StepTrained)} == {"run-1"}
        ended = {job.job_id: job.final_version for job in await lab.events("jobs", JobSucceeded)}
        assert ended["run-2/frozen-old"] == ended["run-2/frozen-base"] == 0
        gone = ForkPoint(run_id="run-1", version=7, model_group="main")
        await submit(lab, "run-2", "frozen-gone", "gone", settings=settings, fork=gone)
        await lab.work(lab.has(JobFailed))
        (failed,) = await lab.events("jobs", JobFailed)
        assert failed.error.startswith("job run-2/frozen-gone: version 7 of run-1/main is not published; fork from ")

    asyncio.run(scenario())


class SlowStore(ArtifactStore):
    """A store whose reads and writes must not hold up the event loop, which gives the process' signs of life."""

    def read(self, ref: ArtifactRef, *, max_bytes: int | None = None) -> bytes:
        assert asyncio._get_running_loop() is None
        return super().read(ref, max_bytes=max_bytes)

    def put_hashed(self, file: HashedFile, suffix: str = "") -> ArtifactRef:
        assert asyncio._get_running_loop() is None
        return super().put_hashed(file, suffix)


def test_no_artifact_is_read_or_written_in_the_event_loop(lab: Any) -> None:
    async def scenario() -> None:
        def worker() -> Worker:
            return Worker(
                lab.log,
                SlowStore(lab.artifacts.uri),
                name="learner",
                checkpoints=lab.folder,
                threads=1,
                permissions=lab.permissions,
            )

        planned = await lab.plan(await lab.submit(), 1)
        await lab.work(lab.has(JobSucceeded), worker())
        child = await submit(lab, "run-2", "rl", "main", fork=ForkPoint(run_id="run-1", version=1))
        await lab.work(lab.has(WeightsPublished, "weights", 3), worker())
        await plan_from(lab, child, planned)
        await lab.work(lab.has(JobSucceeded, count=2), worker())

    asyncio.run(scenario())


def test_a_fork_of_a_version_that_is_not_there_fails_its_job(lab: Any) -> None:
    async def scenario() -> None:
        await submit(lab, "run-2", "rl", "main", fork=ForkPoint(run_id="run-1", version=5))
        await lab.work(lab.has(JobFailed))
        (failed,) = await lab.events("jobs", JobFailed)
        assert (
            failed.error
            == "job run-2/rl: version 5 of run-1/main is not published; fork from one that `rollstream jobs` lists"
        )
        assert await lab.events("weights", WeightsPublished) == []

    asyncio.run(scenario())


def replace_weights(model: Path) -> None:
    """Other weights of the same shapes."""
    file, new = model / "model.safetensors", model / "new"
    save_file({name: value * 2 for name, value in load_file(file).items()}, new, {"format": "pt"})
    new.replace(file)


@pytest.mark.parametrize(
    ("replaced", "path", "alpha", "message"),
    [
        (
            "moved",
            "moved",
            32.0,
            r"version 1 of run-1/main is an adapter of model \S+/model, not of \S+/moved; give that model\.path",
        ),
        (
            "model",
            "model",
            32.0,
            r"version 1 of run-1/main is an adapter of model \S+/model with other weights; restore its weight files",
        ),
        (
            None,
            "model",
            16.0,
            r"version 1 of run-1/main is an adapter with lora_alpha 32\.0, not 16\.0; give model\.lora as",
        ),
    ],
)
def test_an_adapter_of_another_base_model_or_scale_fails_the_fork(
    lab: Any, replaced: str | None, path: str, alpha: float, message: str
) -> None:
    async def scenario() -> None:
        folders = {name: lab.folder / name for name in ("model", "moved")}
        for folder in folders.values():
            shutil.copytree(lab.model, folder)
        lora = LoraSettings(rank=2, alpha=32.0)
        await lab.plan(await lab.submit(model=ModelSettings(path=str(folders["model"]), device="cpu", lora=lora)), 1)
        await lab.work(lab.has(JobSucceeded))
        if replaced:
            replace_weights(folders[replaced])
        other = ModelSettings(path=str(folders[path]), device="cpu", lora=LoraSettings(rank=2, alpha=alpha))
        fork = ForkPoint(run_id="run-1", version=1)
        await submit(lab, "run-2", "rl", "main", fork=fork, settings={"model": other})
        await lab.work(lab.has(JobFailed))
        (failed,) = await lab.events("jobs", JobFailed)
        assert re.search(message, failed.error)
        assert await published(lab, "run-2/main") == []

    asyncio.run(scenario())


def save_in_shards(model: Path, folder: Path) -> None:
    """The same weights in several files."""
    AutoModelForCausalLM.from_pretrained(model).save_pretrained(folder, max_shard_size="8KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 1


@pytest.mark.parametrize("move", [shutil.copytree, save_in_shards])
def test_an_adapter_fits_an_equal_base_model_elsewhere(lab: Any, move: Any) -> None:
    async def scenario() -> None:
        moved = lab.folder / "moved"
        move(lab.model, moved)
        lora = LoraSettings(rank=2)
        planned = await lab.plan(await lab.submit(model=ModelSettings(path=str(lab.model), device="cpu", lora=lora)), 1)
        await lab.work(lab.has(JobSucceeded))
        other = ModelSettings(path=str(moved), device="cpu", lora=lora)
        fork = ForkPoint(run_id="run-1", version=1)
        child = await submit(lab, "run-2", "rl", "main", fork=fork, settings={"model": other, "num_versions": 1})
        await plan_from(lab, child, planned)
        await lab.work(lab.has(JobSucceeded, count=2))
        versions = await lab.events("weights", WeightsPublished)
        assert {one.base_model for one in versions} == {str(lab.model), str(moved)}
        assert {one.base_sha256 for one in versions} == {base_sha256(str(lab.model))} != {""}

    asyncio.run(scenario())


@pytest.mark.parametrize("checkpoint_every", [1, 2], ids=["from-checkpoint", "from-base"])
def test_a_job_whose_base_model_is_replaced_below_its_adapter_fails(lab: Any, checkpoint_every: int) -> None:
    async def scenario() -> None:
        model = lab.folder / "model"
        shutil.copytree(lab.model, model)
        lora = ModelSettings(path=str(model), device="cpu", lora=LoraSettings(rank=2))
        job = await lab.submit(model=lora, num_versions=2, checkpoint_every=checkpoint_every)
        await lab.plan(job, 2)
        await lab.work(lab.has(WeightsPublished, "weights", 2))
        replace_weights(model)
        await lab.work(lab.has(JobFailed))
        (failed,) = await lab.events("jobs", JobFailed)
        assert "is an adapter of model" in failed.error
        assert failed.error.endswith("/model with other weights; restore its weight files")

    asyncio.run(scenario())


def test_another_tokenizer_than_recorded_fails_the_fork(lab: Any) -> None:
    async def scenario() -> None:
        folders = [lab.folder / name for name in ("first", "second")]
        for folder in folders:
            shutil.copytree(lab.model, folder)
            (folder / "tokenizer.json").write_text(folder.name)
        first, second = (ModelSettings(path=str(folder), device="cpu") for folder in folders)
        await lab.plan(await lab.submit(model=first), 1)
        await lab.work(lab.has(JobSucceeded))
        fork = ForkPoint(run_id="run-1", version=1)
        await submit(lab, "run-2", "rl", "main", fork=fork, settings={"model": second})
        await lab.work(lab.has(JobFailed))
        (failed,) = await lab.events("jobs", JobFailed)
        assert f"was trained with another tokenizer than that of model {folders[1]}; restore" in failed.error

    asyncio.run(scenario())


def test_several_adapters_are_trained_on_one_base_each_with_its_own_weights(lab: Any) -> None:
    async def scenario() -> None:
        model = ModelSettings(path=str(lab.model), device="cpu", lora=LoraSettings(rank=2))
        planned = await lab.plan(await lab.submit(model=model))
        await lab.work(lab.has(JobSucceeded))
        wide = ModelSettings(path=str(lab.model), device="cpu", lora=LoraSettings(rank=4, target_modules=("q_proj",)))
        await plan_from(lab, await submit(lab, "run-1", "other", "second", settings={"model": wide}), planned)
        await lab.work(lab.has(JobSucceeded, count=2))
        ends = [(await published(lab, group))[-1] for group in ("run-1/main", "run-1/second")]
        assert [one.version for one in ends] == [3, 3]
        assert [(one.lora or {})["r"] for one in ends] == [2, 4]
        assert {one.base_model for one in ends} == {str(lab.model)}
        for one in ends:
            merged = lab.folder / f"merged-{one.model_group.replace('/', '-')}"
            export_merged(one, lab.artifacts.fetch(one.artifact), merged)
            AutoModelForCausalLM.from_pretrained(merged)

    asyncio.run(scenario())


def test_a_fork_of_a_version_that_was_just_collected_fails_with_the_reason(lab: Any) -> None:
    """It was there when the fork was checked, and the collector has read of no fork."""

    async def scenario() -> None:
        await lab.plan(await lab.submit(), 1)
        await lab.work(lab.has(JobSucceeded))
        parent = (await lab.events("weights", WeightsPublished))[-1]
        lab.artifacts.remove(parent.artifact)
        await submit(lab, "run-2", "rl", "main", fork=ForkPoint(run_id="run-1", version=1))
        await lab.work(lab.has(JobFailed))
        (failed,) = await lab.events("jobs", JobFailed)
        assert failed.error.startswith(
            "job run-2/rl: the weights of version 1 of run-1/main were removed before this fork began: artifact "
        )
        assert failed.error.endswith("; fork from another version, see is_collected of weight_versions")
        assert not [event for event in await lab.events("weights", WeightsPublished) if event.run_id == "run-2"]

    asyncio.run(scenario())


def test_two_learners_train_their_own_model_groups_from_one_runs_topics(lab: Any) -> None:
    async def scenario() -> None:
        first = await submit(lab, "run-1", "rl", "policy")
        planned = await lab.plan(first)
        lr = {"settings": {"optimizer": lab.settings().optimizer.model_copy(update={"learning_rate": 1e-3})}}
        second = await submit(lab, "run-1", "rl-b", "policy-b", **lr)
        await plan_from(lab, second, planned)
        first_worker = lab.worker("a", model_groups=("run-1/policy",))
        await lab.work(lab.has(JobSucceeded), first_worker)
        assert {event.model_group for event in await lab.events("weights", StepTrained)} == {"run-1/policy"}
        # the second one comes when the first is done, and reads all of it again
        await lab.work(lab.has(JobSucceeded, count=2), lab.worker("b", model_groups=("run-1/policy-b",)))
        claims = await lab.events("weights", LearnerClaimed)
        assert [(c.model_group, c.learner, c.term) for c in claims] == [
            ("run-1/policy", "a", 1),
            ("run-1/policy-b", "b", 1),
        ]
        one, other = await published(lab, "run-1/policy"), await published(lab, "run-1/policy-b")
        assert [v.version for v in one] == [v.version for v in other] == [0, 1, 2, 3]
        assert one[0].weights_sha256 == other[0].weights_sha256
        assert one[3].weights_sha256 != other[3].weights_sha256
        done = await lab.events("jobs", JobSucceeded)
        assert [(job.job_id, job.final_version) for job in done] == [("run-1/rl", 3), ("run-1/rl-b", 3)]

    asyncio.run(scenario())


def test_one_learner_serves_two_model_groups_side_by_side_and_keeps_them_apart(lab: Any) -> None:
    async def scenario() -> None:
        first = await submit(lab, "run-1", "rl", "policy")
        planned = await lab.plan(first)
        second = await submit(lab, "run-1", "rl-b", "policy-b")
        await plan_from(lab, second, planned)
        await lab.work(lab.has(JobSucceeded, count=2))
        for group in ("run-1/policy", "run-1/policy-b"):
            assert [(v.version, v.parent) for v in await published(lab, group)] == [(0, None), (1, 0), (2, 1), (3, 2)]

    asyncio.run(scenario())


# ---- what retention or a truncation removed ----


async def failure(lab: Any) -> str:
    await lab.work(lab.has(JobFailed))
    (failed,) = await lab.events("jobs", JobFailed)
    return failed.error


def test_manifests_that_were_removed_are_named_with_topic_and_range(lab: Any) -> None:
    async def scenario() -> None:
        await lab.plan(await lab.submit())
        lab.log.truncate(TopicPartition("batches", 0), 2)
        assert (await failure(lab)).startswith(
            "manifest 0 of job run-1/rl is gone: topic batches partition 0 no longer has records before offset 2"
        )

    asyncio.run(scenario())


def test_trajectories_that_were_removed_are_named_with_topic_and_range(lab: Any) -> None:
    async def scenario() -> None:
        (planned, *_) = await lab.plan(await lab.submit())
        locator = planned.locators[0]
        end = (await lab.log.end_offsets("trajectories"))[locator.partition]
        lab.log.truncate(TopicPartition("trajectories", locator.partition), locator.offset + 1)
        assert await failure(lab) == (
            f"offset {locator.offset} of topic trajectories partition {locator.partition} is not kept: "
            f"it holds {locator.offset + 1} to {end - 1}"
        )

    asyncio.run(scenario())


def test_versions_that_were_removed_are_not_begun_again_from_the_model_folder(lab: Any) -> None:
    async def scenario() -> None:
        job = await lab.submit()
        await lab.plan(job, 2, seal=False)
        await lab.work(lab.has(WeightsPublished, "weights", 3))
        end = (await lab.log.end_offsets("weights"))[0]
        lab.log.truncate(TopicPartition("weights", 0), end)
        assert (await failure(lab)).startswith(
            f"version 0 of run-1/main is gone: topic weights partition 0 no longer has records before offset {end}"
        )
        assert await lab.events("weights", WeightsPublished) == []

    asyncio.run(scenario())
