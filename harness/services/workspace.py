"""A workspace folder: its paths, its locks, and its broker (a running one, or one started for a command)."""

import asyncio
import fcntl
import os
import re
import secrets
import sys
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any, TypeVar

from rollstream.eventlog.disk_space import writing
from rollstream.eventlog.files import obstacle, read_json, update_json
from rollstream.eventlog.private import make_private
from rollstream.harness.services.liveness import read_signs
from rollstream.schemas.errors import BrokerError, ConfigError
from rollstream.schemas.kafka import KafkaSettings, connection, from_environment, merged, renamed, storable
from rollstream.schemas.topics import PREFIX

if TYPE_CHECKING:
    from rollstream.eventlog.broker.broker import EmbeddedBroker
    from rollstream.eventlog.kafka.log import KafkaLog

T = TypeVar("T")

EMBEDDED = "embedded"
ARTIFACT_URI = "ROLLSTREAM_ARTIFACT_URI"
ARTIFACTS = "artifacts"
REMEMBERED = "workspace.json"
NAMES = ("topic_prefix", "group_prefix")
GROUP_PREFIX = "rollstream"
POLL_S = 0.1
MAX_TRAINED_RUNS = 10_000
"""The newest ones are remembered."""
INTERRUPTIONS = (Exception, KeyboardInterrupt, asyncio.CancelledError, SystemExit)
"""Ends of a command after which others may still use its broker: all but the disposal of an unfinished generator."""
PATIENCE_S = 60.0
"""Maximum seconds for which a broker that another command uses may be down."""


class Workspace:
    """Paths below one workspace folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()
        self.logs = self.folder / "logs"
        self.health = self.folder / "health"
        self.lock = self.folder / "finetune.lock"

    def create(self) -> None:
        """Create the folders with access for the owner only.

        Raises ConfigError if they cannot be written or restricted.
        """
        try:
            make_private(self.folder)
            for folder in (self.logs, self.health):
                folder.mkdir(mode=0o700, exist_ok=True)
            TemporaryFile(dir=self.folder).close()
        except OSError as error:
            raise ConfigError(
                f"workspace {self.folder} is not writable: {error.strerror}; give another --workspace"
            ) from error

    def check(self) -> None:
        """Raises ConfigError if the folders could not be created or written, as far as that shows without a try."""
        if why := obstacle(self.folder):
            raise ConfigError(f"workspace {self.folder} is not writable: {why}; give another --workspace")

    @contextmanager
    def in_use(self, what: str, *, is_shared: bool = False) -> Iterator[None]:
        """Lock the workspace for the command named `what`, or for it and others that share it.

        Raises BrokerError if another command holds the lock.
        """
        lock = os.open(self.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(lock, (fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = os.pread(lock, 200, 0).decode("utf-8", "replace").strip() or "another process"
                raise BrokerError(
                    f"workspace {self.folder} is in use by {holder}; stop it, wait, or give another --workspace"
                ) from None
            os.ftruncate(lock, 0)
            with writing(self.lock):
                os.pwrite(lock, f"{what} (process {os.getpid()})\n".encode(), 0)
            yield
            os.ftruncate(lock, 0)
        finally:
            os.close(lock)

    def artifact_uri(self) -> str:
        """The artifact URI of this workspace's runs: the given one, that of the last run, or its own."""
        known = self._remembered()
        remembered = known.get("artifact_uri")
        if "has_artifact_uri" not in known and isinstance(remembered, str) and self._is_own_elsewhere(remembered):
            remembered = None
        if path := known.get("artifact_path"):
            remembered = os.path.normpath(self.folder.absolute() / path)
        return str(os.environ.get(ARTIFACT_URI) or remembered or self.folder / ARTIFACTS)

    def _is_own_elsewhere(self, uri: str) -> bool:
        """Whether a URI is the path of the own artifacts before the workspace was moved or copied.

        Earlier versions remembered it where no other store was configured.
        """
        remembered = Path(uri)
        if "://" in uri or not remembered.is_absolute():
            return False
        before = remembered.parent
        is_workspace = (before / REMEMBERED).exists() or not before.exists()
        return remembered.name == ARTIFACTS and is_workspace and (self.folder / ARTIFACTS).is_dir()

    def remember_broker(
        self, bootstrap_servers: str, block: Mapping[str, Any] | None = None, *, artifact_uri: str | None = None
    ) -> None:
        """Save the connection settings of this workspace's log for later commands.

        `artifact_uri` is None for the workspace's own artifacts, which a copy of the folder has for itself. A relative
        path is saved as an absolute one, because later commands may have another working directory, or as one from the
        workspace if the store is in it or beside it: both may be moved together.
        Secrets of the `kafka:` block are saved only as references to variables or files.
        """
        is_relative = (
            artifact_uri and not artifact_uri.startswith(("/", "~")) and not re.search(r"://|\$", artifact_uri)
        )
        store, folder, path = Path(artifact_uri or "").absolute(), self.folder.absolute(), None
        if is_relative and store.is_relative_to(folder.parent):
            path = os.path.relpath(store, folder)
        self._remember(
            bootstrap_servers=bootstrap_servers,
            kafka=storable(block or {}),
            artifact_uri=str(store) if is_relative else artifact_uri,
            has_artifact_uri=artifact_uri is not None,
            artifact_path=path,
        )

    def own_names(self, bootstrap_servers: str) -> dict[str, str]:
        """Prefixes of this workspace's topics and consumer groups on a shared Kafka cluster.

        If the last run used that cluster, its prefixes (possibly none) are kept.
        """
        if self.remembered_broker() == bootstrap_servers:
            block = self.remembered_block()
            return {name: block[name] for name in NAMES if name in block}
        own = self._remembered().get("id") or secrets.token_hex(3)
        self._remember(id=own)
        return {"topic_prefix": f"{PREFIX}{own}.", "group_prefix": f"{GROUP_PREFIX}-{own}"}

    def remembered_broker(self) -> str:
        """`embedded`, or the bootstrap servers of the last run of this workspace."""
        return str(self._remembered().get("bootstrap_servers", EMBEDDED))

    def remembered_block(self) -> dict[str, Any]:
        """The `kafka:` block of the last run of this workspace."""
        found = self._remembered().get("kafka")
        return found if isinstance(found, dict) else {}

    def remember_trained(self, run_id: str) -> None:
        """Remember that a run's learner works here, so that its checkpoints can be found."""
        known = [one for one in self._remembered().get("trained_runs", []) if one != run_id]
        self._remember(trained_runs=[*known, run_id][-MAX_TRAINED_RUNS:])

    def has_trained(self, run_id: str) -> bool:
        """Whether the learner of a run worked here; always true for runs on the workspace's own broker."""
        remembered = self._remembered()
        is_embedded = remembered.get("bootstrap_servers") == EMBEDDED
        return is_embedded or run_id in remembered.get("trained_runs", [])

    def _remember(self, **values: Any) -> None:
        update_json(self.folder / REMEMBERED, lambda known: {**known, **values})

    def _remembered(self) -> dict[str, Any]:
        return read_json(self.folder / REMEMBERED)


@contextmanager
def broker_of(workspace: Workspace, bootstrap_servers: str | None = None) -> Iterator[KafkaSettings]:
    """Connection settings of the workspace's broker: a given or running one, else one started here and stopped on exit.

    ROLLSTREAM_KAFKA_* override the settings of the last run. Raises ConfigError if the workspace has no broker, cannot
    be restricted to its owner or the settings are inconsistent, BrokerError if the broker does not start.
    """
    from rollstream.eventlog.broker.broker import own_block

    if workspace.folder.is_dir():
        make_private(workspace.folder)
    known = workspace.remembered_broker()
    wanted = bootstrap_servers or known
    remembered = workspace.remembered_block() if wanted == known else {}
    block = merged(own_block(workspace.folder, wanted), remembered, from_environment(os.environ))
    if wanted != EMBEDDED:
        yield connection(wanted, block, os.environ)
        return
    if not (workspace.folder / "broker").is_dir():
        raise ConfigError(_without_broker(workspace))
    with embedded_broker(workspace) as (kafka, _):
        yield renamed(kafka, block)


def _without_broker(workspace: Workspace) -> str:
    """That a workspace names no broker, with the remedy."""
    signs = read_signs(workspace.health)
    address = "--bootstrap_servers or ROLLSTREAM_BOOTSTRAP_SERVERS"
    if signs:
        names = ", ".join(sorted(sign.name for sign in signs))
        return (
            f"workspace {workspace.folder} has services ({names}) and does not name the broker "
            f"that they use; give its address as {address}"
        )
    return (
        f"workspace {workspace.folder} has no runs yet; run `rollstream finetune`, give another --workspace, or the "
        f"address of the broker that its services use as {address}"
    )


def on_log(
    workspace: Workspace,
    bootstrap_servers: str | None,
    client_id: str,
    work: "Callable[[KafkaLog], Coroutine[Any, Any, T]]",
) -> T:
    """The result of `work`, called with the log of a workspace's broker. Raises as `broker_of`; LogError."""
    from rollstream.eventlog.kafka.log import KafkaLog

    async def run(kafka: KafkaSettings) -> T:
        async with KafkaLog(kafka, client_id=client_id) as log:
            return await work(log)

    with broker_of(workspace, bootstrap_servers) as kafka:
        return asyncio.run(run(kafka))


class AttachedBroker:
    """The broker of another command, for `keep_running`: once no command has it any more, it is started again here.

    Of several commands that use it, the one that gets its lock takes it over, and the others use it on. A
    `serve broker` that has ended gets it back if it is started again within seconds, and later waits as one of them.
    """

    def __init__(self, broker: "EmbeddedBroker", bootstrap_servers: str) -> None:
        self.workspace = broker.workspace
        self._broker = broker
        self._bootstrap_servers = bootstrap_servers

    @property
    def is_running(self) -> bool:
        """Whether it runs here, or another command still has it."""
        from rollstream.eventlog.broker.lock import is_locked

        return self._broker.is_running if self._broker.is_own else is_locked(self.workspace)

    def restart(self) -> None:
        """Start it again where its clients know it, unless another command has. Raises as EmbeddedBroker's."""
        if not self._broker.is_own:
            try:
                self._broker.take_over(self._bootstrap_servers)
            except BrokerError:
                if self.is_running:
                    return
                raise
        self._broker.restart()

    def call_off_restart(self) -> None:
        """Have `restart` in another thread raise BrokerError soon."""
        self._broker.call_off_restart()


@contextmanager
def served_broker(folder: Path) -> "Iterator[tuple[KafkaSettings, EmbeddedBroker | AttachedBroker, str]]":
    """The broker that `serve broker` keeps running below a workspace folder: connection settings, the broker, and the
    process id of the run that has it. A broker that a run has taken over is left to that; else it is started here, and
    the process id is empty.

    Raises BrokerError.
    """
    from rollstream.eventlog.broker.broker import EmbeddedBroker
    from rollstream.eventlog.broker.credentials import connection as connection_of
    from rollstream.eventlog.broker.lock import taken_over

    broker = EmbeddedBroker(folder, is_served=True)
    try:
        if (found := taken_over(folder)) is not None:
            address, pid = found
            yield connection_of((folder / "broker").absolute(), address), AttachedBroker(broker, address), pid
        else:
            broker.start()
            yield broker.kafka, broker, ""
    finally:
        broker.stop()


@contextmanager
def embedded_broker(workspace: Workspace) -> Iterator[tuple[KafkaSettings, "EmbeddedBroker | AttachedBroker"]]:
    """Connection settings of the workspace's own broker, and the broker: AttachedBroker if another command started it.

    Raises BrokerError. Several commands may use it at once. Users hold a shared lock on `broker/users`, starting and
    stopping need the exclusive lock, so that only one command starts it, and it is stopped when no other command needs
    it, also if this one failed or was interrupted (at once on a Ctrl-C while it waits for others, which does not change
    its exit status).
    """
    from rollstream.eventlog.broker.broker import EmbeddedBroker, own_block
    from rollstream.eventlog.broker.lock import find_running

    path = workspace.folder / "broker" / "users"
    try:
        make_private(workspace.folder)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        users = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise BrokerError(
            f"workspace {workspace.folder} is not writable: {error.strerror}; give another --workspace"
        ) from error
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
            found = connection(running, own_block(workspace.folder, running), None)
            yield found, broker if broker.is_own else AttachedBroker(broker, running)
        except INTERRUPTIONS:  # raised after the other commands are done, because they need the broker
            _await_others(broker, users, "this command has ended early; ")
            raise
        _await_others(broker, users)
    finally:
        broker.stop()
        os.close(users)


def _await_others(broker: "EmbeddedBroker", users: int, text: str = "") -> None:
    """Wait while others use a broker that was started here and still runs, or until Ctrl-C."""
    if not broker.is_running or _is_alone(users):
        return
    message = f"{text}waiting for other commands that use this workspace's broker (Ctrl-C stops it now)"
    with suppress(KeyboardInterrupt):
        with suppress(OSError):  # of a terminal that was closed
            print(message, file=sys.stderr)
        while broker.is_running and not _is_alone(users):
            time.sleep(POLL_S)


def _found(users: int, workspace: Workspace) -> str | None:
    """Address of the running broker; it is not stopped while the shared lock is held."""
    from rollstream.eventlog.broker.lock import find_running

    fcntl.flock(users, fcntl.LOCK_SH)
    return find_running(workspace.folder)


def _is_alone(users: int) -> bool:
    """Try to take the exclusive lock; if another process holds it, release it."""
    try:
        fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        fcntl.flock(users, fcntl.LOCK_UN)
        return False
    return True
