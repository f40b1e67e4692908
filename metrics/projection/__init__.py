"""Every topic as rows of DuckDB."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rollstream.metrics.projection import database, projector

__all__ = ["database", "projector"]
