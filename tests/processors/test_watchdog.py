"""A worker ends when it stands still with records to read, and only then."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from rollstream.eventlog.log import TopicPartition
from rollstream.eventlog.memory_log import MemoryLog
from rollstream.processors.watchdog import Standstill, watch
from rollstream.schemas.errors import LogError

STEPS = TopicPartition("steps", 0)
GROUPS = TopicPartition("groups", 0)


def looks(*positions, end=10, each_s=5.0, timeout_s=10.0):
    """What is found stuck when the position is seen at these places, one look after the other."""
    standstill = Standstill(timeout_s)
    return [standstill.observe(n * each_s, {STEPS: at}, {STEPS: end}) for n, at in enumerate(positions)]


def test_a_position_that_stands_with_lag_is_told_after_the_time_out():
    assert looks(4, 4, 4) == [None, None, STEPS]


def test_a_slow_worker_that_moves_is_left_alone():
    assert looks(1, 1, 2, 2, 3, 3, 4) == [None] * 7


def test_a_worker_that_has_read_everything_is_left_alone():
    assert looks(10, 10, 10, 10) == [None] * 4


def test_a_partition_without_a_place_counts_only_if_there_is_something_to_read():
    assert looks(None, None, None) == [None, None, STEPS]
    assert looks(None, None, None, end=0) == [None] * 3


def test_a_partition_that_was_given_away_meanwhile_begins_anew():
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
    host: Any = SimpleNamespace(shells={"s": SimpleNamespace(topic="steps")}, positions=lambda: {STEPS: 3})
    log = _Log([7, 7, 7, LogError("away")] + [9] * 20)
    with pytest.raises(LogError, match=r"steps partition 0 has stood at offset 3 .* to 9"):
        asyncio.run(watch(host, log, timeout_s=0.06))
    assert len(list(log.answers)) <= 20 - 6
