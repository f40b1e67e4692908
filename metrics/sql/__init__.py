"""SQL over the metrics, for others than the projector."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rollstream.metrics.sql import client, formats, printable, table

__all__ = ["client", "formats", "printable", "table"]
