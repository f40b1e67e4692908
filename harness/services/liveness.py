"""The heartbeat of a service: a file that its event loop touches, read by `rollstream health`.

It shows that the event loop runs, not that the service makes progress; `rollstream status` shows lag. Its age is
measured with the monotonic clock, which all processes of a machine share, does not jump with the wall clock, and on
Linux and macOS stops while the machine is suspended. For a heartbeat of another machine, the file's date is used. A
process that this one could see, and that has ended without removing the file, is dead whatever its age. Also
kills a child when its parent dies for any reason. The child sets this up itself, so the parent needs no fork code.
Systems other than Linux only check once. A child also gives up its parent's terminal.
"""

import asyncio
import contextlib
import ctypes
import fcntl
import functools
import json
import logging
import os
import platform
import signal
import sys
import termios
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from rollstream.eventlog.files import write_whole

INTERVAL_S = 2.0
FRESH_S = 30.0
"""Older signs mean that the process is gone or stuck (a training step may hold the loop for a while)."""

logger = logging.getLogger(__name__)


class Sign(NamedTuple):
    """The newest heartbeat of a service."""

    service: str
    name: str
    pid: int
    age_s: float
    has_ended: bool = False
    """Whether its process is gone; not known of another machine or container."""

    @property
    def is_alive(self) -> bool:
        """Whether the heartbeat is recent, and its process may still run."""
        return self.age_s <= FRESH_S and not self.has_ended

    @property
    def state(self) -> str:
        """`alive`, `dead` or, if that is not known, `silent`."""
        return "dead" if self.has_ended else "alive" if self.is_alive else "silent"


async def beat(
    folder: Path, service: str, name: str, *, interval_s: float = INTERVAL_S, pid: int | None = None
) -> None:
    """Send heartbeats until cancelled, then remove the file. A failed write is logged once.

    `pid`: of the process to kill if they cease; none: this one.
    """
    path = folder / f"{name}.json"
    is_failing = False
    try:
        while True:
            try:
                _write(path, service, pid or os.getpid())
                is_failing = False
            except OSError as error:
                if not is_failing:
                    logger.warning("cannot write the heartbeat %s: %s; retrying", path, error)
                is_failing = True
            await asyncio.sleep(interval_s)
    finally:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


def read_sign(folder: Path, name: str) -> Sign | None:
    """The newest heartbeat of one service, None if there is none."""
    path = folder / f"{name}.json"
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        age_s = time.time() - path.stat().st_mtime
        by_clock_s = time.monotonic() - float(content.get("monotonic_s", "inf"))
        if content.get("boot") == _boot_id() and by_clock_s >= 0:
            age_s = by_clock_s
        pid = int(content["pid"])
        is_ours = (content.get("boot"), content.get("pids")) == (_boot_id(), _pid_namespace())
        return Sign(str(content["service"]), name, pid, max(0.0, age_s), is_ours and not _runs(pid))
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError):
        return None


def _write(path: Path, service: str, pid: int) -> None:
    """Replace the file atomically; on a full disk, overwrite the existing one with the same number of bytes."""
    now_s = f"{time.monotonic():020.3f}"
    where = {"boot": _boot_id(), "pids": _pid_namespace()}
    content = json.dumps({"service": service, "pid": pid, **where, "monotonic_s": now_s}).encode()
    try:
        write_whole(path, content, is_synced=False, is_private=False, is_alone=True)
    except OSError:
        with path.open("r+b") as there:
            there.write(content)
            there.truncate()


@functools.cache
def _boot_id() -> str:
    """Identifies the monotonic clock of a heartbeat: this machine since its boot."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return platform.node()


@functools.cache
def _pid_namespace() -> str:
    """Identifies the process ids of a heartbeat: containers of one machine have their own."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _runs(pid: int) -> bool:
    """Whether a process of this machine runs; one that its parent has yet to reap does not."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    try:
        return (
            Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[0] != "Z"
        )
    except (OSError, IndexError):
        return True


def read_signs(folder: Path) -> list[Sign]:
    """The newest heartbeat of every service of a workspace, by name."""
    found = [read_sign(folder, path.stem) for path in sorted(folder.glob("*.json"))]
    return [sign for sign in found if sign is not None]


PARENT = "ROLLSTREAM_PARENT"
"""Environment variable with the parent's process id; set for children only."""
PR_SET_PDEATHSIG = 1


def die_with_parent(env: Mapping[str, str]) -> None:
    """Die with the parent process named in the environment; exits at once if it has already died."""
    parent = env.get(PARENT)
    if parent is None:
        return
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):
        sys.exit(1)


def leave_terminal(env: Mapping[str, str]) -> None:
    """Have no controlling terminal, if the environment names a parent process.

    A supervised child is a background process group of its parent's session. Whatever asks for a password on
    `/dev/tty` would be stopped there with the whole group (SIGTTIN); without a terminal it gets an error.
    """
    if PARENT not in env:
        return
    with contextlib.suppress(OSError):  # there is no terminal
        terminal = os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY)
        try:
            fcntl.ioctl(terminal, termios.TIOCNOTTY)
        finally:
            os.close(terminal)
