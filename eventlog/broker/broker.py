"""The embedded broker: a real single-node Apache Kafka (KRaft) below a workspace, for one machine and loopback only.

One per workspace, protected by a lock; its data are kept. It ends with the process that started it: see `guard`.
"""

import base64
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self

from rollstream.eventlog.broker import guard, install
from rollstream.eventlog.broker.class_archive import ClassArchive
from rollstream.eventlog.broker.credentials import HOST, MECHANISM, USER, Credentials, block, connection, password_file
from rollstream.eventlog.broker.lock import SERVED, STARTED, TAKEN_OVER, await_return, take_lock
from rollstream.eventlog.broker.ports import answers, free_ports, is_free
from rollstream.eventlog.files import move, read_json, write_whole
from rollstream.eventlog.private import make_private
from rollstream.schemas.errors import BrokerError, BrokerLostError
from rollstream.schemas.kafka import KafkaSettings

START_TIMEOUT_S = 60.0
PAUSE_S = 0.05
FULL_BYTES = 1024 * 1024
"""Free disk space below which a broker cannot even write its log."""
JVM = ("-Xmx512m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn")
"""Level 1: the JVM's second compiler would take more CPU than the requests, for many thousands of them, beside the
services on the same cores; and its code is hardly faster under load.
"""
CLASSES_LISTED = "classes.txt"
ENDED_AS_ASKED = 128 + signal.SIGTERM
CRASHED = -signal.SIGABRT
"""Exit status of a Java runtime that ends by a fault of its own, or of its class archive."""
_REMEDY = "correct its permissions or free space there, or give another --workspace"

PROPERTIES = f"""\
process.roles=broker,controller
node.id=1
controller.quorum.voters=1@{HOST}:{{controller_port}}
listeners=CLIENT://{HOST}:{{port}},CONTROLLER://{HOST}:{{controller_port}}
advertised.listeners=CLIENT://{HOST}:{{port}}
controller.listener.names=CONTROLLER
inter.broker.listener.name=CLIENT
listener.security.protocol.map=CLIENT:SASL_PLAINTEXT,CONTROLLER:SASL_PLAINTEXT
sasl.mechanism.inter.broker.protocol={MECHANISM}
sasl.mechanism.controller.protocol=PLAIN
listener.name.client.sasl.enabled.mechanisms={MECHANISM}
listener.name.client.scram-sha-512.sasl.jaas.config=org.apache.kafka.common.security.scram.ScramLoginModule required \
 username="{USER}" password="{{password}}";
listener.name.controller.sasl.enabled.mechanisms=PLAIN
listener.name.controller.plain.sasl.jaas.config=org.apache.kafka.common.security.plain.PlainLoginModule required \
 username="{USER}" password="{{password}}" user_{USER}="{{password}}";
log.dirs=data
auto.create.topics.enable=false
num.partitions=1
offsets.topic.replication.factor=1
offsets.topic.num.partitions=1
offsets.retention.minutes=2147483647
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
transaction.state.log.num.partitions=1
share.coordinator.state.topic.replication.factor=1
share.coordinator.state.topic.min.isr=1
share.coordinator.state.topic.num.partitions=1
group.initial.rebalance.delay.ms=0
group.min.session.timeout.ms=1000
log.retention.ms=-1
log.retention.bytes=-1
log.message.timestamp.after.max.ms=9223372036854775807
message.max.bytes={10 * 1024 * 1024}
replica.fetch.max.bytes={10 * 1024 * 1024}
log.cleaner.dedupe.buffer.size={8 * 1024 * 1024}
"""
"""Contains no path, because commas, backslashes and characters beyond Latin-1 are special in a Java properties file."""

logger = logging.getLogger(__name__)


class EmbeddedBroker:
    """A broker of this process. `start` and `stop`, or a context manager.

    `is_served`: of `rollstream serve broker`, which runs give time to come back before they take the broker over.
    """

    def __init__(self, workspace: Path, *, is_served: bool = False) -> None:
        self.workspace = workspace
        self._is_served = is_served
        self.bootstrap_servers = ""
        self._folder = (workspace / "broker").absolute()
        self._lock: int | None = None
        self._guard: subprocess.Popen[str] | None = None
        self._classes: ClassArchive
        self._restarting = threading.Lock()
        self._is_called_off = threading.Event()

    def start(self) -> str:
        """Start the broker and return `host:port` once it is ready. Raises BrokerError with a one-line message."""
        if self._guard is not None:
            return self.bootstrap_servers
        self._is_called_off.clear()
        self._classes = _classes()
        try:
            with self._startable():
                make_private(self.workspace)
                self._folder.mkdir(mode=0o700, exist_ok=True)
                self._lock = take_lock(self.workspace, SERVED if self._is_served else STARTED, self._pause)
                self._start()
        except BaseException:
            self.stop()
            raise
        return self.bootstrap_servers

    @property
    def kafka(self) -> KafkaSettings:
        """Settings for clients of the running broker."""
        return connection(self._folder, self.bootstrap_servers)

    @property
    def is_own(self) -> bool:
        """Whether it was started, or taken over, here."""
        return self._lock is not None

    @property
    def is_running(self) -> bool:
        """Whether the started broker is still running."""
        return self._guard is not None and self._guard.poll() is None

    def take_over(self, bootstrap_servers: str) -> None:
        """Have `restart` start a broker whose command has ended, at the address that its clients know.

        Raises BrokerError if another process has it or this was called off, BrokerLostError if its data are gone.
        """
        self._check_data()
        with self._startable():
            if not self._is_served:
                await_return(self.workspace, self._pause)
            how = SERVED if self._is_served else TAKEN_OVER
            self._classes, self._lock = _classes(), take_lock(self.workspace, how, self._pause)
        self.bootstrap_servers = bootstrap_servers

    def restart(self) -> None:
        """Restart a broker that died, at its old address and with its data.

        Raises BrokerError if it does not start, and the call can be repeated; BrokerLostError if its data are gone.
        """
        assert self._lock is not None, "restart() called before start()"
        with self._restarting:
            self._let_guard_go()
            port = int(self.bootstrap_servers.rpartition(":")[2])
            deadline = time.monotonic() + START_TIMEOUT_S
            while not is_free(port):
                if time.monotonic() > deadline:
                    raise BrokerError(
                        f"the broker of workspace {self.workspace} lost its address: {self.bootstrap_servers} is in "
                        "use; stop the process that uses it"
                    )
                self._pause()
            with self._startable():
                self._check_data()
                self._start(port)

    @contextmanager
    def _startable(self) -> Iterator[None]:
        """Raises BrokerError for an OSError."""
        try:
            yield
        except OSError as error:
            raise BrokerError(f"the broker of workspace {self.workspace} cannot start: {error}; {_REMEDY}") from error

    def call_off_restart(self) -> None:
        """Have `restart` or `take_over` in another thread raise BrokerError soon, until `start` is called."""
        self._is_called_off.set()

    def _check_data(self) -> None:
        """Raises BrokerLostError if another broker would be started, without the data and the password of this one."""
        for path in (self._folder / "data" / "meta.properties", password_file(self._folder)):
            if not path.exists():
                raise BrokerLostError(
                    f"the broker of workspace {self.workspace} cannot be restarted: {path} was removed while it ran; "
                    "restore it, or start a new run and leave its workspace in place"
                )

    def _pause(self, seconds: float = PAUSE_S) -> None:
        """Wait a moment. Raises BrokerError if the restart or the take-over was called off."""
        if self._is_called_off.wait(seconds):
            raise BrokerError(f"the broker of workspace {self.workspace} is being stopped; start it again")

    def _let_guard_go(self) -> None:
        guard, self._guard = self._guard, None
        if guard is not None and guard.stdin is not None and guard.stdout is not None:
            guard.stdin.close()
            code = guard.wait()
            guard.stdout.close()
            if code == ENDED_AS_ASKED:
                self._classes.remember(self._folder / CLASSES_LISTED)

    def stop(self) -> None:
        """Stop the broker and release the workspace. Does nothing if it is not running."""
        self.call_off_restart()
        with self._restarting:
            self._let_guard_go()
            if self._lock is not None:
                os.close(self._lock)
                self._lock = None
            self.bootstrap_servers = ""

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _start(self, port: int | None = None) -> None:
        """Start and wait until it is ready. `port`: its own, which clients know, if this is not its first start."""
        began, classes = time.monotonic(), self._classes
        port, controller_port = _ports(self._folder / "broker.json", port)
        properties = self._folder / "server.properties"
        credentials = Credentials(self._folder)
        ports = {"port": port, "controller_port": controller_port}
        write_whole(properties, PROPERTIES.format(**ports, password=credentials.password))
        if not (self._folder / "data" / "meta.properties").exists():
            if (self._folder / "data" / "__cluster_metadata-0").exists():
                raise BrokerError(
                    f"the broker's data below {self._folder} lack meta.properties, which identifies their cluster; "
                    f"restore that file, or give another --workspace"
                )
            credentials.forget()
            _format_storage(classes, properties)
        command = [str(classes.java), *JVM, *classes.options(Path(CLASSES_LISTED)), "-cp", classes.classpath]
        command += ["kafka.Kafka", properties.name]
        self._pause(0.0)
        broker_pid = self._launch(command)
        self._await_ready(port)
        credentials.make_known(port, controller_port, time.monotonic() + START_TIMEOUT_S, self._pause)
        self.bootstrap_servers = f"{HOST}:{port}"
        status = {"bootstrap_servers": self.bootstrap_servers, **ports, "pid": os.getpid(), "broker_pid": broker_pid}
        status |= {"kafka": install.KAFKA_VERSION}
        write_whole(self._folder / "broker.json", json.dumps(status, indent=1))
        logger.info("broker %s ready after %.1f s", self.bootstrap_servers, time.monotonic() - began)

    def _launch(self, command: list[str]) -> int:
        assert self._lock is not None
        log = self._folder / "broker.log"
        with suppress(FileNotFoundError):
            move(log, log.with_name(f"{log.name}.1"))  # where a broker that died says why
        os.close(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
        command_of_guard = [sys.executable, "-I", "-S", guard.__file__, str(os.getpid()), str(log)]
        self._guard = subprocess.Popen(
            [*command_of_guard, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=self._folder,
            env=_environment(),
            umask=0o077,
            process_group=0,  # Ctrl-C in the terminal is for the parent, which stops the broker last
            pass_fds=(self._lock,),  # the workspace stays locked until the broker has ended
        )
        assert self._guard.stdout is not None
        return int(self._guard.stdout.readline() or 0)

    def _await_ready(self, port: int) -> None:
        assert self._guard is not None
        deadline = time.monotonic() + START_TIMEOUT_S
        while not answers(port):
            if self._guard.poll() is not None:
                _check_crash(self._classes, self._guard.returncode, self._folder)
                raise BrokerError(f"the broker of workspace {self.workspace} exited at once: {self._last_words()}")
            if time.monotonic() > deadline:
                raise BrokerError(
                    f"the broker of workspace {self.workspace} is not ready after {START_TIMEOUT_S:.0f} s; see "
                    f"{self._folder / 'broker.log'}, then start again"
                )
            self._pause()

    def _last_words(self) -> str:
        log = self._folder / "broker.log"
        lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if "rror" in line]
        silent = "its disk is full" if shutil.disk_usage(self._folder).free < FULL_BYTES else "(no log output)"
        return f"{lines[0] if lines else silent} (see {log}); correct that, and start again"


def own_block(workspace: Path, bootstrap_servers: str) -> dict[str, str]:
    """The `kafka:` block of a workspace's own broker, if an address is that broker's and it requires a password.

    A running broker that was started by an earlier version does not.
    """
    folder = workspace / "broker"
    is_own = read_json(folder / "broker.json").get("bootstrap_servers") == bootstrap_servers
    return block(folder) if is_own and password_file(folder).exists() else {}


def _ports(remembered: Path, port: int | None = None) -> tuple[int, int]:
    """The ports of the last start if they are free, else new ones; `port`: that for clients, if it must not change."""
    status, own = read_json(remembered), {} if port is None else {"port": port}
    chosen = [
        own.get(name) or (known if isinstance(known := status.get(name), int) and is_free(known) else new)
        for name, new in zip(("port", "controller_port"), free_ports(2), strict=True)
    ]
    return chosen[0], chosen[1]


def _classes() -> ClassArchive:
    classpath = os.pathsep.join(str(jar) for jar in install.jars())
    return ClassArchive(install.cache_folder(), install.java(), classpath, JVM)


def _environment() -> dict[str, str]:
    """Environment of the Java process: in a locale without UTF-8, Java cannot open files with non-ASCII paths."""
    return {**os.environ, "LC_ALL": "C.UTF-8"}


def _format_storage(classes: ClassArchive, properties: Path) -> None:
    cluster = "R" + base64.urlsafe_b64encode(uuid.uuid4().bytes).decode("ascii")[1:22]
    command = [str(classes.java), *JVM, f"-XX:SharedArchiveFile={classes.path}"]
    command += ["-cp", classes.classpath, "kafka.tools.StorageTool", "format", "--cluster-id", cluster]
    command += ["--config", properties.name, "--ignore-formatted"]
    folder = properties.parent
    done = subprocess.run(
        command, cwd=folder, env=_environment(), capture_output=True, text=True, check=False, umask=0o077
    )
    if done.returncode != 0:
        _check_crash(classes, done.returncode, folder)
        lines = (done.stderr or done.stdout).strip().splitlines() or ["no reason given"]
        raise BrokerError(
            f"the broker's storage below {properties.parent} cannot be formatted: {lines[-1]}; "
            "correct its permissions, or free space there"
        )


def _check_crash(classes: ClassArchive, code: int, folder: Path) -> None:
    """Raises BrokerError if the Java runtime crashed with a class archive, which is then removed."""
    if code in (CRASHED, CRASHED % 256) and classes.throw_away():
        raise BrokerError(
            f"Java crashed (see {folder}); the possibly damaged archive {classes.path} was removed, start again"
        )
