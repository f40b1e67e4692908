"""The process between a parent and its broker: stops the broker when the parent dies for any reason.

On Linux it is the subreaper of all that the broker (or another server) starts: what a killed server leaves running
becomes the guard's own child, and is killed too. Otherwise it would keep its memory, which the next server may need.

Run by file name with `python -I -S guard.py PARENT_PID LOG COMMAND...`, so it imports the standard library only.
Its standard input is a pipe from the parent, its first line of output the broker's process id.
"""

import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType

POLL_S = 0.5
GRACE_S = 20.0
KILL_S = 3.0
"""Seconds for which the kill is repeated, for processes that start others while they are killed."""
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
MAX_LOG_BYTES = 16 * 1024 * 1024


def main(arguments: list[str]) -> int:
    """Start the command, wait until it or the parent ends, and return the command's exit status."""
    parent, log, command = int(arguments[0]), arguments[1], arguments[2:]
    asked = threading.Event()

    def ask(_number: int, _frame: FrameType | None) -> None:
        asked.set()

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, ask)
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    with open(log, "ab", buffering=0) as output:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, preexec_fn=_die_with_guard
        )
    print(child.pid, flush=True)
    while child.poll() is None and not asked.is_set() and os.getppid() == parent:
        bound_log(log)
        readable, _, _ = select.select([0], [], [], POLL_S)
        if readable:
            break
    return end(child)


def bound_log(path: str, max_bytes: int = MAX_LOG_BYTES) -> bool:
    """Copy a log that has grown too large to `PATH.1`, over the copy before it, and empty it; returns whether it was
    done. The writer has it open for appending and continues at its new end; lines written between copy and truncation
    are lost. If the disk is full there is no copy.
    """
    with suppress(OSError):
        if os.path.getsize(path) > max_bytes:
            with suppress(OSError):
                shutil.copyfile(path, f"{path}.1")
            os.truncate(path, 0)
            return True
    return False


def end(child: "subprocess.Popen[bytes]") -> int:
    """Terminate a process, then kill it and the processes that it has left running."""
    if child.poll() is None:
        child.terminate()
    try:
        return child.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        child.kill()
        return child.wait()
    finally:
        _kill_orphans()


def _kill_orphans() -> None:
    """Kill the guard's children, whose own children become the guard's by that, until none is left."""
    deadline = time.monotonic() + KILL_S
    while time.monotonic() < deadline:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                continue
        except ChildProcessError:
            return
        for path in Path("/proc/self/task").glob("*/children"):
            for pid in path.read_text().split():
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(int(pid), signal.SIGKILL)
        time.sleep(0.01)


def _die_with_guard() -> None:
    # Only the guard's main thread starts the child, and it lives as long as the guard does.
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
