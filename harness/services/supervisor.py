"""Services as child processes: started, watched, restarted with back-off, stopped in order. Knows no service's work."""

import asyncio
import logging
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rollstream.harness.services.lifeline import PARENT
from rollstream.harness.services.log_relay import LogRelay
from rollstream.schemas.errors import RunFailedError

MAX_RESTARTS = 5
"""Of one child, without progress of the run in between."""
FIRST_BACKOFF_S = 0.5
MAX_BACKOFF_S = 15.0
POLL_S = 0.2
GRACE_S = 20.0
SILENCE_S = 120.0
"""A child whose event loop gives no sign of life for so long is stuck, and is killed to be started again."""
LAST_LINES = 3
LAST_BYTES = 8192

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ChildSpec:
    """What to run: `stdin` is given to every start (settings that no file may hold)."""

    name: str
    command: Sequence[str]
    stdin: bytes = b""
    stop_rank: int = 0
    """Children of a lower rank are stopped before those of a higher one."""


@dataclass
class _Child:
    spec: ChildSpec
    process: "subprocess.Popen[bytes] | None" = None
    num_restarts: int = 0
    """Since the run last made progress."""
    restart_at: float = 0.0


@dataclass
class Supervisor:
    """Children of this process: `start`, `watch` until cancelled, `stop`. One use."""

    specs: Sequence[ChildSpec]
    logs: Path
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    grace_s: float = GRACE_S
    first_backoff_s: float = FIRST_BACKOFF_S
    silence_s: Callable[[str, int], float] = lambda name, pid: 0.0
    """Seconds since the child of this name and process id gave a sign of life; 0 before the first one."""
    total_restarts: int = 0

    def __post_init__(self) -> None:
        self._children = [_Child(spec) for spec in self.specs]
        self._relay = LogRelay(self.logs)

    def start(self) -> None:
        """Start all children."""
        self.logs.mkdir(parents=True, exist_ok=True)
        for child in self._children:
            self._launch(child)

    def pids(self) -> dict[str, int]:
        """Process id by name of the children that run."""
        return {
            child.spec.name: child.process.pid
            for child in self._children
            if child.process is not None and child.process.poll() is None
        }

    def progressed(self) -> None:
        """The run made progress: earlier restarts no longer count."""
        for child in self._children:
            child.num_restarts = 0

    async def watch(self) -> None:
        """Restart children that end, until cancelled. Raises RunFailedError when one ends again and again."""
        while True:
            for child in self._children:
                self._look_after(child)
            for error in self._relay.news([child.spec.name for child in self._children]):
                logger.error("%s", error)
            await asyncio.sleep(POLL_S)

    async def stop(self) -> None:
        """SIGTERM rank by rank, SIGKILL for what is still there after the grace period."""
        for rank in sorted({child.spec.stop_rank for child in self._children}):
            running = [child.process for child in self._children if child.spec.stop_rank == rank and child.process]
            for process in running:
                if process.poll() is None:
                    process.send_signal(signal.SIGTERM)
            deadline = time.monotonic() + self.grace_s
            while any(process.poll() is None for process in running):
                if time.monotonic() > deadline:
                    self._kill(running)
                await asyncio.sleep(0.02)

    def kill(self) -> None:
        """End all children at once, without asking."""
        self._kill([child.process for child in self._children if child.process])

    def last_words(self, name: str) -> str:
        """Last lines of a child's log, in one line."""
        path = self.logs / f"{name}.log"
        if not path.exists():
            return "it said nothing"
        text = path.read_bytes()[-LAST_BYTES:].decode("utf-8", "replace")
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        return " | ".join(lines[-LAST_LINES:]) or "it said nothing"

    def _look_after(self, child: _Child) -> None:
        now = time.monotonic()
        if child.process is None:
            if now >= child.restart_at:
                self._launch(child)
            return
        code = child.process.poll()
        if code is None:
            if self.silence_s(child.spec.name, child.process.pid) > SILENCE_S:
                logger.warning("service %s gives no sign of life for %.0f s; it is killed", child.spec.name, SILENCE_S)
                child.process.kill()
            return
        child.process = None
        child.num_restarts += 1
        self.total_restarts += 1
        name = child.spec.name
        if child.num_restarts > MAX_RESTARTS:
            raise RunFailedError(
                f"service {name} ended {child.num_restarts} times without progress (status {code}): "
                f"{self.last_words(name)} (see {self.logs / name}.log)"
            )
        wait_s = min(MAX_BACKOFF_S, self.first_backoff_s * 2 ** (child.num_restarts - 1))
        child.restart_at = now + wait_s
        words = self.last_words(name)
        logger.warning("service %s ended with status %s; starts again in %.1f s: %s", name, code, wait_s, words)

    def _launch(self, child: _Child) -> None:
        with (self.logs / f"{child.spec.name}.log").open("ab") as log:
            process = subprocess.Popen(
                list(child.spec.command),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env={**self.environ, PARENT: str(os.getpid())},
                start_new_session=True,  # Ctrl-C in the terminal is for the parent, which stops the children in order
            )
        assert process.stdin is not None
        try:
            process.stdin.write(child.spec.stdin)
            process.stdin.close()
        except BrokenPipeError:
            logger.warning("service %s ended before it read its settings", child.spec.name)
        child.process = process

    @staticmethod
    def _kill(processes: Sequence["subprocess.Popen[bytes]"]) -> None:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()
