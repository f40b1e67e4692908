"""Further tasks in place of groups that a batch cannot train on: how many, of which examples, and until when."""

import asyncio

import pytest

from rollstream.eventlog.artifacts import ArtifactStore
from rollstream.eventlog.blocking_calls import Retry
from rollstream.eventlog.memory.log import MemoryLog
from rollstream.processors.curate.shell import CurateShell
from rollstream.schemas.base import Event
from rollstream.schemas.events import (
    BatchPlanned,
    EpochSealed,
    JobStarted,
    RunEnded,
    TaskCancelled,
    TaskRequested,
    TrajectoryRejected,
)
from tests.processors.host.groups_rig import close_groups, groups_batch, run_events
from tests.rigs.steps_rig import events_of

QUICK = Retry(first_wait_s=0.01, max_wait_s=0.01)

PLAN = {"tasks_per_epoch": 3, "num_generations": 2, "num_epochs": 2, "max_refills": 2}


def tasks_in(outputs):
    return [event for event in outputs if isinstance(event, TaskRequested)]


def closed(partition, tasks, *rewards):
    """Events caused by the last of the groups."""
    outputs = []
    for task, values in zip(tasks, rewards, strict=True):
        outputs = partition.close(task, values)
    return outputs


def test_flat_groups_are_replaced_until_the_batch_is_full(partition):
    tasks = partition.start(**PLAN)
    more = tasks_in(closed(partition, tasks, [1.0, 1.0], [0.0, 1.0], [0.0, 0.0]))
    assert [(task.index, task.group_id[-6:], task.epoch) for task in more] == [(3, "t00003", 0), (4, "t00004", 0)]
    assert not {task.example_id for task in more} & {task.example_id for task in tasks}
    *_, batch, sealed = closed(partition, more, [0.0, 1.0], [1.0, 0.0])
    assert isinstance(batch, BatchPlanned)
    assert [member.group_id[-6:] for member in batch.members[::2]] == ["t00001", "t00003", "t00004"]
    assert isinstance(sealed, EpochSealed)
    assert (sealed.num_groups, sealed.zero_variance_groups, sealed.num_trained_groups) == (5, 2, 3)


def test_a_batch_is_planned_as_it_is_after_the_last_refill(partition):
    tasks = partition.start(**PLAN)
    for _ in range(2):
        tasks = tasks_in(closed(partition, tasks, *[[1.0, 1.0]] * len(tasks)))
        assert len(tasks) == 3
    *_, batch, sealed = closed(partition, tasks, [1.0, 1.0], [0.0, 1.0], [0.0, 0.0])
    assert [member.group_id[-6:] for member in batch.members] == ["t00007"] * 2
    assert sealed.num_groups == 9
    assert [task.index for task in partition.start_epoch(1)] == [0, 1, 2]


@pytest.mark.parametrize("curriculum", [{}, {"enabled": True, "initial_percentile": 1.0, "explore_share": 0.5}])
def test_a_refill_asks_for_an_example_twice_only_once_all_were_asked_for(new_partition, curriculum):
    plan = PLAN | {"tasks_per_epoch": 9, "max_refills": 4, "curriculum": curriculum}
    for num_examples in (10, 12, 14):
        partition = new_partition(num_examples)
        tasks = partition.start(**plan, revision=2)
        asked = [task.example_id for task in tasks]
        more = tasks_in(closed(partition, tasks, *[[1.0, 1.0]] * 4, *[[0.0, 1.0]] * 5))
        assert [task.index for task in more] == [9, 10, 11, 12]
        asked += [task.example_id for task in more]
        assert set(asked) == set(partition.dataset) or len(set(asked)) == 13
        repeats = [example_id for example_id in asked[9:] if asked.count(example_id) > 1]
        assert len(repeats) == len(set(repeats)) == max(0, 13 - num_examples)


@pytest.mark.parametrize(("revision", "num_more", "num_trained"), [(5, 3, 3), (4, 1, 1)])
def test_groups_that_a_rollback_made_stale_are_replaced_unless_the_plan_is_older(
    partition, revision, num_more, num_trained
):
    closed(partition, partition.start(**PLAN, revision=revision), *[[0.0, 1.0]] * 3)
    *tasks, last = tasks_in(partition.start_epoch(1))
    for task in tasks:
        partition.close(task, [0.0, 1.0], version=1)
    partition.roll_back(0)
    more = tasks_in(partition.close(last, [1.0, 1.0], version=1))
    assert [task.min_version for task in more] == [2] * num_more
    outputs = []
    for task in more:
        outputs = partition.close(task, [0.0, 1.0], version=2)
    assert outputs[-1].num_trained_groups == num_trained
    assert [one.cause for one in outputs if isinstance(one, TrajectoryRejected)] == ["stale"] * 4


def test_a_recorded_refill_of_an_earlier_plan_asks_for_what_it_did(new_partition):
    partition = new_partition(10)
    tasks = partition.start(**PLAN | {"tasks_per_epoch": 9})
    more = tasks_in(closed(partition, tasks, *[[1.0, 1.0]] * 4, *[[0.0, 1.0]] * 5))
    assert len({task.example_id for task in more}) == 1


def test_a_group_of_a_refill_that_closes_twice_changes_nothing(partition):
    tasks = partition.start(**PLAN)
    more = tasks_in(closed(partition, tasks, [1.0, 1.0], [0.0, 1.0], [0.0, 1.0]))
    assert partition.close(more[0], [0.0, 1.0])
    assert partition.close(more[0], [0.0, 1.0]) == []
    assert partition.close(tasks[0], [1.0, 1.0]) == []


def test_only_epochs_of_one_batch_whose_groups_are_judged_one_by_one_are_refilled(partition):
    for number, plan in enumerate(
        (
            {"max_refills": 0},
            {"drop_zero_variance": False},
            {"batches_per_epoch": 3, "max_staleness": 2},
        )
    ):
        partition.start_run(f"run-{number}")
        partition.start_job(f"run-{number}", **PLAN | plan)
        tasks = tasks_in(partition.start_epoch(0, f"run-{number}"))
        assert not tasks_in(closed(partition, tasks, *[[1.0, 1.0]] * 3))


def refilling(events):
    """The same run with refills of its batches."""
    return [
        event.model_copy(update={"plan": event.plan.model_copy(update={"max_refills": 1})})
        if isinstance(event, JobStarted)
        else event
        for event in events
    ]


@pytest.mark.parametrize("is_gone", [False, True])
def test_a_batch_is_refilled_after_a_restart_unless_the_dataset_is_gone(tmp_path, is_gone):
    async def go():
        log, store = MemoryLog(num_partitions=1), ArtifactStore(str(tmp_path / "artifacts"))
        await log.send_all(refilling(run_events(store)))
        before = CurateShell(log, store, service="p", retry=QUICK)
        await before.take(await groups_batch(log))
        if is_gone:
            for path in (tmp_path / "artifacts").rglob("*.jsonl"):
                path.unlink()
        shell = CurateShell(log, store, service="q", retry=QUICK)
        await shell.prepare(0, 3, before.metadata(0))
        await close_groups(log, rewards=(1.0, 1.0))
        await shell.take(await groups_batch(log, 3))
        ends = [event for event in await events_of(log, "groups", Event) if isinstance(event, RunEnded)]
        asked = [task.index for task in await events_of(log, "tasks", TaskRequested)]
        assert (asked, len(ends)) == (([0, 1], 1) if is_gone else ([0, 1, 2, 3], 0))
        if is_gone:
            await shell.take(await groups_batch(log, 5))
        found = await events_of(log, "batches", Event)
        judged = [event.trajectory_id for event in found if isinstance(event, TrajectoryRejected)]
        assert len(judged) == len(set(judged)) == 4, "each trajectory has one outcome"
        assert not [event for event in await events_of(log, "tasks", Event) if isinstance(event, TaskCancelled)]

    asyncio.run(go())
