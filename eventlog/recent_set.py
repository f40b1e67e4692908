"""A set of bounded size that keeps its newest entries: finds repeats that follow soon after the first."""

from collections.abc import Iterable, Iterator


class RecentSet:
    """The `limit` entries that were added last."""

    def __init__(self, limit: int, entries: Iterable[str] = ()) -> None:
        self._limit = limit
        self._entries: dict[str, None] = {}
        for entry in entries:
            self.add(entry)

    def add(self, entry: str) -> None:
        """Add an entry as the newest one and evict the oldest if there are too many."""
        self._entries.pop(entry, None)
        self._entries[entry] = None
        if len(self._entries) > self._limit:
            del self._entries[next(iter(self._entries))]

    def discard(self, entry: str) -> None:
        """Remove an entry if it is there."""
        self._entries.pop(entry, None)

    def __contains__(self, entry: object) -> bool:
        return entry in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)
