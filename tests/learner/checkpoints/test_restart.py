"""A learner that dies anywhere between its writes, and one that another takes over from."""

import asyncio
import hashlib
import shutil
from pathlib import Path
from typing import Any

import pytest

from rollstream.eventlog.artifacts import ArtifactStore
from rollstream.eventlog.blocking_calls import Retry
from rollstream.eventlog.files import HashedFile
from rollstream.learner.checkpoints.checkpoint import CheckpointFolder
from rollstream.learner.model.tensor_file import from_bytes, to_bytes
from rollstream.learner.worker import Worker
from rollstream.schemas.algorithms import GrpoSettings
from rollstream.schemas.errors import ArtifactError, FencedError, StoreUnavailableError, VersionDivergedError
from rollstream.schemas.events import (
    JobFailed,
    JobProgressed,
    JobSucceeded,
    LearnerClaimed,
    StepTrained,
    WeightsPublished,
)
from rollstream.schemas.settings import ArtifactRef, ModelSettings
from tests.learner.checkpoints.restart_rig import Crash, Fuse, fused_worker

pytestmark = pytest.mark.slow


async def undisturbed(lab: Any, folder: Path, **settings: Any) -> tuple[Any, ...]:
    other = type(lab)(folder, lab.model)
    job = await other.submit(**settings)
    await other.plan(job)
    await other.work(other.has(JobSucceeded))
    return await other.outcome()


def test_a_restart_before_the_first_checkpoint_begins_at_what_the_published_weights_were_rounded_from(
    lab: Any, tmp_path: Path
) -> None:
    async def scenario() -> None:
        settings = {"model": ModelSettings(path=str(lab.model), device="cpu", dtype="bfloat16")}
        expected = await undisturbed(lab, tmp_path / "undisturbed", **settings)
        job = await lab.submit(**settings)
        await lab.work(lab.has(WeightsPublished, "weights"))
        await lab.plan(job)
        await lab.work(lab.has(JobSucceeded))
        assert await lab.outcome() == expected

    asyncio.run(scenario())


@pytest.mark.parametrize("checkpoint_every", [1, 2])
@pytest.mark.parametrize("is_before", [True, False], ids=["before", "after"])
def test_a_crash_at_any_write_changes_nothing_of_what_is_published(
    lab: Any, tmp_path: Path, checkpoint_every: int, is_before: bool
) -> None:
    async def scenario() -> None:
        settings = {"checkpoint_every": checkpoint_every, "algorithm": GrpoSettings(mini_batches=2)}
        expected = await undisturbed(lab, tmp_path / "undisturbed", **settings)
        for at in range(100):
            each = type(lab)(tmp_path / f"crash-{at}", lab.model)
            job = await each.submit(**settings)
            await each.plan(job)
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


@pytest.mark.parametrize("checkpoint_every", [1, 3])
def test_a_restart_without_any_checkpoint_trains_again_to_the_same_bits(
    lab: Any, tmp_path: Path, checkpoint_every: int
) -> None:
    async def scenario() -> None:
        expected = await undisturbed(lab, tmp_path / "undisturbed", checkpoint_every=checkpoint_every)
        job = await lab.submit(checkpoint_every=checkpoint_every)
        first = await lab.plan(job, 2, seal=False)
        await lab.work(lab.has(WeightsPublished, "weights", 3))
        for path in (lab.folder / "checkpoints").rglob("*.safetensors"):
            path.unlink()
        previous = next(r.digest for r in await lab.received("batches") if r.event == first[-1])
        await lab.plan(job, 1, first=2, previous=previous)
        await lab.work(lab.has(JobSucceeded))
        assert await lab.outcome() == expected

    asyncio.run(scenario())


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(
    lab: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        expected = await undisturbed(lab, tmp_path / "undisturbed")
        job = await lab.submit()
        first = await lab.plan(job, 2, seal=False)
        await lab.work(lab.has(JobProgressed, "jobs", 2))
        newest = max((lab.folder / "checkpoints").rglob("*.safetensors"))
        data = bytearray(newest.read_bytes())
        data[-1] ^= 1
        newest.write_bytes(data)
        previous = next(r.digest for r in await lab.received("batches") if r.event == first[-1])
        await lab.plan(job, 1, first=2, previous=previous)
        with caplog.at_level("INFO", "rollstream.learner"):
            await lab.work(lab.has(JobSucceeded))
        assert f"checkpoint {newest} is damaged" in caplog.text
        assert "begins at manifest 1" in caplog.text
        assert await lab.outcome() == expected

    asyncio.run(scenario())


def test_other_bits_for_a_published_version_end_the_job_and_the_learner(lab: Any) -> None:
    async def scenario() -> None:
        job = await lab.submit()
        await lab.plan(job)
        wrong = hashlib.sha256(b"other").hexdigest()
        claim = LearnerClaimed(run_id=job.run_id, time_ms=1, model_group=job.model_group, term=1, learner="old")
        await lab.log.send(claim)
        await lab.work(lab.has(WeightsPublished, "weights"))
        published = (await lab.events("weights", WeightsPublished))[0]
        for path in (lab.folder / "checkpoints").rglob("*.safetensors"):
            path.unlink()
        other = type(lab)(lab.folder / "other", lab.model)
        shutil.copytree(lab.folder / "artifacts", other.folder / "artifacts")
        other_job = await other.submit()
        await other.plan(other_job)
        await other.log.send(claim)
        await other.log.send(published.model_copy(update={"term": 1}))
        changed = {"version": 1, "parent": 0, "term": 1, "weights_sha256": wrong, "batch_id": "x"}
        await other.log.send(published.model_copy(update=changed))
        with pytest.raises(VersionDivergedError, match=f"version 1 of model group run-1/main .* {wrong}"):
            await other.work(other.has(JobSucceeded))
        (failed,) = await other.events("jobs", JobFailed)
        assert wrong in failed.error

    asyncio.run(scenario())


async def with_other_bits(lab: Any, *, is_published: bool) -> tuple[Any, ArtifactRef]:
    """A lab without checkpoints whose log knows other weights of version 1 than training gives; their artifact."""
    model = ModelSettings(path=str(lab.model), device="cpu", deterministic=False)
    job = await lab.submit(model=model)
    await lab.plan(job)
    await lab.work(lab.has(JobSucceeded))
    base, first, *_ = await lab.events("weights", WeightsPublished)
    step = (await lab.events("weights", StepTrained))[0]
    other = type(lab)(lab.folder / "other", lab.model)
    tensors = from_bytes(lab.artifacts.read(first.artifact), "version 1")
    shifted = other.artifacts.put_bytes(to_bytes({n: t + 0.01 for n, t in tensors.items()}), ".safetensors")
    other.artifacts.put_bytes(lab.artifacts.read(base.artifact), ".safetensors")
    await other.plan(await other.submit(model=model))
    await other.log.send(
        LearnerClaimed(run_id=job.run_id, time_ms=1, model_group=job.model_group, term=1, learner="old")
    )
    await other.log.send(base)
    await other.log.send(step.model_copy(update={"weights_sha256": shifted.sha256}))
    if is_published:
        changed = {"weights_sha256": shifted.sha256, "artifact": shifted}
        await other.log.send(first.model_copy(update=changed))
    return other, shifted


def test_without_determinism_a_collected_version_with_other_bits_fails_its_job(lab: Any) -> None:
    async def scenario() -> None:
        other, shifted = await with_other_bits(lab, is_published=True)
        other.artifacts.remove(shifted)
        await other.work(other.has(JobFailed))
        (failed,) = await other.events("jobs", JobFailed)
        assert f"artifact {shifted.uri}" in failed.error

    asyncio.run(scenario())


@pytest.mark.parametrize("is_published", [True, False])
def test_without_determinism_a_version_with_other_bits_counts_as_published(
    lab: Any, caplog: pytest.LogCaptureFixture, is_published: bool
) -> None:
    """A learner without checkpoints trains version 1 again, of which the log knows other weights."""

    async def scenario() -> None:
        other, shifted = await with_other_bits(lab, is_published=is_published)
        with caplog.at_level("WARNING", "rollstream.learner"):
            await other.work(other.has(JobSucceeded))
        assert "version=1 was trained again with other bits" in caplog.text
        found = {one.version: one.weights_sha256 for one in await other.events("weights", WeightsPublished)}
        expected = {one.version: one.weights_sha256 for one in await lab.events("weights", WeightsPublished)}
        assert found[1] == shifted.sha256
        assert found.keys() == expected.keys()
        assert found[2] != expected[2]

    asyncio.run(scenario())


def test_a_higher_term_stops_the_older_learner_before_it_publishes(lab: Any) -> None:
    async def scenario() -> None:
        job = await lab.submit()
        first = await lab.plan(job, 1, seal=False)
        old = asyncio.create_task(lab.worker("old").run())
        while not await lab.has(WeightsPublished, "weights", 2)():
            await asyncio.sleep(0.01)
        await lab.log.send(
            LearnerClaimed(run_id=job.run_id, time_ms=1, model_group=job.model_group, term=2, learner="new")
        )
        previous = next(r.digest for r in await lab.received("batches") if r.event == first[-1])
        await lab.plan(job, 1, first=1, previous=previous)
        with pytest.raises(FencedError, match="claimed by learner new with term 2"):
            await asyncio.wait_for(old, 30)
        assert [p.version for p in await lab.events("weights", WeightsPublished)] == [0, 1]
        await lab.work(lab.has(JobSucceeded), lab.worker("newest"))
        claims = await lab.events("weights", LearnerClaimed)
        assert [(c.term, c.learner) for c in claims] == [(1, "old"), (2, "new"), (3, "newest")]
        assert [(p.version, p.term) for p in await lab.events("weights", WeightsPublished)] == [(0, 1), (1, 1), (2, 3)]

    asyncio.run(scenario())


class FullStore(ArtifactStore):
    """An artifact store without room for anything more, once it is full."""

    is_full = False

    def put_hashed(self, file: HashedFile, suffix: str = "") -> ArtifactRef:
        if self.is_full:
            raise ArtifactError(f"artifact store {self.uri} cannot be written: no space left on device")
        return super().put_hashed(file, suffix)


def test_a_replaced_learner_does_not_fail_the_job_of_the_one_that_took_over(lab: Any) -> None:
    async def scenario() -> None:
        job = await lab.submit()
        first = await lab.plan(job, 1, seal=False)
        store = FullStore(lab.artifacts.uri)
        old = asyncio.create_task(
            Worker(
                lab.log,
                store,
                name="old",
                checkpoints=lab.folder / "checkpoints",
                threads=1,
                permissions=lab.permissions,
            ).run()
        )
        while not await lab.has(WeightsPublished, "weights", 2)():
            await asyncio.sleep(0.01)
        store.is_full = True
        claim = {"run_id": job.run_id, "time_ms": 1, "model_group": job.model_group}
        await lab.log.send(LearnerClaimed(**claim, term=2, learner="new"))
        previous = next(r.digest for r in await lab.received("batches") if r.event == first[-1])
        await lab.plan(job, 1, first=1, previous=previous)
        with pytest.raises(FencedError, match="claimed by learner new with term 2"):
            await asyncio.wait_for(old, 30)
        assert await lab.events("jobs", JobFailed) == []
        await lab.work(lab.has(JobSucceeded), lab.worker("newest"))

    asyncio.run(scenario())


def test_versions_of_a_replaced_learner_are_void(lab: Any, tmp_path: Path) -> None:
    async def scenario() -> None:
        expected = await undisturbed(lab, tmp_path / "undisturbed")
        job = await lab.submit()
        await lab.work(lab.has(WeightsPublished, "weights"))
        base = (await lab.events("weights", WeightsPublished))[0]
        claim = {"run_id": job.run_id, "time_ms": 1, "model_group": job.model_group}
        await lab.log.send(LearnerClaimed(**claim, term=5, learner="new"))
        await lab.log.send(base.model_copy(update={"version": 1, "weights_sha256": "0" * 64, "term": 1}))
        await lab.plan(job)
        await lab.work(lab.has(JobSucceeded))
        published = {p.version: p.weights_sha256 for p in await lab.events("weights", WeightsPublished) if p.term != 1}
        assert published == {version: sha256 for version, sha256, _ in expected[1] if version > 0}

    asyncio.run(scenario())


def test_old_checkpoints_go_but_the_last_and_every_mth(lab: Any) -> None:
    async def scenario() -> None:
        job = await lab.submit(num_versions=7, keep_last=2, keep_every=3)
        await lab.plan(job, 7)
        await lab.work(lab.has(JobSucceeded))
        kept = CheckpointFolder(lab.folder / "checkpoints", job.model_group).versions()
        assert kept == [3, 6, 7]

    asyncio.run(scenario())


class _AwayStore(ArtifactStore):
    """A store that cannot be written some times in a row."""

    failures = 3

    def put_hashed(self, file: HashedFile, suffix: str = "") -> ArtifactRef:
        if self.failures and self.listing():
            self.failures -= 1
            raise StoreUnavailableError(f"artifact store {self.uri} cannot be written: connection reset")
        return super().put_hashed(file, suffix)


def test_a_store_that_is_away_for_a_while_ends_no_job(lab: Any) -> None:
    async def scenario() -> None:
        job = await lab.submit()
        await lab.plan(job)
        store = _AwayStore(lab.artifacts.uri)
        retry = Retry(first_wait_s=0.01)
        worker = Worker(
            lab.log,
            store,
            name="l",
            checkpoints=lab.folder / "checkpoints",
            threads=1,
            permissions=lab.permissions,
            retry=retry,
        )
        await lab.work(lab.has(JobSucceeded), worker)
        assert store.failures == 0
        assert await lab.events("jobs", JobFailed) == []
        assert [p.version for p in await lab.events("weights", WeightsPublished)] == [0, 1, 2, 3]

    asyncio.run(scenario())
