"""The policy on its device: collation, steps, optimizer, export."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rollstream.learner.model import export, loading, ranks

__all__ = ["export", "loading", "ranks"]
