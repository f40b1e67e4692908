"""Producers killed at each of their failpoints, twenty times: every member of every group comes to one complete end."""

import asyncio
import contextlib
import random
from collections import Counter

import pytest

from rollstream.eventlog.failpoints import FAILPOINTS, Killed, armed
from rollstream.eventlog.log import partition_of
from rollstream.eventlog.memory.log import MemoryLog
from rollstream.schemas.events import GroupStarted, RolloutEnded, RolloutFailed
from tests.producers import worker_rig as r

KILLS = 20
TASKS_A_LIFE = 8
TASKS = KILLS * TASKS_A_LIFE
MEMBERS = 2
PARTITIONS = 2
HAND_OVER = "producer/during-hand-over"
POINTS = [name for name in FAILPOINTS if name.startswith("producer/")]


class MortalWire(r.Wire):
    """A connection that is cut as soon as the failpoint has struck."""

    def __init__(self, log, kill):
        self._kill = kill
        self._is_cut = False
        super().__init__(log)

    @property
    def is_cut(self):
        return self._is_cut or bool(self._kill.fired)

    @is_cut.setter
    def is_cut(self, value):
        self._is_cut = value

    async def _pass(self):
        if self.is_cut:
            raise Killed("the process is gone")
        await super()._pass()


async def _end(process):
    """Die, and let the group notice, as it does when a session is over."""
    with contextlib.suppress(Killed):
        await process.kill()
    if process.wire.member is not None:
        await process.wire.expel()


async def _num_ended(log):
    return sum([len(await r.steps(log, RolloutEnded, partition)) for partition in range(PARTITIONS)])


async def _is_settled(log, num_tasks):
    wanted = Counter(partition_of(r.task(index).key, PARTITIONS) for index in range(num_tasks))
    return all([await r.all_settled(log, wanted[partition], partition) for partition in range(PARTITIONS)])


async def _life(log, number, failpoint, hit):
    """A worker until it dies; for a hand-over a second one joins it after a while, and both die."""
    processes = []
    is_hand_over = failpoint == HAND_OVER
    ended = await _num_ended(log)
    with armed(failpoint, hit + 1 if is_hand_over else hit) as kill:
        processes.append(r.Process(MortalWire(log, kill), name=f"producer-{number}", slots=4))
        try:
            if is_hand_over:
                await r.wait_until(lambda: _more_ended(log, ended + 3), 20)
                processes.append(r.Process(MortalWire(log, kill), name=f"second-{number}", slots=4))
            await r.wait_until(lambda: kill.fired, 20)
        finally:
            for process in processes:
                await _end(process)
    return len(kill.fired)


async def _more_ended(log, count):
    return await _num_ended(log) >= count


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # what a death keeps from beginning
@pytest.mark.parametrize("failpoint", POINTS)
def test_twenty_kills_at_a_failpoint_lose_no_member_and_complete_none_twice(failpoint):
    async def main():
        rng = random.Random(failpoint)
        log = MemoryLog(num_partitions=PARTITIONS)
        num_kills = 0
        for number in range(KILLS):
            first, end = number * TASKS_A_LIFE, (number + 1) * TASKS_A_LIFE
            await log.send_all([r.task(index, num_rollouts=MEMBERS) for index in range(first, end)])
            hit = rng.randint(1, 2 if failpoint == HAND_OVER else TASKS_A_LIFE)
            num_kills += await _life(log, number, failpoint, hit)
            async with r.Process(log, name=f"heir-{number}"):
                await r.wait_until(lambda: _is_settled(log, end), 30)  # noqa: B023
        assert num_kills == KILLS
        await _check(log)

    asyncio.run(main())


async def _check(log):
    found = {kind: [] for kind in (GroupStarted, RolloutEnded, RolloutFailed)}
    for partition in range(PARTITIONS):
        for kind, events in found.items():
            events += await r.steps(log, kind, partition)
    assert Counter(event.group_id for event in found[GroupStarted]) == {r.task(i).group_id: 1 for i in range(TASKS)}
    members = Counter(event.rollout_id.rpartition("/a")[0] for event in found[RolloutEnded])
    assert members == {f"{r.task(i).group_id}/m{member}": 1 for i in range(TASKS) for member in range(MEMBERS)}
    assert {event.cause for event in found[RolloutFailed]} <= {"producer_lost"}
    assert not any(event.is_final for event in found[RolloutFailed])
