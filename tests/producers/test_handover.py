"""A partition of tasks changes hands: what the old owner left open is closed, and only missing members run again."""

import asyncio
import json

import pytest

from rollstream.eventlog.log import TopicPartition
from rollstream.eventlog.memory.log import MemoryLog
from rollstream.producers.group_execution import MAX_LOST
from rollstream.schemas.events import (
    GroupStarted,
    RolloutEnded,
    RolloutFailed,
    RolloutStarted,
    StepRecorded,
    TaskCancelled,
)
from tests.producers import worker_rig as r


def hanging(*attempts):
    rollouts = r.Rollouts()
    rollouts.hangs = set(attempts)
    return rollouts


def ids_of(events):
    return sorted(event.rollout_id[-5:] for event in events)


async def _has(log, kind, count, partition=0):
    return len(await r.steps(log, kind, partition)) >= count


def test_a_new_owner_fails_what_was_open_and_runs_only_what_is_missing():
    async def main():
        log = MemoryLog(num_partitions=1)
        dead = r.Process(log, rollouts=hanging((2, 0)))
        await log.send(r.task(num_rollouts=3))
        await r.wait_until(lambda: _has(log, RolloutEnded, 2))
        await dead.kill()
        async with r.Process(log, name="producer-2") as heir:
            await r.wait_until(lambda: r.all_settled(log, 1))
            await r.wait_until(lambda: _committed(heir, 1))
        assert [e.owner for e in await r.steps(log, GroupStarted)] == ["producer-1"]
        (lost,) = await r.steps(log, RolloutFailed)
        assert (lost.rollout_id[-5:], lost.cause, lost.is_final) == ("m2/a0", "producer_lost", False)
        assert heir.rollouts.calls == [(r.task().group_id, 2, 1)]
        assert ids_of(await r.steps(log, RolloutEnded)) == ["m0/a0", "m1/a0", "m2/a1"]

    asyncio.run(main())


def test_lost_producers_use_up_no_attempts_until_there_are_too_many_of_them():
    async def main(num_dead):
        log = MemoryLog(num_partitions=1)
        await log.send(r.task(num_rollouts=1, max_attempts=1))
        for number in range(num_dead):
            dead = r.Process(
                log, rollouts=hanging(*((0, attempt) for attempt in range(num_dead))), name=f"dead-{number}"
            )
            await r.wait_until(lambda count=number + 1: _has(log, RolloutStarted, count))
            await dead.kill()
        async with r.Process(log) as heir:
            await r.wait_until(lambda: r.all_settled(log, 1))
        fails = [(e.rollout_id[-2:], e.cause, e.is_final) for e in await r.steps(log, RolloutFailed)]
        return fails, heir.rollouts.calls

    fails, calls = asyncio.run(main(2))
    assert fails == [("a0", "producer_lost", False), ("a1", "producer_lost", False)]
    assert calls == [(r.task().group_id, 0, 2)]
    fails, calls = asyncio.run(main(MAX_LOST + 1))
    assert fails[-1] == (f"a{MAX_LOST}", "producer_lost", True)
    assert [is_final for _, _, is_final in fails] == MAX_LOST * [False] + [True]
    assert calls == []


def test_attempts_that_really_failed_are_counted_across_owners():
    async def main():
        log = MemoryLog(num_partitions=1)
        await log.send(r.task(num_rollouts=1, max_attempts=2))
        dead = r.Process(log, rollouts=hanging((0, 0)))
        await r.wait_until(lambda: _has(log, RolloutStarted, 1))
        await dead.kill()
        rollouts = r.Rollouts()
        rollouts.fails = {(0, 1), (0, 2), (0, 3)}
        async with r.Process(log, rollouts=rollouts):
            await r.wait_until(lambda: r.all_settled(log, 1))
        fails = [(e.rollout_id[-2:], e.cause, e.is_final) for e in await r.steps(log, RolloutFailed)]
        assert fails == [
            ("a0", "producer_lost", False),
            ("a1", "environment_error", False),
            ("a2", "environment_error", True),
        ]

    asyncio.run(main())


def test_a_settled_task_that_was_not_committed_is_not_run_again():
    async def main():
        log = MemoryLog(num_partitions=1)
        wire = r.Wire(log)
        wire.commits = False
        dead = r.Process(wire)
        await log.send(r.task())
        await r.wait_until(lambda: r.all_settled(log, 1))
        await dead.kill()
        num_steps = (await log.end_offsets("steps"))[0]
        async with r.Process(log) as heir:
            await r.wait_until(lambda: _committed(heir, 1))
        assert heir.rollouts.calls == []
        assert (await log.end_offsets("steps"))[0] == num_steps

    asyncio.run(main())


@pytest.mark.slow
def test_a_killed_owner_at_any_record_loses_and_doubles_nothing():
    async def main(num_records):
        log = MemoryLog(num_partitions=1)
        dead = r.Process(r.Wire(log, cut_after=num_records), tick_s=60)
        await log.send(r.task(num_rollouts=2))
        await log.send(r.task(1, num_rollouts=2))
        await r.wait_until(lambda: _ended_or_cut(log, dead))
        await dead.kill()
        async with r.Process(log, name="producer-2", tick_s=60) as heir:
            await r.wait_until(lambda: r.all_settled(log, 2))
            await r.wait_until(lambda: _committed(heir, 2))
        events = await r.steps(log)
        assert len({event.event_id for event in events}) == len(events)
        ends = [event.rollout_id.rsplit("/", 1)[0] for event in events if isinstance(event, RolloutEnded)]
        assert len(ends) == len(set(ends)) == 4
        begun = {event.rollout_id for event in events if isinstance(event, RolloutStarted)}
        decided = [event.rollout_id for event in events if isinstance(event, RolloutEnded | RolloutFailed)]
        assert sorted(begun) == sorted(decided)

    async def _ended_or_cut(log, dead):
        return dead.wire.is_cut or await r.all_settled(log, 2)

    for num_records in range(2 * (1 + 2 * (r.NUM_STEPS + 3)) + 1):
        asyncio.run(main(num_records))


def test_event_time_goes_on_from_the_last_record_and_not_from_the_wall_clock():
    async def main():
        log = MemoryLog(num_partitions=1)
        dead = r.Process(log, rollouts=hanging((0, 0)), wall=lambda: 1_000_000)
        await log.send(r.task())
        await r.wait_until(lambda: _has(log, RolloutEnded, 1))
        await dead.kill()
        last_ms = max(event.time_ms for event in await r.steps(log))
        async with r.Process(log, wall=lambda: 0):
            await r.wait_until(lambda: r.all_settled(log, 1))
        times = [event.time_ms for event in await r.steps(log)]
        assert times == sorted(times)
        assert 1_000_000 <= last_ms <= times[-1] < 1_060_000

    asyncio.run(main())


async def expelled(wire, **times):
    """A process that runs both rollouts of a task, each hanging in its first attempt, and is taken for dead."""
    zombie = r.Process(wire, rollouts=hanging((0, 0), (1, 0)), name="zombie", **times)
    await wire.send(r.task(num_rollouts=2))
    await r.wait_until(lambda: _has(wire, RolloutStarted, 2))
    await wire.expel()
    return zombie


def test_late_ends_by_a_zombie_change_nothing():
    async def main():
        log = MemoryLog(num_partitions=1)
        its_events = 2 + 2 * (1 + r.NUM_STEPS + 2)  # the task, the group's start, both attempts, and not one more
        zombie = await expelled(r.Wire(log, is_zombie=True, cut_after=its_events), tick_s=60)
        async with r.Process(log, name="heir") as heir:
            await r.wait_until(lambda: _has(log, RolloutFailed, 2))
            zombie.rollouts.go_on.set()
            await r.wait_until(lambda: _has(log, RolloutEnded, 4))
            await r.wait_until(lambda: r.all_settled(log, 1))
            await r.wait_until(lambda: _committed(heir, 1))
        await zombie.kill()
        assert {e.cause for e in await r.steps(log, RolloutFailed)} == {"producer_lost"}
        assert sorted(heir.rollouts.calls) == [(r.task().group_id, 0, 1), (r.task().group_id, 1, 1)]

    asyncio.run(main())


def test_a_zombie_that_goes_on_with_the_group_does_not_keep_the_owner_from_completing_it():
    async def main():
        log = MemoryLog(num_partitions=1)
        zombie = await expelled(r.Wire(log, is_zombie=True))
        async with r.Process(log, name="heir") as heir:
            await r.wait_until(lambda: _has(log, RolloutFailed, 2))
            zombie.rollouts.go_on.set()
            await r.wait_until(lambda: r.all_settled(log, 1))
            await r.wait_until(lambda: _committed(heir, 1))
        await zombie.kill()
        assert {e.cause for e in await r.steps(log, RolloutFailed)} == {"producer_lost"}
        assert {(0, 1), (1, 1)} <= {call[1:] for call in heir.rollouts.calls}

    asyncio.run(main())


def test_an_attempt_that_a_zombie_wrote_as_well_is_made_good_by_the_next():
    async def main():
        log = MemoryLog(num_partitions=1)
        task = r.task(num_rollouts=1)
        async with r.Process(log, rollouts=hanging((0, 0))) as owner:
            await log.send(task)
            await r.wait_until(lambda: _has(log, StepRecorded, 1))
            await log.send(r.step(task, 0, 0, 1, text="what the zombie's model said"), partition=0)
            owner.rollouts.go_on.set()
            await r.wait_until(lambda: r.all_settled(log, 1))
            await r.wait_until(lambda: _committed(owner, 1))
        assert owner.rollouts.calls == [(task.group_id, 0, 0), (task.group_id, 0, 1)]

    asyncio.run(main())


def test_a_group_that_a_zombie_holds_open_is_settled_by_the_owner_and_ticks_go_on_until_then():
    async def main():
        log = MemoryLog(num_partitions=1)
        task = r.task(num_rollouts=1, max_attempts=1)
        rollouts = hanging((0, 0))
        rollouts.fails = {(0, 0)}
        async with r.Process(log, rollouts=rollouts) as owner:
            await log.send(task)
            await r.wait_until(lambda: _has(log, StepRecorded, 1))
            await log.send(r.started(task, 0, 1), partition=0)
            rollouts.go_on.set()
            await r.wait_until(lambda: _committed(owner, 1))
        assert await r.all_settled(log, 1)
        assert (await r.steps(log, RolloutFailed))[-1].rollout_id[-2:] == "a1"

    asyncio.run(main())


def test_a_group_that_a_zombie_opened_first_is_settled_although_the_owner_opens_it_void():
    async def main():
        log = MemoryLog(num_partitions=1)
        task = r.task(num_rollouts=1, min_version=5)
        async with r.Process(log, name="owner") as owner:
            await log.send(task)
            await asyncio.sleep(0.01)
            other = MemoryLog(num_partitions=1)
            async with r.Process(other, rollouts=hanging((0, 0)), weights=r.Weights(5), name="zombie"):
                await other.send(task)
                await r.wait_until(lambda: _has(other, StepRecorded, 1))
            for event in await r.steps(other):
                await log.send(event, partition=0)
            await log.send(TaskCancelled(run_id=r.RUN, time_ms=1, group_id=task.group_id, cause="stopped"))
            await r.wait_until(lambda: _committed(owner, 2))
        assert await r.all_settled(log, 1)

    asyncio.run(main())


def test_rollouts_on_a_partition_that_stays_go_on_when_a_process_joins_or_leaves():
    async def main():
        log = MemoryLog(num_partitions=2)
        async with r.Process(log, rollouts=hanging((0, 0), (1, 0))) as first:
            await log.send(r.task_in(0, 2))
            await r.wait_until(lambda: _has(log, RolloutStarted, 2, 0))
            async with r.Process(log, name="producer-2") as second:
                await log.send(r.task_in(1, 2))
                await r.wait_until(lambda: r.all_settled(log, 1, 1))
                assert len(second.rollouts.calls) == 2
            await log.send(r.task_in(1, 2, 1))
            await r.wait_until(lambda: _has(log, RolloutStarted, 4, 1))
            first.rollouts.go_on.set()
            await r.wait_until(lambda: r.all_settled(log, 1, 0))
            await r.wait_until(lambda: r.all_settled(log, 2, 1))
            await r.wait_until(lambda: _committed(first, 1))
        assert await r.steps(log, RolloutFailed, 0) == []
        assert ids_of(await r.steps(log, RolloutEnded, 0)) == ["m0/a0", "m1/a0"]

    asyncio.run(main())


def test_a_partition_that_comes_back_after_another_wrote_to_it_is_read_again():
    async def main():
        log = MemoryLog(num_partitions=1)
        first = r.Process(r.Wire(log), rollouts=hanging((0, 0), (1, 0)))
        await log.send(r.task(0))
        await r.wait_until(lambda: _has(log, RolloutStarted, 2))
        await first.worker._on_revoked({TopicPartition("tasks", 0)})
        num_steps = (await log.end_offsets("steps"))[0]
        first.rollouts.go_on.set()
        await asyncio.sleep(3 * r.TICK_S)
        assert (await log.end_offsets("steps"))[0] == num_steps, "nothing is written in between"
        await log.send(r.failed(r.task(0), 0, 0, "producer_lost", is_final=False), partition=0)
        await first.worker._on_assigned({TopicPartition("tasks", 0)})
        async with first:
            await log.send(r.task(0), partition=0)
            await r.wait_until(lambda: r.all_settled(log, 1))
        assert ids_of(await r.steps(log, RolloutEnded)) == ["m0/a1", "m1/a1"]

    asyncio.run(main())


def test_partitions_move_to_a_process_that_joins_and_nothing_is_written_after_they_are_gone():
    async def main():
        log = MemoryLog(num_partitions=2)
        tasks = [r.task_in(0, 2), r.task_in(1, 2)]
        async with r.Process(log, rollouts=hanging((0, 0), (1, 0))) as first:
            for partition, task in enumerate(tasks):
                await log.send(task, partition=partition)
            await r.wait_until(lambda: _has(log, RolloutStarted, 2, 0))
            await r.wait_until(lambda: _has(log, RolloutStarted, 2, 1))
            async with r.Process(log, name="producer-2") as second:
                await r.wait_until(lambda: r.all_settled(log, 1, 1))
                first.rollouts.go_on.set()
                await r.wait_until(lambda: r.all_settled(log, 1, 0))
                assert {group_id for group_id, _, _ in second.rollouts.calls} == {tasks[1].group_id}
        lost = await r.steps(log, RolloutFailed, 1)
        assert ids_of(lost) == ["m0/a0", "m1/a0"]
        assert ids_of(await r.steps(log, RolloutEnded, 1)) == ["m0/a1", "m1/a1"]

    asyncio.run(main())


def test_a_worker_that_is_stopped_commits_what_is_settled_and_leaves_the_rest():
    async def main():
        log = MemoryLog(num_partitions=1)
        first = r.Process(log, rollouts=hanging((1, 0)))
        await log.send(r.task(0, num_rollouts=1))
        await log.send(r.task(1, num_rollouts=2))
        await r.wait_until(lambda: _has(log, RolloutEnded, 2))

        async def is_settled():
            return first.worker._owners[0].commit_point()[0] == 1

        await r.wait_until(is_settled)
        await first.stop()
        num_steps = (await log.end_offsets("steps"))[0]
        offset, metadata = await r.commit_of(first)
        assert offset == 1
        assert json.loads(metadata)["steps"] <= num_steps
        async with r.Process(log) as second:
            await r.wait_until(lambda: _committed(second, 2))
        assert second.rollouts.calls == [(r.task(1).group_id, 1, 1)]

    asyncio.run(main())


def test_a_void_group_is_not_opened_twice_by_two_owners():
    async def main():
        log = MemoryLog(num_partitions=1)
        for name in ("first", "second"):
            wire = r.Wire(log)
            wire.commits = False
            process = r.Process(wire, name=name)
            if name == "first":
                await log.send_raw("tasks", key=b"run-1/rl/e00000/t00000", value=b"{", partition=0)
            await r.wait_until(lambda: r.all_settled(log, 1))
            await asyncio.sleep(0.02)
            await process.kill()
        assert len(await r.steps(log)) == 1

    asyncio.run(main())


def test_a_settled_group_that_a_zombie_starts_again_holds_nothing_up():
    async def main():
        log = MemoryLog(num_partitions=1)
        async with r.Process(log) as first:
            await log.send(r.task())
            await r.wait_until(lambda: _committed(first, 1))
        (again,) = await r.steps(log, GroupStarted)
        await log.send(again, partition=0)
        async with r.Process(log) as second:
            await log.send(r.task(1))
            await r.wait_until(lambda: _committed(second, 2))
            end = (await log.end_offsets("steps"))[0]
            assert json.loads((await r.commit_of(second))[1])["steps"] == end
            await asyncio.sleep(3 * r.TICK_S)
            assert (await log.end_offsets("steps"))[0] == end

    asyncio.run(main())


async def _committed(process, offset):
    return (await r.commit_of(process))[0] == offset
