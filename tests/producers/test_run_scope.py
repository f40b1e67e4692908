"""Producers of a managed run: tasks of other runs on the same log stay open for whoever serves those."""

import asyncio

from rollstream.eventlog.log import partition_of
from rollstream.eventlog.memory.log import MemoryLog
from rollstream.processors.assemble import fold as assembly
from rollstream.producers import partition_owner
from rollstream.schemas.events import GroupStarted, RolloutEnded, RolloutFailed, RunEnded, TaskCancelled, Tick
from tests.producers import worker_rig as r


async def closed(log):
    """(group, why it closed) by what assembly makes of a partition."""
    state = assembly.initial()
    closings = [one.closed for received in await r.records(log, "steps") for one in assembly.evolve(state, received)]
    return {(closing.group_id, closing.reason) for closing in closings}


def test_tasks_of_another_run_are_left_for_its_own_producers():
    async def main():
        log = MemoryLog(num_partitions=1)
        theirs, ours = r.task(0, run_id="run-2"), r.task(1)
        async with r.Process(log, runs=["run-1"]) as process:
            for task in (theirs, ours):
                await log.send(task)
            await r.wait_until(lambda: r.all_settled(log, 1))
            assert {call[0] for call in process.rollouts.calls} == {ours.group_id}
        async with r.Process(log, runs=["run-2"], name="producer-2") as process:
            await r.wait_until(lambda: r.all_settled(log, 2))
            assert {call[0] for call in process.rollouts.calls} == {theirs.group_id}

            async def is_committed():
                return (await r.commit_of(process))[0] == 2

            await r.wait_until(is_committed)

    asyncio.run(main())


def test_a_started_group_of_another_run_keeps_its_time_and_its_attempts():
    async def main():
        log, now = MemoryLog(num_partitions=1), [0.0]
        rollouts = r.Rollouts()
        rollouts.hangs = {(0, 0)}
        theirs = r.task(0, run_id="run-2", group_timeout_s=60.0)
        left = r.Process(log, rollouts=rollouts, runs=["run-2"], monotonic=lambda: now[0])
        await log.send(theirs)
        await r.wait_until(lambda: r.steps(log, RolloutEnded))
        await left.kill()
        async with r.Process(log, runs=["run-1"], name="producer-2", monotonic=lambda: now[0]) as process:
            for index in range(1, 40):
                await log.send(r.task(index))
                await r.wait_until(lambda index=index: r.all_ended(log, 1 + 2 * index))
                now[0] += 8.0  # less than a tick may miss, far more than the other group's time in all
                ticks = len(process.rollouts.calls)
                await asyncio.sleep(2 * r.TICK_S)
                assert len(process.rollouts.calls) == ticks
        assert (theirs.group_id, "timeout") not in await closed(log)
        async with r.Process(log, runs=["run-2"], name="producer-3", monotonic=lambda: now[0]):
            await r.wait_until(lambda: r.all_settled(log, 40))
        assert (theirs.group_id, "complete") in await closed(log)
        assert {failed.cause for failed in await r.steps(log, RolloutFailed)} == {"producer_lost"}

    asyncio.run(main())


def test_as_many_groups_as_were_settled_behind_a_task_that_waits_are_known_to_a_new_owner(monkeypatch):
    monkeypatch.setattr(partition_owner, "MAX_SETTLED", 2)

    async def main():
        log = MemoryLog(num_partitions=1)
        await log.send(r.task(0, run_id="run-1"))
        async with r.Process(log, runs=["run-2"]):
            for index in range(6):
                await log.send(r.task(index, run_id="run-2", num_rollouts=1))
            await r.wait_until(lambda: r.all_settled(log, 6))
        async with r.Process(log, runs=["run-2"], name="producer-2") as process:
            await log.send(r.task(6, run_id="run-2", num_rollouts=1))
            await r.wait_until(lambda: r.all_settled(log, 7))
            assert [call[0] for call in process.rollouts.calls] == [r.task(6, run_id="run-2").group_id]

    asyncio.run(main())


class SlowExtensions:
    """A log whose acknowledgements of extensions are slow, so that a rebalance comes in between."""

    def __init__(self, log):
        self._log = log

    def __getattr__(self, name):
        return getattr(self._log, name)

    async def send_raw(self, topic, **record):
        if b'"group_extended"' in record["value"]:
            await asyncio.sleep(0.3)
        return await self._log.send_raw(topic, **record)


def test_event_time_goes_on_in_a_partition_that_stays_when_one_is_given_away_in_mid_extension():
    async def main():
        log = MemoryLog(num_partitions=2)
        for partition in (0, 1):
            for nth in (0, 1):
                await log.send(theirs := r.task_in(partition, 2, nth, group_timeout_s=30))
                await log.send(started_by_another(theirs), partition=partition)
        rollouts, others = r.Rollouts(), r.Rollouts()
        rollouts.hangs, others.hangs = {(0, 0)}, {(0, 0), (0, 1)}
        for partition in (0, 1):
            found = (r.task(index, run_id="run-2", num_rollouts=1, group_timeout_s=600) for index in range(99))
            await log.send(next(task for task in found if partition_of(task.key, 2) == partition))
        async with r.Process(r.Wire(SlowExtensions(log)), rollouts=rollouts, runs=["run-2"]) as process:
            await r.wait_until(lambda: has_begun(rollouts, 2))
            await asyncio.sleep(0.1)  # an extension is on its way
            async with r.Process(r.Wire(log), rollouts=others, runs=["run-2"], name="producer-2") as other:
                await r.wait_until(lambda: owns_one(other))
                (kept,) = process.worker._owners
                for _ in range(2):
                    count = await num_ticks(log, kept)
                    await r.wait_until(lambda count=count: more_ticks(log, kept, count))
                rollouts.go_on.set()
                others.go_on.set()

    asyncio.run(main())


def started_by_another(task):
    return GroupStarted(
        run_id=task.run_id,
        time_ms=1,
        group_id=task.group_id,
        example_id="x",
        job_id=task.job_id,
        epoch=0,
        index=task.index,
        size=2,
        minimum=1,
        timeout_ms=100,
        seed=1,
        agents=task.settings.agents,
    )


async def has_begun(rollouts, count):
    return rollouts.num_running == count


async def owns_one(process):
    return len(process.worker._owners) == 1


async def num_ticks(log, partition):
    return len(await r.steps(log, Tick, partition))


async def more_ticks(log, partition, count):
    return await num_ticks(log, partition) > count


def test_tasks_of_another_run_are_settled_once_it_has_ended_or_they_are_cancelled():
    async def main():
        log = MemoryLog(num_partitions=1)
        theirs = [r.task(index, run_id=run) for index, run in enumerate(("run-2", "run-3"))]
        async with r.Process(log, runs=["run-1"]) as process:
            for task in theirs:
                await log.send(task)
            await log.send(TaskCancelled(run_id="run-3", time_ms=1, group_id=theirs[1].group_id, cause="stopped"))
            await r.wait_until(lambda: r.all_settled(log, 1))
            await log.send(RunEnded(run_id="run-2", time_ms=1, cause="stopped"))
            await r.wait_until(lambda: r.all_settled(log, 2))
            assert process.rollouts.calls == []
        voids = [(group.run_id, group.void_cause) for group in await r.steps(log, GroupStarted)]
        assert voids == [("run-3", "cancelled"), ("run-2", "run_ended")]

    asyncio.run(main())


def test_groups_settled_behind_a_waiting_task_are_not_run_again():
    async def main():
        log = MemoryLog(num_partitions=1)
        weights = r.Weights(version=0)
        first = r.Process(log, weights=weights)
        await log.send(r.task(0, min_version=1))
        await log.send(r.task(1))
        await r.wait_until(lambda: r.all_settled(log, 1))
        await first.stop()
        await weights.load(1)
        async with r.Process(log, weights=weights, name="producer-2") as second:
            await r.wait_until(lambda: r.all_settled(log, 2))
            await log.send(r.task(2))
            await r.wait_until(lambda: r.all_settled(log, 3))
            assert {call[0][-1] for call in second.rollouts.calls} == {"0", "2"}

    asyncio.run(main())
