"""Processes that begin with their libraries loaded: forks of one that has imported them and done nothing else.

Importing torch and transformers is most of the start of a service with models. The fork server imports them once for
the services of a run, which share that memory, and a service that was killed goes on without importing them again. A
forked process is as good as `python -m MODULE ARGUMENTS`: it has its own standard input, log, process group, title and
exit status. It dies with the fork server, and the fork server with the process that started it.

The standard library's fork server (multiprocessing) imports the main module of its parent again in every process: a
user's script, where a trainer is called from Python.

Requests and answers are lines of JSON on the fork server's standard input and output.
"""

import base64
import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import selectors
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import setproctitle

from rollstream.harness.services.liveness import PARENT, die_with_parent
from rollstream.harness.services.optional_dependencies import skip_unused_libraries
from rollstream.schemas.errors import RollstreamError

GPU_DEVICES = ("/dev/nvidiactl", "/dev/kfd")
IS_POSSIBLE = sys.platform == "linux" and not any(map(os.path.exists, GPU_DEVICES))
"""macOS' own libraries do not work in a fork, and a library that opens a GPU while it is imported (bitsandbytes does)
leaves it unusable for forks."""
ANSWER_TIMEOUT_S = 10.0
POLL_S = 0.01
MAX_READ = 1 << 16


class ForkServerError(RollstreamError):
    """The fork server has ended, or does not answer."""


class ForkedProcess:
    """A child of the fork server, with those methods of `subprocess.Popen` that a supervisor needs."""

    def __init__(self, server: "ForkServer", pid: int) -> None:
        self._server = server
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit status, negative for a signal; None while it runs."""
        if self.returncode is None:
            self.returncode = self._server.take_status(self.pid)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal unless it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def wait(self) -> int:
        """The exit status once it has ended."""
        while (status := self.poll()) is None:
            time.sleep(POLL_S)
        return status


class ForkServer:
    """The parent's side: starts the fork server, and asks it for processes."""

    def __init__(self, modules: Sequence[str], log: Path, env: Mapping[str, str]) -> None:
        with log.open("ab") as output:
            self._process = started(modules, output, {**env, PARENT: str(os.getpid())})
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._requests, self._answers = self._process.stdin, self._process.stdout
        os.set_blocking(self._answers.fileno(), False)
        self._rest = b""
        self._is_ready = False
        self._started: list[int] = []
        """Process ids that no `fork` has returned yet."""
        self._statuses: dict[int, int] = {}
        """Exit statuses by process id, until they are taken."""

    def is_ready(self) -> bool:
        """Whether the libraries are loaded. Raises ForkServerError if it has ended."""
        self._read()
        if self._process.poll() is not None:
            raise ForkServerError(f"the fork server has ended with status {self._process.returncode}")
        return self._is_ready

    def fork(self, command: Sequence[str], stdin: bytes, log: Path) -> ForkedProcess:
        """Start `python -m` with the words of the command; returns once it has. Raises ForkServerError."""
        request = {"command": list(command), "stdin": base64.b64encode(stdin).decode(), "log": str(log)}
        deadline = time.monotonic() + ANSWER_TIMEOUT_S
        try:
            self._requests.write(json.dumps(request).encode() + b"\n")
            self._requests.flush()
        except OSError as error:
            raise ForkServerError(f"the fork server takes no requests: {error}") from error
        while not self._started:
            if time.monotonic() > deadline:
                raise ForkServerError(f"the fork server has not answered for {ANSWER_TIMEOUT_S:.0f} s")
            self.is_ready()
            select.select([self._answers], [], [], POLL_S)
        return ForkedProcess(self, self._started.pop())

    def take_status(self, pid: int) -> int | None:
        """Exit status of a process of this server, None while it runs. To be asked until it is not None."""
        has_ended = self._process.poll() is not None
        self._read()
        return self._statuses.pop(pid, -signal.SIGKILL if has_ended else None)

    def close(self) -> None:
        """End it, and kill what it has started."""
        with contextlib.suppress(OSError):
            self._requests.close()
        self._process.kill()
        self._process.wait()
        self._read()
        self._answers.close()

    def _read(self) -> None:
        while not self._answers.closed and (data := self._answers.read(MAX_READ)):
            self._rest += data
        *lines, self._rest = self._rest.split(b"\n")
        for line in lines:
            answer: dict[str, int] = json.loads(line)
            if "status" in answer:
                self._statuses[answer["pid"]] = answer["status"]
            elif "pid" in answer:
                self._started.append(answer["pid"])
            else:
                self._is_ready = True


def started(modules: Sequence[str], errors: BinaryIO, env: Mapping[str, str]) -> "subprocess.Popen[bytes]":
    """The fork server's process."""
    return subprocess.Popen(
        [sys.executable, "-m", __name__, *modules],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
        env=env,
        process_group=0,
    )


def main(modules: Sequence[str]) -> None:
    """Import the modules, then fork for every request until standard input is closed; a fork runs its command."""
    die_with_parent(os.environ)
    os.environ[PARENT] = str(os.getpid())
    answers = os.dup(1)
    os.dup2(2, 1)  # what a library prints while it is imported is no answer
    _load(modules)
    _answer(answers, {})
    request = _next_fork(answers)
    os.close(answers)
    if request is not None:
        _become(request)


def _load(modules: Sequence[str]) -> None:
    """Import the modules. One that cannot be imported is left to the process that needs it, which fails by it."""
    gc.disable()
    skip_unused_libraries()
    for module in modules:
        try:
            importlib.import_module(module)
        except Exception:  # noqa: BLE001 -- whatever a library's import raises
            traceback.print_exc()
    gc.freeze()  # a collection in a fork would write to all objects, and so copy the memory that the forks share
    gc.enable()


def _next_fork(answers: int) -> dict[str, Any] | None:
    """Serve requests. Returns one in each fork, and None in the fork server once there are no more."""
    rest = b""
    with selectors.DefaultSelector() as ready:
        ready.register(0, selectors.EVENT_READ)
        while True:
            for key, _ in ready.select():
                if key.fd:
                    ready.unregister(key.fd)
                    os.close(key.fd)
                    pid, status = os.waitpid(key.data, 0)
                    _answer(answers, {"pid": pid, "status": os.waitstatus_to_exitcode(status)})
                    continue
                data = os.read(0, MAX_READ)
                if not data:
                    return None
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    pid = os.fork()
                    if not pid:
                        for other in ready.get_map().values():
                            if other.fd:
                                os.close(other.fd)
                        return json.loads(line)
                    ready.register(os.pidfd_open(pid), selectors.EVENT_READ, pid)
                    _answer(answers, {"pid": pid})


def _answer(answers: int, content: dict[str, int]) -> None:
    os.write(answers, json.dumps(content).encode() + b"\n")


def _become(request: dict[str, Any]) -> None:
    """Be the process that was asked for; returns when its module has run."""
    os.setpgid(0, 0)
    stdin = os.memfd_create("stdin")
    with open(stdin, "wb", closefd=False) as file:
        file.write(base64.b64decode(request["stdin"]))
    os.lseek(stdin, 0, os.SEEK_SET)
    log = os.open(request["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    for given, number in ((stdin, 0), (log, 1), (log, 2)):
        os.dup2(given, number)
    os.close(stdin)
    os.close(log)
    module, *_ = sys.argv = request["command"]
    setproctitle.setproctitle(" ".join([sys.executable, "-m", *sys.argv]))
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(sys.argv[1:])
