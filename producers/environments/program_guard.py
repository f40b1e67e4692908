"""Runs one program in a process group of its own, and ends the whole group with itself: `-m ... PARENT MEMORY_MB LINE`.

It dies with its parent (PDEATHSIG) however that ends, and imports nothing of ours but what its package does.
"""

import ctypes
import os
import resource
import signal
import sys

PR_SET_PDEATHSIG = 1
NOT_FOUND = 127


def main(arguments: list[str]) -> int:
    """The program's exit code, negative for a signal's."""
    parent, memory_mb, *program = arguments
    child = 0

    def stop(number: int, frame: object) -> None:
        _kill(child)
        os._exit(128 + number)

    signal.signal(signal.SIGTERM, stop)
    _die_with_parent(int(parent), signal.SIGTERM)
    guard = os.getpid()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    child = os.fork()
    if child == 0:
        _become(program, guard, int(memory_mb) * 1024 * 1024)
    _own_group(child)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    _, status = os.waitpid(child, 0)
    _kill(child)  # what it left running
    return os.waitstatus_to_exitcode(status)


def _become(program: list[str], guard: int, memory: int) -> None:
    """Turn this child into the program; never returns."""
    try:
        _own_group(0)
        _die_with_parent(guard, signal.SIGKILL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.execvp(program[0], program)
    except OSError as error:
        os.write(2, f"{program[0]}: {error.strerror}\n".encode())
    os._exit(NOT_FOUND)


def _own_group(process: int) -> None:
    """Done by both sides, so that it is done before either goes on."""
    try:
        os.setpgid(process, process)
    except OSError:
        return  # it is the program already, or gone


def _die_with_parent(parent: int, number: signal.Signals) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os._exit(1)


def _kill(group: int) -> None:
    if group:
        try:
            os.killpg(group, signal.SIGKILL)
        except ProcessLookupError:
            return


if __name__ == "__main__":
    found = main(sys.argv[1:])
    if found < 0:  # end as the program did
        signal.signal(-found, signal.SIG_DFL) if -found not in (signal.SIGKILL, signal.SIGSTOP) else None
        os.kill(os.getpid(), -found)
    sys.exit(found)
