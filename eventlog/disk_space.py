"""Free space of local disks, and detection of errors of a full disk. Reads no files."""

import errno
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from rollstream.schemas.errors import with_causes

FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


class Disk(NamedTuple):
    """The disk of a folder."""

    folder: Path
    """The folder as requested; it need not exist yet."""
    free_bytes: int
    total_bytes: int


def is_full(error: BaseException | None) -> bool:
    """Whether an error or one of its causes reports a full disk or quota."""
    return any(isinstance(one, OSError) and one.errno in FULL for one in with_causes(error))


def disk_of(folder: Path) -> Disk:
    """The disk of a folder, or of its nearest existing parent. Raises OSError."""
    usage = shutil.disk_usage(_existing(folder))
    return Disk(folder, usage.free, usage.total)


def disks_of(folders: Iterable[Path]) -> Iterator[Disk]:
    """The disks of several folders without duplicates, each with its first folder. Raises OSError."""
    seen: set[int] = set()
    for folder in folders:
        device = os.stat(_existing(folder)).st_dev
        if device not in seen:
            seen.add(device)
            yield disk_of(folder)


def _existing(folder: Path) -> Path:
    folder = folder.absolute()
    return next(one for one in (folder, *folder.parents) if one.exists())
