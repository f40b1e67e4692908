"""Checkpoints of a model group: a learner goes on from the newest one after any stop."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rollstream.learner.checkpoints import checkpoint_files

__all__ = ["checkpoint_files"]
