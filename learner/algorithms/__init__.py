"""Losses, advantages and preference pairs; one file an algorithm."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rollstream.learner.algorithms import table

__all__ = ["table"]
