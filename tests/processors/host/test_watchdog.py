"""A worker ends when it stands still with records to read, and only then."""

import asyncio
import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from rollstream.eventlog.log import TopicPartition
from rollstream.eventlog.memory.log import MemoryLog
from rollstream.processors.host.watchdog import Standstill, StandstillInAll, watch
from rollstream.schemas.errors import LogError

STEPS = TopicPartition("steps", 0)
GROUPS = TopicPartition("groups", 0)


def looks(*positions, end=10, each_s=5.0, timeout_s=10.0):
    """Stuck partitions when the position is seen at these places, one check after the other."""
    standstill = Standstill(timeout_s)
    return [standstill.observe(n * each_s, {STEPS: at}, {STEPS: end}) for n, at in enumerate(positions)]


def test_a_position_that_does_not_move_despite_lag_is_reported_after_the_timeout():
    assert looks(4, 4, 4) == [None, None, STEPS]


def test_a_slow_worker_that_moves_is_left_alone():
    assert looks(1, 1, 2, 2, 3, 3, 4) == [None] * 7


def test_a_worker_that_has_read_everything_is_left_alone():
    assert looks(10, 10, 10, 10) == [None] * 4


def test_a_partition_without_a_place_counts_only_if_there_is_something_to_read():
    assert looks(None, None, None) == [None, None, STEPS]
    assert looks(None, None, None, end=0) == [None] * 3


def test_a_partition_that_was_given_away_meanwhile_starts_afresh():
    standstill = Standstill(10.0)
    ends = {STEPS: 10}
    assert standstill.observe(0, {STEPS: 4}, ends) is None
    assert standstill.observe(5, {}, ends) is None
    assert standstill.observe(10, {STEPS: 4}, ends) is None
    assert standstill.observe(20, {STEPS: 4}, ends) == STEPS


def test_one_partition_that_moves_does_not_hide_another_that_stands():
    standstill = Standstill(10.0)
    for now in (0, 5):
        assert standstill.observe(now, {STEPS: now, GROUPS: 1}, {STEPS: 99, GROUPS: 2}) is None
    assert standstill.observe(10, {STEPS: 10, GROUPS: 1}, {STEPS: 99, GROUPS: 2}) == GROUPS


def host_of(**says) -> Any:
    """A host of one partition of `steps`, whose position is 3."""
    shell = SimpleNamespace(**{"topic": "steps", "is_waiting": lambda partition: False} | says)
    reported: dict[str, Any] = {
        "generation": 1,
        "is_flowing": True,
        "positions": lambda: {STEPS: 3},
        "shell": lambda where: shell,
    }
    return SimpleNamespace(shells={"s": shell}, check_membership=lambda: None, **reported)


def test_a_fold_that_is_folded_again_makes_progress_though_its_position_stands():
    numbers = iter(range(100))
    host = host_of(progress=lambda partition: next(numbers))
    with pytest.raises(_Over):
        asyncio.run(watch(host, _Log([*[9] * 20, _Over()]), timeout_s=0.06))


def test_a_fold_that_waits_for_the_artifact_store_is_left_alone_and_stalls_count_from_its_end():
    waits = iter([True] * 12 + [False] * 100)
    log = _Log([9] * 40)
    host = host_of(progress=lambda partition: 3, is_waiting=lambda partition: next(waits))
    with pytest.raises(LogError, match=r"steps partition 0 is stalled"):
        asyncio.run(watch(host, log, timeout_s=0.06, monotonic=ticking(0.003)))
    assert len(list(log.answers)) <= 40 - 12 - 6


class _Over(Exception):
    """The test has seen enough."""


class _Log(MemoryLog):
    """A log whose ends are answers given in advance, or errors."""

    def __init__(self, answers):
        super().__init__()
        self.answers = iter(answers)

    async def end_offsets(self, topic):
        answer = next(self.answers)
        if isinstance(answer, Exception):
            raise answer
        return {0: answer}


def test_the_watch_names_topic_partition_and_place_and_bears_a_broker_that_is_away():
    host = host_of(progress=lambda partition: 3)
    log = _Log([7, 7, 7, LogError("away")] + [9] * 20)
    with pytest.raises(LogError, match=r"steps partition 0 is stalled at offset 3 .* 9"):
        asyncio.run(watch(host, log, timeout_s=0.06, monotonic=ticking(0.003)))
    assert len(list(log.answers)) <= 20 - 6


def test_a_pause_of_the_whole_process_does_not_count_as_a_stall_of_a_partition():
    """A suspended laptop: by the clock every partition has stood still for hours when it wakes up."""
    host = host_of(progress=lambda partition: 3)
    log = _Log([7] * 8)
    clock = iter(range(0, 10**9, 36_000))  # ten hours between any two looks
    with pytest.raises(RuntimeError, match="StopIteration"):  # all answers are used up, and nothing was found stuck
        asyncio.run(watch(host, log, timeout_s=0.06, monotonic=lambda: float(next(clock))))


class _Rebalancing(SimpleNamespace):
    """A host whose partitions are assigned again and again."""

    looks = 0

    @property
    def generation(self):
        self.looks += 1
        return self.looks // 2


def test_a_rebalance_begins_the_count_from_the_start():
    steady = vars(host_of(progress=lambda partition: 3))
    host: Any = _Rebalancing(**{name: value for name, value in steady.items() if name != "generation"})
    with pytest.raises(_Over):
        asyncio.run(watch(host, _Log([*[9] * 20, _Over()]), timeout_s=0.06, monotonic=ticking(0.005)))


def test_rebalances_that_never_end_do_not_hide_a_stall():
    steady = vars(host_of(progress=lambda partition: 3))
    host: Any = _Rebalancing(**{name: value for name, value in steady.items() if name != "generation"})
    with pytest.raises(LogError, match=r"is stalled at offset 3 for 1 s in all, over rebalances, with"):
        asyncio.run(watch(host, _Log([9] * 1000), timeout_s=0.06, monotonic=ticking(0.01)))


def test_progress_between_two_rebalances_begins_the_count_in_all_from_the_start():
    numbers = itertools.count()
    steady = vars(host_of(progress=lambda partition: next(numbers) // 20))
    host: Any = _Rebalancing(**{name: value for name, value in steady.items() if name != "generation"})
    with pytest.raises(_Over):
        asyncio.run(watch(host, _Log([*[9] * 200, _Over()]), timeout_s=0.06, monotonic=ticking(0.005)))


def in_all(*looks, timeout_s=10.0):
    """Stuck partitions at checks 5 s apart: (position, progress), or None while the partition is not assigned."""
    standstill = StandstillInAll(timeout_s)
    found = []
    for state in looks:
        positions = {} if state is None else {STEPS: state[0]}
        progress = {} if state is None else {STEPS: state[1]}
        found.append(standstill.observe(5.0, positions, {STEPS: 10}, progress=progress))
    return found


def test_only_the_time_in_which_a_partition_is_assigned_counts_in_all():
    assert in_all((4, 4), None, None, (4, 4), None, (4, 4)) == [None] * 5 + [STEPS]
    assert in_all((4, 4), None, (5, 5), None, (5, 5)) == [None] * 5
    assert in_all((4, 4), (10, 10), (4, 4), (4, 4), (4, 4)) == [None] * 4 + [STEPS]


def test_a_fold_that_has_no_position_in_a_rebalance_has_made_no_progress():
    assert in_all((4, 4), (None, 0), (4, 4)) == [None, None, STEPS]
    assert in_all((None, 0), (None, 0), (None, 0)) == [None, None, STEPS]
    assert in_all((4, 4), (None, 0), (6, 6), (6, 6)) == [None] * 4
    assert in_all((None, 0), (None, 1), (None, 2), (None, 3), (None, 3)) == [None] * 5, "it reads, to find its position"


def ticking(step_s):
    """A clock that moves on by so much at each look at it."""
    return map(step_s.__mul__, itertools.count()).__next__


def test_partitions_that_are_not_fetched_during_a_rebalance_do_not_stand_still():
    host = host_of(progress=lambda partition: 3)
    host.is_flowing = False
    with pytest.raises(_Over):
        asyncio.run(watch(host, _Log([*[9] * 20, _Over()]), timeout_s=0.06, monotonic=ticking(0.02)))


def test_a_client_that_never_fetches_again_after_a_rebalance_is_a_stall():
    host = host_of(progress=lambda partition: 3)
    host.is_flowing = False
    with pytest.raises(LogError, match="is stalled"):
        asyncio.run(watch(host, _Log([9] * 1000), timeout_s=0.06, monotonic=ticking(0.5)))
