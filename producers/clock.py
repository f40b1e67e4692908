"""Event time of one steps partition, kept by its owner: the time of the last record, plus monotonic time since.

The wall clock is asked once in a partition's life, when it is empty; a pause between two owners takes no event time.
"""

import time
from collections.abc import Callable

from rollstream.eventlog.log import wall_ms


class EventClock:
    """Milliseconds of event time; never goes back."""

    def __init__(self, start_ms: int, monotonic: Callable[[], float] = time.monotonic) -> None:
        """`start_ms`: event time now; `monotonic`: seconds that never go back."""
        self._start_ms = start_ms
        self._monotonic = monotonic
        self._began_s = monotonic()

    def __call__(self) -> int:
        """Event time in milliseconds."""
        return self._start_ms + int((self._monotonic() - self._began_s) * 1000)


def start_ms(last_event_ms: int | None, wall: Callable[[], int] = wall_ms) -> int:
    """Event time at which a new owner begins: the partition's newest event time, the wall clock if it has none."""
    return wall() if last_event_ms is None else last_event_ms
