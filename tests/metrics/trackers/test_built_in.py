"""Trackers behind the service: TensorBoard, Weights & Biases, and one of users that fails at first."""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import pytest
import wandb
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rollstream.eventlog.memory.log import MemoryLog
from rollstream.metrics.service import run as run_metrics
from rollstream.metrics.trackers import service
from rollstream.metrics.trackers.built_in import EventFile
from rollstream.metrics.trackers.points import Point, TrackedJob
from rollstream.metrics.trackers.service import Tracking, serve
from rollstream.metrics.trackers.table import check_tracker, opener
from rollstream.schemas.base import Event
from rollstream.schemas.errors import ConfigError
from rollstream.schemas.services import TrackerServiceSettings
from rollstream.schemas.trackers import CustomTrackerSettings, TensorBoardSettings, WandbSettings
from tests.metrics.trackers.conftest import RUN, Projected

JOB = TrackedJob(RUN, f"{RUN}/rl", "rl", "running", False, "grpo", "tiny", {"seed": 1})
FIRST = [Point("training", 1, 1000, {"training/loss": 0.5}), Point("epoch", 0, 2000, {"epoch/avg_reward": 0.25})]
SECOND = [Point("training", 2, 3000, {"training/loss": float("nan")})]


def scalars(folder: Path, tag: str) -> list[tuple[int, float]]:
    found = EventAccumulator(str(folder))
    found.Reload()
    return [(one.step, one.value) for one in found.Scalars(tag)]


def test_an_event_file_loses_what_a_killed_process_did_not_record(tmp_path: Path) -> None:
    settings = TensorBoardSettings(log_dir=tmp_path)
    kept: Mapping[str, Any] = {}
    for points, first, is_recorded in ((FIRST, 0, True), (SECOND, 2, False), (SECOND, 2, True)):
        file = EventFile(settings, JOB, kept, tmp_path)
        after = file.log(points, first)
        kept = after if is_recorded else kept
        file.close(None)
    folder = tmp_path / RUN / "rl"
    assert [step for step, _ in scalars(folder, "training/loss")] == [1, 2]
    assert scalars(folder, "epoch/avg_reward") == [(0, 0.25)]


@pytest.mark.parametrize("is_recorded", [True, False])
def test_a_workspace_that_was_moved_continues_its_event_file(tmp_path: Path, is_recorded: bool) -> None:
    before, after = tmp_path / "project", tmp_path / "renamed"
    before.mkdir()
    file = EventFile(TensorBoardSettings(log_dir=before / "boards"), JOB, {}, before)
    kept = file.log(FIRST, 0)
    file.close(None)
    before.rename(after)
    moved = EventFile(TensorBoardSettings(log_dir=after / "boards"), JOB, kept if is_recorded else {}, after)
    moved.log(SECOND if is_recorded else [*FIRST, *SECOND], 2 if is_recorded else 0)
    moved.close(None)
    folder = after / "boards" / RUN / "rl"
    assert len(list(folder.iterdir())) == 1
    assert [step for step, _ in scalars(folder, "training/loss")] == [1, 2]


def test_points_of_a_job_that_another_file_has_are_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings = TensorBoardSettings(log_dir=tmp_path / "boards")
    for name in ("one", "two"):
        file = EventFile(settings, JOB, {}, tmp_path / name)
        file.log(FIRST, 0)
        file.close(None)
    assert "has points of job" in caplog.text
    assert len(caplog.records) == 1


@pytest.mark.parametrize("job_id", ["..", ".", "../../up", "a b/ü"])
def test_an_event_file_stays_in_its_folder(tmp_path: Path, job_id: str) -> None:
    log_dir = tmp_path / "one" / "two" / "boards"
    EventFile(
        TensorBoardSettings(log_dir=log_dir), JOB._replace(run_id=job_id, job_id=f"{job_id}/.."), {}, tmp_path
    ).close(None)
    files = list(tmp_path.rglob("*tfevents*"))
    assert [path.is_relative_to(log_dir) and path.parent != log_dir for path in files] == [True]


def test_a_job_has_a_run_of_wandb(projected: Projected, run_events: list[Event]) -> None:
    workspace = projected(run_events)
    tracking = Tracking(WandbSettings(mode="offline", project="demo"), workspace, (RUN,))
    tracking.catch_up()
    tracking.close()
    wandb.teardown()
    assert tracking.num_points == 5
    assert len([*(workspace / "wandb").glob("*/wandb/offline-run-*")]) == 2


class Collected:
    """A tracker of users. Its first calls fail."""

    points: ClassVar[list[Point]] = []
    num_failures = 0

    def __init__(self, job: TrackedJob, options: Mapping[str, Any], kept: Mapping[str, Any]) -> None:
        self.prefix = options["prefix"]

    def log(self, points: Sequence[Point], first: int) -> Mapping[str, Any]:
        if Collected.num_failures:
            Collected.num_failures -= 1
            raise OSError(f"{self.prefix}: the server is down")
        Collected.points += points
        return {}

    def close(self, state: str | None) -> None: ...


def test_the_service_sends_over_outages_and_what_is_left_when_it_is_stopped(
    run_events: list[Event], tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    workspace = tmp_path
    monkeypatch.setattr(Collected, "points", [])
    monkeypatch.setattr(Collected, "num_failures", 2)
    monkeypatch.setattr(service, "UNSERVED_S", 0.0)
    monkeypatch.setattr(service, "END_TIMEOUT_S", 120.0)
    tracker = CustomTrackerSettings(
        kind=f"python:{__name__}.Collected", options={"prefix": "mine"}, poll_interval_s=0.05
    )
    settings = TrackerServiceSettings(
        bootstrap_servers="localhost:1",
        artifact_uri="",
        workspace=workspace,
        name="tracker-1",
        tracker=tracker,
        runs=(RUN,),
    )

    async def scenario() -> None:
        log = MemoryLog(num_partitions=2)
        await log.send_all(run_events)
        serving = asyncio.create_task(serve(settings))
        while "is not up" not in caplog.text:
            await asyncio.sleep(0.05)
        projecting = asyncio.create_task(run_metrics(log, workspace))
        while Collected.num_failures:
            await asyncio.sleep(0.05)
        for one in (serving, projecting):
            one.cancel()
            with suppress(asyncio.CancelledError):
                await one

    with caplog.at_level(logging.ERROR):
        asyncio.run(scenario())
    assert len(Collected.points) == 5
    assert "OSError" in caplog.text
    assert "mine: the server is down" in caplog.text
    assert "everything that is missing will be sent" in caplog.text


def test_a_tracker_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"trackers.0.kind: python:json.Nothing: module json has no 'Nothing'"):
        check_tracker(CustomTrackerSettings(kind="python:json.Nothing"), "trackers.0")
    monkeypatch.setattr("rollstream.metrics.trackers.table.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"trackers.0: wandb is not installed: pip install '.\[wandb\]'"):
        check_tracker(WandbSettings(), "trackers.0")


def test_variables_in_the_options_of_a_tracker_are_expanded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("BOARD_KEY", "secret")
    settings = CustomTrackerSettings(kind=f"python:{__name__}.Collected", options={"prefix": "${BOARD_KEY}"})
    made = opener(settings, tmp_path)(JOB, {})
    assert isinstance(made, Collected)
    assert made.prefix == "secret"


def test_a_tensorboard_folder_is_one_tracker_however_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    relative, whole = TensorBoardSettings(log_dir=Path("boards")), TensorBoardSettings(log_dir=tmp_path / "boards")
    assert relative.target() == whole.target()
    assert relative.target() == relative.model_copy(update={"poll_interval_s": 1.0}).target()
