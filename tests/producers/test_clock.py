"""The clock of events: monotonic, and never behind what its partition holds."""

from rollstream.producers.clock import EventClock, start_ms


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
