"""The ACLs of docs/security.md, given to a real broker as written: with them alone, services and commands work."""

import asyncio
import json
import os
import subprocess
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from rollstream.eventlog.artifacts import ArtifactStore
from rollstream.eventlog.codec import decode
from rollstream.eventlog.kafka.log import KafkaLog
from rollstream.eventlog.log import TopicPartition
from rollstream.harness.cli.main import rollstream
from rollstream.harness.upkeep import collecting
from rollstream.harness.upkeep.collecting import UnneededFiles
from rollstream.harness.upkeep.dead_letters import Letter, read_letters
from rollstream.learner.retention import Stored
from rollstream.learner.tiny_model import make_tiny_model
from rollstream.producers.openai import service as endpoint_service
from rollstream.schemas.engine_settings import ScriptedSettings
from rollstream.schemas.errors import AccessDeniedError
from rollstream.schemas.events import RunStarted
from rollstream.schemas.kafka import KafkaSettings
from rollstream.schemas.services import EndpointSettings
from tests.rigs.services.secured_broker import SecuredBroker, bindings_of, commands_in, secured_broker
from tests.rigs.services.service_processes import CLI, NAMES, Running, running_services, write_config

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "security.md"
PREFIX = "lab."
RUN = "secured-run"
GROUP = f"{RUN}/policy"
SERVED = (*NAMES, "endpoint")
WAIT_S = 240
POISON = b"no event"
DEAD_LETTERED_BY = {"tasks": "producers", "steps": "processors", "batches": "learner"}
"""The service that makes a dead letter of a record that is not an event, by topic."""


def documented(*, topic_prefix: str = PREFIX, group_prefix: str = "lab") -> str:
    """The document's commands for other prefixes, as it says that they are to be changed."""
    commands = [" ".join(command) for command in commands_in(DOCUMENT.read_text(encoding="utf-8"))]
    text = "\n".join(commands).replace("rollstream-", f"{group_prefix}-")
    return text.replace("--topic rollstream.", f"--topic {topic_prefix}")


@dataclass
class Lab:
    """A broker where each service has the documented rights alone, the services, and a run that has ended."""

    broker: SecuredBroker
    data: Path
    running: Running

    def settings(self, user: str) -> KafkaSettings:
        return self.broker.settings("SASL_SSL", user, topic_prefix=PREFIX, group_prefix="lab")

    def environment(self, user: str) -> dict[str, str]:
        return {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "ROLLSTREAM_BOOTSTRAP_SERVERS": f"127.0.0.1:{self.broker.ports['SASL_SSL']}",
            "ROLLSTREAM_ARTIFACT_URI": str(self.data / "artifacts"),
            "ROLLSTREAM_WORKSPACE": str(self.data / "workspace"),
            "ROLLSTREAM_ALLOW": f"model:{self.data}",
            "ROLLSTREAM_KAFKA_SECURITY_PROTOCOL": "SASL_SSL",
            "ROLLSTREAM_KAFKA_USERNAME": user,
            "ROLLSTREAM_KAFKA_PASSWORD": f"{user}-secret",
            "ROLLSTREAM_KAFKA_CA_FILE": str(self.broker.authority.file),
            "ROLLSTREAM_KAFKA_TOPIC_PREFIX": PREFIX,
            "ROLLSTREAM_KAFKA_GROUP_PREFIX": "lab",
        }

    def log_of(self, service: str) -> str:
        return (self.data / f"{service}.log").read_text()

    def command(self, user: str, *arguments: str) -> Result:
        return CliRunner().invoke(rollstream, arguments, env=self.environment(user))

    def output_of(self, user: str, *arguments: str) -> str:
        """Output of a command for a user who may run it."""
        done = self.command(user, *arguments)
        assert done.exit_code == 0, (arguments, done.output, done.exception)
        return done.output

    def deprive(self, guest: str, service: str, missing: str) -> None:
        """Give a guest what a service has by the document, but for one right (`kafka-acls` options)."""
        found = [one for command in commands_in(documented()) for one in bindings_of(command)]
        rights = [(*one[:3], f"User:{guest}", *one[4:]) for one in found if one[3] == f"User:{service}"]
        asyncio.run(self.broker.add(rights))
        asyncio.run(self.broker.allow(f"kafka-acls --add --deny-principal User:{guest} {missing}"))

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + WAIT_S
        while not condition():
            ended = [name for name, process in self.running.items() if process.poll() is not None]
            assert not ended, self.log_of(ended[0])[-3000:]
            assert time.monotonic() < deadline, what + "".join(f"\n== {n}\n{self.log_of(n)[-2000:]}" for n in SERVED)
            time.sleep(0.2)

    def work(self, user: str, use: Callable[[KafkaLog], Awaitable[object]]) -> None:
        async def connected() -> None:
            async with KafkaLog(self.settings(user)) as log:
                await use(log)

        asyncio.run(connected())

    def letters(self) -> list[Letter]:
        found: list[Letter] = []

        async def read(log: KafkaLog) -> None:
            found.extend(await read_letters(log))

        self.work("operator", read)
        return found

    def letter_of(self, topic: str) -> str:
        """The number of the dead letter of a topic's record that is not an event."""
        number: list[int] = []

        def found() -> bool:
            number.extend(one.number for one in self.letters() if one.came_from and one.came_from.topic == topic)
            return bool(number)

        self.wait(found, f"the record of {topic} that is not an event has no dead letter")
        return str(number[0])


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    folder = tmp_path_factory.mktemp("least-privilege")
    data, served, paced = folder / "data", folder / "endpoint.json", folder / "producers.json"
    (folder / "broker").mkdir()
    data.mkdir()
    paced.write_text(json.dumps({"pace": {"max_staleness": 1}}))
    served.write_text(json.dumps({"model_group": GROUP, "port": 0, "engine": {"kind": "scripted"}}))
    with secured_broker(folder / "broker") as broker:
        asyncio.run(broker.allow(documented()))
        lab = Lab(broker, data, {})
        write_config(folder / "run.yaml", lab.settings("operator"), data, make_tiny_model(data / "model", seed=0))
        lab.work("operator", lambda log: log.ensure_topics(num_partitions=6))  # no service may create them
        arguments = {name: ["serve", name] for name in NAMES}
        arguments["producers"] += ["--settings", str(paced)]
        arguments["endpoint"] = ["serve", "endpoint", "--settings", str(served)]
        environments = {name: lab.environment(name) for name in SERVED}
        with running_services(arguments, environments, data) as lab.running:
            lab.wait(lambda: all("ready" in lab.log_of(name) for name in SERVED), "services are not ready")
            lab.work("operator", send_poison)
            _finetune(lab, folder / "run.yaml")
            yield lab


async def send_poison(log: KafkaLog) -> None:
    """Records that are not events, of which services have to make dead letters."""
    for topic in DEAD_LETTERED_BY:
        await log.send_raw(topic, key=b"poison", value=POISON)


def _finetune(lab: Lab, config: Path) -> None:
    done = subprocess.run(
        [*CLI, "finetune", "--config_file", str(config), "--run_id", RUN],
        env=lab.environment("operator"),
        capture_output=True,
        text=True,
        timeout=300,
    )
    logs = "".join(f"\n== {name}\n{lab.log_of(name)[-2000:]}" for name in SERVED)
    assert done.returncode == 0, done.stdout + done.stderr + logs


async def begin(log: KafkaLog, run_id: str) -> None:
    """Another run, which goes on until it is stopped."""
    reader = await log.reader({TopicPartition("groups", 0): 0})
    try:
        records = await reader.poll(timeout_s=WAIT_S)
    finally:
        await reader.close()
    events = [decode(record).event for record in records]
    started = next(event for event in events if isinstance(event, RunStarted))
    await log.send(started.model_copy(update={"run_id": run_id}))


@pytest.mark.kafka
@pytest.mark.slow
def test_every_service_works_with_the_documented_rights_alone(lab: Lab) -> None:
    lab.wait(lambda: f"loaded model_group={GROUP} version=2" in lab.log_of("endpoint"), "the endpoint has no weights")
    lab.wait(lambda: len(lab.letters()) >= len(DEAD_LETTERED_BY), "records that are not events have no dead letters")
    dead_lettered_by = {letter.came_from.topic: letter.service for letter in lab.letters() if letter.came_from}
    assert {topic: name.split("-")[0] for topic, name in dead_lettered_by.items()} == DEAD_LETTERED_BY
    assert all(process.poll() is None for process in lab.running.values())
    for name in SERVED:
        assert "-secret" not in lab.log_of(name)
        assert "lacks the right" not in lab.log_of(name)
    assert "secret" not in (lab.data / "workspace" / "workspace.json").read_text()


@pytest.mark.kafka
@pytest.mark.slow
def test_commands_that_only_look_need_no_more_than_to_read(lab: Lab, tmp_path: Path) -> None:
    lab.wait(lambda: len(lab.letters()) >= len(DEAD_LETTERED_BY), "records that are not events have no dead letters")
    reported = lab.output_of("auditor", "status")
    assert "lab-producers" in reported
    assert "lab-processors" in reported
    assert RUN in lab.output_of("auditor", "runs")
    assert RUN in lab.output_of("auditor", "jobs")
    assert "steps/" in lab.output_of("auditor", "dlq", "list")
    assert POISON.decode() in lab.output_of("auditor", "dlq", "show", "0")
    lab.output_of("auditor", "export", RUN, "-o", str(tmp_path / "export"))
    assert "equal" in lab.output_of("auditor", "replay", RUN, "--verify", "--train")
    assert str(tmp_path) in lab.output_of("auditor", "rebuild", "--output", str(tmp_path / "metrics.duckdb"))
    lab.output_of("auditor", "gc", "--dry-run")
    done = lab.command("auditor", "dlq", "redrive", "--force", "0")
    assert_reported(done.exception, "auditor", "Write of a topic, or IdempotentWrite of the cluster")


@pytest.mark.kafka
@pytest.mark.slow
def test_the_operator_runs_every_command_with_the_documented_rights_alone(lab: Lab) -> None:
    lab.wait(lambda: len(lab.letters()) >= len(DEAD_LETTERED_BY), "records that are not events have no dead letters")
    assert "sent to batches/0@" in lab.output_of("operator", "dlq", "redrive", "--force", lab.letter_of("batches"))
    lab.work("operator", lambda log: begin(log, "left-open"))
    assert "run left-open stopped" in lab.output_of("operator", "stop", "left-open")
    lab.output_of("operator", "gc")
    store = ArtifactStore(str(lab.data / "artifacts"))
    unneeded = unneeded_in(store, "left-open/policy")
    lab.work("operator", lambda log: remove(log, store, unneeded))
    assert not unneeded.weights.keys() & store.listing().keys()


def unneeded_in(store: ArtifactStore, model_group: str) -> UnneededFiles:
    """Weights that nothing needs."""
    stored = Stored(model_group, 1, store.put_bytes(model_group.encode(), ".safetensors"))
    name = store.name_of(stored.ref)
    assert name is not None
    return UnneededFiles({name: (stored, 1)}, [], 0, [], 0, {stored.model_group: [stored]}, {})


async def remove(log: KafkaLog, store: ArtifactStore, unneeded: UnneededFiles) -> None:
    end = (await log.end_offsets("groups"))[0]
    await collecting.remove(log, store, unneeded._replace(read_to=end))


def topic(name: str) -> str:
    return f"--topic {PREFIX}{name}.v1"


@pytest.mark.kafka
@pytest.mark.slow
@pytest.mark.parametrize(
    ("guest", "arguments", "operation", "name"),
    [
        ("guest0", ["runs"], "Read", "groups"),
        ("guest1", ["dlq", "redrive", "--force", "LETTER"], "Write", "tasks"),
        ("guest2", ["replay", RUN, "--verify"], "Read", "batches"),
        ("guest3", ["replay", RUN, "--train"], "Read", "trajectories"),
        ("guest5", ["gc"], "Read", "weights"),
        ("guest6", ["stop", "denied-run"], "Write", "groups"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_a_right_that_the_operator_lacks_is_one_error(
    lab: Lab, guest: str, arguments: list[str], operation: str, name: str
) -> None:
    lab.deprive(guest, "operator", f"--operation {operation} {topic(name)}")
    if arguments[0] == "stop":
        lab.work("operator", lambda log: begin(log, arguments[1]))
    done = lab.command(guest, *(lab.letter_of(name) if one == "LETTER" else one for one in arguments))
    assert_reported(done.exception, guest, f"{operation} of topic {PREFIX}{name}.v1")
    assert done.exit_code == 1
    if arguments[0] == "stop":
        lab.output_of("operator", *arguments)


def assert_reported(error: BaseException | None, guest: str, right: str) -> None:
    assert isinstance(error, AccessDeniedError), error
    assert f"User:{guest} lacks the right {right}; allow it with kafka-acls" in str(error)
    assert "\n" not in str(error)
    assert f"{guest}-secret" not in str(error)


@pytest.mark.kafka
@pytest.mark.slow
def test_weights_are_kept_if_their_removal_cannot_be_recorded(lab: Lab) -> None:
    lab.deprive("guest7", "operator", f"--operation Write {topic('weights')}")
    store = ArtifactStore(str(lab.data / "artifacts"))
    unneeded = unneeded_in(store, "guest/policy")
    with pytest.raises(AccessDeniedError) as caught:
        lab.work("guest7", lambda log: remove(log, store, unneeded))
    assert_reported(caught.value, "guest7", f"Write of topic {PREFIX}weights.v1")
    assert unneeded.weights.keys() <= store.listing().keys()


@pytest.mark.kafka
@pytest.mark.slow
@pytest.mark.parametrize(
    ("guest", "missing", "reported"),
    [
        ("guest8", ("Read", "weights"), f"Read of topic {PREFIX}weights.v1"),
        ("guest9", ("Read", "groups"), f"Read of topic {PREFIX}groups.v1"),
        ("guest10", ("Read", "jobs"), f"Read of topic {PREFIX}jobs.v1"),
        ("guest11", ("Write", "weights"), "Write of a topic, or IdempotentWrite of the cluster"),  # its only one
    ],
)
def test_a_right_that_the_endpoint_lacks_ends_it_with_one_error(
    lab: Lab, tmp_path: Path, caplog: pytest.LogCaptureFixture, guest: str, missing: tuple[str, str], reported: str
) -> None:
    lab.deprive(guest, "endpoint", f"--operation {missing[0]} {topic(missing[1])}")
    kafka = lab.settings(guest)
    settings = EndpointSettings(
        bootstrap_servers=kafka.bootstrap_servers,
        kafka=kafka.section,
        artifact_uri=str(lab.data / "artifacts"),
        workspace=tmp_path,
        name=guest,
        allow=(f"model:{lab.data}",),
        engine=ScriptedSettings(),
        model_group=GROUP,
        port=0,
    )
    with pytest.raises(AccessDeniedError) as caught:
        asyncio.run(asyncio.wait_for(endpoint_service.serve(settings), WAIT_S))
    assert_reported(caught.value, guest, reported)
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == []


def test_the_document_gives_no_service_more_than_prefixed_reading() -> None:
    commands = commands_in(DOCUMENT.read_text(encoding="utf-8"))
    bindings = [one for command in commands for one in bindings_of(command)]
    assert {principal for _, _, _, principal, *_ in bindings} == {
        f"User:{name}" for name in (*SERVED, "tracker", "operator", "auditor")
    }
    writers = {
        (name, principal) for kind, name, _, principal, _, operation, _ in bindings if (kind, operation) == (2, 4)
    }
    assert {principal for name, principal in writers if name == "rollstream.batches.v1"} == {"User:processors"}
    assert not {"User:metrics", "User:auditor"} & {principal for _, principal in writers}
