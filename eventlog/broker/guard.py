"""The process between a parent and its broker: stops the broker when the parent dies for any reason.

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
from contextlib import suppress
from types import FrameType

POLL_S = 0.5
GRACE_S = 20.0
PR_SET_PDEATHSIG = 1
MAX_LOG_BYTES = 16 * 1024 * 1024


def main(arguments: list[str]) -> int:
    """Start the command, wait until it or the parent ends, and return the command's exit status."""
    parent, log, command = int(arguments[0]), arguments[1], arguments[2:]
    asked = threading.Event()

    def ask(_number: int, _frame: FrameType | None) -> None:
        asked.set()

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, ask)
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
    """Terminate a process, then kill it."""
    if child.poll() is None:
        child.terminate()
    try:
        return child.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        child.kill()
        return child.wait()


def _die_with_guard() -> None:
    # Only the guard's main thread starts the child, and it lives as long as the guard does.
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
