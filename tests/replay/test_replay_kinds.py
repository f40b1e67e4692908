"""docs/replay.md holds of what goes wrong, and of submissions: kinds that test_replay_fields.py has no record of."""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest

from rollstream.schemas.events import KINDS, TaskCancelled
from tests.rigs.runs import faulty_run
from tests.rigs.runs.epochwise_rig import Choosy, EpochwiseRig, components_for, conducted, configuration
from tests.rigs.runs.recorded_run import JOB, RUN
from tests.rigs.runs.replay_changes import Change, changes, finders, is_found, other
from tests.rigs.runs.replay_rig import named, tampered, verified

KINDS_TRIED = {
    *("GroupExtended", "JobCancelled", "JobFailed", "RolloutFailed", "SubmissionReceived", "TaskCancelled", "Tick"),
    "TrajectoryRejected",
}
IN_PARTS = {
    ("GroupExtended", "deadline_ms"),
    *(("SubmissionReceived", field) for field in ("num_before", "num_empty")),
}
"""Found only where something follows from just this value: tried by tests of their own."""


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return faulty_run.record(tmp_path_factory.mktemp("stopped"))


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return faulty_run.record(tmp_path_factory.mktemp("failed"), fails=True)


@pytest.fixture(scope="module")
def submitted(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Two epochs of which the builder leaves out some trajectories, and the curriculum some groups."""
    folder = tmp_path_factory.mktemp("submitted")
    curriculum = {"enabled": True, "initial_percentile": 0.5, "min_reward_diff": 0.0}
    rig = EpochwiseRig(folder, configuration(folder, num_epochs=2, curriculum_learning=curriculum))
    parts = components_for(rig)
    parts = parts._replace(trajectory_builder=Choosy(parts.trajectory_builder.trajectory_builder_config))
    asyncio.run(conducted(rig, run_id=RUN, parts=parts))
    return rig


def with_field(run: Any, kind: str, field: str, new: Callable[[Any], Any], nth: int = 0) -> Change:
    """The nth record of a kind with another value in a field."""
    found = [
        (where, number, body)
        for where, kept in run.log._store._partitions.items()
        for number, body in enumerate(orjson.loads(record.value) for record in kept.records)
        if KINDS[body["kind"]].__name__ == kind
    ]
    where, number, body = found[nth]
    unwritten = KINDS[body["kind"]].model_fields[field].get_default(call_default_factory=True)
    return Change(kind, field, where, number, orjson.dumps({**body, field: new(body.get(field, unwritten))}))


def test_every_row_is_true_of_what_goes_wrong_and_of_submissions(
    stopped: Any, failed: Any, submitted: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    rows, untrue, tried = finders(), list[str](), set[tuple[str, str]]()
    for run in (stopped, failed, submitted):
        assert verified(run).verdict == "equal"
        for decodes in (True, False):
            for change in changes(run, decodes=decodes):
                row = rows.get((change.kind, change.field), "")
                is_tried = (change.kind, change.field) in tried
                if change.kind not in KINDS_TRIED or is_tried or (change.kind, change.field) in IN_PARTS:
                    continue
                tried.add((change.kind, change.field))
                by_verify, by_both = is_found(verified, run, change), is_found(named, run, change)
                if (by_verify, by_both) != ("verify" in row, "train" in row):
                    untrue.append(f"{change.kind}.{change.field}: {row}; verify {by_verify}, both {by_both}")
    assert untrue == []
    assert sorted({row for row in rows if row[0] in KINDS_TRIED} - tried - IN_PARTS) == []


@pytest.mark.parametrize(
    ("deadline_ms", "wanted"),
    [
        (0, True),  # not extended at all
        (faulty_run.EXTENDED_MS + 1, False),  # the same Tick closes it
        (faulty_run.EXTENDED_MS + 10**6, True),  # no record closes it
    ],
)
def test_another_deadline_is_found_where_the_group_closes_at_another_time(
    stopped: Any, deadline_ms: int, wanted: bool
) -> None:
    change = with_field(stopped, "GroupExtended", "deadline_ms", lambda _: deadline_ms)
    assert is_found(verified, stopped, change) == wanted


def test_whether_a_member_is_tried_again_is_found_where_its_group_closes_otherwise(
    stopped: Any, tmp_path: Path
) -> None:
    for nth in (0, 1):
        assert is_found(verified, stopped, with_field(stopped, "RolloutFailed", "is_final", other, nth))
    timed_out = faulty_run.record(tmp_path, times_out=True)
    assert verified(timed_out).verdict == "equal"
    changed = [with_field(timed_out, "RolloutFailed", "is_final", other, nth) for nth in range(3)]
    assert [is_found(verified, timed_out, one) for one in changed] == [b"timeout" not in one.value for one in changed]


@pytest.mark.parametrize("run_id", ["", RUN])
def test_the_partition_of_a_tick_is_found_whatever_run_it_names(stopped: Any, run_id: str) -> None:
    change = with_field(stopped, "Tick", "partition", lambda partition: partition + 1)
    named_so = change._replace(value=orjson.dumps({**orjson.loads(change.value), "run_id": run_id}))
    assert is_found(verified, stopped, named_so)


@pytest.mark.parametrize("part", ["group_id", "trajectory_ids", "rewards"])
def test_every_part_of_a_submitted_group_is_found(submitted: Any, part: str) -> None:
    def new(groups: Any) -> Any:
        return [{**groups[0], part: other(groups[0][part])}, *groups[1:]]

    assert is_found(verified, submitted, with_field(submitted, "SubmissionReceived", "groups", new))


def test_the_order_of_submitted_groups_is_found(submitted: Any) -> None:
    change = with_field(submitted, "SubmissionReceived", "groups", lambda groups: groups[::-1])
    assert is_found(verified, submitted, change)


def test_a_submission_that_becomes_a_part_of_one_is_found(submitted: Any) -> None:
    assert is_found(verified, submitted, with_field(submitted, "SubmissionReceived", "is_part", lambda _: True))


def test_of_a_submission_what_changes_no_answer_is_found_by_nothing(submitted: Any) -> None:
    """At the plan's last epoch the job ends whatever is_last is; all submitted groups were offered."""

    def with_one_more(names: Any) -> Any:
        body = orjson.loads(with_field(submitted, "SubmissionReceived", "epoch", lambda epoch: epoch).value)
        return [*names, body["groups"][0]["trajectory_ids"][0]]

    tried = [("is_last", other, 1), ("not_offered", with_one_more, 0), ("num_before", lambda _: 1, 0)]
    tried += [("num_empty", lambda _: {"curriculum": 1}, 0)]
    for field, new, nth in tried:
        assert not is_found(verified, submitted, with_field(submitted, "SubmissionReceived", field, new, nth))


@pytest.mark.parametrize(("field", "wanted"), [("job_id", True), ("epoch", False), ("num_tasks", False)])
def test_where_submissions_decide_only_the_job_of_an_epochs_start_is_found(
    submitted: Any, field: str, wanted: bool
) -> None:
    for new in (other, lambda value: value - 1 if isinstance(value, int) and value else other(value)):
        change = with_field(submitted, "EpochStarted", field, new)
        assert is_found(verified, submitted, change) == wanted
        assert is_found(named, submitted, change) == wanted


def test_a_task_that_curation_did_not_cancel_may_have_any_cause(submitted: Any) -> None:
    task = orjson.loads(with_field(submitted, "TaskRequested", "epoch", lambda epoch: epoch).value)
    run = tampered(submitted)
    asyncio.run(run.log.send(TaskCancelled(run_id=RUN, time_ms=1, group_id=task["group_id"], cause="theirs")))
    assert verified(run).verdict == "equal"
    assert not is_found(verified, run, with_field(run, "TaskCancelled", "cause", other))


def test_of_tasks_that_the_harness_asked_for_what_their_groups_repeat_is_found(submitted: Any) -> None:
    tried = [change for change in changes(submitted) if change.kind == "TaskRequested"]
    unfound = {change.field for change in tried if not is_found(verified, submitted, change)}
    assert unfound == {"inputs", "min_version"}


@pytest.mark.parametrize("kind", ["JobProgressed", "JobFailed", "JobCancelled"])
def test_an_event_of_a_job_that_nobody_submitted_is_found(stopped: Any, failed: Any, kind: str) -> None:
    run = failed if kind == "JobFailed" else stopped
    change = with_field(run, kind, "job_id", lambda _: f"{JOB}-2")
    assert is_found(verified, run, change)
    assert is_found(named, run, change)


def test_the_newest_progress_of_a_job_that_did_not_succeed_is_named_by_nothing(stopped: Any) -> None:
    assert not is_found(verified, stopped, with_field(stopped, "JobProgressed", "version", lambda version: version - 1))
