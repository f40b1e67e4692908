"""Services as child processes: started, watched, restarted with back-off, stopped in order.

Also relays errors in the services' logs, each once and up to a limit, and rotates logs: the part already read of a log
that is too large replaces its one old copy.
"""

import asyncio
import logging
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from rollstream.eventlog.broker.guard import MAX_LOG_BYTES, bound_log
from rollstream.eventlog.broker.restarts import FIRST_BACKOFF_S, Restarts
from rollstream.harness.services.fork_server import ForkedProcess, ForkServer, ForkServerError
from rollstream.harness.services.liveness import PARENT
from rollstream.schemas.errors import RunFailedError

POLL_S = 0.2
GRACE_S = 20.0
UNNEEDED_BACKOFF_S = 60.0
"""Seconds before a child that the run does not need is started again."""
GRACE_WITHOUT_LOG_S = 2.0
"""Seconds that the children get to stop while the log is down: they can send and commit nothing."""
SILENCE_S = 120.0
"""Seconds without a heartbeat of its event loop after which a child counts as stuck; it is killed and restarted."""
WARN_S = 30.0
"""Seconds without a heartbeat after which the terminal says so."""
BLOCKING = ", such as an environment or a reward that computes or sleeps without await (use asyncio.to_thread)"
ENDING = "; an environment or a reward may have ended it"
MAX_GAP_S = 5.0
"""After a longer pause between two looks this process was stopped, frozen or suspended itself, its children probably
too: each gets the whole silence time-out again."""
LAST_LINES = 3
LAST_BYTES = 8192
_LEAKS = re.compile(r"nanobind: |See https://nanobind|- leaked |- \.\.\. skipped remainder")
"""Lines that libraries built by nanobind (triton) print at every exit of Python, after the reason of it."""
_INFO = re.compile(r"\S+ \S+ (?:INFO|DEBUG) ")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ChildSpec:
    """The command to run; `stdin` is passed at every start (settings that must not be in a file)."""

    name: str
    command: Sequence[str]
    stdin: bytes = b""
    stop_rank: int = 0
    """Children of a lower rank are stopped before those of a higher one."""
    is_forked: bool = False
    """Start it by the fork server, if there is one; `command` is the interpreter, `-m`, and what to run then."""
    is_needed: bool = True
    """Whether the run fails if it exits too often; otherwise it is restarted at long intervals."""


@dataclass
class _Child:
    spec: ChildSpec
    restarts: Restarts
    process: "subprocess.Popen[bytes] | ForkedProcess | None" = None
    restart_at: float = 0.0
    is_silent: bool = False
    """Whether it sent no heartbeats at the last look."""
    log_begin: int = 0
    """Size of its log when the process was started."""
    is_alone: bool = False
    """Whether it failed by itself, perhaps because it was a fork; it is started as an ordinary process then."""


@dataclass
class Supervisor:
    """Children of this process: `start`, `watch` until cancelled, `stop`. One use."""

    specs: Sequence[ChildSpec]
    logs: Path
    env: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    grace_s: float = GRACE_S
    first_backoff_s: float = FIRST_BACKOFF_S
    unneeded_backoff_s: float = UNNEEDED_BACKOFF_S
    silence_s: Callable[[str, int], float] = lambda name, pid: 0.0
    """Seconds since the child of this name and process id gave a sign of life; 0 before the first one."""
    monotonic: Callable[[], float] = time.monotonic
    waits_for: Callable[[], str] = lambda: ""
    """The resource that all services lack at the moment, for example disk space, and why; empty: none.

    A service that ends meanwhile, or gives no sign of life, is started again afterwards, and that does not count.
    """
    has_log: Callable[[], bool] = lambda: True
    """Whether the log that the children write to is up, as far as this process knows."""
    fork_server: ForkServer | None = None
    """Starts the children that are forks, once it has loaded its libraries. Whoever made it closes it, too."""
    total_restarts: int = 0

    def __post_init__(self) -> None:
        self._children = [_Child(spec, Restarts(self.first_backoff_s)) for spec in self.specs]
        self._relay = LogRelay(self.logs)
        self._checked_at = self.monotonic()
        self._paused_until = float("-inf")

    def start(self) -> None:
        """Start all children; forks are started by `check` if the fork server is not ready yet."""
        self.logs.mkdir(parents=True, exist_ok=True)
        for child in self._children:
            if self._is_startable(child):
                self._launch(child)

    def pids(self) -> dict[str, int]:
        """Process ids of the running children by name."""
        return {
            child.spec.name: child.process.pid
            for child in self._children
            if child.process is not None and child.process.poll() is None
        }

    @property
    def logged(self) -> tuple[str, ...]:
        """Errors of the services that were relayed."""
        return self._relay.relayed

    def progressed(self) -> None:
        """The run made progress: earlier restarts no longer count."""
        for child in self._children:
            if child.spec.is_needed:
                child.restarts.reset()

    async def watch(self) -> None:
        """Restart children that exit, until cancelled. Raises RunFailedError when one exits too often."""
        while True:
            self.check()
            for error in self._relay.new_errors([child.spec.name for child in self._children]):
                logger.error("%s", error)
            await asyncio.sleep(POLL_S)

    def check(self) -> None:
        """Check every child once. Raises RunFailedError when one has exited too often."""
        now = self.monotonic()
        if now - self._checked_at > MAX_GAP_S:
            self._paused_until = now
        self._checked_at = now
        for child in self._children:
            self._check_child(child)

    async def stop(self) -> None:
        """SIGTERM rank by rank, SIGKILL for children still running after the grace period; without a log all ranks at
        once, and soon. Last errors of children that the run does not need are passed on.
        """
        for rank in sorted({child.spec.stop_rank for child in self._children}):
            has_log = self.has_log()
            last = rank if has_log else max(child.spec.stop_rank for child in self._children)
            running = [child.process for child in self._children if child.process and child.spec.stop_rank <= last]
            for process in running:
                if process.poll() is None:
                    process.send_signal(signal.SIGTERM)
            deadline = time.monotonic() + (self.grace_s if has_log else min(self.grace_s, GRACE_WITHOUT_LOG_S))
            while any(process.poll() is None for process in running):
                if time.monotonic() > deadline:
                    self._kill(running)
                await asyncio.sleep(0.02)
        for error in self._relay.new_errors([child.spec.name for child in self._children if not child.spec.is_needed]):
            logger.error("%s", error)

    def kill(self) -> None:
        """SIGKILL all children at once."""
        self._kill([child.process for child in self._children if child.process])

    def last_words(self, name: str) -> str:
        """Last warnings, errors and lines of other programs that a child's newest process has logged, in one line."""
        path = self.logs / f"{name}.log"
        if not path.exists():
            return "(no log output)"
        try:
            data = path.read_bytes()
        except OSError as error:
            return f"(its log cannot be read: {error})"
        begin = next((child.log_begin for child in self._children if child.spec.name == name), 0)
        own = data[begin:] if begin <= len(data) else data  # a log that was too large has been emptied since
        text = own[-LAST_BYTES:].decode("utf-8", "replace")
        lines = [line.strip() for line in text.splitlines() if line.strip() and not _LEAKS.match(line.strip())]
        telling = [line for line in lines if not _INFO.match(line)]
        nothing = "(no warnings in its log)" if lines else "(no log output)"
        return " | ".join(telling[-LAST_LINES:]) or nothing + (ENDING if name.startswith("producers") else "")

    def _check_child(self, child: _Child) -> None:
        now = self._checked_at
        if child.process is None:
            if now >= child.restart_at and self._is_startable(child) and not self.waits_for():
                self._launch(child)
            return
        code = child.process.poll()
        if code is not None:
            child.process = None
            child.is_alone |= code > 0 and not self.waits_for()
            how = f"was killed by signal {-code}" if code < 0 else f"exited with status {code}"
            child.restart_at = now + self._ended(child, how)
            return
        silence_s = min(self.silence_s(child.spec.name, child.process.pid), now - self._paused_until)
        was_silent, child.is_silent = child.is_silent, silence_s > WARN_S and not self.waits_for()
        if silence_s > SILENCE_S and child.is_silent:
            logger.warning("service %s sent no heartbeat for %.0f s; killing it", child.spec.name, SILENCE_S)
            child.process.kill()
        elif child.is_silent and not was_silent:
            logger.warning(
                "service %s has sent no heartbeat for %.0f s: something blocks its event loop%s; after %.0f s it is "
                "killed and started again",
                child.spec.name,
                WARN_S,
                BLOCKING if child.spec.name.startswith("producers") else "",
                SILENCE_S,
            )

    def _ended(self, child: _Child, how: str) -> float:
        """Delay in seconds before an exited child is restarted. Raises RunFailedError if it exited too often."""
        name = child.spec.name
        words = self.last_words(name)
        self.total_restarts += child.spec.is_needed
        if reason := self.waits_for():
            logger.warning("service %s %s: %s; it will be restarted", name, how, reason)
            return self.first_backoff_s
        wait_s = child.restarts.add()
        if not child.spec.is_needed:
            level = logging.WARNING if child.restarts.count == 1 else logging.INFO
            logger.log(level, "service %s %s; restarting in %.0f s: %s", name, how, self.unneeded_backoff_s, words)
            return self.unneeded_backoff_s
        if child.restarts.are_too_many:
            raise RunFailedError(
                f"service {name} exited {child.restarts.count} times without progress (the last time it {how}): "
                f"{words} (see {self.logs / name}.log)"
            )
        logger.warning("service %s %s; restarting in %.1f s: %s", name, how, wait_s, words)
        return wait_s

    def _is_startable(self, child: _Child) -> bool:
        server = self._server_of(child)
        try:
            return server is None or server.is_ready()
        except ForkServerError as error:
            logger.warning("%s (see %s); services import their libraries themselves now", error, server and server.log)
            return True

    def _server_of(self, child: _Child) -> ForkServer | None:
        server = self.fork_server
        is_forked = child.spec.is_forked and not child.is_alone
        return server if is_forked and server is not None and not server.is_closed else None

    def _launch(self, child: _Child) -> None:
        """Start a child. One that cannot be started, as without memory for a process, counts as one that has exited.

        Raises RunFailedError if that happened too often.
        """
        try:
            self._start_process(child)
        except OSError as error:
            child.restart_at = self.monotonic() + self._ended(child, f"could not be started ({error})")

    def _start_process(self, child: _Child) -> None:
        path = self.logs / f"{child.spec.name}.log"
        with path.open("a+b") as log:
            _end_line(log)
            child.log_begin = log.seek(0, os.SEEK_END)
            child.process = self._forked(child, path) or self._started(child.spec, log)

    def _forked(self, child: _Child, log: Path) -> ForkedProcess | None:
        server = self._server_of(child)
        if server is None:
            return None
        try:
            return server.fork(child.spec.command[2:], child.spec.stdin, log)
        except ForkServerError as error:
            logger.warning("%s (see %s); %s imports its libraries itself", error, server.log, child.spec.name)
            return None

    def _started(self, spec: ChildSpec, log: BinaryIO) -> "subprocess.Popen[bytes]":
        process = subprocess.Popen(
            list(spec.command),
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            env={**self.env, PARENT: str(os.getpid())},
            process_group=0,  # Ctrl-C in the terminal is for the parent, which stops the children in order
        )
        assert process.stdin is not None
        try:
            process.stdin.write(spec.stdin)
            process.stdin.close()
        except BrokenPipeError:
            logger.warning("service %s exited before it read its settings", spec.name)
        return process

    @staticmethod
    def _kill(processes: Sequence["subprocess.Popen[bytes] | ForkedProcess"]) -> None:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()


def _end_line(log: BinaryIO) -> None:
    """End a last line that a process before left open; otherwise the first line of the next one would continue it."""
    if log.tell():
        log.seek(-1, os.SEEK_END)
        if log.read(1) != b"\n":
            log.write(b"\n")
            log.flush()


MAX_RELAYED = 20
"""Maximum number of errors displayed in one run; the logs have them all."""
MAX_OF_TRACKER = 3
MAX_BYTES = 256 * 1024
"""Read of one log at a time; of more, the newest."""
_ERROR = re.compile(r"^\S+ \S+ (?:ERROR|CRITICAL) rollstream\.[\w.]+: (.*)")


class LogRelay:
    """Follows the logs of a folder, starting at their ends at creation."""

    def __init__(self, folder: Path, *, max_log_bytes: int = MAX_LOG_BYTES) -> None:
        self._folder = folder
        self._max_log_bytes = max_log_bytes
        self._offsets = {path.name: path.stat().st_size for path in folder.glob("*.log")}
        self._relayed: dict[str, None] = {}

    @property
    def relayed(self) -> tuple[str, ...]:
        """Errors that `new_errors` has returned so far."""
        return tuple(self._relayed)

    def new_errors(self, names: list[str]) -> list[str]:
        """Errors that the named services logged since the last call, as `service: message`; repeats are left out."""
        found: list[str] = []
        for name in names:
            for line in self._newest_lines(self._folder / f"{name}.log"):
                match = _ERROR.match(line)
                text = f"{name}: {match.group(1)}" if match else ""
                if text and text not in self._relayed and self._has_room(name):
                    self._relayed[text] = None
                    found.append(text)
        return found

    def _newest_lines(self, path: Path) -> list[str]:
        """New lines of a log, which is rotated if it is too large; none if it cannot be read at the moment."""
        try:
            lines = self._new_lines(path)
            if bound_log(str(path), self._max_log_bytes):
                self._offsets[path.name] = 0
        except OSError as error:
            logger.debug("%s cannot be read: %s", path, error)
            return []
        return lines

    def _has_room(self, name: str) -> bool:
        """Whether one more error of a service is displayed. A tracker, whose errors may change each time, has a few."""
        own = sum(text.startswith(f"{name}: ") for text in self._relayed)
        return len(self._relayed) < MAX_RELAYED and (own < MAX_OF_TRACKER or not name.startswith("tracker-"))

    def _new_lines(self, path: Path) -> list[str]:
        """Complete new lines only; the rest is read by the next call."""
        if not path.exists():
            return []
        size, begin = path.stat().st_size, self._offsets.get(path.name, 0)
        if size <= begin:
            return []
        with path.open("rb") as file:
            file.seek(max(begin, size - MAX_BYTES))
            data = file.read()
            end = file.tell()
        whole = data.rfind(b"\n") + 1
        self._offsets[path.name] = end - (len(data) - whole)
        return data[:whole].decode("utf-8", "replace").splitlines()
