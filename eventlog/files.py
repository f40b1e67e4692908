"""Atomic replacement of files, and locked updates of small ones, shared by several processes."""

import fcntl
import json
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO


@contextmanager
def replacing(path: Path, *, is_synced: bool = True, is_private: bool = True) -> Iterator[BinaryIO]:
    """A temporary file that is renamed to `path` when the block ends well: a reader finds the old file or the new one.

    Its mode is 0600, or what the process's umask leaves if `is_private` is false. `is_synced=False` skips fsync, for
    files that may be lost in a power failure. Several processes may write the same file at once; the last one wins.
    Raises OSError, and then leaves no temporary file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f"{path.name}.{secrets.token_hex(4)}.aside")
    handle = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if is_private else 0o666)
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            if is_synced:
                file.flush()
                os.fsync(file.fileno())
        os.replace(aside, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(aside)
        raise


def write_whole(path: Path, content: str | bytes, *, is_synced: bool = True, is_private: bool = True) -> None:
    """Replace a file by one with this content (text as UTF-8). As `replacing`."""
    data = content.encode() if isinstance(content, str) else content
    with replacing(path, is_synced=is_synced, is_private=is_private) as file:
        file.write(data)


def sync_folder(folder: Path) -> None:
    """Wait until the names of a folder's files are on the disk. Raises OSError."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read_json(path: Path) -> dict[str, Any]:
    """Contents of a JSON file; empty if it is missing or invalid. Raises OSError."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def update_json(path: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Apply `change` to a JSON file's content and write the result if it differs.

    A lock file serializes the updates of several processes. Raises OSError.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_name(f".{path.name}.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        known = read_json(path)
        changed = change(known)
        if changed != known:
            write_whole(path, json.dumps(changed, indent=1))
