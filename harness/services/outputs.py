"""Files that a user named for a result: regular ones are replaced, others are written as they are."""

import errno
import os
import stat
from pathlib import Path

from rollstream.eventlog.disk_space import is_full
from rollstream.eventlog.files import replacing

MAX_LINKS = 40
"""Symbolic links that a path may lead through, as in Linux."""


def can_write(path: Path) -> bool:
    """Whether `write_output` can write a file, as far as that shows without a try; its folder must exist."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return os.access(os.path.dirname(os.path.realpath(path)), os.W_OK | os.X_OK)
    except OSError:
        return False
    return not stat.S_ISDIR(status.st_mode) and os.access(path, os.W_OK)


def write_output(path: Path, content: str | bytes) -> None:
    """Write a user's file whole or not at all, with the mode and the group that it has, through symbolic links.

    It is written in place where it cannot be replaced: a file of another owner, with several hard links, read-only,
    mounted alone or in a folder that is not writable, a pipe, and what is in /dev or /proc. A descriptor of this
    process, such as /dev/stdout, is written where it stands. Raises OSError, also if the folder does not exist.
    """
    data = content.encode() if isinstance(content, str) else content
    target = _end_of_links(path)
    if (number := _descriptor(target)) is not None:
        with open(number, "wb", closefd=False) as file:
            file.write(data)
        return
    if _may_replace(target):
        try:
            _replace(target, data)
        except OSError as error:
            if is_full(error):
                raise
        else:
            return
    path.write_bytes(data)


def _end_of_links(path: Path) -> Path:
    """The path that symbolic links lead to, or the first one in /proc. Raises OSError if they lead in a circle."""
    found = path
    for _ in range(MAX_LINKS):
        found = Path(os.path.realpath(found.parent), found.name)
        if found.is_relative_to("/proc") or not found.is_symlink():
            return found
        found = found.parent / os.readlink(found)
    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))


def _descriptor(path: Path) -> int | None:
    """The descriptor of this process that a path names, else None."""
    is_one = str(path.parent) in {f"/proc/{os.getpid()}/fd", "/dev/fd"} and path.name.isdecimal()
    return int(path.name) if is_one else None


def _may_replace(path: Path) -> bool:
    """Whether a file beside it could take its name with nothing else changed."""
    if path.is_relative_to("/dev") or path.is_relative_to("/proc") or not path.parent.is_dir():
        return False
    try:
        status = path.stat()
    except FileNotFoundError:
        return True
    is_own = status.st_uid == os.geteuid() and status.st_nlink == 1
    return stat.S_ISREG(status.st_mode) and is_own and os.access(path, os.W_OK)


def _replace(path: Path, data: bytes) -> None:
    """Replace a file, if there is one, by one with its mode and group."""
    status = path.stat() if path.exists() else None
    with replacing(path, is_private=status is not None) as file:
        file.write(data)
        if status is not None:
            if os.fstat(file.fileno()).st_gid != status.st_gid:
                os.fchown(file.fileno(), -1, status.st_gid)
            os.fchmod(file.fileno(), stat.S_IMODE(status.st_mode))
