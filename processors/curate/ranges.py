"""A set of integers that takes constant memory while it is dense."""

from bisect import bisect_right
from dataclasses import dataclass, field


@dataclass(slots=True)
class Ranges:
    """Integers, stored as contiguous ranges."""

    bounds: list[int] = field(default_factory=list[int])
    """First number of a range, the one after its last, and so on; ascending, no two ranges touch."""

    def add(self, number: int) -> None:
        """Add a number; idempotent."""
        bounds, at = self.bounds, bisect_right(self.bounds, number)
        if at % 2:
            return
        extends = at > 0 and bounds[at - 1] == number
        meets = at < len(bounds) and bounds[at] == number + 1
        if extends and meets:
            del bounds[at - 1 : at + 1]
        elif extends:
            bounds[at - 1] = number + 1
        elif meets:
            bounds[at] = number
        else:
            bounds[at:at] = (number, number + 1)

    def __contains__(self, number: int) -> bool:
        return bisect_right(self.bounds, number) % 2 == 1

    def __bool__(self) -> bool:
        return bool(self.bounds)

    @property
    def newest(self) -> int:
        """The largest number. Raises IndexError if there is none."""
        return self.bounds[-1] - 1
