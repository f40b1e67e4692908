"""Commands of `rollstream` in processes that have its libraries loaded: importing them was half the time of whole runs.

Each is a process of its own with the command's title, signals and exit status. What it starts is started as ever, but
for the fork server of a run, which is a fork of the command and so has the libraries, too.
"""

import atexit
import functools
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TypeAlias

from rollstream.harness.cli.main import COMMANDS
from rollstream.harness.services.fork_server import ForkedProcess, ForkServer
from rollstream.harness.services.serving import LOADED_ONCE
from tests.rigs.services import forked_command

LOADED = (*LOADED_ONCE, *(f"rollstream.harness.cli.{name}" for name in {*COMMANDS.values()}))
READY_TIMEOUT_S = 120.0
NO_CONSTANTS: Mapping[str, float] = MappingProxyType({})


class ForkedCommand(ForkedProcess):
    """A command that runs, with the methods of `subprocess.Popen`."""

    def wait(self, timeout: float | None = None) -> int:
        """Raises TimeoutExpired."""
        deadline = time.monotonic() + (timeout if timeout is not None else float("inf"))
        while (status := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("rollstream", timeout or 0.0)
            time.sleep(0.02)
        return status

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


Command: TypeAlias = "subprocess.Popen[str] | ForkedCommand"


def start(
    arguments: Sequence[str],
    output: Path,
    *,
    cwd: Path,
    env: Mapping[str, str],
    errors: Path | None = None,
    constants: Mapping[str, float] = NO_CONSTANTS,
) -> ForkedCommand:
    """Start `rollstream ARGUMENTS` with exactly these variables; none that a library reads when it is imported.

    `constants`: other values for constants by their dotted names, such as intervals that a test would wait for. They
    hold in the command, not in its services.
    """
    output.touch()
    given = {
        "arguments": [*arguments],
        "cwd": str(cwd),
        "env": {**env},
        "errors": errors and str(errors),
        "constants": {**constants},
    }
    server = _server()
    process = server.fork([forked_command.__name__], json.dumps(given).encode(), output)
    return ForkedCommand(server, process.pid)


def run(
    arguments: Sequence[str],
    timeout: float,
    *,
    cwd: Path,
    env: Mapping[str, str],
    constants: Mapping[str, float] = NO_CONSTANTS,
) -> subprocess.CompletedProcess[str]:
    """The command to its end, and what it wrote. Raises TimeoutExpired."""
    with tempfile.TemporaryDirectory() as folder:
        output, errors = Path(folder, "output"), Path(folder, "errors")
        process = start(arguments, output, cwd=cwd, env=env, errors=errors, constants=constants)
        try:
            status = process.wait(timeout)
        except subprocess.TimeoutExpired as error:
            process.kill()
            raise subprocess.TimeoutExpired(error.cmd, timeout, output.read_bytes(), errors.read_bytes()) from error
        return subprocess.CompletedProcess([*arguments], status, output.read_text(), errors.read_text())


@functools.cache
def _server() -> ForkServer:
    """The fork server of this process."""
    log = Path(tempfile.mkdtemp(prefix="rollstream-tests-")) / "fork-server.log"
    server = ForkServer(LOADED, log, {**os.environ, **forked_command.AT_IMPORT})
    deadline = time.monotonic() + READY_TIMEOUT_S
    while not server.is_ready():
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.05)
    atexit.register(server.close)
    return server
