"""Records whose ids or counts are out of all bounds: they cost nothing and stop nobody."""

import asyncio

import orjson
import pytest

from rollstream.eventlog import codec
from rollstream.eventlog.artifacts import ArtifactStore
from rollstream.eventlog.attempts import Recorded
from rollstream.eventlog.memory.log import MemoryLog
from rollstream.processors.assemble import fold as assembly
from rollstream.processors.assemble.shell import AssembleShell
from rollstream.processors.curate import fold as curate
from rollstream.processors.curate.known_groups import KnownGroups
from rollstream.processors.curate.shell import CurateShell
from rollstream.processors.curate.state import Clock, CurateState, Run
from rollstream.processors.curate.undo import Undo
from rollstream.processors.host.app import Batch
from rollstream.schemas import ids
from rollstream.schemas.base import Event
from rollstream.schemas.errors import DecodeError
from rollstream.schemas.events import (
    BatchPlanned,
    EpochStarted,
    GroupClosed,
    RolloutEnded,
    RunStarted,
    StepRecorded,
    SubmissionReceived,
    TaskRequested,
)
from rollstream.schemas.settings import MAX_MEMBERS, MAX_TASKS, RolloutSettings
from tests.rigs.steps_rig import attempt, events_of, group, records_of, started

LONG = "9" * 5000


@pytest.mark.parametrize("end", [f"/m{LONG}/a0", f"/m0/a{LONG}", "/m٣/a0", "/m0/a0/a1", "/m-1/a0", "x/m0/a0"])
def test_steps_of_attempts_that_no_number_can_name_leave_assembly_at_work(end):
    async def go():
        log = MemoryLog(num_partitions=1)
        events = [started(0, size=1), *attempt()]
        step = next(event for event in events if isinstance(event, StepRecorded))
        strange = [step.model_copy(update={"rollout_id": group(0) + end, "step_index": n}) for n in range(20)]
        for event in [events[0], *strange, *events[1:]]:
            await log.send(event, partition=0)
        shell = AssembleShell(log, None, service="p")
        await shell.take(Batch(0, 1, await records_of(log, "steps")))
        await shell.drain()
        (closed,) = await events_of(log, "groups", GroupClosed)
        assert [(one.member, one.attempt) for one in closed.attempts] == [(0, 0)]
        assert await records_of(log, "dlq") == []

    asyncio.run(go())


@pytest.mark.parametrize("name", [f"run/rl/e00000/t{LONG}", f"run/rl/e{LONG}/t00000", "run/rl/e٠٠٠٠٠/t00000", "t", ""])
def test_group_ids_that_no_number_can_name_are_groups_without_an_index(name):
    groups = KnownGroups()
    groups.announce("run/rl", 0, 2)
    assert not groups.has_closed(name)
    assert groups.close(name) is None
    assert groups.has_closed(name)


def test_ids_are_taken_apart_as_they_are_put_together():
    name = ids.group_id("run", "rl", 123_456, 7)
    assert ids.epoch_position(name) == ("run/rl", 123_456, 7)
    assert ids.split_index(name) == ("run/rl/e123456", 7)
    assert ids.attempt_of(name, ids.rollout_id(name, 11, 3)) == (11, 3)
    assert ids.epoch_position(ids.validation_group_id("run", "rl", 0, "ab", 1)) is None


def test_an_end_that_counts_more_steps_than_there_are_is_incomplete_at_once():
    ended = next(event for event in attempt() if isinstance(event, RolloutEnded))
    huge = ended.model_copy(update={"num_steps": 10**15})
    assert Recorded("run-1/rl/e00000/t00000/m0/a0", 0, 0, {0: "a"}).incompleteness(huge) == "incomplete"


def test_taking_a_record_back_copies_one_clock_of_each_other_run(partition, make_closed):
    tasks = partition.start(num_generations=2, tasks_per_epoch=2)
    for number in range(3):
        partition.start_run(f"idle-{number}")
    state: CurateState = partition.state
    for run in state.runs.values():
        assert isinstance(run, Run)
        run.idle.clocks = {index: Clock(1, 1) for index in range(64)}
    event = make_closed(tasks[0], (), steps_at={"partition": 5, "first_offset": 0, "last_offset": 1})
    undo = Undo.before(state, event)
    assert len(undo.clocks) == 4
    assert len(Undo.before(state, partition.records[0].event).clocks) == 0
    state.runs["idle-1"].idle.clocks[5].total_ms = 99
    state.runs["idle-1"].idle.is_abandoned = True
    undo.apply(state, CurateState(runs={"run-1": state.runs["run-1"]}))
    assert state.runs["idle-1"].idle.clocks == {index: Clock(1, 1) for index in range(64)}
    assert not state.runs["idle-1"].idle.is_abandoned


TASK = TaskRequested(
    run_id="run",
    time_ms=0,
    group_id=group(0),
    example_id="x",
    job_id="run/rl",
    epoch=0,
    index=0,
    inputs={},
    num_rollouts=1,
    minimum=1,
    seed=0,
    min_version=0,
    settings=RolloutSettings(environment="none"),
)


@pytest.mark.parametrize(
    ("event", "changes"),
    [
        (EpochStarted(run_id="run", time_ms=0, job_id="run/rl", epoch=0), {"num_tasks": MAX_TASKS + 1}),
        (TASK, {"num_rollouts": MAX_MEMBERS + 1}),
        (started(), {"size": MAX_MEMBERS + 1}),
        (attempt()[0], {"member": MAX_MEMBERS}),
    ],
)
def test_a_count_out_of_all_bounds_is_not_decoded(event, changes):
    value = codec.encode(event.model_copy(update=changes)).value
    with pytest.raises(DecodeError, match=f"{next(iter(changes))}: Input should be less than"):
        codec.parse(event.TOPIC, value)


def test_the_largest_epoch_that_a_record_may_announce_is_known_by_its_groups():
    groups = KnownGroups()
    assert groups.close("run/rl/e00000/t00007") is None
    assert groups.announce("run/rl", 0, MAX_TASKS) == MAX_TASKS - 1
    assert groups.has_closed("run/rl/e00000/t00007")
    assert groups.close("run/rl/e00000/t99999") is not None


def test_one_group_whose_records_cannot_be_folded_never_ends_assembly():
    def bad(state, received):
        answer = assembly.evolve(state, received)
        if isinstance(received.event, StepRecorded) and received.event.group_id == group(0):
            raise ZeroDivisionError
        return answer

    async def go():
        log = MemoryLog(num_partitions=1)
        first = next(event for event in attempt() if isinstance(event, StepRecorded))
        steps = [first.model_copy(update={"step_index": index}) for index in range(40)]
        for event in [started(0, size=1), started(1, size=1), *steps, *attempt(1)]:
            await log.send(event, partition=0)
        records = await records_of(log, "steps")
        for part in (records[:30], records):  # the second owner finds the letters of the first
            shell = AssembleShell(log, None, service="p", evolve=bad)
            await shell.prepare(0, 0)
            await shell.take(Batch(0, 1, part))
            await shell.drain()
        assert len(await records_of(log, "dlq")) == 40
        assert [one.group_id for one in await events_of(log, "groups", GroupClosed)] == [group(1)]

    asyncio.run(go())


@pytest.mark.parametrize("number", [2**64, -(2**63) - 1, 10**20])
@pytest.mark.parametrize(
    ("event", "path"),
    [
        (EpochStarted(run_id="run", time_ms=0, job_id="run/rl", epoch=0), ("epoch",)),
        (
            next(event for event in attempt() if isinstance(event, StepRecorded) and event.llm),
            ("llm", "spans", 0, "version"),
        ),
        (TASK, ("settings", "max_turns")),
    ],
)
def test_an_integer_that_no_event_could_be_written_with_is_not_decoded(event, path, number):
    content = orjson.loads(codec.encode(event).value)
    within = content
    for name in path[:-1]:
        within = within[name]
    within[path[-1]] = str(number)
    with pytest.raises(DecodeError, match=r"Input should be (less|greater) than or equal to"):
        codec.parse(event.TOPIC, orjson.dumps(content))
    within[path[-1]] = str(2**64 - 1)
    assert codec.encode(codec.parse(event.TOPIC, orjson.dumps(content))[0])


@pytest.mark.parametrize("number", ["nan", "inf", "-Infinity"])
def test_a_number_that_is_not_finite_is_not_decoded(partition, number):
    partition.start_run()
    submission = SubmissionReceived(
        run_id="run", time_ms=0, job_id="run/rl", submission_id="s", epoch=0, groups=(), curriculum_percentile=0.5
    )
    step = next(event for event in attempt() if isinstance(event, StepRecorded))
    numbers = (
        (partition.records[0].event, "idle_timeout_s"),
        (submission, "curriculum_percentile"),
        (step, "event_timestamp"),
    )
    for event, name in numbers:
        content = orjson.loads(codec.encode(event).value) | {name: number}
        with pytest.raises(DecodeError, match=f"{name}: Input should be a finite number"):
            codec.parse(event.TOPIC, orjson.dumps(content))


def test_a_record_whose_answer_cannot_be_written_is_a_dead_letter_and_other_runs_go_on(partition, tmp_path):
    async def go():
        store = ArtifactStore(str(tmp_path))
        lines = b"\n".join(orjson.dumps({"example_id": name, "inputs": {}}) for name in partition.dataset)
        dataset = store.put_bytes(lines, ".jsonl")
        log = MemoryLog(num_partitions=1)
        for run_id in ("odd", "good"):
            partition.start_run(run_id)
            partition.start_job(run_id, tasks_per_epoch=1, num_generations=2)
            (task,) = partition.start_epoch(0, run_id)
            partition.close(task, [0.0, 1.0])
        for received in partition.records:
            event = received.event
            await log.send(event.model_copy(update={"dataset": dataset}) if isinstance(event, RunStarted) else event)

        def with_long_epochs(state, received, datasets):
            sent = curate.evolve(state, received, datasets)
            return [one.model_copy(update={"epoch": 2**64}) if one.run_id == "odd" else one for one in sent]

        shell = CurateShell(log, store, service="p", evolve=with_long_epochs)
        await shell.take(Batch(0, 1, await records_of(log, "groups")))
        (letter, _) = await records_of(log, "dlq")
        assert dict(letter.headers)["__connect.errors.exception.message"].startswith(b"Integer exceeds 64-bit range")
        sent = await events_of(log, "batches", Event)
        assert [event.run_id for event in sent if isinstance(event, BatchPlanned)] == ["good"]

    asyncio.run(go())
