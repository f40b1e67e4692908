"""Evaluators of the configuration as reward functions."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rollstream.producers.evaluators import table

__all__ = ["table"]
