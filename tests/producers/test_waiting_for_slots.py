"""Waiting for a slot is not rollout time: groups begin with their first slot, and nothing of them fails unbegun."""

import asyncio

import pytest

from rollstream.eventlog.codec import encode
from rollstream.eventlog.memory.log import MemoryLog
from rollstream.processors.assemble import fold as assembly
from rollstream.producers.slots import Slots
from rollstream.producers.takeover import fold
from rollstream.schemas.events import GroupExtended, GroupStarted, RolloutEnded, RolloutFailed, RolloutStarted, Tick
from tests.producers import worker_rig as r

ROLLOUT_S = 0.4
TIMEOUT_S = 1.0
NUM_ROLLOUTS = 16


class Slow(r.Rollouts):
    """Rollouts that take ROLLOUT_S each of a clock that only they advance."""

    def __init__(self, now):
        super().__init__()
        self.now = now

    async def _play(self, task, member, attempt, is_last, emit, clock):
        await super()._play(task, member, attempt, is_last, emit, clock)
        self.now[0] += ROLLOUT_S / 2  # two at once


async def closed(log):
    """The groups that assembly closes by what a partition holds."""
    state = assembly.initial()
    return [
        closing.closed for received in await r.records(log, "steps") for closing in assembly.evolve(state, received)
    ]


def test_sixteen_rollouts_on_two_slots_all_run_whatever_the_group_timeout():
    async def main():
        log, now = MemoryLog(num_partitions=1), [0.0]
        async with r.Process(log, rollouts=Slow(now), slots=2, monotonic=lambda: now[0]):
            await log.send(r.task(num_rollouts=NUM_ROLLOUTS, group_timeout_s=TIMEOUT_S))
            await r.wait_until(lambda: r.all_settled(log, 1))
        assert await r.steps(log, RolloutFailed) == []
        (group,) = await closed(log)
        assert group.reason == "complete"
        assert [outcome.outcome for outcome in group.attempts] == ["complete"] * NUM_ROLLOUTS
        assert group.time_ms - (await r.steps(log, GroupStarted))[0].time_ms > 2 * TIMEOUT_S * 1000

    asyncio.run(main())


def test_a_producer_killed_while_members_wait_takes_no_time_from_them():
    async def main():
        log, now = MemoryLog(num_partitions=1), [0.0]
        first = r.Process(log, rollouts=Slow(now), slots=2, monotonic=lambda: now[0])
        await log.send(r.task(num_rollouts=NUM_ROLLOUTS, group_timeout_s=TIMEOUT_S))
        await r.wait_until(lambda: len(first.rollouts.calls) > NUM_ROLLOUTS // 2)
        await first.kill()
        now[0] += 3600.0
        (state,) = fold(await r.records(log, "steps")).groups.values()
        started = r.only(await r.steps(log), GroupStarted)
        assert state.deadline_ms > started.time_ms + started.timeout_ms
        async with r.Process(log, rollouts=Slow(now), slots=2, name="producer-2", monotonic=lambda: now[0]):
            await r.wait_until(lambda: r.all_settled(log, 1))
        (group,) = await closed(log)
        assert group.reason == "complete"
        assert sum(outcome.outcome == "complete" for outcome in group.attempts) == NUM_ROLLOUTS
        assert {outcome.cause for outcome in group.attempts if outcome.outcome == "failed"} <= {"producer_lost"}

    asyncio.run(main())


def test_a_rollout_that_hangs_is_timed_out_after_the_last_has_begun():
    async def main():
        log, now = MemoryLog(num_partitions=1), [0.0]
        rollouts = r.Rollouts()
        rollouts.hangs = {(0, 0)}
        async with r.Process(log, rollouts=rollouts, slots=2, monotonic=lambda: now[0]):
            await log.send(r.task(num_rollouts=6, group_timeout_s=0.5))
            await r.wait_until(lambda: r.all_ended(log, 5))
            now[0] += 60.0
            await r.wait_until(lambda: r.all_settled(log, 1))
        (failed,) = await r.steps(log, RolloutFailed)
        assert (failed.rollout_id[-5:], failed.cause) == ("m0/a0", "timeout")
        assert len(await r.steps(log, RolloutEnded)) == 5

    asyncio.run(main())


def test_a_group_begins_with_its_first_slot_and_is_not_kept_waiting_by_later_ones():
    async def main():
        log = MemoryLog(num_partitions=1)
        async with r.Process(log, slots=1):
            for index in range(3):
                await log.send(r.task(index, num_rollouts=3))
            await r.wait_until(lambda: r.all_settled(log, 3))
        order = [e.group_id[-1] for e in await r.steps(log) if isinstance(e, GroupStarted | RolloutStarted)]
        assert order == ["0"] * 4 + ["1"] * 4 + ["2"] * 4

    asyncio.run(main())


def test_groups_that_need_not_wait_are_not_extended():
    async def main():
        log = MemoryLog(num_partitions=1)
        async with r.Process(log, slots=8):
            await log.send(r.task(num_rollouts=8))
            await r.wait_until(lambda: r.all_settled(log, 1))
        assert await r.steps(log, GroupExtended) == []

    asyncio.run(main())


def test_the_deadline_moves_on_in_the_log_ahead_of_event_time_while_a_member_waits():
    async def main():
        log, now = MemoryLog(num_partitions=1), [0.0]
        rollouts = r.Rollouts()
        rollouts.hangs = {(0, 0)}
        async with r.Process(log, rollouts=rollouts, slots=1, monotonic=lambda: now[0]):
            await log.send(r.task(num_rollouts=2, group_timeout_s=0.3))
            started = r.only(await r.wait_until(lambda: r.steps(log, GroupStarted)))
            end_ms = started.time_ms + 2 * started.timeout_ms

            async def has_passed():
                now[0] += 0.005
                return any(tick.time_ms > end_ms for tick in await r.steps(log, Tick))

            await r.wait_until(has_passed)
            assert await r.steps(log, GroupExtended)
            assert await closed(log) == []
            rollouts.go_on.set()
            await r.wait_until(lambda: r.all_settled(log, 1))
        assert [group.reason for group in await closed(log)] == ["complete"]

    asyncio.run(main())


def test_a_retry_that_waits_with_little_time_left_keeps_it():
    class Late(r.Rollouts):
        async def _play(self, task, member, attempt, is_last, emit, clock):
            if task.index == 0 and attempt == 0:
                now[0] += 950.0
                await emit(encode(r.started(task, member, attempt, clock())))
                await emit(encode(r.failed(task, member, attempt, is_final=is_last, time_ms=clock())))
                return
            if task.index == 1:
                await r.wait_until(lambda: r.steps(log, GroupExtended))
            await super()._play(task, member, attempt, is_last, emit, clock)

    log, now = MemoryLog(num_partitions=1), [0.0]

    async def main():
        async with r.Process(log, rollouts=Late(), slots=1, monotonic=lambda: now[0]):
            for index in range(2):
                await log.send(r.task(index, num_rollouts=1, group_timeout_s=1000))
            await r.wait_until(lambda: r.all_settled(log, 2))
        assert [group.reason for group in await closed(log)] == ["complete"] * 2

    asyncio.run(main())


@pytest.mark.parametrize("is_granted", [True, False])
def test_a_slot_that_is_given_up_goes_to_the_next(is_granted):
    async def main():
        slots = Slots(1)
        first, second, third = (slots.ask((True, turn)) for turn in (0, 2, 1))
        assert (first.done(), second.done(), third.done()) == (True, False, False)
        slots.release(first if is_granted else third)
        if is_granted:
            assert (second.done(), third.done()) == (False, True)
            slots.release(third)
        else:
            slots.release(first)
        assert second.done()
        slots.release(second)
        assert slots.ask((True, 9)).done()

    asyncio.run(main())
