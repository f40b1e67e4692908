"""Processes that begin with their libraries loaded: forks of one that has imported them and done nothing else.

Importing torch and transformers is most of the start of a service with models. The fork server imports them once for
the services of a run, which share that memory, and a service that was killed goes on without importing them again. A
forked process is as good as `python -m MODULE ARGUMENTS`: it has its own standard input, log, process group, title and
exit status. It dies with the fork server, and the fork server with the process that started it.

The standard library's fork server (multiprocessing) imports the main module of its parent again in every process: a
user's script, where a trainer is called from Python.

Requests and answers are lines of JSON on a socket, which is the fork server's standard input.
"""

import base64
import contextlib
import fcntl
import functools
import gc
import importlib
import json
import logging
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import setproctitle

from rollstream.eventlog.broker.guard import bound_log
from rollstream.harness.services.liveness import PARENT, die_with_parent
from rollstream.harness.services.optional_dependencies import skip_unused_libraries
from rollstream.schemas.errors import RollstreamError

GPUS = ("/dev/nvidiactl", "/proc/driver/nvidia/version", "/dev/dxg", "/dev/nvhost-ctrl", "/dev/kfd")
IS_POSSIBLE = sys.platform == "linux" and not any(map(os.path.exists, GPUS))
"""macOS' own libraries do not work in a fork, and a library that opens a GPU while it is imported (bitsandbytes does)
leaves it unusable for forks."""
LOAD_TIMEOUT_S = 300.0
ANSWER_TIMEOUT_S = 10.0
POLL_S = 0.01
MAX_READ = 1 << 16
IGNORED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals for all processes of a run, on which its services end in order; the fork server ends after them."""

logger = logging.getLogger(__name__)


class ForkServerError(RollstreamError):
    """The fork server has ended, does not answer, or cannot fork."""


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
        """SIGKILL. Ends the fork server if that does not report the end in time."""
        self.send_signal(signal.SIGKILL)
        deadline = time.monotonic() + ANSWER_TIMEOUT_S
        while self.poll() is None:
            if time.monotonic() > deadline:
                self._server.close()
            time.sleep(POLL_S)

    def wait(self) -> int:
        """The exit status once it has ended."""
        while (status := self.poll()) is None:
            time.sleep(POLL_S)
        return status


class ForkServer:
    """The parent's side: starts the fork server, and asks it for processes."""

    def __init__(self, modules: Sequence[str], log: Path, env: Mapping[str, str]) -> None:
        """Raises ForkServerError if it cannot be started."""
        self.log = log
        self._socket, its_socket = socket.socketpair()
        try:
            bound_log(str(log))
            with log.open("ab") as output:
                self._process = started(modules, its_socket, output, {**env, PARENT: str(os.getpid())})
        except OSError as error:
            self._socket.close()
            raise ForkServerError(f"the fork server cannot be started: {error}") from error
        finally:
            its_socket.close()
        self._socket.setblocking(False)
        self._ready_by = time.monotonic() + LOAD_TIMEOUT_S
        self._rest = b""
        self._is_ready = False
        self._answer: dict[str, Any] | None = None
        self._statuses: dict[int, int] = {}
        """Exit statuses by process id, until they are taken."""

    @property
    def is_closed(self) -> bool:
        """Whether it is closed, by its owner or because it did not answer."""
        return self._socket.fileno() < 0

    def is_ready(self) -> bool:
        """Whether the libraries are loaded. Raises ForkServerError if it has ended, or takes too long."""
        self._read()
        if self._process.poll() is not None:
            self._fail(f"the fork server has ended with status {self._process.returncode}")
        if not self._is_ready and time.monotonic() > self._ready_by:
            self._fail(f"the fork server has not loaded its libraries in {LOAD_TIMEOUT_S:.0f} s")
        return self._is_ready

    def fork(self, command: Sequence[str], stdin: bytes, log: Path) -> ForkedProcess:
        """Start `python -m` with the words of the command; returns once it has.

        Raises ForkServerError; unless it could not fork, it is closed then.
        """
        request = {"command": list(command), "stdin": base64.b64encode(stdin).decode(), "log": str(log.absolute())}
        deadline = time.monotonic() + ANSWER_TIMEOUT_S
        try:
            self._socket.settimeout(ANSWER_TIMEOUT_S)
            self._socket.sendall(json.dumps(request).encode() + b"\n")
            self._socket.setblocking(False)
        except OSError as error:
            self._fail(f"the fork server takes no requests: {error}")
        self._answer = None
        while self._answer is None:
            if time.monotonic() > deadline:
                self._fail(f"the fork server has not answered for {ANSWER_TIMEOUT_S:.0f} s")
            self.is_ready()
            time.sleep(POLL_S)
        if "error" in self._answer:
            raise ForkServerError(f"the fork server cannot fork: {self._answer['error']}")
        return ForkedProcess(self, self._answer["pid"])

    def take_status(self, pid: int) -> int | None:
        """Exit status of a process of this server, None while it runs. To be asked until it is not None."""
        has_ended = self._process.poll() is not None
        self._read()
        return self._statuses.pop(pid, -signal.SIGKILL if has_ended else None)

    def close(self) -> None:
        """End it, and kill what it has started. Closing twice changes nothing."""
        self._process.kill()
        self._process.wait()
        self._read()
        self._socket.close()

    def _fail(self, message: str) -> NoReturn:
        """Whatever it would still start could be there twice."""
        self.close()
        raise ForkServerError(message)

    def _read(self) -> None:
        with contextlib.suppress(OSError):  # nothing to read, or closed
            while data := self._socket.recv(MAX_READ):
                self._rest += data
        *lines, self._rest = self._rest.split(b"\n")
        for line in lines:
            answer: dict[str, Any] = json.loads(line)
            if "status" in answer:
                self._statuses[answer["pid"]] = answer["status"]
            elif answer:
                self._answer = answer
            else:
                self._is_ready = True


def start_where_possible(modules: Sequence[str], logs: Path, env: Mapping[str, str]) -> ForkServer | None:
    """A fork server with its log in a folder; None where there can be none."""
    if not IS_POSSIBLE:
        return None
    logs.mkdir(parents=True, exist_ok=True)
    try:
        return ForkServer(modules, logs / "fork-server.log", env)
    except ForkServerError as error:
        logger.warning("%s; services import their libraries themselves", error)
        return None


def started(
    modules: Sequence[str], requests: socket.socket, output: BinaryIO, env: Mapping[str, str]
) -> "subprocess.Popen[bytes]":
    """The fork server's process."""
    return subprocess.Popen(
        [sys.executable, "-m", __name__, *modules],
        stdin=requests.fileno(),
        stdout=output,
        stderr=output,
        env=env,
        process_group=0,
    )


def main(modules: Sequence[str]) -> None:
    """Import the modules, then fork for every request until standard input is closed; a fork runs its command."""
    handlers = {number: signal.signal(number, signal.SIG_IGN) for number in IGNORED}
    die_with_parent(os.environ)
    os.environ[PARENT] = str(os.getpid())
    _load(modules)
    _answer({})
    request = _next_fork()
    if request is not None:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        _become(request)


def _load(modules: Sequence[str]) -> None:
    """Import the modules. One that cannot be imported is left to the process that needs it, which fails by it."""
    gc.disable()
    for load in (skip_unused_libraries, *(functools.partial(importlib.import_module, module) for module in modules)):
        try:
            load()
        except Exception:  # noqa: BLE001 -- whatever a library's import raises
            traceback.print_exc()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        sys.exit("a library has opened the GPU while it was imported")
    sys.stdout.flush()  # else every fork would write it, too
    gc.freeze()  # a collection in a fork would write to all objects, and so copy the memory that the forks share
    gc.enable()


def _next_fork() -> dict[str, Any] | None:
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
                    _answer({"pid": pid, "status": os.waitstatus_to_exitcode(status)})
                    continue
                data = os.read(0, MAX_READ)
                if not data:
                    return None
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    if _is_fork(ready):
                        return json.loads(line)


def _is_fork(ready: selectors.BaseSelector) -> bool:
    """Fork, and watch the new process. Returns whether this is the fork."""
    try:
        pid = os.fork()
    except OSError as error:
        _answer({"error": str(error)})
        return False
    if not pid:
        for other in ready.get_map().values():
            if other.fd:
                os.close(other.fd)
        return True
    ready.register(os.pidfd_open(pid), selectors.EVENT_READ, pid)
    _answer({"pid": pid})
    return False


def _answer(content: dict[str, Any]) -> None:
    with contextlib.suppress(BrokenPipeError):  # its parent has ended, and so does it
        os.write(0, json.dumps(content).encode() + b"\n")


def _become(request: dict[str, Any]) -> None:
    """Be the process that was asked for; returns when its module has run."""
    die_with_parent(os.environ)
    os.setpgid(0, 0)
    log = os.open(request["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    for given, number in ((_holding(base64.b64decode(request["stdin"])), 0), (log, 1), (log, 2)):
        os.dup2(given, number)
        if number != 1:
            os.close(given)
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()  # its global state is the same in all forks
    module, *_ = sys.argv = request["command"]
    sys.orig_argv = [sys.executable, "-m", *sys.argv]
    setproctitle.setproctitle(" ".join(sys.orig_argv))
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _holding(data: bytes) -> int:
    """A file descriptor from which to read the data, once if they fit into a pipe: they may be secret."""
    reading, writing = os.pipe()
    try:
        fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, max(len(data), MAX_READ))
    except OSError:
        os.close(reading)
        os.close(writing)
        reading = writing = os.memfd_create("stdin")
    with open(os.dup(writing), "wb") as file:
        file.write(data)
    if reading == writing:
        os.lseek(reading, 0, os.SEEK_SET)
    else:
        os.close(writing)
    return reading


if __name__ == "__main__":
    main(sys.argv[1:])
