"""What a learner reads beside its events in order: the members of manifests, dead letters, how far it has read."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rollstream.learner.reading import members

__all__ = ["members"]
