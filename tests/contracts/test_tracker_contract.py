"""The contract of the built-in trackers: points stay, and a later process goes on after them."""

import json
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import wandb
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rollstream.metrics.trackers.built_in import EventFile, WandbRun
from rollstream.metrics.trackers.table import JobTracker
from rollstream.schemas.trackers import TensorBoardSettings, WandbSettings
from tests.metrics.trackers.follow_rig import FIRST, JOB, SECOND

EXPECTED = {
    ("training/loss", 1): 0.5, ("training/loss", 2): 0.125, ("epoch/avg_reward", 0): 0.25, ("validation/mean", 1): 1.0
}  # fmt: skip


class Case(NamedTuple):
    """A tracker and what its own package or format shows of it: each value by name and step."""

    open: Callable[[Mapping[str, Any]], JobTracker]
    shown: Callable[[], Iterator[tuple[tuple[str, int], float]]]


def event_file(folder: Path) -> Case:
    def shown() -> Iterator[tuple[tuple[str, int], float]]:
        found = EventAccumulator(str(folder / JOB.run_id / "rl"))
        found.Reload()
        for tag in found.Tags()["scalars"]:
            yield from (((tag, one.step), one.value) for one in found.Scalars(tag))

    return Case(lambda kept: EventFile(TensorBoardSettings(log_dir=folder), JOB, kept, folder), shown)


def wandb_run(folder: Path) -> Case:
    def shown() -> Iterator[tuple[tuple[str, int], float]]:
        wandb.teardown()  # until then, its own process may not have written everything
        steps: list[int] = []
        for path in sorted(folder.glob("*/wandb/offline-run-*/run-*.wandb")):
            for row in history(path):
                steps.append(row.pop("_step"))
                step = row.pop("version", None)
                step = row.pop("epoch", None) if step is None else step
                yield from (((name, step), value) for name, value in row.items() if not name.startswith("_"))
        assert steps == list(range(len(steps))), "a point's number is its step"

    return Case(lambda kept: WandbRun(WandbSettings(mode="offline"), JOB, folder), shown)


def history(path: Path) -> Iterator[dict[str, Any]]:
    """Rows of the file of an offline run: records of LevelDB's log format, in blocks of 32 KiB."""
    from wandb.proto.wandb_internal_pb2 import Record  # pyright: ignore[reportAttributeAccessIssue]

    data, offset, parts = path.read_bytes(), 7, b""
    while offset + 7 <= len(data):
        if 32768 - offset % 32768 < 7:
            offset += 32768 - offset % 32768
        length, kind = struct.unpack_from("<HB", data, offset + 4)
        parts += data[offset + 7 : offset + 7 + length]
        offset += 7 + length
        if kind in {1, 4}:  # a whole record, or its last part
            record, parts = Record.FromString(parts), b""
            if record.WhichOneof("record_type") == "history":
                yield {one.key or "/".join(one.nested_key): json.loads(one.value_json) for one in record.history.item}


@pytest.fixture(params=[event_file, wandb_run])
def case(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Case]:
    yield request.param(tmp_path)
    with suppress(Exception):
        wandb.teardown()


def test_points_stay_and_a_later_process_goes_on(case: Case) -> None:
    first = case.open({})
    kept = first.log(FIRST, 0)
    first.close(None)
    second = case.open(kept)
    kept = second.log(SECOND, len(FIRST))
    second.close("succeeded")
    found = list(case.shown())
    assert dict(found) == EXPECTED
    assert len(found) == len(EXPECTED), "each value once"
    assert json.loads(json.dumps(kept)) == kept


def test_a_tracker_is_closed_without_a_point(case: Case) -> None:
    case.open({}).close("failed")
