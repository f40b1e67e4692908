"""The writer of a steps partition and its clock: waiting events are sent together, in order, none after a failure."""

import asyncio
from typing import Any

import pytest

from rollstream.eventlog import codec
from rollstream.eventlog.memory.log import MemoryLog
from rollstream.producers.clock import EventClock, start_ms
from rollstream.producers.steps_writer import Outbox, StepsWriter
from rollstream.schemas.errors import LogError
from rollstream.schemas.events import RolloutEnded, Tick


class SlowLog(MemoryLog):
    """Acknowledges one send each time that it is let go on."""

    def __init__(self):
        super().__init__(num_partitions=1)
        self.sends = []
        self.gate = asyncio.Semaphore(0)
        self.fails = False

    async def send_all(self, events, *, partition=None):
        self.sends.append([codec.encode(one).event.time_ms for one in events])
        await self.gate.acquire()
        if self.fails:
            raise LogError("the disk is full")
        return await super().send_all(events, partition=partition)


def tick(number):
    return codec.encode(Tick(run_id="", time_ms=number, partition=0))


def ended(number):
    fields: dict[str, Any] = {
        "group_id": "r/j/e00000/t00000",
        "rollout_id": "r/j/e00000/t00000/m0/a0",
        "digest": "0" * 64,
    }
    return codec.encode(RolloutEnded(run_id="r", time_ms=number, num_steps=1, num_rewards=0, **fields))


async def turns():
    for _ in range(5):
        await asyncio.sleep(0)


def writer_of(log):
    return StepsWriter(log, 0, EventClock(0), 0)


def test_events_of_many_attempts_that_wait_for_one_send_go_together_with_the_next_in_order():
    async def main():
        log, landed = SlowLog(), []
        writer = writer_of(log)
        one, other = (Outbox(writer, lambda event: landed.append(event.event.time_ms)) for _ in range(2))
        await one.put(tick(1))
        await turns()
        for number, outbox in ((2, other), (3, one), (4, other)):
            await outbox.put(tick(number))
        await turns()
        assert (log.sends, landed, writer.floor()) == ([[1]], [], 0)
        log.gate.release()
        await turns()
        assert (log.sends, landed, writer.floor()) == ([[1], [2, 3, 4]], [1], 1)
        log.gate.release()
        await asyncio.gather(one.acknowledged(), other.acknowledged())
        assert (landed, writer.floor(), writer.take_foreign()) == ([1, 2, 3, 4], 4, [])

    asyncio.run(main())


def test_the_last_event_of_an_attempt_is_sent_once_all_others_are_acknowledged_and_is_waited_for():
    async def main():
        log = SlowLog()
        async with Outbox(writer_of(log)) as outbox:
            await outbox.put(tick(1))
            ending = asyncio.create_task(outbox.put(ended(2)))
            await turns()
            assert log.sends == [[1]]
            log.gate.release()
            await turns()
            assert log.sends == [[1], [2]]
            assert not ending.done()
            assert outbox.terminal is None
            log.gate.release()
            await ending
            assert outbox.terminal is not None

    asyncio.run(main())


def test_events_that_are_not_sent_when_their_attempt_is_left_are_dropped_and_a_wait_for_them_fails():
    async def main():
        log = SlowLog()
        writer = writer_of(log)
        async with Outbox(writer) as outbox:
            await outbox.put(tick(1))
            await turns()
            await outbox.put(tick(2))
            waiting = asyncio.create_task(outbox.acknowledged())
            await turns()
        sending = asyncio.create_task(writer.send(tick(3)))
        given_up = asyncio.create_task(writer.send(tick(4)))
        await turns()
        given_up.cancel()
        with pytest.raises(LogError, match="has ended before its events were acknowledged"):
            await waiting
        log.gate.release()
        log.gate.release()
        assert await sending == 1
        assert log.sends == [[1], [3]]

    asyncio.run(main())


def test_a_send_that_fails_ends_all_who_wait_and_nothing_is_sent_any_more():
    async def main():
        log = SlowLog()
        writer = writer_of(log)
        one, other = Outbox(writer), Outbox(writer)
        await one.put(tick(1))
        await turns()
        await other.put(tick(2))
        waiting = [asyncio.create_task(outbox.acknowledged()) for outbox in (one, other)]
        sending = asyncio.create_task(writer.send(tick(3)))
        await turns()
        log.fails = True
        log.gate.release()
        for task in (*waiting, sending, one.put(tick(4)), writer.send(tick(5))):
            with pytest.raises(LogError, match="the disk is full"):
                await task
        assert log.sends == [[1]]

    asyncio.run(main())


def test_a_pause_lets_what_is_sent_land_and_holds_the_rest_back_while_attempts_go_on():
    async def main():
        log = SlowLog()
        writer = writer_of(log)
        outbox = Outbox(writer)
        await outbox.put(tick(1))
        await turns()
        pausing = asyncio.create_task(writer.pause())
        await outbox.put(tick(2))
        await turns()
        assert not pausing.done()
        log.gate.release()
        await pausing
        await turns()
        assert (log.sends, writer.floor()) == ([[1]], 1)
        writer.resume()
        log.gate.release()
        await outbox.acknowledged()
        assert log.sends == [[1], [2]]

    asyncio.run(main())


def test_an_offset_is_handed_over_before_anybody_sees_the_floor_pass_it():
    """Else a commit in between passes the beginning of a group that nobody knows yet."""

    async def main():
        log = MemoryLog(num_partitions=1)
        writer = writer_of(log)
        opened = []
        sending = asyncio.create_task(writer.send(tick(1), opened.append))
        while writer.floor() == 0:
            assert opened == []
            await asyncio.sleep(0)
        assert opened == [0]
        assert await sending == 0

    asyncio.run(main())


def test_a_closed_writer_sends_nothing_more_and_fails_what_waits():
    async def main():
        log = SlowLog()
        writer = writer_of(log)
        outbox = Outbox(writer)
        await outbox.put(tick(1))
        await turns()
        sending = asyncio.create_task(writer.send(tick(2)))
        await turns()
        await writer.close()
        for waiting in (sending, outbox.acknowledged(), writer.send(tick(3))):
            with pytest.raises(LogError, match="partition 0 of steps is closed here"):
                await waiting
        assert log.sends == [[1]]

    asyncio.run(main())


def test_event_time_begins_at_the_newest_event_of_the_partition():
    assert start_ms(5_000, wall=lambda: 9_000) == 5_000


def test_an_empty_partition_begins_at_the_wall_clock():
    assert start_ms(None, wall=lambda: 9_000) == 9_000


def test_event_time_moves_by_the_monotonic_clock_alone():
    now = [100.0]
    clock = EventClock(5_000, monotonic=lambda: now[0])
    assert clock() == 5_000
    now[0] += 1.2345
    assert clock() == 6_234
