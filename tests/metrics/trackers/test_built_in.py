"""The built-in trackers, with their own packages: files of TensorBoard and of Weights & Biases hold each point once."""

import asyncio
import json
import logging
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import pytest
import wandb
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rollstream.metrics.trackers.points import Point, TrackedJob
from rollstream.metrics.trackers.service import Following, serve
from rollstream.metrics.trackers.table import check_tracker
from rollstream.metrics.trackers.tensorboard import EventFile
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
        file = EventFile(settings, JOB, kept)
        after = file.log(points, first)
        kept = after if is_recorded else kept
        file.close(None)
    folder = tmp_path / RUN / "rl"
    assert [step for step, _ in scalars(folder, "training/loss")] == [1, 2]
    assert scalars(folder, "epoch/avg_reward") == [(0, 0.25)]


@pytest.mark.parametrize("job_id", ["run/..", "../../up", "run/.", "a b/ü"])
def test_an_event_file_stays_in_its_folder(tmp_path: Path, job_id: str) -> None:
    log_dir = tmp_path / "one" / "two" / "boards"
    EventFile(TensorBoardSettings(log_dir=log_dir), JOB._replace(job_id=job_id), {}).close(None)
    files = [path for path in tmp_path.rglob("*tfevents*")]
    assert [path.is_relative_to(log_dir) and path.parent != log_dir for path in files] == [True]


def wandb_rows(folder: Path) -> Iterator[dict[str, Any]]:
    """History rows of the file of an offline run: records of LevelDB's log format, in blocks of 32 KiB."""
    from wandb.proto.wandb_internal_pb2 import Record  # pyright: ignore[reportAttributeAccessIssue]

    (path,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    data, offset, parts = path.read_bytes(), 7, b""
    while offset + 7 <= len(data):
        if 32768 - offset % 32768 < 7:
            offset += 32768 - offset % 32768
        length, kind = struct.unpack_from("<HB", data, offset + 4)
        parts += data[offset + 7 : offset + 7 + length]
        offset += 7 + length
        if kind in {1, 4}:  # a whole record, or its last part
            record = Record.FromString(parts)
            parts = b""
            if record.WhichOneof("record_type") == "history":
                yield {one.key or "/".join(one.nested_key): json.loads(one.value_json) for one in record.history.item}


def test_a_run_of_wandb_has_a_step_for_each_point(
    projected: Projected, run_events: list[Event], tmp_path: Path
) -> None:
    workspace = projected(run_events)
    following = Following(WandbSettings(mode="offline", project="demo"), workspace, (RUN,))
    following.catch_up()
    following.close()
    wandb.teardown()
    assert following.num_points == 5
    runs = sorted((workspace / "wandb" / "wandb").glob("offline-run-*"))
    assert len(runs) == 2
    found = [row for folder in runs for row in wandb_rows_of(folder, tmp_path)]
    rows = [{name: value for name, value in row.items() if not name.startswith("_")} for row in found]
    trained = {row["version"]: row["training/loss/total"] for row in rows if "version" in row}
    assert trained == {1: 1.0, 2: 0.5, 3: pytest.approx(1 / 3)}
    assert sorted(row["epoch"] for row in rows if "epoch/avg_reward" in row) == [0, 1]
    steps = sorted(row["_step"] for row in found if "version" in row or "epoch" in row)
    assert steps == [0, 0, 1, 2, 3]


def wandb_rows_of(run: Path, tmp_path: Path) -> list[dict[str, Any]]:
    alone = tmp_path / "alone" / run.name / "wandb"
    alone.mkdir(parents=True)
    (alone / run.name).symlink_to(run)
    return list(wandb_rows(alone.parent))


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
    projected: Projected, run_events: list[Event], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    workspace = projected(run_events)
    monkeypatch.setattr(Collected, "points", [])
    monkeypatch.setattr(Collected, "num_failures", 2)
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
        serving = asyncio.create_task(serve(settings))
        while Collected.num_failures:
            await asyncio.sleep(0.05)
        serving.cancel()
        with suppress(asyncio.CancelledError):
            await serving

    with caplog.at_level(logging.ERROR):
        asyncio.run(scenario())
    assert len(Collected.points) == 5
    assert "OSError" in caplog.text
    assert "mine: the server is down" in caplog.text
    assert "trying again in" in caplog.text


def test_a_tracker_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"trackers.0.kind: python:json.Nothing: module json has no 'Nothing'"):
        check_tracker(CustomTrackerSettings(kind="python:json.Nothing"), "trackers.0")
    monkeypatch.setattr("rollstream.metrics.trackers.table.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"trackers.0: wandb is not installed: pip install '.\[wandb\]'"):
        check_tracker(WandbSettings(), "trackers.0")
