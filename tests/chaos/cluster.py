"""A broker, processors and metrics as real processes under the real supervisor, and a workload that is fed to them."""

import asyncio
import http.client
import json
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import TypeVar

from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import KafkaError

from rollstream.eventlog import failpoints
from rollstream.eventlog.artifacts import ArtifactStore
from rollstream.eventlog.broker.broker import EmbeddedBroker
from rollstream.eventlog.broker.credentials import environment
from rollstream.eventlog.kafka.log import KafkaLog
from rollstream.eventlog.kafka.security import client_options
from rollstream.eventlog.log import TopicPartition
from rollstream.harness.services.supervisor import ChildSpec, Supervisor
from rollstream.metrics.sql.client import HOST, port_file, token_file
from rollstream.schemas.errors import LogError
from rollstream.schemas.topics import TOPICS
from tests.chaos.chaos_workload import PARTITIONS, Line, Workload

GROUP = "rollstream-processors"
SESSION_TIMEOUT_S = 6.0
RETRY_S = 0.5
NUDGE_S = 2.0
FAILPOINT_TIMEOUT_S = 90.0
PROBE = "probe"
T = TypeVar("T")


class Cluster:
    """All processes of one workspace. `start`, then `stop`."""

    def __init__(self, workspace: Path, *, workers: int) -> None:
        self.workspace = workspace
        self.processors = [f"processors-{number + 1}" for number in range(workers)]
        self.broker = EmbeddedBroker(workspace)
        self.once = workspace / "failpoints"
        self._env: dict[str, str] = {}
        self._watching: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Broker and topics, then the services."""
        self.workspace.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.once.mkdir()
        await asyncio.to_thread(self.broker.start)
        self.log = KafkaLog(self.broker.kafka, client_id="chaos")
        await self.log.start()
        await self.log.ensure_topics(num_partitions=PARTITIONS)
        self.store = ArtifactStore(str(self.workspace / "artifacts"))
        self._env |= os.environ | {
            **environment(self.broker.kafka),
            "ROLLSTREAM_ARTIFACT_URI": str(self.workspace / "artifacts"),
            "ROLLSTREAM_WORKSPACE": str(self.workspace),
            "ROLLSTREAM_NUM_PARTITIONS": str(PARTITIONS),
            failpoints.ONCE: str(self.once),
        }
        settings = {"processors": json.dumps({"session_timeout_s": SESSION_TIMEOUT_S}), "metrics": "{}"}
        specs = [
            ChildSpec(name, [*_SERVE, name.rpartition("-")[0], "--name", name, "--settings", "-"], stdin.encode())
            for name in (*self.processors, "metrics-1")
            for stdin in [settings[name.rpartition("-")[0]]]
        ]
        self.supervisor = Supervisor(specs, self.workspace / "logs", self._env)
        self.supervisor.start()
        self._watching = asyncio.create_task(self.supervisor.watch())

    async def stop(self) -> None:
        """The services end in order, so that metrics come to the log's end; the broker goes on until `close`."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
            await self.supervisor.stop()

    async def close(self) -> None:
        """End what still runs."""
        if self._watching is not None:
            self.supervisor.kill()
            await self.log.close()
        await asyncio.to_thread(self.broker.stop)

    def check(self) -> None:
        """Raises what the supervisor gave up with."""
        if self._watching is not None and self._watching.done():
            self._watching.result()

    async def kill(self, victim: str) -> None:
        """SIGKILL to a service, or to the broker, which is started again at its address."""
        if victim != "broker":
            os.kill(await self._pid(victim), signal.SIGKILL)
            return
        reported = json.loads((self.workspace / "broker" / "broker.json").read_text())
        os.kill(reported["broker_pid"], signal.SIGKILL)
        while self.broker.is_running:
            await asyncio.sleep(0.05)
        await asyncio.to_thread(self.broker.restart)

    async def kill_at(self, failpoint: str, hit: int, nudge: Callable[[], Awaitable[object]]) -> None:
        """Have the services that pass a failpoint start again with it armed; returns once one has killed itself.

        `nudge` gives them something to do, now and then.
        """
        self._env[failpoints.VARIABLE] = f"{failpoint}:{hit}"
        for name in ["metrics-1"] if failpoint.startswith("metrics/") else self.processors:
            os.kill(await self._pid(name), signal.SIGTERM)
        deadline = time.monotonic() + FAILPOINT_TIMEOUT_S
        while not (self.once / failpoint.replace("/", ".")).exists():
            self.check()
            if time.monotonic() > deadline:
                raise TimeoutError(f"failpoint {failpoint} was not hit {hit} times in {FAILPOINT_TIMEOUT_S:.0f} s")
            with suppress(TimeoutError):
                async with asyncio.timeout(NUDGE_S):
                    while not (self.once / failpoint.replace("/", ".")).exists():
                        await asyncio.sleep(0.02)
            await nudge()
        del self._env[failpoints.VARIABLE]

    async def _pid(self, name: str) -> int:
        while name not in self.supervisor.pids():
            await asyncio.sleep(0.05)
        return self.supervisor.pids()[name]

    # ---- how far it is ----

    async def committed(self, topic: str = "steps") -> dict[int, int]:
        """Offsets that the processors have committed, by Kafka's account."""
        admin = AIOKafkaAdminClient(**client_options(self.broker.kafka))
        await admin.start()
        try:
            found = await admin.list_consumer_group_offsets(GROUP)
        finally:
            await admin.close()
        return {tp.partition: at.offset for tp, at in found.items() if tp.topic == TOPICS[topic].name}

    async def probe(self, text: str) -> set[bytes]:
        """Write a record that cannot be decoded to every partition of steps; returns their values."""
        lines = [Line(b"probe", f"{PROBE} {text} {partition}".encode()) for partition in range(PARTITIONS)]
        await asyncio.gather(*(send(self.log, partition, line) for partition, line in enumerate(lines)))
        return {line.value or b"" for line in lines}

    async def letters(self, start: int) -> set[bytes | None]:
        """Values of the dead letters from an offset on."""
        end = (await self.log.end_offsets("dlq"))[0]
        where = TopicPartition("dlq", 0)
        reader = await self.log.reader({where: start})
        found: set[bytes | None] = set()
        try:
            while reader.position(where) < end:
                found |= {record.value for record in await reader.poll(timeout_s=0.2)}
        finally:
            await reader.close()
        return found

    async def num_records(self) -> int:
        """Number of records of all topics."""
        return sum([sum((await self.log.end_offsets(topic)).values()) for topic in TOPICS])

    async def is_done(self) -> bool:
        """Whether the processors have committed everything that there is to read."""
        for topic in ("steps", "groups"):
            if await self.committed(topic) != {p: end for p, end in (await self.log.end_offsets(topic)).items() if end}:
                return False
        return True

    def projected(self) -> int | None:
        """Sum of the offsets in the metrics file, None while its service does not answer."""
        try:
            port = int(json.loads(port_file(self.workspace).read_text())["port"])
            token = token_file(self.workspace).read_text().strip()
            asked = {"sql": "SELECT sum(next_offset) FROM offsets", "fresh": False, "limit": 1, "timeout_s": 5}
            with closing(http.client.HTTPConnection(HOST, port, timeout=10)) as connection:
                connection.request("POST", "/query", json.dumps(asked), {"Authorization": f"Bearer {token}"})
                return int(json.loads(connection.getresponse().read())["rows"][0][0] or 0)
        except (OSError, http.client.HTTPException, ValueError, KeyError):
            return None


_SERVE = (sys.executable, "-m", "rollstream.harness.cli.main", "serve")


class Feeder:
    """Writes a workload's records, every partition in its order, up to a share that may grow."""

    def __init__(self, log: KafkaLog, workload: Workload) -> None:
        self.share = 0.0
        self.num_written = 0
        self._log = log
        self._workload = workload

    async def run(self) -> None:
        """Until everything is written."""
        async with asyncio.TaskGroup() as tasks:
            for partition, lines in enumerate(self._workload.partitions):
                tasks.create_task(self._feed(partition, lines))

    @property
    def is_waiting(self) -> bool:
        """Whether all that it may write by now is written."""
        allowed = sum(int(len(lines) * min(1.0, self.share)) for lines in self._workload.partitions)
        return self.num_written >= allowed

    async def _feed(self, partition: int, lines: list[Line]) -> None:
        for number, line in enumerate(lines):
            while number >= int(len(lines) * min(1.0, self.share)):
                await asyncio.sleep(0.05)
            await send(self._log, partition, line)
            self.num_written += 1


async def send(log: KafkaLog, partition: int, line: Line) -> None:
    """Write a line, also across the death of the broker."""
    while True:
        try:
            await log.send_raw("steps", key=line.key, value=line.value, headers=line.headers, partition=partition)
        except LogError:
            await asyncio.sleep(RETRY_S)  # it may be there; what is there twice, the oracle reads twice too
        else:
            return


async def patiently(ask: Callable[[], Awaitable[T]]) -> T:
    """The answer, also across the death of the broker and before its groups are there."""
    while True:
        try:
            return await ask()
        except (LogError, KafkaError, OSError):
            await asyncio.sleep(RETRY_S)
