"""An exported run: Parquet files with a manifest, written and read as a log."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rollstream.replay.archive import export, log, manifest

__all__ = ["export", "log", "manifest"]
