"""How many rollouts of a process run at the same time, and whose turn it is: that of the group that came first.

So a group that was started is not kept waiting by those that come after it.
"""

import asyncio
import heapq
import itertools

Slot = asyncio.Future[None]
"""Asked for; done once it is granted."""


class Slots:
    """Slots of one process, for use in one event loop."""

    def __init__(self, num_slots: int) -> None:
        self._num_free = num_slots
        self._waiting: list[tuple[int, int, Slot]] = []
        self._numbers = itertools.count()

    def next_turn(self) -> int:
        """A later place in the order than all that were given before."""
        return next(self._numbers)

    def ask(self, turn: int) -> Slot:
        """A slot, granted at once if one is free. It is to be released, granted or not."""
        slot: Slot = asyncio.get_running_loop().create_future()
        if self._num_free:
            self._num_free -= 1
            slot.set_result(None)
        else:
            heapq.heappush(self._waiting, (turn, next(self._numbers), slot))
        return slot

    def release(self, slot: Slot) -> None:
        """Give a slot to whose turn it is, or withdraw it if it was not granted."""
        if not slot.done() or slot.cancelled():
            slot.cancel()
            return
        while self._waiting:
            _, _, other = heapq.heappop(self._waiting)
            if not other.done():
                other.set_result(None)
                return
        self._num_free += 1
