"""Finding the processes of a command that goes on, and waiting until it has come so far."""

import time
from typing import Any

import psutil

from tests.rigs.services.forked_commands import Command


def child(command: Command, words: tuple[str, ...]) -> psutil.Process | None:
    """The descendant whose command line holds all the words."""
    for process in psutil.Process(command.pid).children(recursive=True):
        try:
            line = " ".join(process.cmdline()).split()  # of a fork, it is one string
        except psutil.NoSuchProcess:
            continue
        if all(word in line for word in words):
            return process
    return None


def wait_versions(project: Any, command: Command, count: int, *, timeout_s: float = 120) -> None:
    """Until so many weight versions are published."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        assert command.poll() is None, project.output() + project.logs()
        if versions_loaded(project) > count:
            return
        time.sleep(0.05)
    raise AssertionError(f"no {count} versions\n{project.output()}\n{project.logs()}")


def versions_loaded(project: Any) -> int:
    """Number of versions that an engine of the first producers process has loaded so far."""
    log = project.workspace / "logs" / "producers-1.log"
    return log.read_text().count(" loaded model_group=") if log.exists() else 0


def kill_at(project: Any, command: Command, count: int, name: str) -> None:
    """Kill the process whose command line has `name`, by SIGKILL, once so many weight versions are published."""
    wait_versions(project, command, count)
    victim = child(command, (name,))
    assert victim is not None, name
    victim.kill()
