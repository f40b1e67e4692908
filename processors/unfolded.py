"""Records on which a fold raises: told apart from other failures, and bounded, so that a broken fold still ends."""

from collections.abc import Callable, Container
from typing import TypeVar

from rollstream.eventlog.log import Received
from rollstream.schemas.errors import ArtifactError, FoldError

MAX_IN_A_ROW = 16
"""When so many neighbours cannot be folded, it is the fold that is broken, not the records."""

T = TypeVar("T")


def fold_one(evolve: Callable[[Received], T], received: Received) -> T:
    """What `evolve` answers. Raises FoldError from what it raises; then the state that it works on is worth nothing.

    What is no fault of the record (ArtifactError, MemoryError) is raised as it is.
    """
    try:
        return evolve(received)
    except (ArtifactError, MemoryError):
        raise
    except Exception as error:
        where = received.position
        raise FoldError(
            f"{where.topic}/{where.partition}@{where.offset} ({received.event.event_id}) cannot be folded: "
            f"{type(error).__name__}: {error}"
        ) from error


def is_broken(unfolded: Container[int], offset: int) -> bool:
    """Whether the records before `offset` could not be folded either, so many that the fold must end."""
    return all(before in unfolded for before in range(offset - MAX_IN_A_ROW, offset))
