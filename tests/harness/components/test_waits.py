"""Waits of a run that components conduct: each is ended by a job that fails, a stop and the run's own end."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from rollstream.harness.components.build import Components
from rollstream.harness.components.conduct import conduct_components
from rollstream.harness.config.jobs import ENDPOINT
from rollstream.harness.runs.run_handle import RunHandle
from rollstream.schemas.errors import LogError, RunFailedError, StoreUnavailableError
from rollstream.schemas.events import BatchPlanned, RunEnded
from rollstream.schemas.finetuning import TrainingJobRef, TrainingJobStatus, TrainingStatusEnum
from tests.rigs.runs.epochwise_rig import EpochwiseRig, components_for, configuration, opened_rig

COMPLETED, FAILED = TrainingStatusEnum.COMPLETED, TrainingStatusEnum.FAILED
CANCELED = TrainingStatusEnum.CANCELED
NEVER = 10_000.0


def serving(folder: Path, **how: Any) -> EpochwiseRig:
    """A run whose model is served too, as it is for rollouts that another package makes."""
    written = configuration(folder, num_epochs=2, num_examples=2)
    written["trainer_adapters"]["a"]["endpoint"] = {"port": 8765}
    return EpochwiseRig(folder, written, **how)


async def submitted(parts: Components, epoch: int) -> TrainingJobRef:
    await parts.trajectory_builder.start_run("mine", {"epoch": epoch})
    collection = await parts.trajectory_builder.finalize("mine")
    return await parts.trainer_adapter.submit(collection)


async def waited_for(parts: Components, ref: TrainingJobRef) -> TrainingJobStatus:
    return await parts.trainer_adapter.wait_until_complete(ref, poll_interval=NEVER)


async def stop(rig: EpochwiseRig) -> None:
    await rig.log.send(RunEnded(run_id="run-1", time_ms=1, cause="stopped"))


def test_the_wait_for_a_job_that_fails_ends_although_its_version_is_never_served(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with opened_rig(serving(tmp_path, fails_at=1, serves=0)) as (_, parts):
            found = await waited_for(parts, await submitted(parts, 0))
        assert (found.status, found.message) == (FAILED, "out of memory")

    asyncio.run(scenario())


def test_the_wait_for_a_version_that_a_stop_forestalls_ends(tmp_path: Path) -> None:
    async def scenario() -> None:
        rig = serving(tmp_path, serves=0)

        async def stopped(planned: BatchPlanned) -> None:
            await stop(rig)
            await asyncio.Event().wait()

        rig.trains_slowly = stopped
        async with opened_rig(rig) as (_, parts):
            found = await waited_for(parts, await submitted(parts, 0))
        assert (found.status, found.message) == (CANCELED, "the run is over: stopped")

    asyncio.run(scenario())


def test_the_wait_for_a_version_that_is_published_but_not_served_ends_with_the_run(tmp_path: Path) -> None:
    async def scenario() -> None:
        rig = serving(tmp_path, serves=0)
        async with opened_rig(rig) as (handle, parts):
            ref = await submitted(parts, 0)
            waiting = asyncio.create_task(waited_for(parts, ref))
            await published(handle, 1)
            assert not waiting.done()
            await stop(rig)
            assert (await waiting).status == COMPLETED
            assert handle.progress.loaded[ENDPOINT] == 0

    asyncio.run(scenario())


async def published(handle: RunHandle, version: int) -> None:
    await handle.wait_for(lambda: handle.progress.version >= version or None)


def test_the_wait_for_room_on_a_disk_ends_with_the_run(tmp_path: Path) -> None:
    async def scenario() -> None:
        rig = serving(tmp_path, serves=0)
        async with opened_rig(rig) as (handle, _):
            waiting = asyncio.create_task(handle.wait_for_disk(min_free_share=2.0))
            await stop(rig)
            with pytest.raises(RunFailedError, match="run run-1 stopped"):
                await waiting

    asyncio.run(scenario())


@pytest.mark.parametrize("is_required", [True, False])
def test_a_service_that_fails_during_a_validation_leaves_the_run_open(tmp_path: Path, is_required: bool) -> None:
    (tmp_path / "valid.jsonl").write_text('{"id": "v", "question": "guess", "secret": 1}\n')
    validated = {"validation_dataset": str(tmp_path / "valid.jsonl"), "validation_interval": 1}
    written = configuration(tmp_path, num_epochs=3, num_examples=2, run_configuration=validated)
    written["trainers"]["t"]["validation_required"] = is_required

    async def scenario() -> None:
        rig, failing = EpochwiseRig(tmp_path, written), asyncio.Event()

        async def watch() -> None:
            await failing.wait()
            raise RunFailedError("service producers-1 exited 6 times without progress")

        async with asyncio.timeout(90), rig.services():
            handle, parts = await rig.open_run(), components_for(rig)
            await handle.start(watch())

            async def run_eval() -> Any:
                failing.set()
                return await handle.wait_for(lambda: None)

            parts.trajectory_builder.run_eval = run_eval
            try:
                with pytest.raises(RunFailedError, match=r"^service producers-1 exited 6 times"):
                    await conduct_components(handle, parts, rig.loaded.finetune)
            finally:
                await handle.close()
            assert not await rig.events("groups", RunEnded)

    asyncio.run(scenario())
    assert not (tmp_path / "output" / "validation_history.json").exists()


@pytest.mark.parametrize("error", [LogError("no answer"), StoreUnavailableError("no answer")], ids=repr)
def test_a_log_or_a_store_that_fails_during_a_required_validation_leaves_the_run_open(
    tmp_path: Path, error: Exception
) -> None:
    (tmp_path / "valid.jsonl").write_text('{"id": "v", "question": "guess", "secret": 1}\n')
    written = configuration(
        tmp_path, num_epochs=2, num_examples=2, run_configuration={"validation_dataset": str(tmp_path / "valid.jsonl")}
    )
    written["trainers"]["t"]["validation_required"] = True

    async def run_eval() -> Any:
        raise error

    async def scenario() -> None:
        rig = EpochwiseRig(tmp_path, written)
        async with asyncio.timeout(90), rig.services(), await rig.open_run() as handle:
            parts = components_for(rig)
            parts.trajectory_builder.run_eval = run_eval
            with pytest.raises(type(error), match=r"^no answer$"):
                await conduct_components(handle, parts, rig.loaded.finetune)
        assert not await rig.events("groups", RunEnded)

    asyncio.run(scenario())
    assert not (tmp_path / "output" / "validation_history.json").exists()
