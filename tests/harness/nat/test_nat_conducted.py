"""A run that NAT's command conducts ends on its log as the command ends, with a trainer of any package."""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from rollstream.harness.components.run_completion import watch_curriculum
from rollstream.harness.nat.components import close_at_exit
from rollstream.harness.nat.conducted import conducted
from rollstream.harness.runs.run_handle import RunHandle, opened
from rollstream.schemas.errors import LogError, RunFailedError, StoreUnavailableError, TruncatedError
from rollstream.schemas.events import RunEnded
from rollstream.schemas.finetuning import TrainingJobStatus, TrainingStatusEnum, Trajectory, TrajectoryCollection
from tests.rigs.runs.epochwise_rig import EpochwiseRig, components_for, configuration

COMPLETED, FAILED = TrainingStatusEnum.COMPLETED, TrainingStatusEnum.FAILED
CANCELED = TrainingStatusEnum.CANCELED
Run = Callable[[RunHandle], Awaitable[list[Any]]]


def status(kind: TrainingStatusEnum, message: str = "") -> TrainingJobStatus:
    return TrainingJobStatus(run_id="theirs", backend="other", status=kind, message=message or None)


def ended(folder: Path, run: Run, *, is_cancelled: bool = False) -> tuple[list[Any] | str, list[RunEnded]]:
    """Result of the command, statuses or an error, and the run's end on the log."""

    async def scenario() -> tuple[list[Any] | str, list[RunEnded]]:
        rig = EpochwiseRig(folder, configuration(folder, num_epochs=2, num_examples=2))
        reported: list[Any] | str = "cancelled"
        async with asyncio.timeout(120), rig.services(), await rig.open_run() as handle:
            parts = components_for(rig)
            await parts.trainer.bind_components(parts.trajectory_builder, parts.trainer_adapter)
            await parts.trainer.initialize(rig.loaded.finetune)
            conducting = asyncio.ensure_future(conducted(handle, _as_coroutine(run(handle))))
            if is_cancelled:
                await handle.begin()
                conducting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                try:
                    reported = await conducting
                except RunFailedError as error:
                    reported = str(error)
        return reported, await rig.events("groups", RunEnded)

    return asyncio.run(scenario())


async def _as_coroutine(work: Awaitable[list[Any]]) -> list[Any]:
    return await work


def test_a_trainer_that_raises_has_its_run_fail_with_the_same_words_and_without_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("JUDGE_API_KEY", "s3cr3t-of-the-judge")

    async def run(backend: RunHandle) -> list[Any]:
        raise KeyError("s3cr3t-of-the-judge")

    with caplog.at_level("INFO"):
        reported, (event,) = ended(tmp_path, run)
    reason = f"KeyError (test_nat_conducted.py line {run.__code__.co_firstlineno + 1}, in run): '${{JUDGE_API_KEY}}'"
    assert reported == f"run run-1 failed: {reason}"
    assert (event.cause, event.message) == ("failed", reason)
    assert "Traceback" in caplog.text
    assert "s3cr3t" not in caplog.text


def test_a_failed_status_of_a_trainer_is_a_failed_run_on_the_log(tmp_path: Path) -> None:
    async def run(backend: RunHandle) -> list[Any]:
        return [status(COMPLETED), status(FAILED, "no evaluation\x1b[2J")]

    reported, (event,) = ended(tmp_path, run)
    assert reported == r"run run-1 failed: no evaluation\x1b[2J"
    assert (event.cause, event.message) == ("failed", "no evaluation\x1b[2J")


def test_epochs_that_are_called_completed_and_submitted_nothing_fail_the_run(tmp_path: Path) -> None:
    async def run(backend: RunHandle) -> list[Any]:
        return [status(COMPLETED, "No trajectories to train on")] * 2

    reported, (event,) = ended(tmp_path, run)
    assert isinstance(reported, str)
    assert "nothing was trained (no trajectories were submitted for 2 epochs)" in reported
    assert event.cause == "failed"


def test_the_failure_of_a_run_that_submitted_nothing_quotes_other_packages_logs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_API_KEY", "s3cr3t-of-the-judge")
    theirs = logging.getLogger("nat.plugins.other")

    async def run(backend: RunHandle) -> list[Any]:
        for number in range(50):
            theirs.warning("No reward results found for generation %d", number)
            try:
                raise RuntimeError("s3cr3t-of-the-judge has no quota")
            except RuntimeError:
                theirs.exception("An error occurred while running evaluator share")
        logging.getLogger("rollstream.ours").error("said elsewhere")
        return [status(COMPLETED, "No trajectories to train on")] * 2

    handlers = list(logging.getLogger().handlers)
    reported, (event,) = ended(tmp_path, run)
    assert isinstance(reported, str)
    assert event.message in reported
    assert event.message.endswith(
        "(no trajectories were submitted for 2 epochs); logged meanwhile: An error occurred while running evaluator "
        "share: RuntimeError: ${JUDGE_API_KEY} has no quota"
    )
    assert logging.getLogger().handlers == handlers


class CuttingTrainer:
    """Its curriculum leaves nothing of what comes."""

    def apply_curriculum_learning(self, collection: TrajectoryCollection, epoch: int) -> TrajectoryCollection:
        return TrajectoryCollection(trajectories=[], run_id=collection.run_id)


@pytest.mark.parametrize(("num_cut", "state"), [(2, "completed"), (1, "failed")])
def test_a_run_is_completed_if_the_curriculum_of_another_trainer_left_nothing_of_all_its_epochs(
    tmp_path: Path, num_cut: int, state: str
) -> None:
    async def run(backend: RunHandle) -> list[Any]:
        trainer: Any = CuttingTrainer()
        watch_curriculum(backend, trainer)
        group = [Trajectory(episode=[], reward=1.0)]
        for epoch in range(2):
            come = [group] if epoch < num_cut else []
            trainer.apply_curriculum_learning(TrajectoryCollection(trajectories=come, run_id="theirs"), epoch)
        return [status(COMPLETED, "No trajectories to train on")] * 2

    reported, (event,) = ended(tmp_path, run)
    assert event.cause == state
    assert f"the curriculum filtered out all groups of {num_cut} epoch" in event.message
    assert isinstance(reported, str) == (state == "failed")


@pytest.mark.parametrize("raises", [True, False])
def test_a_run_that_is_stopped_ends_the_command_well_whatever_its_trainer_makes_of_that(
    tmp_path: Path, raises: bool
) -> None:
    async def run(backend: RunHandle) -> list[Any]:
        await backend.begin()
        await backend.log.send(RunEnded(run_id="run-1", time_ms=1, cause="stopped"))
        await backend.wait_for(lambda: backend.is_over or None)
        if raises:
            raise ValueError("no answer")
        return [status(FAILED, "no answer")]

    reported, (event,) = ended(tmp_path, run)
    assert reported == ([] if raises else [status(CANCELED, "no answer")])
    assert event.cause == "stopped"


def test_a_trainer_that_cancels_itself_fails_its_run(tmp_path: Path) -> None:
    async def run(backend: RunHandle) -> list[Any]:
        raise asyncio.CancelledError("Cancelled by cancel scope 7f")

    reported, (event,) = ended(tmp_path, run)
    assert event.cause == "failed"
    assert isinstance(reported, str)
    assert reported.endswith(event.message)
    assert event.message.endswith("Cancelled by cancel scope 7f")


def test_a_command_that_is_cancelled_leaves_its_run_open(tmp_path: Path) -> None:
    async def run(backend: RunHandle) -> list[Any]:
        return await asyncio.Event().wait() and []

    assert ended(tmp_path, run, is_cancelled=True) == ("cancelled", [])


def test_a_service_that_has_failed_leaves_the_run_open_with_the_remedy(tmp_path: Path) -> None:
    async def scenario() -> None:
        rig, failing = EpochwiseRig(tmp_path, configuration(tmp_path, num_epochs=2, num_examples=2)), asyncio.Event()

        async def watch() -> None:
            await failing.wait()
            raise RunFailedError("service producers-1 exited 6 times without progress")

        async with asyncio.timeout(60), rig.services():
            handle = await rig.open_run()
            await handle.start(watch())

            async def run() -> list[Any]:
                await handle.begin()
                failing.set()
                return await handle.wait_for(lambda: None) or []

            try:
                with pytest.raises(RunFailedError) as raised:
                    await conducted(handle, run())
            finally:
                await handle.close()
        assert str(raised.value) == (
            "run run-1 stays open: service producers-1 exited 6 times without progress; "
            "`rollstream finetune --resume run-1` continues it once that is corrected"
        )
        assert not await rig.events("groups", RunEnded)

    asyncio.run(scenario())


@pytest.mark.parametrize("kind", [LogError, TruncatedError, StoreUnavailableError])
def test_a_log_or_a_store_that_fails_leaves_the_run_open_with_the_remedy(tmp_path: Path, kind: type[Exception]) -> None:
    handles: list[RunHandle] = []

    async def run(backend: RunHandle) -> list[Any]:
        await backend.begin()
        handles.append(backend)
        raise kind("no acknowledgement within 120 s; check its brokers")

    assert ended(tmp_path, run) == (
        "run run-1 stays open: no acknowledgement within 120 s; check its brokers; "
        "`rollstream finetune --resume run-1` continues it once that is corrected",
        [],
    )
    assert handles[0].is_finished, "else the run is failed when the program ends"


def test_a_program_that_fails_before_its_trainer_runs_ends_and_leaves_the_run_open(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def program(rig: EpochwiseRig) -> None:
        handle = await rig.open_run()
        await handle.start()
        close_at_exit(handle)
        await asyncio.sleep(0.01)
        raise ValueError("the builder cannot be built")

    async def scenario(rig: EpochwiseRig) -> None:
        async with asyncio.timeout(20):
            await asyncio.to_thread(asyncio.run, program(rig))

    for number in range(12):  # a loop ends its tasks in the order of a set of weak references
        folder = tmp_path / str(number)
        folder.mkdir()
        rig = EpochwiseRig(folder, configuration(folder, num_epochs=2, num_examples=2))
        caplog.clear()
        with pytest.raises(ValueError, match="the builder cannot be built"):
            asyncio.run(scenario(rig))
        assert "stays open on the log: the program ends" in caplog.text
        assert not asyncio.run(rig.events("groups", RunEnded))
        assert opened(folder) is None
