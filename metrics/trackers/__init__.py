"""Copies of a run's metrics in experiment trackers."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rollstream.metrics.trackers import service, table

__all__ = ["service", "table"]
