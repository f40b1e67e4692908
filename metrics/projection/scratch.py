"""Folders that queries spill to: one a query, beside the metrics file, where there is room for as much as it holds."""

import glob
import os
import shutil
import tempfile
from pathlib import Path


def new_scratch(path: Path) -> Path:
    """A folder for one query on the file at `path`; elsewhere if nothing can be written beside it. Raises OSError."""
    beside = path.parent if os.access(path.parent, os.W_OK) else None
    return Path(tempfile.mkdtemp(prefix=_prefix(path), dir=beside))


def remove_left_scratch(path: Path) -> None:
    """Remove what queries of a service that was killed have spilled; only while no other has the file open."""
    for folder in path.parent.glob(f"{glob.escape(_prefix(path))}*"):
        shutil.rmtree(folder, ignore_errors=True)


def _prefix(path: Path) -> str:
    return f"{path.name}.sql-"
