"""The rollout worker on a log in memory: attempts and their limits, cancelling, dead letters, ticks and commits."""

import asyncio
import gc
import json
import warnings
from typing import Any

import pytest

from rollstream.eventlog.memory.log import MemoryLog
from rollstream.producers.attempt import record_rollout
from rollstream.schemas.errors import LogError
from rollstream.schemas.events import (
    GroupStarted,
    RolloutEnded,
    RolloutFailed,
    RolloutStarted,
    RunEnded,
    TaskCancelled,
    Tick,
)
from tests.producers import worker_rig as r


def cancelled(task):
    return TaskCancelled(run_id=task.run_id, time_ms=1, group_id=task.group_id, cause="stopped")


def test_a_task_becomes_a_started_group_and_as_many_complete_rollouts():
    async def main():
        log = MemoryLog(num_partitions=1)
        async with r.Process(log):
            await log.send(r.task(num_rollouts=3))
            await r.wait_until(lambda: r.all_settled(log, 1))
        events = await r.steps(log)
        group = events[0]
        assert isinstance(group, GroupStarted)
        assert (group.size, group.minimum, group.timeout_ms, group.owner) == (3, 1, 600_000, "producer-1")
        assert (group.example_id, group.job_id, group.agents) == ("x0", "run-1/rl", {"agent": "run-1/policy"})
        assert [type(e) for e in events].count(RolloutEnded) == 3

    asyncio.run(main())


def test_events_of_a_task_go_to_the_partition_of_its_number():
    async def main():
        log = MemoryLog(num_partitions=3)
        async with r.Process(log):
            await log.send(r.task_in(0, 3))
            await log.send(r.task_in(2, 3))
            await r.wait_until(lambda: r.all_settled(log, 1, partition=0))
            await r.wait_until(lambda: r.all_settled(log, 1, partition=2))
        assert (await log.end_offsets("steps"))[1] == 0

    asyncio.run(main())


def test_no_more_rollouts_run_at_once_than_allowed():
    async def main():
        log = MemoryLog(num_partitions=2)
        async with r.Process(log, slots=3) as process:
            for index in range(6):
                await log.send(r.task_in(index % 2, 2, index // 2))
            await r.wait_until(lambda: r.all_settled(log, 3, partition=0))
            await r.wait_until(lambda: r.all_settled(log, 3, partition=1))
        assert process.rollouts.most_running == 3

    asyncio.run(main())


def test_a_failed_attempt_is_tried_again_until_attempts_are_used_up():
    async def main():
        log = MemoryLog(num_partitions=1)
        rollouts = r.Rollouts()
        rollouts.fails = {(0, 0), (1, 0), (1, 1), (1, 2)}
        async with r.Process(log, rollouts=rollouts):
            await log.send(r.task(num_rollouts=2, max_attempts=3))
            await r.wait_until(lambda: r.all_settled(log, 1))
        ends = [e.rollout_id[-5:] for e in await r.steps(log, RolloutEnded)]
        assert ends == ["m0/a1"]
        fails = sorted((e.rollout_id[-5:], e.is_final) for e in await r.steps(log, RolloutFailed))
        assert fails == [("m0/a0", False), ("m1/a0", False), ("m1/a1", False), ("m1/a2", True)]

    asyncio.run(main())


def test_a_group_that_is_oversampled_stops_its_slow_rollouts_once_enough_are_complete():
    async def main():
        log = MemoryLog(num_partitions=1)
        rollouts = r.Rollouts()
        rollouts.hangs = {(1, 0)}
        rollouts.fails = {(2, 0)}
        async with r.Process(log, rollouts=rollouts, slots=4):
            await log.send(r.task(num_rollouts=4, enough=3))
            await r.wait_until(lambda: r.all_settled(log, 1))
            rollouts.hangs = set()
            await log.send(r.task(1))  # it begins once nothing of the other is left
            await r.wait_until(lambda: r.all_settled(log, 2))
        assert [(e.size, e.enough) for e in await r.steps(log, GroupStarted)] == [(4, 3), (2, 0)]
        ends = sorted(e.rollout_id[-12:] for e in await r.steps(log, RolloutEnded))
        assert ends[:3] == ["t00000/m0/a0", "t00000/m2/a1", "t00000/m3/a0"]
        assert len(ends) == 5
        fails = sorted((e.rollout_id[-5:], e.cause, e.is_final) for e in await r.steps(log, RolloutFailed))
        assert fails == [("m1/a0", "oversampled", True), ("m2/a0", "environment_error", False)]

    asyncio.run(main())


def test_a_task_waits_for_its_weights_before_its_group_is_started():
    async def main():
        log = MemoryLog(num_partitions=1)
        weights = r.Weights(version=1)
        async with r.Process(log, weights=weights):
            await log.send(r.task(min_version=2))
            await log.send(r.task(1, min_version=1))
            await r.wait_until(lambda: r.all_settled(log, 1))
            await asyncio.sleep(3 * r.TICK_S)
            assert [e.index for e in await r.steps(log, GroupStarted)] == [1]
            await weights.load(2)
            await r.wait_until(lambda: r.all_settled(log, 2))

    asyncio.run(main())


def test_a_task_requested_twice_is_run_once():
    async def main():
        log = MemoryLog(num_partitions=1)
        async with r.Process(log) as process:
            await log.send(r.task())
            await log.send(r.task())
            await r.wait_until(lambda: r.all_settled(log, 1))
            await log.send(r.task())
            await log.send(r.task(1))
            await r.wait_until(lambda: r.all_settled(log, 2))
        assert len(process.rollouts.calls) == 4

    asyncio.run(main())


def test_a_task_cancelled_while_it_waits_becomes_a_void_group():
    async def main():
        log = MemoryLog(num_partitions=1)
        async with r.Process(log) as process:
            task = r.task(min_version=5)
            await log.send(task)
            await log.send(cancelled(task))
            await r.wait_until(lambda: r.all_settled(log, 1))
        (group,) = await r.steps(log)
        assert isinstance(group, GroupStarted)
        assert (group.size, group.void_cause, group.example_id) == (0, "cancelled", "x0")
        assert process.rollouts.calls == []

    asyncio.run(main())


def test_a_task_cancelled_while_it_runs_fails_its_open_members_for_good():
    async def main():
        log = MemoryLog(num_partitions=1)
        rollouts = r.Rollouts()
        rollouts.hangs = {(1, 0)}
        task = r.task(num_rollouts=3)
        async with r.Process(log, rollouts=rollouts, slots=2):
            await log.send(task)
            await r.wait_until(lambda: _has(log, RolloutEnded, 2))
            await log.send(cancelled(task))
            await r.wait_until(lambda: r.all_settled(log, 1))
        (failed,) = await r.steps(log, RolloutFailed)
        assert (failed.rollout_id[-5:], failed.cause, failed.is_final) == ("m1/a0", "cancelled", True)

    asyncio.run(main())


def test_tasks_of_an_ended_run_are_settled_without_running():
    async def main():
        log = MemoryLog(num_partitions=1)
        rollouts = r.Rollouts()
        rollouts.hangs = {(0, 0), (1, 0)}
        await log.send(RunEnded(run_id="run-0", time_ms=1, cause="failed"))
        async with r.Process(log, rollouts=rollouts):
            await log.send(r.task(run_id="run-0"))
            await log.send(r.task())
            await log.send(r.task(1, min_version=9))
            await r.wait_until(lambda: _has(log, RolloutStarted, 2))
            await log.send(RunEnded(run_id=r.RUN, time_ms=1, cause="stopped"))
            await r.wait_until(lambda: r.all_settled(log, 3))
        voids = {(e.run_id, e.index) for e in await r.steps(log, GroupStarted) if e.void_cause == "run_ended"}
        assert voids == {("run-0", 0), ("run-1", 1)}
        assert [(e.cause, e.is_final) for e in await r.steps(log, RolloutFailed)] == [("cancelled", True)] * 2

    asyncio.run(main())


def test_an_undecodable_task_goes_to_the_dead_letters_and_voids_the_group_its_key_names():
    async def main():
        log = MemoryLog(num_partitions=1)
        task = r.task()
        async with r.Process(log) as process:
            await log.send_raw("tasks", key=b"run-1/rl/e00002/t00007", value=b"{broken", partition=0)
            for key in (b"no group", b"r/j/e99999999999999999999/t0", b"r/j/e" + b"9" * 5000 + b"/t0"):
                await log.send_raw("tasks", key=key, value=b"[]", partition=0)
            await log.send_raw("tasks", key=None, value=None, partition=0)
            await log.send(task)
            await log.send_raw("tasks", key=task.key.encode(), value=b"{}", partition=0)
            await r.wait_until(lambda: r.all_settled(log, 2))
            await r.wait_until(lambda: len(process.dead_letters) == 6)
            await r.wait_until(lambda: _committed(process, 7))
        assert sorted(where.offset for where, _ in process.dead_letters) == [0, 1, 2, 3, 4, 6]
        void = (await r.steps(log, GroupStarted))[0]
        assert (void.group_id, void.job_id, void.epoch, void.index) == ("run-1/rl/e00002/t00007", "run-1/rl", 2, 7)
        assert (void.size, void.void_cause) == (0, "undecodable")

    asyncio.run(main())


def test_a_task_with_an_excessive_timeout_is_refused():
    with pytest.raises(ValueError, match="group_timeout_s"):
        r.task(group_timeout_s=1e18)


class BrokenCommits(r.Wire):
    """A broker that takes no commit any more once it has seen one task."""

    is_broken = False
    is_closed = False

    async def group_reader(self, *args, **options):
        found: Any = await super().group_reader(*args, **options)
        commit, close = found.commit, found._reader.close

        async def committed(offsets, metadata=None):
            if self.is_broken:
                raise LogError("the broker is slow")
            await commit(offsets, metadata)

        async def closed():
            self.is_closed = True
            await close()

        found.commit, found.close = committed, closed
        return found


def test_a_worker_whose_last_commit_fails_leaves_its_group():
    async def main():
        log = MemoryLog(num_partitions=1)
        wire = BrokenCommits(log)
        process = r.Process(wire)
        await log.send(r.task(0, num_rollouts=1))
        await r.wait_until(lambda: _committed(process, 1))
        wire.is_broken = True
        await log.send(r.task(1, num_rollouts=1))
        with pytest.raises(LogError, match="slow"):
            await process.task
        assert wire.is_closed

    asyncio.run(main())


def test_a_task_in_the_partition_of_another_is_a_dead_letter_and_opens_no_group():
    async def main():
        log = MemoryLog(num_partitions=2)
        async with r.Process(log) as process:
            await log.send(r.task_in(1, 2), partition=0)
            await log.send_raw("tasks", key=r.task_in(1, 2, 1).key.encode(), value=b"{", partition=0)
            await log.send(r.task_in(0, 2))
            await r.wait_until(lambda: r.all_settled(log, 1))
            await r.wait_until(lambda: _committed(process, 3))
        assert [reason.split(":")[0] for _, reason in process.dead_letters] == ["wrong partition", "not UTF-8 JSON"]
        assert (await log.end_offsets("steps"))[1] == 0

    asyncio.run(main())


def test_a_task_of_an_unknown_environment_fails_all_members_and_nothing_else():
    async def main():
        log = MemoryLog(num_partitions=1)
        async with r.Process(log, rollouts=record_rollout):
            await log.send(r.task(environment="no_such_environment", max_attempts=1))
            await r.wait_until(lambda: r.all_settled(log, 1))
        fails = [(e.cause, e.is_final) for e in await r.steps(log, RolloutFailed)]
        assert fails == [("environment_error", True)] * 2

    asyncio.run(main())


def test_a_group_past_its_deadline_is_given_up():
    async def main():
        log = MemoryLog(num_partitions=1)
        rollouts = r.Rollouts()
        rollouts.hangs = {(0, 0)}
        now = [0.0]
        async with r.Process(log, rollouts=rollouts, monotonic=lambda: now[0]):
            await log.send(r.task(group_timeout_s=0.1))
            await r.wait_until(lambda: _has(log, RolloutEnded, 1))
            now[0] += 1.0
            await r.wait_until(lambda: r.all_settled(log, 1))
        (failed,) = await r.steps(log, RolloutFailed)
        (group,) = await r.steps(log, GroupStarted)
        assert (failed.rollout_id[-5:], failed.cause, failed.is_final) == ("m0/a0", "timeout", True)
        assert failed.time_ms >= group.time_ms + group.timeout_ms

    asyncio.run(main())


def test_ticks_are_written_only_while_a_group_is_open():
    async def main():
        log = MemoryLog(num_partitions=1)
        rollouts = r.Rollouts()
        rollouts.hangs = {(0, 0)}
        async with r.Process(log, rollouts=rollouts) as process:
            await asyncio.sleep(3 * r.TICK_S)
            assert await r.steps(log) == []
            await log.send(r.task())
            await r.wait_until(lambda: _has(log, Tick, 2))
            rollouts.go_on.set()
            await r.wait_until(lambda: r.all_settled(log, 1))
            await r.wait_until(lambda: _committed(process, 1))
            num_ticks = len(await r.steps(log, Tick))
            await asyncio.sleep(3 * r.TICK_S)
            assert len(await r.steps(log, Tick)) == num_ticks
        times = [e.time_ms for e in await r.steps(log)]
        assert times == sorted(times)

    asyncio.run(main())


def test_the_commit_is_the_oldest_task_in_progress_with_the_oldest_open_group_as_metadata():
    async def main():
        log = MemoryLog(num_partitions=1)
        rollouts = r.Rollouts()
        async with r.Process(log, rollouts=rollouts, tick_s=60) as process:
            await log.send(r.task(0))
            await r.wait_until(lambda: _committed(process, 1))
            end = (await log.end_offsets("steps"))[0]
            assert json.loads((await r.commit_of(process))[1])["steps"] == end
            rollouts.hangs = {(0, 0)}
            await log.send(r.task(1))
            await r.wait_until(lambda: _has(log, RolloutEnded, 3))
            rollouts.hangs = set()
            await log.send(r.task(2))
            await r.wait_until(lambda: _has(log, RolloutEnded, 5))
            await r.wait_until(lambda: _committed(process, 1))
            assert json.loads((await r.commit_of(process))[1])["steps"] == end
            rollouts.go_on.set()
            await r.wait_until(lambda: _committed(process, 3))
            assert json.loads((await r.commit_of(process))[1])["steps"] == (await log.end_offsets("steps"))[0]

    asyncio.run(main())


def test_an_error_of_a_send_ends_the_worker():
    class Refusing(r.Wire):
        async def send_raw(self, topic, **record):
            if b'"rollout_ended"' in record["value"]:
                raise OSError("the disk is full")
            return await super().send_raw(topic, **record)

    async def main():
        log = MemoryLog(num_partitions=1)
        process = r.Process(Refusing(log))
        await log.send(r.task())
        with pytest.raises(OSError, match="the disk is full"):
            await asyncio.wait_for(process.task, 30)

    asyncio.run(main())


async def _has(log, kind, count):
    return len(await r.steps(log, kind)) >= count


async def _committed(process, offset):
    return (await r.commit_of(process))[0] == offset


def test_a_worker_that_is_stopped_as_a_task_comes_leaves_no_coroutine_unawaited():
    async def main():
        log = MemoryLog(num_partitions=1)
        await log.send(r.task())
        process = r.Process(log)
        process.wire.on_records = process.task.cancel
        await asyncio.wait({process.task})
        assert process.task.cancelled()
        assert process.rollouts.calls == []

    gc.collect()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        asyncio.run(main())
        gc.collect()
    assert [str(one.message) for one in found] == []
