"""A tracker gets every point of a run once: in steps, over crashes at each moment, and over its own outages."""

import itertools
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from rollstream.harness.config.file import resolve
from rollstream.harness.runs.outcome import behind_of
from rollstream.metrics.trackers import follow, points
from rollstream.metrics.trackers.follow import unfinished_runs
from rollstream.metrics.trackers.points import jobs_of, new_keys, points_of
from rollstream.schemas import ids
from rollstream.schemas.base import Event
from rollstream.schemas.errors import RollstreamError
from rollstream.schemas.events import EpochStarted, GroupClosed, RunEnded, TaskRequested
from tests.harness.conftest import configuration
from tests.metrics.trackers.conftest import RUN, Crash, KeptTracker, Projected, asking
from tests.metrics.trackers.follow_rig import EXPECTED, RL, SETTINGS, SFT, send, send_to_the_end, steps, tracked


def test_points_of_a_run_have_their_values_by_name(projected: Projected, run_events: list[Event]) -> None:
    ask = asking(projected(run_events))
    jobs = {job.job_id: job for job in jobs_of(ask, RUN)}
    found = points_of(ask, RUN, new_keys(ask, RUN, {SFT: {}, RL: {}}))
    assert {job: (one.kind, one.state, one.is_over) for job, one in jobs.items()} == {
        SFT: ("sft", "succeeded", True),
        RL: ("rl", "succeeded", True),
    }
    assert jobs[RL].settings["model"]["path"] == "tiny"
    assert {job: [(one.series, one.step) for one in ones] for job, ones in found.items()} == EXPECTED
    trained = found[RL][0]
    assert trained.time_ms > 1_790_000_000_000
    assert trained.values["training/loss/total"] == 0.5
    assert trained.values["training/seconds/fetch"] == 0.1
    assert trained.values["training/epoch"] == 0
    sealed = found[RL][3].values
    assert sealed["epoch/avg_reward"] == pytest.approx((0.3 + 0.3 + 0.5) / 3)
    assert sealed["epoch/curriculum_percentile"] == 0.5
    assert sealed["epoch/zero_variance_groups"] == 1


def test_epochs_that_never_started_such_as_a_what_ifs_are_sent_once_the_run_is_over(
    projected: Projected, run_events: list[Event]
) -> None:
    tracker, found = KeptTracker(), [event for event in run_events if not isinstance(event, EpochStarted)]
    send_to_the_end(tracker, projected([event for event in found if not isinstance(event, RunEnded)]))
    assert "epoch" not in {series for series, _ in steps(tracker)[RL]}
    send_to_the_end(tracker, projected([event for event in found if isinstance(event, RunEnded)]))
    assert sorted(steps(tracker)[RL]) == sorted(EXPECTED[RL])


def test_a_growing_run_is_sent_in_steps(projected: Projected, run_events: list[Event]) -> None:
    tracker = KeptTracker()
    workspace = projected(run_events[:1])
    for begin in range(1, len(run_events) - 1, 110):
        projected(run_events[begin : min(begin + 110, len(run_events) - 1)])
        send_to_the_end(tracker, workspace)
    assert unfinished_runs(workspace, SETTINGS) == [RUN]
    projected(run_events[-1:])
    send_to_the_end(tracker, workspace)
    assert {job: sorted(found) for job, found in steps(tracker).items()} == {
        job: sorted(found) for job, found in EXPECTED.items()
    }
    assert tracker.again == []
    assert sorted(tracker.closed[-2:]) == [(RL, "succeeded"), (SFT, "succeeded")]
    assert unfinished_runs(workspace, SETTINGS) == []


@pytest.mark.parametrize("moment", [0, 1, 3])
def test_points_arrive_under_one_number_over_a_crash(
    projected: Projected, run_events: list[Event], moment: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(points, "MAX_POINTS", 1)
    workspace = projected(run_events)
    tracker = KeptTracker()
    tracker.crashes = {moment, moment + 3}
    num_crashes = send_to_the_end(tracker, workspace)
    assert num_crashes > 0
    assert {job: sorted(found) for job, found in steps(tracker).items()} == {
        job: sorted(found) for job, found in EXPECTED.items()
    }
    for mine in tracker.points.values():
        assert sorted(mine) == list(range(len(mine)))
    send_to_the_end(tracker, workspace)
    ended = [one for one in tracker.closed if one[1] is not None]
    assert sorted(ended) == [(RL, "succeeded"), (SFT, "succeeded")], "an ended job is not opened again"


def test_points_that_a_crash_left_unsent_are_sent_before_newer_ones(
    projected: Projected, run_events: list[Event]
) -> None:
    num_first = next(i for i, one in enumerate(run_events) if one.time_ms and getattr(one, "version", 0) == 2) + 1
    workspace = projected(run_events[:num_first])
    tracker = KeptTracker()
    tracker.crashes = {1}
    crashed = tracked(tracker, workspace)
    with pytest.raises(Crash):
        crashed.send_new(asking(workspace), asking(workspace))
    crashed.close()
    first = dict(tracker.points[next(iter(tracker.points))])
    projected(run_events[num_first:])
    send_to_the_end(tracker, workspace)
    assert tracker.again == [(next(iter(tracker.points)), number) for number in first]
    assert sorted(steps(tracker)[RL]) == sorted(EXPECTED[RL])


def test_a_job_that_ended_is_not_asked_for_again_until_the_run_ends(
    projected: Projected, run_events: list[Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follow, "QUIET_POLLS", 3)
    workspace = projected(run_events[:-1])
    tracker, ask, asked = KeptTracker(), asking(workspace), list[str]()

    def counted(sql: str) -> Sequence[Sequence[Any]]:
        asked.append(sql)
        return ask(sql)

    one = tracked(tracker, workspace)
    for _ in range(4):
        one.send_new(counted, ask)
    one.close()
    asked.clear()
    later = tracked(tracker, workspace)
    later.send_new(counted, ask)
    later.close()
    assert len(asked) == 1, "only the jobs' states"
    assert {job: sorted(found) for job, found in steps(tracker).items()} == {
        job: sorted(found) for job, found in EXPECTED.items()
    }
    projected(run_events[-1:])
    send_to_the_end(tracker, workspace)
    assert sorted(tracker.closed[-2:]) == [(RL, "succeeded"), (SFT, "succeeded")]
    assert tracker.again == []


def test_metrics_that_are_made_again_meanwhile_double_no_point(projected: Projected, run_events: list[Event]) -> None:
    workspace = projected(run_events[:-1])
    tracker, ask, calls = KeptTracker(), asking(workspace), itertools.count()

    def behind(sql: str) -> Sequence[Sequence[Any]]:
        """The first query is answered before the RL job is in the metrics again."""
        is_first = next(calls) == 0
        return [row for row in ask(sql) if not is_first or row[0] != RL]

    one = tracked(tracker, workspace)
    while one.send_new(ask, ask):
        pass
    one.send_new(behind, ask)
    one.close()
    assert {job: sorted(found) for job, found in steps(tracker).items()} == {
        job: sorted(found) for job, found in EXPECTED.items()
    }


def test_many_jobs_are_asked_for_in_queries_of_a_limited_size(
    projected: Projected, run_events: list[Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(points, "MAX_JOBS", 1)
    ask, asked = asking(projected(run_events)), list[str]()
    found = new_keys(lambda sql: (asked.append(sql), ask(sql))[1], RUN, {SFT: {}, RL: {}})
    assert sorted((key.series, key.step) for key in found) == sorted(EXPECTED[SFT] + EXPECTED[RL])
    assert ["/sft'" in sql for sql in asked] == [True, False]


def test_a_run_is_sent_by_one_process(projected: Projected, run_events: list[Event]) -> None:
    workspace = projected([event for event in run_events if not isinstance(event, RunEnded)])
    tracker = KeptTracker()
    first, second = tracked(tracker, workspace), tracked(tracker, workspace)
    first.send_new(asking(workspace), asking(workspace))
    with pytest.raises(RollstreamError, match="another process sends it to this tracker"):
        second.send_new(asking(workspace), asking(workspace))
    first.close()
    second.send_new(asking(workspace), asking(workspace))
    second.close()


def test_a_process_that_begins_while_another_ends_the_run_sends_nothing_again(
    projected: Projected, run_events: list[Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    workspace = projected(run_events[:-1])
    tracker, ask, opened, exists = KeptTracker(), asking(workspace), follow.folder_of(workspace, SETTINGS), Path.exists
    first, second = tracked(tracker, workspace), tracked(tracker, workspace)
    while first.send_new(ask, ask):
        pass
    projected(run_events[-1:])
    ending = [first]

    def found(self: Path, **named: Any) -> bool:
        """Whether a path exists; after the look at the open folder, the other process ends the run."""
        result = exists(self, **named)
        if ending and self == opened / "open" / RUN:
            ending.pop().send_new(ask, ask)
        return result

    monkeypatch.setattr(Path, "exists", found)
    for one in (second, second, first):
        with suppress(RollstreamError):
            send(one, workspace)
        one.close()
    assert {job: sorted(found) for job, found in steps(tracker).items()} == {
        job: sorted(found) for job, found in EXPECTED.items()
    }
    assert tracker.again == []
    assert not exists(opened / "open" / RUN)


def test_an_ended_run_that_goes_on_is_followed_again(projected: Projected, run_events: list[Event]) -> None:
    cut = next(i for i, one in enumerate(run_events) if getattr(one, "version", 0) == 3)
    ended = RunEnded(run_id=RUN, time_ms=run_events[cut].time_ms, cause="failed", message="stopped")
    workspace = projected([*run_events[:cut], ended])
    tracker = KeptTracker()
    written = configuration(workspace)
    written["trainers"]["t"]["trackers"] = [{"kind": SETTINGS.kind}]
    config = resolve(written).config
    assert "`rollstream track demo-000001 --to python:a.B`" in behind_of(workspace, RUN, config)[0]
    send_to_the_end(tracker, workspace)
    assert unfinished_runs(workspace, SETTINGS) == []
    assert behind_of(workspace, RUN, config) == ()
    projected(run_events[cut:])
    send_to_the_end(tracker, workspace)
    assert sorted(steps(tracker)[RL]) == sorted(EXPECTED[RL])
    assert tracker.again == []


@pytest.mark.parametrize(("cause", "state"), [("failed", "failed"), ("abandoned", "failed"), ("stopped", "cancelled")])
def test_a_job_that_its_runs_end_cut_short_has_failed_unless_the_run_was_stopped(
    projected: Projected, run_events: list[Event], cause: Any, state: str
) -> None:
    cut = next(i for i, one in enumerate(run_events) if getattr(one, "version", 0) == 3)
    workspace = projected([*run_events[:cut], RunEnded(run_id=RUN, time_ms=run_events[cut].time_ms, cause=cause)])
    tracker = KeptTracker()
    send_to_the_end(tracker, workspace)
    assert (RL, state) in tracker.closed


def test_a_validation_is_sent_once_all_its_tasks_are_closed(
    projected: Projected, run_events: list[Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(points, "SETTLED_MS", 0)

    def validated(index: int) -> list[Event]:
        group = ids.validation_group_id(RUN, "rl", 0, "aaaaaaaa", index)
        changes = {"group_id": group, "epoch": 0, "index": index, "purpose": "validation"}
        closed = next(one for one in run_events if isinstance(one, GroupClosed) and one.job_id == RL)
        members = [one.model_copy(update={"trajectory_id": f"{group}/{one.member}"}) for one in closed.members]
        return [
            next(one for one in run_events if isinstance(one, TaskRequested) and one.job_id == RL).model_copy(
                update=changes
            ),
            closed.model_copy(update={**changes, "members": tuple(members)}),
        ]

    running = [event for event in run_events if not isinstance(event, RunEnded)]
    (task, group), (second_task, second_group) = validated(0), validated(1)
    workspace = projected([*running, task, second_task, group])
    tracker = KeptTracker()
    send_to_the_end(tracker, workspace)
    assert ("validation", 0) not in steps(tracker)[RL]
    projected([second_group])
    send_to_the_end(tracker, workspace)
    sent = tracker.points[RL][4]
    assert (sent.series, sent.step, sent.values["validation/groups"]) == ("validation", 0, 2)
