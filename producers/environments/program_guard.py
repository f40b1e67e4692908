"""Runs one program and ends all processes that it started when it ends itself: `-m ... PARENT MEMORY_MB LINE`.

The program has a process group of its own. On Linux the guard is also the subreaper of its descendants: one that leaves
the group (`setsid`) becomes its child once its own parent has ended, and is killed too. It dies with its parent
(PDEATHSIG) however that ends, and imports nothing of rollstream but what its package does.
"""

import contextlib
import ctypes
import os
import resource
import signal
import sys
import time
from pathlib import Path

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
NOT_FOUND = 127
KILL_S = 3.0
"""Seconds for which the kill is repeated, for descendants that start others while they are killed."""


def main(arguments: list[str]) -> int:
    """The program's exit code, negative for a signal's."""
    parent, memory_mb, *program = arguments
    child = 0

    def stop(number: int, frame: object) -> None:
        _end_all(child)
        os._exit(128 + number)

    signal.signal(signal.SIGTERM, stop)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # also when it ends as the program did
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    _die_with_parent(int(parent), signal.SIGTERM)
    guard = os.getpid()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    child = os.fork()
    if child == 0:
        _become(program, guard, int(memory_mb) * 1024 * 1024)
    _own_group(child)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    ended, status = 0, 0
    while ended != child:  # others are orphans of the program's
        ended, status = os.wait()
    _end_all(child)  # what it left running
    return os.waitstatus_to_exitcode(status)


def _become(program: list[str], guard: int, memory: int) -> None:
    """Turn this child into the program; never returns."""
    try:
        _own_group(0)
        _die_with_parent(guard, signal.SIGKILL)
        for number in (signal.SIGTERM, signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)  # Python ignores the last two, and so would a shell
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        memory = _at_most(resource.getrlimit(resource.RLIMIT_DATA)[1], memory)
        resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
        os.execvp(program[0], program)
    except OSError as error:
        os.write(2, f"{program[0]}: {error.strerror}\n".encode())
    os._exit(NOT_FOUND)


def _at_most(hard: int, memory: int) -> int:
    """The limit of data for `memory` bytes under a hard limit, which may be lower but not be raised."""
    return min(memory, sys.maxsize if hard == resource.RLIM_INFINITY else hard)


def _own_group(process: int) -> None:
    """Done by both sides, so that it is done before either goes on."""
    try:
        os.setpgid(process, process)
    except OSError:
        return  # it is the program already, or gone


def _die_with_parent(parent: int, number: signal.Signals) -> None:
    _prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os._exit(1)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value)


def _end_all(group: int) -> None:
    """Kill the group and all descendants, until none is left or KILL_S are over. Elsewhere than on Linux: the group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL) if group else None
    deadline = time.monotonic() + KILL_S
    while sys.platform == "linux" and time.monotonic() < deadline:
        for process in _descendants(os.getpid()):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)
        if not _reap():
            return
        time.sleep(0.005)


def _reap() -> bool:
    """Whether a child is left, after those that have ended are taken note of."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            continue
    except ChildProcessError:
        return False
    return True


def _descendants(ancestor: int) -> list[int]:
    """Ids of an ancestor and all its descendants, from /proc; parents come before their children."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError, ValueError, IndexError):
                # pid (name) state parent: a name may hold anything
                parent = int((entry / "stat").read_text(errors="replace").rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(entry.name))
    found = [ancestor]
    for process in found:
        found += children.get(process, [])
    return found[1:]


if __name__ == "__main__":
    found = main(sys.argv[1:])
    if found < 0:  # end as the program did
        signal.signal(-found, signal.SIG_DFL) if -found not in (signal.SIGKILL, signal.SIGSTOP) else None
        os.kill(os.getpid(), -found)
    sys.exit(found)
