"""Opponents of the newest weights: who is drawn for a task, and how an engine holds their weights."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rollstream.producers.league import draw, opponents

__all__ = ["draw", "opponents"]
