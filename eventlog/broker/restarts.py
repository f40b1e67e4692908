"""The restart policy of processes, shared by services and the broker."""

from dataclasses import dataclass

MAX_RESTARTS = 5
"""Maximum restarts of one process without progress in between."""
FIRST_BACKOFF_S = 0.5
MAX_BACKOFF_S = 15.0


@dataclass(slots=True)
class Restarts:
    """Number of times that a process exited since the last progress."""

    first_backoff_s: float = FIRST_BACKOFF_S
    count: int = 0

    def add(self) -> float:
        """Count one more exit; returns the seconds to wait before the restart."""
        self.count += 1
        return min(MAX_BACKOFF_S, self.first_backoff_s * 2 ** (self.count - 1))

    def reset(self) -> None:
        """Record progress: earlier exits no longer count."""
        self.count = 0

    @property
    def are_too_many(self) -> bool:
        """Whether the process must not be restarted."""
        return self.count > MAX_RESTARTS
