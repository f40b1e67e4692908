"""Trackers, files and metrics that fail or change in between: no point is lost or doubled, and the next try goes on."""

import itertools
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rollstream.metrics.trackers import built_in, follow, points
from rollstream.metrics.trackers.built_in import EventFile
from rollstream.metrics.trackers.follow import TrackedRun
from rollstream.metrics.trackers.points import Point, TrackedJob, TrackerError
from rollstream.schemas import ids
from rollstream.schemas.base import Event
from rollstream.schemas.events import GroupClosed, RunEnded, TaskRequested
from rollstream.schemas.trackers import TensorBoardSettings
from tests.metrics.trackers.conftest import RUN, Crash, KeptTracker, Projected, asking
from tests.metrics.trackers.follow_rig import EXPECTED, RL, SETTINGS, SFT, send, send_to_the_end, steps, tracked


def in_order(tracker: KeptTracker) -> dict[str, list[tuple[str, int]]]:
    return {job: sorted(found) for job, found in steps(tracker).items()}


ALL = {job: sorted(found) for job, found in EXPECTED.items()}


def cut_before_version_3(run_events: list[Event]) -> int:
    return next(i for i, one in enumerate(run_events) if getattr(one, "version", 0) == 3)


def test_points_that_are_projected_after_the_runs_end_are_sent(projected: Projected, run_events: list[Event]) -> None:
    cut = cut_before_version_3(run_events)
    ended = RunEnded(run_id=RUN, time_ms=run_events[cut].time_ms, cause="stopped")
    workspace = projected([*run_events[:cut], ended])
    tracker = KeptTracker()
    one = tracked(tracker, workspace)
    ask = asking(workspace)
    one.send_new(ask, ask)

    def after_the_whole_log(sql: str) -> Any:
        projected(run_events[cut:])
        return ask(sql)

    one.send_new(ask, after_the_whole_log)
    send(one, workspace)
    assert in_order(tracker) == ALL
    assert {state for _, state in tracker.closed} == {"succeeded"}


def test_points_are_sent_again_as_they_were_while_the_metrics_are_rebuilt(
    projected: Projected, run_events: list[Event]
) -> None:
    workspace = projected(run_events)
    tracker = KeptTracker()
    tracker.crashes = {0, 2}
    for _ in range(2):
        one = tracked(tracker, workspace)
        with suppress(Crash):
            one.send_new(asking(workspace), asking(workspace))
        one.close()

    def without_rows(sql: str) -> Any:
        return asking(workspace)(sql) if "FROM jobs" in sql else []

    one = tracked(tracker, workspace)
    one.send_new(without_rows, without_rows)
    one.close()
    send_to_the_end(tracker, workspace)
    assert in_order(tracker) == ALL


def board(folder: Path, job: str) -> list[int]:
    found = EventAccumulator(str(folder / RUN / job))
    found.Reload()
    return [one.step for one in found.Scalars("training/loss/total")]


@pytest.mark.parametrize("fault", ["the position cannot be written", "the file cannot be synchronised"])
def test_an_event_file_has_points_once_if_the_disk_fails(
    projected: Projected, run_events: list[Event], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    workspace, boards = projected(run_events), tmp_path / "boards"
    settings, calls = TensorBoardSettings(log_dir=boards), itertools.count()
    write, sync = follow.write_whole, built_in.sync_file

    def failing_write(path: Path, content: str) -> None:
        if '"sending":[]' in content and next(calls) < 3:
            raise OSError(28, "No space left on device")
        write(path, content)

    def failing_sync(path: Path) -> None:
        if next(calls) < 3:
            raise OSError(5, "Input/output error")
        sync(path)

    if fault.startswith("the position"):
        monkeypatch.setattr(follow, "write_whole", failing_write)
    else:
        monkeypatch.setattr(built_in, "sync_file", failing_sync)
    one = TrackedRun(RUN, settings, lambda job, kept: EventFile(settings, job, kept, workspace), workspace)
    for _ in range(3):
        with pytest.raises(OSError, match=r"device|output"):
            one.send_new(asking(workspace), asking(workspace))
    send(one, workspace)
    assert (board(boards, "sft"), board(boards, "rl")) == ([1], [2, 3])


def test_an_event_file_that_was_removed_is_reported(projected: Projected, run_events: list[Event]) -> None:
    workspace = projected([event for event in run_events if not isinstance(event, RunEnded)])
    settings = TensorBoardSettings(log_dir=workspace / "boards")

    def opened() -> TrackedRun:
        return TrackedRun(RUN, settings, lambda job, kept: EventFile(settings, job, kept, workspace), workspace)

    one = opened()
    send(one, workspace)
    one.close()
    for file in (workspace / "boards").rglob("*tfevents*"):
        file.unlink()
    projected([event for event in run_events if isinstance(event, RunEnded)])
    again = opened()
    with pytest.raises(
        TrackerError, match=r"was removed or cut off; stop this tracker, and send .* -o log_dir \S+/boards --again`"
    ):
        send(again, workspace)
    again.close()
    last = opened()
    last.forget()
    send(last, workspace)
    last.close()
    assert (board(workspace / "boards", "sft"), board(workspace / "boards", "rl")) == ([1], [2, 3])


def test_two_workspaces_have_an_event_file_each(tmp_path: Path) -> None:
    from tests.metrics.trackers.follow_rig import FIRST, JOB, SECOND

    settings = TensorBoardSettings(log_dir=tmp_path / "boards")
    first = EventFile(settings, JOB, {}, tmp_path / "one")
    first.log(FIRST, 0)
    EventFile(settings, JOB, {}, tmp_path / "two").close(None)
    first.log(SECOND, len(FIRST))
    first.close(None)
    sizes = sorted(file.stat().st_size for file in (tmp_path / "boards").rglob("*tfevents*"))
    assert sizes[0] == 0 < sizes[1]


class Silent:
    """A tracker whose `log` returns nothing and whose `close` raises."""

    def __init__(self, seen: list[int]) -> None:
        self._seen = seen

    def log(self, points: Sequence[Point], first: int) -> Mapping[str, Any]:
        self._seen.append(first)
        return None  # pyright: ignore[reportReturnType]

    def close(self, state: str | None) -> None:
        raise RuntimeError("it cannot be closed")


def test_a_log_that_returns_nothing_and_a_close_that_raises_stop_nothing(
    projected: Projected, run_events: list[Event]
) -> None:
    workspace, seen = projected(run_events), list[int]()
    one = TrackedRun(RUN, SETTINGS, lambda job, kept: Silent(seen), workspace)
    for _ in range(3):
        with suppress(RuntimeError):
            send(one, workspace)
    with suppress(RuntimeError):
        one.close()
    assert seen == [0, 0]
    assert follow.unfinished_runs(workspace, SETTINGS) == []
    other = KeptTracker()
    send(tracked(other, workspace), workspace)
    assert other.points == {}


def test_a_tracker_that_cannot_be_opened_at_the_end_gets_the_states_later(
    projected: Projected, run_events: list[Event]
) -> None:
    workspace = projected([event for event in run_events if not isinstance(event, RunEnded)])
    tracker = KeptTracker()
    one = tracked(tracker, workspace)
    send(one, workspace)
    one.close()
    projected([event for event in run_events if isinstance(event, RunEnded)])

    def away(job: TrackedJob, kept: Mapping[str, Any]) -> Any:
        raise ConnectionError("the server is away")

    without = TrackedRun(RUN, SETTINGS, away, workspace)
    with pytest.raises(ConnectionError):
        send(without, workspace)
    without.close()
    assert follow.unfinished_runs(workspace, SETTINGS) == [RUN]
    send(tracked(tracker, workspace), workspace)
    assert sorted(tracker.closed[-2:]) == [(RL, "succeeded"), (SFT, "succeeded")]
    assert follow.unfinished_runs(workspace, SETTINGS) == []


def test_a_result_that_cannot_be_kept_names_the_method(projected: Projected, run_events: list[Event]) -> None:
    class Odd(Silent):
        def log(self, points: Sequence[Point], first: int) -> Mapping[str, Any]:
            return {"a": object()}

    one = TrackedRun(RUN, SETTINGS, lambda job, kept: Odd([]), projected(run_events))
    with pytest.raises(TrackerError, match=r"log returned .*object.*; return a mapping of JSON values, or nothing"):
        one.send_new(asking(projected([])), asking(projected([])))
    with suppress(RuntimeError):
        one.close()


def test_a_run_is_locked_until_it_is_put_aside(
    projected: Projected, run_events: list[Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    workspace = projected(run_events)
    tracker = KeptTracker()
    one, other = tracked(tracker, workspace), tracked(tracker, workspace)
    move = follow.move

    def while_another_tries(path: Path, target: Path) -> None:
        if target.parent.name == follow.ENDED:
            with pytest.raises(TrackerError):
                other.send_new(asking(workspace), asking(workspace))
        move(path, target)

    monkeypatch.setattr(follow, "move", while_another_tries)
    send(one, workspace)
    monkeypatch.setattr(follow, "move", move)
    send(other, workspace)
    assert tracker.again == []


def test_points_that_another_process_sent_meanwhile_are_known(projected: Projected, run_events: list[Event]) -> None:
    cut = cut_before_version_3(run_events)
    workspace = projected(run_events[:cut])
    tracker = KeptTracker()
    one, other = tracked(tracker, workspace), tracked(tracker, workspace)
    send(one, workspace)
    one.close()
    projected(run_events[cut:])
    send(other, workspace)
    other.close()
    send(one, workspace)
    assert tracker.again == []
    assert in_order(tracker) == ALL


def test_a_late_validation_is_sent(
    projected: Projected, run_events: list[Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(points, "SETTLED_MS", 0)

    def validated(epoch: int) -> list[Event]:
        group = ids.validation_group_id(RUN, "rl", epoch, "aaaaaaaa", 0)
        changes = {"group_id": group, "epoch": epoch, "index": 0, "purpose": "validation"}
        closed = next(one for one in run_events if isinstance(one, GroupClosed) and one.job_id == RL)
        members = [one.model_copy(update={"trajectory_id": f"{group}/{one.member}"}) for one in closed.members]
        task = next(one for one in run_events if isinstance(one, TaskRequested) and one.job_id == RL)
        return [task.model_copy(update=changes), closed.model_copy(update={**changes, "members": tuple(members)})]

    (first, first_closed), (second, second_closed) = validated(0), validated(1)
    running = [event for event in run_events if not isinstance(event, RunEnded)]
    workspace = projected([*running, first, second, second_closed])
    tracker = KeptTracker()
    send_to_the_end(tracker, workspace)
    projected([first_closed, run_events[-1]])
    send_to_the_end(tracker, workspace)
    assert [one for one in steps(tracker)[RL] if one[0] == "validation"] == [("validation", 1), ("validation", 0)]
    assert steps(tracker)[SFT] == EXPECTED[SFT]
