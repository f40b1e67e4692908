"""A real broker with every kind of listener and ACLs, for tests: one PEM authority, users, and rights given by name."""

import datetime
import ipaddress
import itertools
import shlex
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.protocol.api import Request, RequestStruct, Response
from aiokafka.protocol.types import Array, Int8, Int16, Int32, Schema, String
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from rollstream.eventlog.broker.broker import install as kafka_install
from rollstream.eventlog.broker.ports import answers, free_ports
from rollstream.eventlog.kafka.security import client_options
from rollstream.schemas.kafka import KafkaSettings

HOST = "127.0.0.1"
SERVICES = ("producers", "processors", "learner", "metrics", "endpoint", "operator", "auditor")
USERS = (*SERVICES, *(f"guest{number}" for number in range(24)))
"""Each has its name and `-secret` for password."""
LISTENERS: tuple[str, ...] = ("PLAINTEXT", "SASL_PLAINTEXT", "SSL", "SASL_SSL")
SCRAM = "org.apache.kafka.common.security.scram.ScramLoginModule required;"
PLAIN = "org.apache.kafka.common.security.plain.PlainLoginModule required"
PERMISSIONS = {"allow-principal": 3, "deny-principal": 2}
RESOURCES = {"topic": 2, "group": 3, "cluster": 4}
OPERATIONS = {
    "All": 2, "Read": 3, "Write": 4, "Create": 5, "Delete": 6, "Alter": 7, "Describe": 8,
    "DescribeConfigs": 10, "IdempotentWrite": 12,
}  # fmt: skip


class Authority:
    """Certificates in PEM, signed by one authority, in a folder."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self.certificate = self._signed(self._name, self._key.public_key(), is_authority=True)
        self.file = self._write(f"{name}.pem", self.certificate.public_bytes(serialization.Encoding.PEM))

    def issue(self, name: str, *, password: str | None = None, host: str = HOST) -> tuple[Path, Path]:
        """Certificate and key file of a subject CN=name, good for the host."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        certificate = self._signed(subject, key.public_key(), host=host)
        encryption: Any = serialization.NoEncryption()
        if password is not None:
            encryption = serialization.BestAvailableEncryption(password.encode())
        private = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption)
        chain = certificate.public_bytes(serialization.Encoding.PEM)
        return self._write(f"{name}.pem", chain), self._write(f"{name}.key", private)

    def _signed(self, subject: x509.Name, key: Any, *, is_authority: bool = False, host: str = HOST) -> Any:
        now = datetime.datetime.now(datetime.UTC)
        alternative: Any = x509.DNSName(host) if host != HOST else x509.IPAddress(ipaddress.ip_address(host))
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=30))
            .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
        )
        if not is_authority:
            builder = builder.add_extension(x509.SubjectAlternativeName([alternative]), critical=False)
        return builder.sign(self._key, hashes.SHA256())

    def _write(self, name: str, content: bytes) -> Path:
        path = self.folder / name
        path.write_bytes(content)
        path.chmod(0o600)
        return path


class SecuredBroker:
    """A running broker: how its listeners are reached as each user, and a way to give rights."""

    def __init__(self, ports: dict[str, int], authority: Authority) -> None:
        self.ports = ports
        self.authority = authority

    def settings(self, protocol: str, user: str = "operator", **changes: Any) -> KafkaSettings:
        """Settings of a user at the listener of a protocol: SCRAM, or its certificate at SSL."""
        values: dict[str, Any] = {"bootstrap_servers": f"{HOST}:{self.ports[protocol]}", "security_protocol": protocol}
        if protocol.startswith("SASL"):
            values |= {"username": user, "password": f"{user}-secret"}
        if protocol.endswith("SSL"):
            values["ca_file"] = self.authority.file
        if protocol == "SSL":
            values["cert_file"], values["key_file"] = self.authority.issue(user)
        return KafkaSettings.model_validate({**values, **changes})

    async def allow(self, commands: str) -> None:
        """Apply every `kafka-acls --add` command in a text."""
        await self.add([one for command in commands_in(commands) for one in bindings_of(command)])

    async def add(self, bindings: "list[Binding]") -> None:
        """Add ACLs."""
        admin = AIOKafkaAdminClient(**client_options(self.settings("PLAINTEXT")))
        await admin.start()
        try:
            answer: Any = await admin._send_request(_CreateAcls(bindings))
            assert [code for code, _ in answer.results] == [0] * len(bindings), answer.results
        finally:
            await admin.close()


def commands_in(text: str) -> list[list[str]]:
    """The `kafka-acls` commands of a text, continued lines joined, as lists of arguments."""
    lines = text.replace("\\\n", " ").splitlines()
    return [shlex.split(line) for line in lines if "kafka-acls" in line and "--add" in line]


Binding = tuple[int, str, int, str, str, int, int]


def bindings_of(command: list[str]) -> list[Binding]:
    """ACLs that a command adds: every operation of every principal, allowed or denied, on every resource."""
    options: dict[str, list[str]] = {}
    for index, word in enumerate(command):
        if word.startswith("--"):
            following = command[index + 1] if index + 1 < len(command) else "--"
            options.setdefault(word[2:], []).extend([] if following.startswith("--") else [following])
    known = {"add", "bootstrap-server", "command-config", "operation", "resource-pattern-type"}
    assert options.keys() <= known | PERMISSIONS.keys() | RESOURCES.keys(), command
    pattern = {"literal": 3, "prefixed": 4}[options.get("resource-pattern-type", ["literal"])[0]]
    return [
        (RESOURCES[kind], name, 3 if kind == "cluster" else pattern, principal, "*", OPERATIONS[operation], permission)
        for kind in RESOURCES
        for name in (["kafka-cluster"] if kind == "cluster" and kind in options else options.get(kind, []))
        for option, permission in PERMISSIONS.items()
        for principal in options.get(option, [])
        for operation in options["operation"]
    ]


class _Created(Response):
    API_KEY = 30  # pyright: ignore[reportIncompatibleMethodOverride, reportAssignmentType]
    API_VERSION = 1  # pyright: ignore[reportIncompatibleMethodOverride, reportAssignmentType]
    SCHEMA = Schema(
        ("throttle_time_ms", Int32), ("results", Array(("error_code", Int16), ("error_message", String("utf-8"))))
    )


class _Create(RequestStruct):
    API_KEY = 30
    API_VERSION = 1
    RESPONSE_TYPE = _Created
    SCHEMA = Schema(
        (
            "creations",
            Array(
                ("resource_type", Int8), ("resource_name", String("utf-8")), ("pattern_type", Int8),
                ("principal", String("utf-8")), ("host", String("utf-8")), ("operation", Int8), ("permission", Int8),
            ),
        )
    )  # fmt: skip


class _CreateAcls(Request[_Create]):
    API_KEY = 30

    def __init__(self, bindings: list[Binding]) -> None:
        self._bindings = bindings

    def build(self, request_struct_class: type[_Create]) -> _Create:
        return request_struct_class(self._bindings)


@contextmanager
def secured_broker(folder: Path) -> Iterator[SecuredBroker]:
    """A broker with a listener of each protocol. At PLAINTEXT everybody may do all; elsewhere ACLs decide."""
    authority = Authority(folder / "certificates")
    certificate, key = authority.issue("broker")
    *ports, controller = free_ports(len(LISTENERS) + 1)
    by_name = dict(zip(LISTENERS, ports, strict=True))
    properties = folder / "server.properties"
    properties.write_text(_properties(by_name, controller, certificate, key, authority.file))
    java = [str(kafka_install.java()), "-Xmx512m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-cp"]
    java += [":".join(str(jar) for jar in kafka_install.jars())]
    scram = [["--add-scram", f"SCRAM-SHA-512=[name={user},password={user}-secret]"] for user in USERS]
    formatting = ["kafka.tools.StorageTool", "format", "--cluster-id", "RsecuredBrokerOfTest0w", "--config"]
    done = subprocess.run(
        [*java, *formatting, properties.name, *itertools.chain(*scram)],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    with (folder / "broker.log").open("wb") as log:
        broker = subprocess.Popen([*java, "kafka.Kafka", properties.name], cwd=folder, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 90
        while not (answers(by_name["PLAINTEXT"]) and all(map(_listens, ports))):
            assert broker.poll() is None, (folder / "broker.log").read_text()[-3000:]
            assert time.monotonic() < deadline, (folder / "broker.log").read_text()[-3000:]
            time.sleep(0.05)
        yield SecuredBroker(by_name, authority)
    finally:
        broker.terminate()
        broker.wait(30)


def _listens(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex((HOST, port)) == 0


def _properties(ports: dict[str, int], controller: int, certificate: Path, key: Path, authority: Path) -> str:
    listeners = ",".join(f"{name}://{HOST}:{port}" for name, port in ports.items())
    protocols = ",".join(f"{name}:{name}" for name in ports)
    plain = " ".join(f'user_{user}="{user}-secret"' for user in USERS)
    sasl = "\n".join(
        f"listener.name.{name}.sasl.enabled.mechanisms=SCRAM-SHA-512,PLAIN\n"
        f"listener.name.{name}.scram-sha-512.sasl.jaas.config={SCRAM}\n"
        f"listener.name.{name}.plain.sasl.jaas.config={PLAIN} {plain};"
        for name in ("sasl_plaintext", "sasl_ssl")
    )
    return f"""\
process.roles=broker,controller
node.id=1
controller.quorum.voters=1@{HOST}:{controller}
listeners={listeners},CONTROLLER://{HOST}:{controller}
advertised.listeners={listeners}
controller.listener.names=CONTROLLER
inter.broker.listener.name=PLAINTEXT
listener.security.protocol.map={protocols},CONTROLLER:PLAINTEXT
log.dirs=data
auto.create.topics.enable=false
offsets.topic.replication.factor=1
offsets.topic.num.partitions=1
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
share.coordinator.state.topic.replication.factor=1
share.coordinator.state.topic.min.isr=1
group.initial.rebalance.delay.ms=0
group.min.session.timeout.ms=1000
message.max.bytes={10 * 1024 * 1024}
replica.fetch.max.bytes={10 * 1024 * 1024}
log.cleaner.dedupe.buffer.size={8 * 1024 * 1024}
authorizer.class.name=org.apache.kafka.metadata.authorizer.StandardAuthorizer
super.users=User:ANONYMOUS
listener.name.ssl.ssl.client.auth=required
ssl.principal.mapping.rules=RULE:^CN=(.*?)$/$1/,DEFAULT
ssl.keystore.type=PEM
ssl.truststore.type=PEM
ssl.truststore.location={authority}
ssl.keystore.certificate.chain={_in_one_line(certificate)}
ssl.keystore.key={_in_one_line(key)}
{sasl}
"""


def _in_one_line(path: Path) -> str:
    return path.read_text().strip().replace("\n", "\\n")
