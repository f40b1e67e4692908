"""Free space of local disks, and detection of errors of a disk or of the network. Reads no files."""

import errno
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path
from typing import NamedTuple

from rollstream.schemas.errors import OF_DISKS, with_causes

FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
OF_NETWORK = frozenset({"ConnectionError", "TimeoutError", "TransportError", "gaierror"})
"""Names of the classes of errors of a connection: Python's, httpx's, and those of libraries above them."""
AFTER_NETWORK = "client has been closed"
"""Part of the message by which the hub's client shows that its connection failed before."""
_OF_RUST = re.compile(r"\(os error (\d+)\)")
"""The number of an error in the messages of safetensors, whose OSErrors have no `errno`."""


class Disk(NamedTuple):
    """The disk of a folder."""

    folder: Path
    """The folder as requested; it need not exist yet."""
    free_bytes: int
    total_bytes: int


@contextmanager
def writing(path: Path | str) -> Iterator[None]:
    """Have an OSError of a full disk, which has no file if it is open already, name the one that is written."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL or error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def is_full(error: BaseException | None) -> bool:
    """Whether an error or one of its causes reports a full disk or quota."""
    return any(_number_of(one) in FULL for one in with_causes(error))


def is_outage(error: BaseException) -> bool:
    """Whether an error or one of its causes reports a disk, a network or a server that may be back later.

    Libraries raise OSError of a wrong name, too. Where the hub's offline mode is on, nothing is expected back.
    """
    return any(_number_of(one) in OF_DISKS or _is_of_network(one) for one in with_causes(error))


def _number_of(error: BaseException) -> int | None:
    """The number of an error of the operating system; None for other errors."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    is_of_rust = isinstance(error, OSError) or type(error).__name__ == "SafetensorError"
    found = _OF_RUST.search(str(error)) if is_of_rust else None
    return int(found[1]) if found else None


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


def _is_of_network(error: BaseException) -> bool:
    kinds = {kind.__name__ for kind in type(error).__mro__}  # of packages that are not installed everywhere
    if "OfflineModeIsEnabled" in kinds:
        return False
    status = getattr(getattr(error, "response", None), "status_code", 0)
    is_busy = isinstance(status, int) and (
        status == HTTPStatus.TOO_MANY_REQUESTS or status >= HTTPStatus.INTERNAL_SERVER_ERROR
    )
    return is_busy or not kinds.isdisjoint(OF_NETWORK) or AFTER_NETWORK in str(error)
