"""Every topic as rows of DuckDB."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rollstream.metrics.projection import columns, connection, database, projector

__all__ = ["columns", "connection", "database", "projector"]
