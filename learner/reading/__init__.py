"""Reading beside a learner's events in order: the members of manifests, dead letters, and its position in the log."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rollstream.learner.reading import members

__all__ = ["members"]
