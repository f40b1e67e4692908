"""docs/replay.md holds: every field of a recorded run is changed, one by one, and found by what its row says."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import orjson
import pytest

from rollstream.eventlog import codec
from rollstream.eventlog.log import TopicPartition
from rollstream.schemas.events import KINDS, RunContinued, WeightsCollected, WeightsLoaded, WeightsPublished
from tests.rigs.runs import replay_rig
from tests.rigs.runs.recorded_run import EPOCHS, GROUP, RUN
from tests.rigs.runs.replay_changes import Change, changes, finders, first_records, is_found, other
from tests.rigs.runs.replay_rig import named, trained, verified

KINDS_OF_THE_RUN = {
    *("BatchPlanned", "EpochSealed", "EpochStarted", "GroupClosed", "GroupStarted", "JobProgressed", "JobStarted"),
    *("JobSubmitted", "JobSucceeded", "LearnerClaimed", "RewardRecorded", "RolloutEnded", "RolloutStarted"),
    *("RunEnded", "RunStarted", "StepRecorded", "StepTrained", "TaskRequested", "TrajectoryAssembled"),
    *("RunContinued", "WeightsCollected", "WeightsLoaded", "WeightsPublished"),
}
OF_OTHER_RUNS = {
    *("GroupExtended", "JobCancelled", "JobFailed", "RolloutFailed", "SubmissionReceived", "TaskCancelled", "Tick"),
    *("TrajectoryRejected", "RollbackRequested", "VersionJudged", "JobSkipped", "ModelSwitched", "ReferenceScored"),
}
"""Kinds that the recorded run has none of: test_replay_kinds.py, test_replay_adoptions.py and test_replay_scores.py try
them, and those of a shared model group its own test_replay.py."""
IN_PARTS = {("GroupStarted", "revision"), ("RunEnded", "cause"), ("WeightsLoaded", "version")}
"""Found only where another record depends on just this value."""


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A whole run whose engine loaded a version, and one of whose artifacts was collected."""
    run = replay_rig.record(tmp_path_factory.mktemp("replay"))
    records, index = run.find("weights", "weights_published", 1)
    published = codec.decode(records[index]).event
    assert isinstance(published, WeightsPublished)
    run.artifacts.remove(published.artifact)
    common = {"run_id": RUN, "time_ms": 1, "model_group": GROUP}
    collected = WeightsCollected(
        **common,
        versions=(published.version,),
        weights_sha256=(published.weights_sha256,),
        artifacts=(published.artifact,),
        by="gc",
    )
    loaded = WeightsLoaded(**common, version=EPOCHS, engine="e")
    asyncio.run(run.log.send_all([RunContinued(run_id=RUN, time_ms=1), loaded, collected]))
    assert verified(run).verdict == trained(run).verdict == "equal"
    return run


def test_every_row_is_true_of_a_recorded_run(recorded: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    expected, untrue = finders(), list[str]()
    tried = list(changes(recorded))
    for change in tried:
        row = expected[change.kind, change.field]
        if (change.kind, change.field) in IN_PARTS:
            continue
        by_verify = is_found(verified, recorded, change)
        if by_verify != ("verify" in row) and not (row == "nothing" and by_verify):
            untrue.append(f"{change.kind}.{change.field}: {row}; verify {by_verify}")
        if "train" in row and not is_found(named, recorded, change) and not is_found(trained, recorded, change):
            untrue.append(f"{change.kind}.{change.field}: {row}; train says equal")
    assert untrue == []
    rows = {(change.kind, change.field) for change in tried}
    broken = [one for one in changes(recorded, decodes=False) if (one.kind, one.field) not in rows]
    assert [one for one in broken if not is_found(verified, recorded, one)] == []
    untried = {row for row in expected if row[0] in KINDS_OF_THE_RUN} - rows - {(one.kind, one.field) for one in broken}
    assert sorted(untried) == []
    assert {kind for kind, _ in expected} | {"RunContinued"} == KINDS_OF_THE_RUN | OF_OTHER_RUNS | {"all"}


def test_a_record_that_became_one_of_another_run_is_gone(recorded: Any, caplog: pytest.LogCaptureFixture) -> None:
    """The row `all` of `run_id`, where the record decodes."""
    caplog.set_level(logging.CRITICAL)
    unfound = {
        KINDS[orjson.loads(change.value)["kind"]].__name__
        for change in first_records(recorded)
        if not is_found(verified, recorded, change, moved=True)
    }
    assert unfound == {"RunContinued", "WeightsLoaded"}


@pytest.mark.parametrize("field", ["run_id", "kind", "v"])
def test_a_record_that_no_longer_decodes_is_found(recorded: Any, field: str) -> None:
    unfound: set[str] = set()
    for change in first_records(recorded):
        body = orjson.loads(change.value)
        broken = change._replace(value=orjson.dumps({**body, field: other(body[field])}))
        unfound |= set() if is_found(verified, recorded, broken) else {change.kind}
    assert unfound == ({"WeightsLoaded"} if field == "run_id" else set())  # its key is the model group's, not the run's


def test_a_changed_time_is_found_where_event_time_closes_groups(recorded: Any) -> None:
    """The row `all` of `time_ms`."""
    for change in first_records(recorded):
        later = change._replace(value=orjson.dumps({**orjson.loads(change.value), "time_ms": 10**12}))
        is_in_time = change.where.topic == "steps" and change.kind not in ("GroupStarted",)
        assert is_found(verified, recorded, later) == is_in_time, change.kind


@pytest.mark.parametrize(
    ("field", "new", "wanted"),
    [
        ("sha256", lambda value: other(value), True),
        ("uri", lambda value: f"{value}x", True),
        ("uri", lambda value: f"elsewhere/{value}", False),
        ("size_bytes", lambda value: value + 1, False),
    ],
)
def test_of_an_artifact_hash_and_file_name_are_held(
    recorded: Any, field: str, new: Callable[[Any], Any], wanted: bool
) -> None:
    change = next(one for one in first_records(recorded) if one.kind == "WeightsPublished")
    body = orjson.loads(change.value)
    body["artifact"][field] = new(body["artifact"][field])
    assert is_found(verified, recorded, change._replace(value=orjson.dumps(body))) == wanted


def test_the_range_of_a_group_must_close_it(recorded: Any) -> None:
    """The row GroupClosed of `steps_at`: its end always, its beginning where it is the partition's first."""
    where = TopicPartition("groups", 0)
    records = recorded.log._store._partitions[where].records
    bodies = [(number, orjson.loads(record.value)) for number, record in enumerate(records)]
    closed = [(number, body) for number, body in bodies if body["kind"] == "group_closed"]
    for partition in {body["steps_at"]["partition"] for _, body in closed}:
        of_partition = [one for one in closed if one[1]["steps_at"]["partition"] == partition]
        first = min(of_partition, key=lambda one: one[1]["steps_at"]["first_offset"])
        last = max(of_partition, key=lambda one: one[1]["steps_at"]["last_offset"])
        for (number, body), field, by in ((first, "first_offset", 1), (last, "last_offset", -1)):
            moved = {**body, "steps_at": {**body["steps_at"], field: body["steps_at"][field] + by}}
            assert is_found(verified, recorded, Change("GroupClosed", "steps_at", where, number, orjson.dumps(moved)))
