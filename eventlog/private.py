"""Folders and files that only their owner can read: a workspace, its secrets, and a process's copies of artifacts."""

import atexit
import errno
import functools
import logging
import os
import secrets
import shutil
import stat
import threading
from contextlib import suppress
from pathlib import Path
from typing import IO, NamedTuple

from rollstream.eventlog.files import own_number, write_whole
from rollstream.schemas.errors import ArtifactError, ConfigError, StoreUnavailableError

OTHERS = stat.S_IRWXG | stat.S_IRWXO
"""Permissions of everybody but the owner."""

MIN_TOKEN_CHARS = 32

logger = logging.getLogger(__name__)


def make_private(folder: Path) -> None:
    """Create a folder of mode 0700, or remove other users' permissions from an existing one and its entries.

    Raises ConfigError if that is not possible or the folder is shared, like /tmp; OSError if it cannot be created.
    """
    folder.mkdir(mode=stat.S_IRWXU, parents=True, exist_ok=True)
    before = folder.stat()
    is_home = os.path.realpath(folder) in ("/", os.path.realpath(os.path.expanduser("~")))
    if not is_home and not before.st_mode & OTHERS:
        return
    if is_home or before.st_mode & stat.S_ISVTX:
        raise ConfigError(
            f"workspace {folder} also contains files that do not belong to a workspace; give a separate folder"
        )
    with suppress(PermissionError):
        folder.chmod(stat.S_IMODE(before.st_mode) & ~OTHERS)
    if folder.stat().st_mode & OTHERS:
        raise ConfigError(
            f"workspace {folder} is accessible to other users (mode {stat.S_IMODE(before.st_mode):04o}) and cannot "
            f"be restricted; run chmod 700 {folder} as its owner, or give a folder on a file system with permissions"
        )
    logger.warning(
        "workspace %s was accessible to other users (mode %04o); its mode is now 0700",
        folder,
        stat.S_IMODE(before.st_mode),
    )
    for entry in os.scandir(folder):
        _close(entry)


def _close(entry: "os.DirEntry[str]") -> None:
    """Remove other users' permissions from an entry of a private folder; entries that cannot be changed are protected
    by the folder."""
    with suppress(OSError):
        mode = entry.stat(follow_symlinks=False).st_mode
        if mode & OTHERS and not entry.is_symlink():
            os.chmod(entry.path, stat.S_IMODE(mode) & ~OTHERS)


def read_private(path: Path) -> str | None:
    """A private file's text, None if it does not exist; removes other users' permissions. Raises OSError."""
    try:
        with path.open(encoding="utf-8") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            if mode & OTHERS:
                os.fchmod(file.fileno(), mode & ~OTHERS)
            return file.read()
    except OSError as error:
        if error.errno == errno.ENOENT:
            return None
        raise


def token_in(path: Path) -> str:
    """The random token in a private file, which is created on first use. Raises OSError."""
    if len(token := (read_private(path) or "").strip()) >= MIN_TOKEN_CHARS:
        return token
    token = secrets.token_hex(MIN_TOKEN_CHARS)
    write_whole(path, token)
    return token


_MAKING_CACHE = threading.Lock()


class _Cache(NamedTuple):
    folder: Path
    lock: IO[str]


def own_cache(temporary: Path) -> Path:
    """This process's folder for copies of remote artifacts, without those of a process before. Raises ArtifactError."""
    with _MAKING_CACHE:
        return _own_cache(temporary, os.getpid()).folder


@functools.cache
def _own_cache(temporary: Path, pid: int) -> _Cache:
    base = temporary / f"rollstream-artifacts-{os.getuid()}"
    _check_private(base)
    try:
        number, lock = own_number(base, "{}.lock")
    except OSError as error:
        raise StoreUnavailableError(
            f"artifacts cannot be copied to {base}: {error}; make room there, or set TMPDIR to another folder"
        ) from error
    folder = base / str(number)

    def leave() -> None:
        if os.getpid() == pid:  # a process that is forked from this one has another cache
            shutil.rmtree(folder, ignore_errors=True)
        lock.close()

    shutil.rmtree(folder, ignore_errors=True)
    atexit.register(leave)
    return _Cache(folder, lock)


def _check_private(folder: Path) -> None:
    """Raises ArtifactError if the cache folder in a world-writable directory is accessible to other users."""
    with suppress(FileExistsError):
        folder.mkdir(mode=stat.S_IRWXU, parents=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ArtifactError(
            f"folder {folder} is accessible to other users (its mode must be 0700); remove it, or set TMPDIR to "
            f"another folder"
        )
