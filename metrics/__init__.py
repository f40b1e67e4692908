"""Every topic into DuckDB: projection, SQL service, plots."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rollstream.metrics import parquet, plot, rebuild

__all__ = ["parquet", "plot", "rebuild"]
