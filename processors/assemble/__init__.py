"""Steps to trajectories and closed groups: a pure fold and its shell."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rollstream.processors.assemble import fold, shell, state, trajectories

__all__ = ["fold", "shell", "state", "trajectories"]
