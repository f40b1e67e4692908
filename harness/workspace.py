"""A workspace folder: where its files lie, who uses it, and its broker (a running one, or one for the moment)."""

import fcntl
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from rollstream.schemas.errors import BrokerError, ConfigError, RollstreamError

if TYPE_CHECKING:
    from rollstream.eventlog.broker import EmbeddedBroker

EMBEDDED = "embedded"
POLL_S = 0.1
PATIENCE_S = 60.0
"""How long a broker that another command uses may be down."""


class Workspace:
    """Paths below one workspace folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()
        self.logs = self.folder / "logs"
        self.health = self.folder / "health"
        self.lock = self.folder / "finetune.lock"

    def create(self) -> None:
        """Make the folders. Raises ConfigError if they cannot be written."""
        try:
            for folder in (self.folder, self.logs, self.health):
                folder.mkdir(parents=True, exist_ok=True)
            probe = self.folder / ".writable"
            probe.write_bytes(b"")
            probe.unlink()
        except OSError as error:
            raise ConfigError(f"workspace {self.folder} cannot be written: {error.strerror}; give another") from error

    @contextmanager
    def in_use(self, what: str) -> Iterator[None]:
        """Hold the workspace for one command, `what` it says. Raises BrokerError if another one holds it."""
        lock = os.open(self.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = os.pread(lock, 200, 0).decode("utf-8", "replace").strip() or "another process"
                raise BrokerError(
                    f"workspace {self.folder} is in use by {holder}; stop it, wait, or give another --workspace"
                ) from None
            os.ftruncate(lock, 0)
            os.pwrite(lock, f"{what} (process {os.getpid()})\n".encode(), 0)
            yield
            os.ftruncate(lock, 0)
        finally:
            os.close(lock)

    def remember_broker(self, bootstrap_servers: str) -> None:
        """Let later commands find the log that this workspace's runs are in."""
        told = {"bootstrap_servers": bootstrap_servers}
        (self.folder / "workspace.json").write_text(json.dumps(told), encoding="utf-8")

    def remembered_broker(self) -> str:
        """`embedded`, or the address of the Kafka that the last run of this workspace used."""
        try:
            told = json.loads((self.folder / "workspace.json").read_text(encoding="utf-8"))
            return str(told["bootstrap_servers"])
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return EMBEDDED


@contextmanager
def broker_of(workspace: Workspace, bootstrap_servers: str | None = None) -> Iterator[str]:
    """Address of the workspace's broker: a given or running one, else one started here and stopped again.

    Raises ConfigError if the workspace has none, BrokerError if it does not start.
    """
    wanted = bootstrap_servers or workspace.remembered_broker()
    if wanted != EMBEDDED:
        yield wanted
        return
    if not (workspace.folder / "broker").is_dir():
        raise ConfigError(f"workspace {workspace.folder} has no runs yet: run `rollstream finetune`, or give another")
    with embedded_broker(workspace) as (address, _):
        yield address


@contextmanager
def embedded_broker(workspace: Workspace) -> Iterator[tuple[str, "EmbeddedBroker | None"]]:
    """Address of the workspace's own broker, and the broker if it was started here. Raises BrokerError.

    Several commands may want it at once. Whoever uses it holds `broker/users` shared; whoever starts or stops it holds
    that alone, so two never start one at once, and it is stopped when nobody else needs it (at once on Ctrl-C, which
    changes nothing of how a command ends that only waits for others).
    """
    from rollstream.eventlog.broker import EmbeddedBroker, find_running

    path = workspace.folder / "broker" / "users"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        users = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise BrokerError(f"workspace {workspace.folder} cannot be written: {error.strerror}; give another") from error
    broker = EmbeddedBroker(workspace.folder)
    try:
        deadline = time.monotonic() + PATIENCE_S
        while (running := _found(users, workspace)) is None:
            is_alone = _is_alone(users) and find_running(workspace.folder) is None
            if is_alone or time.monotonic() > deadline:
                broker.start()
            else:
                time.sleep(POLL_S)
        try:
            yield running, broker if broker.is_running else None
        except (RollstreamError, OSError):  # told once the others are done; they need the broker all the same
            _await_others(broker, users, "this command failed; ")
            raise
        _await_others(broker, users)
    finally:
        broker.stop()
        os.close(users)


def _await_others(broker: "EmbeddedBroker", users: int, told: str = "") -> None:
    """Wait as long as others use a broker that was started here and still runs, or until Ctrl-C."""
    if not broker.is_running or _is_alone(users):
        return
    message = f"{told}waiting for other commands that use this workspace's broker (Ctrl-C stops it now)"
    with suppress(KeyboardInterrupt):
        print(message, file=sys.stderr)
        while broker.is_running and not _is_alone(users):
            time.sleep(POLL_S)


def _found(users: int, workspace: Workspace) -> str | None:
    """Address of the broker that runs; it is not stopped while the lock is held shared."""
    from rollstream.eventlog.broker import find_running

    fcntl.flock(users, fcntl.LOCK_SH)
    return find_running(workspace.folder)


def _is_alone(users: int) -> bool:
    """Whether nobody else holds the lock: it is then held alone, else not at all."""
    try:
        fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        fcntl.flock(users, fcntl.LOCK_UN)
        return False
    return True
