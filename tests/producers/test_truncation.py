"""Positions of producers that the log does not hold: what was committed, what its metadata names, what is written; and
those of records that cannot be decoded, behind which event time is that of earlier ones.
"""

import asyncio
import re

import pytest

from rollstream.eventlog import codec
from rollstream.eventlog.log import TopicPartition
from rollstream.eventlog.memory.log import MemoryLog
from rollstream.producers import takeover
from rollstream.producers.clock import EventClock
from rollstream.producers.ended_runs import CommitMetadata
from rollstream.producers.group_execution import WorkerContext
from rollstream.producers.slots import Slots
from rollstream.producers.steps_writer import StepsWriter
from rollstream.producers.takeover import recover
from rollstream.producers.worker import GROUP, RolloutWorker
from rollstream.schemas.errors import TruncatedError
from rollstream.schemas.events import Tick
from tests.producers import worker_rig as r

TICK = Tick(run_id="", time_ms=7, partition=0, owner="p")


async def log_with(num_steps):
    log = MemoryLog(num_partitions=1)
    for _ in range(num_steps):
        await log.send(TICK, partition=0)
    return log


def worker_of(log):
    """A worker that has nothing to roll out."""
    parts = {"engine": None, "weights": r.Weights(), "rollout": r.Rollouts(), "dead_letter": None}
    return RolloutWorker(WorkerContext(log=log, slots=Slots(1), runs=frozenset(), name="p", **parts), tick_interval_s=1)


def metadata(offset):
    return {0: CommitMetadata(offset)}


@pytest.mark.parametrize(
    ("offset", "cut", "reported"),
    [
        (2, 3, "offset 2 of topic steps partition 0 is not kept: it holds 3 to 4"),
        (
            9,
            0,
            "offset 9 of topic steps partition 0 is not kept: it holds 0 to 4; the topic was truncated at its end, or",
        ),
        (2, 5, "offset 2 of topic steps partition 0 is not kept: it is empty at 5"),
    ],
)
def test_a_note_that_points_out_of_the_steps_that_are_kept_is_an_error(offset, cut, reported):
    async def go():
        log = await log_with(5)
        log.truncate(TopicPartition("steps", 0), cut)
        with pytest.raises(TruncatedError, match=re.escape(reported)):
            await recover(log, metadata(offset))

    asyncio.run(go())


def test_steps_that_are_settled_may_be_removed():
    async def go():
        log = await log_with(5)
        assert (await recover(log, metadata(5)))[0][0].last_event_ms == 7
        log.truncate(TopicPartition("steps", 0), 5)
        state, end = (await recover(log, metadata(5)))[0]
        assert (state.groups, end) == ({}, 5)

    asyncio.run(go())


def test_a_partition_that_was_made_again_under_its_owner_ends_it():
    async def go():
        writer = StepsWriter(await log_with(2), 0, EventClock(0), 2)
        assert await writer.send(codec.encode(TICK)) == 2
        made_again = StepsWriter(await log_with(0), 0, EventClock(0), 3)
        with pytest.raises(TruncatedError, match="offset 3 of topic steps partition 0 is not kept: it is empty at 0"):
            await made_again.send(codec.encode(TICK))

    asyncio.run(go())


@pytest.mark.parametrize(("committed", "cut"), [(1, 2), (9, 0)])
def test_a_committed_task_that_is_not_kept_ends_the_worker(committed, cut):
    async def go():
        log = MemoryLog(num_partitions=1)
        for _ in range(4):
            await log.send_raw("tasks", key=b"x", value=b"{}")
        member = await log.group_reader(GROUP, ["tasks"])
        while not member.assigned():
            await member.poll(timeout_s=0.01)
        await member.commit({TopicPartition("tasks", 0): committed}, {TopicPartition("tasks", 0): ""})
        await member.close()
        log.truncate(TopicPartition("tasks", 0), cut)
        worker = worker_of(log)
        with pytest.raises(TruncatedError, match=f"offset {committed} of topic tasks partition 0 is not kept"):
            await asyncio.wait_for(worker.run(), 20)

    asyncio.run(go())


async def add_undecodable(log, number):
    for _ in range(number):
        await log.send_raw("steps", key=b"k", value=b"no event", partition=0)


@pytest.mark.parametrize("num_bad", [1, 99, 100, 101, 1200])
def test_event_time_is_that_of_the_newest_event_although_no_later_record_can_be_decoded(num_bad):
    async def go():
        log = await log_with(3)
        await add_undecodable(log, num_bad)
        state, end = (await recover(log, metadata(3 + num_bad)))[0]
        assert end == 3 + num_bad
        assert state.last_event_ms == TICK.time_ms
        assert state.first_offset is None  # what is before is settled

    asyncio.run(go())


def test_event_time_is_unknown_where_no_record_is_an_event(monkeypatch):
    async def go():
        log = await log_with(1)
        await add_undecodable(log, 9)
        monkeypatch.setattr(takeover, "LOOKS_BACK", (2, 5))
        assert (await recover(log, metadata(10)))[0][0].last_event_ms is None
        log.truncate(TopicPartition("steps", 0), 6)
        assert (await recover(log, {0: None}))[0][0].last_event_ms is None

    asyncio.run(go())
