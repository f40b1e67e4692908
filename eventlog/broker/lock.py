"""The lock of a workspace's broker, which its process and the one that started it hold: once it is free, both ended."""

import fcntl
import os
import shutil
import time
from pathlib import Path

from rollstream.eventlog.broker.ports import answers
from rollstream.eventlog.broker.watch import MIN_FREE_BYTES
from rollstream.eventlog.files import read_json
from rollstream.schemas.errors import BrokerError

LOCK_PATIENCE_S = 25.0
"""Maximum seconds to wait for the broker of a process that has just died: the longest that its shutdown takes."""


def find_running(workspace: Path) -> str | None:
    """`host:port` of the running broker of a workspace; None if there is none, or it is stopping because the process
    that started it has ended."""
    status = read_json(workspace / "broker" / "broker.json")
    if not is_locked(workspace) or not _is_alive(str(status.get("pid"))) or not answers(int(status["port"])):
        return None
    return str(status["bootstrap_servers"])


def is_locked(workspace: Path) -> bool:
    """Whether a workspace's broker, or the process that starts or has started it, still runs."""
    try:
        lock = os.open(workspace / "broker" / "lock", os.O_RDWR)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False


def take_lock(workspace: Path) -> int:
    """Take the lock of a workspace's broker. Raises BrokerError if another process keeps it; OSError."""
    lock = os.open(workspace / "broker" / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    deadline = time.monotonic() + LOCK_PATIENCE_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            holder = os.pread(lock, 32, 0).decode("ascii", "replace").strip()
            if _is_alive(holder) or time.monotonic() > deadline:
                os.close(lock)
                raise BrokerError(_held(workspace, holder or "unknown")) from None
            time.sleep(0.1)
    os.ftruncate(lock, 0)
    os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
    return lock


def _held(workspace: Path, holder: str) -> str:
    """The message about a workspace that another process has locked, whose broker may have died on a full disk."""
    free_bytes = shutil.disk_usage(workspace / "broker").free
    if free_bytes < MIN_FREE_BYTES and find_running(workspace) is None:
        return (
            f"the broker of workspace {workspace}, which process {holder} started, is paused: its disk is full, "
            f"{free_bytes:,} bytes are free; free space there"
        )
    return (
        f"workspace {workspace} is in use: its broker was started by process {holder}; use or stop that broker, or "
        "give another --workspace"
    )


def _is_alive(pid: str) -> bool:
    if not pid.isdigit():
        return False
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
