"""The lock of a workspace's broker, which its process and the one that started it hold: once it is free, both ended."""

import fcntl
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from rollstream.eventlog.broker.ports import answers
from rollstream.eventlog.broker.watch import MIN_FREE_BYTES
from rollstream.eventlog.files import read_json
from rollstream.schemas.errors import BrokerError

LOCK_PATIENCE_S = 25.0
"""Maximum seconds to wait for the broker of a process that has just died: the longest that its shutdown takes."""
RETURN_S = 20.0
"""Seconds for which a run does not take over the broker of a `serve broker` that has ended: it may be restarted."""
POLL_S = 0.1
SERVED, STARTED, TAKEN_OVER = "served", "started", "taken-over"


class Holder(NamedTuple):
    """The process that has the lock, or had it last, and how it got the broker: `serve broker` started it, another
    command did, or a run took it over.
    """

    pid: str
    how: str

    @property
    def is_alive(self) -> bool:
        """Whether the process runs."""
        return _is_alive(self.pid)


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


def taken_over(workspace: Path) -> tuple[str, str] | None:
    """`host:port` of a workspace's broker and the process id of the run that took it over, if that still has it."""
    holder = _holder(workspace)
    servers = read_json(workspace / "broker" / "broker.json").get("bootstrap_servers")
    if holder.how != TAKEN_OVER or not holder.is_alive or not is_locked(workspace) or servers is None:
        return None
    return str(servers), holder.pid


def await_return(workspace: Path, pause: Callable[[float], None]) -> None:
    """Give a `serve broker` that has ended RETURN_S to take its lock again; returns at once after another command.

    Raises what `pause` raises; OSError.
    """
    deadline = time.monotonic() + RETURN_S
    while _holder(workspace).how == SERVED and not is_locked(workspace) and time.monotonic() < deadline:
        pause(POLL_S)


def take_lock(workspace: Path, how: str, pause: Callable[[float], None]) -> int:
    """Take the lock of a workspace's broker, and record `how` this process gets the broker.

    Raises BrokerError if another process keeps it, what `pause` raises while it waits for a broker that ends; OSError.
    """
    lock = os.open(workspace / "broker" / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    deadline = time.monotonic() + LOCK_PATIENCE_S
    try:
        while not _locked(lock):
            holder = _holder(workspace)
            if holder.is_alive or time.monotonic() > deadline:
                raise BrokerError(_held(workspace, holder.pid or "unknown"))
            pause(POLL_S)
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"{os.getpid()} {how}\n".encode(), 0)
    except BaseException:
        os.close(lock)
        raise
    return lock


def _locked(lock: int) -> bool:
    """Try to take the exclusive lock."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _holder(workspace: Path) -> Holder:
    """The record of the lock file; earlier versions wrote the process id only."""
    try:
        text = (workspace / "broker" / "lock").read_text(encoding="ascii", errors="replace")
    except FileNotFoundError:
        text = ""
    pid, _, how = text.strip().partition(" ")
    return Holder(pid, how)


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
