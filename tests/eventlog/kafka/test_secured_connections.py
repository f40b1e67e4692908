"""Connections to a real broker with TLS, SASL and client certificates, and one clear error for each mistake."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rollstream.eventlog.codec import decode
from rollstream.eventlog.kafka.log import KafkaLog
from rollstream.eventlog.log import Position, Record, TopicPartition
from rollstream.processors import service as processors
from rollstream.schemas.errors import AccessDeniedError, ConfigError
from rollstream.schemas.events import GroupClosed
from rollstream.schemas.kafka import KafkaSettings
from rollstream.schemas.services import ProcessorSettings
from tests.rigs.services.secured_broker import LISTENERS, Authority, SecuredBroker, secured_broker
from tests.rigs.steps_rig import attempt, started

pytestmark = [
    pytest.mark.kafka,
    pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"),  # aiokafka's, closed while a broker refuses it
]
ALL_RIGHTS = """
kafka-acls --add --allow-principal User:operator --operation All --topic rollstream. --resource-pattern-type prefixed
kafka-acls --add --allow-principal User:operator --operation All --group rollstream- --resource-pattern-type prefixed
"""


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredBroker]:
    with secured_broker(tmp_path_factory.mktemp("secured")) as running:
        asyncio.run(running.allow(ALL_RIGHTS))
        yield running


@pytest.fixture(scope="module")
def other_authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """An authority that nobody trusts."""
    return Authority(tmp_path_factory.mktemp("other"), "other")


async def used(kafka: KafkaSettings) -> bytes | None:
    """A record sent, read by a group and by a plain reader, and fetched: every kind of client once."""
    log = KafkaLog(kafka)
    try:
        await log.start()
        await log.ensure_topics(num_partitions=2)
        sent = await log.send_raw("steps", key=b"k", value=kafka.security_protocol.encode(), partition=0)
        group = await log.group_reader(kafka.group(f"test-{kafka.security_protocol}-{kafka.sasl_mechanism}"), ["steps"])
        try:
            while not any(record.offset == sent.offset for record in await group.poll(timeout_s=5)):
                pass
        finally:
            await group.close()
        assert await log.topic_ids()
        (record,) = await log.fetch([Position("steps", 0, sent.offset)])
        return record.value
    finally:
        await log.close()


def refused(kafka: KafkaSettings) -> str:
    async def attempt() -> None:
        log = KafkaLog(kafka)
        try:
            await log.start()
        finally:
            await log.close()

    with pytest.raises(AccessDeniedError) as caught:
        asyncio.run(attempt())
    assert "secret" not in str(caught.value)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("protocol", LISTENERS)
def test_every_client_connects_by_every_protocol(broker: SecuredBroker, protocol: str) -> None:
    assert asyncio.run(used(broker.settings(protocol))) == protocol.encode()


@pytest.mark.parametrize("protocol", ["SASL_PLAINTEXT", "SASL_SSL"])
def test_a_password_may_be_given_in_plain(broker: SecuredBroker, protocol: str) -> None:
    assert asyncio.run(used(broker.settings(protocol, sasl_mechanism="PLAIN"))) == protocol.encode()


async def assembled(kafka: KafkaSettings, folder: Path) -> None:
    """A group whose steps are sent by one client is closed by a Faust worker, which commits how far it has read."""
    run, settings = (
        f"run-{kafka.group_prefix}",
        ProcessorSettings(
            bootstrap_servers=kafka.bootstrap_servers,
            kafka=kafka.section,
            artifact_uri=str(folder / "artifacts"),
            workspace=folder,
            name="processors-1",
            num_partitions=2,
        ),
    )
    async with KafkaLog(kafka) as log:
        await log.ensure_topics(num_partitions=2)
        working = asyncio.create_task(processors.run(log, settings))
        groups = await log.reader({TopicPartition("groups", 0): -1})
        try:
            sent = [await log.send(event) for event in (started(size=1, run=run), *attempt(run=run))]
            async with asyncio.timeout(120):
                while not any(_closes(record, run) for record in await groups.poll(timeout_s=0.5)):
                    assert not working.done(), working.result()
        finally:
            await groups.close()
            working.cancel()
            with pytest.raises(asyncio.CancelledError):
                await working
        committed = await log.committed_offsets(kafka.group("processors"))
        assert committed[TopicPartition("steps", sent[-1].partition)] == sent[-1].offset + 1


def _closes(record: Record, run: str) -> bool:
    event = decode(record).event
    return isinstance(event, GroupClosed) and event.run_id == run


def test_processors_work_with_a_client_certificate(broker: SecuredBroker, tmp_path: Path) -> None:
    asyncio.run(assembled(broker.settings("SSL", group_prefix="rollstream-certificate"), tmp_path))


def test_processors_work_with_a_password_in_plain(broker: SecuredBroker, tmp_path: Path) -> None:
    settings = broker.settings("SASL_SSL", sasl_mechanism="PLAIN", group_prefix="rollstream-plain")
    asyncio.run(assembled(settings, tmp_path))


def test_secrets_may_come_from_files(broker: SecuredBroker, tmp_path: Path) -> None:
    (tmp_path / "password").write_text("operator-secret\n")
    found = broker.settings("SASL_SSL", password=None, password_file=tmp_path / "password")
    assert asyncio.run(used(found)) == b"SASL_SSL"
    certificate, key = broker.authority.issue("operator", password="of the key")
    (tmp_path / "key").write_text("of the key")
    found = broker.settings("SSL", cert_file=certificate, key_file=key, key_password_file=tmp_path / "key")
    assert asyncio.run(used(found)) == b"SSL"


@pytest.mark.parametrize("mechanism", ["SCRAM-SHA-512", "PLAIN"])
@pytest.mark.parametrize("protocol", ["SASL_PLAINTEXT", "SASL_SSL"])
def test_a_wrong_password_is_named_with_the_user(broker: SecuredBroker, protocol: str, mechanism: str) -> None:
    message = refused(broker.settings(protocol, password="other-secret", sasl_mechanism=mechanism))
    assert f"refuses User:operator: wrong username or password for {mechanism}" in message


def test_a_mechanism_that_the_broker_does_not_take_is_named(broker: SecuredBroker) -> None:
    message = refused(broker.settings("SASL_SSL", sasl_mechanism="SCRAM-SHA-256"))
    assert "does not support kafka.sasl_mechanism SCRAM-SHA-256" in message


def test_a_broker_that_is_not_trusted_is_not_connected_to(broker: SecuredBroker, other_authority: Authority) -> None:
    choices: list[dict[str, Any]] = [{"ca_file": other_authority.file}, {"ca_file": None}]
    for changes in choices:
        message = refused(broker.settings("SASL_SSL", **changes))
        assert "is not trusted" in message
        assert "set kafka.ca_file" in message


def test_a_certificate_of_another_host_is_refused_unless_asked_for(broker: SecuredBroker) -> None:
    address: dict[str, Any] = {"bootstrap_servers": f"localhost:{broker.ports['SASL_SSL']}"}
    assert "Hostname mismatch" in refused(broker.settings("SASL_SSL", **address))
    assert asyncio.run(used(broker.settings("SASL_SSL", check_hostname=False, **address))) == b"SASL_SSL"


def test_a_client_certificate_that_is_asked_for_is_named(broker: SecuredBroker, other_authority: Authority) -> None:
    message = refused(broker.settings("SSL", cert_file=None, key_file=None))
    assert "set kafka.cert_file and kafka.key_file" in message
    certificate, key = other_authority.issue("operator")
    assert "set another kafka.cert_file" in refused(broker.settings("SSL", cert_file=certificate, key_file=key))


@pytest.mark.parametrize("listener", LISTENERS)
@pytest.mark.parametrize("protocol", LISTENERS)
def test_a_wrong_protocol_is_named(broker: SecuredBroker, protocol: str, listener: str) -> None:
    if protocol == listener:
        return
    address = f"127.0.0.1:{broker.ports[listener]}"
    message = refused(broker.settings(protocol, bootstrap_servers=address))
    if (protocol, listener) == ("SASL_SSL", "SSL"):
        assert "requires a client certificate" in message
    else:
        assert f"Kafka at {address} does not speak {protocol}" in message
        assert "set kafka.security_protocol" in message


def test_files_that_cannot_be_used_are_named(broker: SecuredBroker, tmp_path: Path) -> None:
    certificate, key = broker.authority.issue("locked", password="x")
    other = tmp_path / "other.pem"
    other.write_text("no certificate")
    choices: list[tuple[dict[str, Any], str]] = [
        ({"ca_file": tmp_path / "none.pem"}, "ca_file"),
        ({"ca_file": other}, "ca_file"),
        ({"cert_file": certificate, "key_file": key}, "key_password"),
        ({"cert_file": certificate, "key_file": broker.authority.issue("another")[1]}, "cert_file"),
        ({"cert_file": certificate, "key_file": key, "key_password_file": tmp_path / "none"}, "key_password_file"),
    ]
    for changes, name in choices:
        with pytest.raises(ConfigError, match=rf"kafka\..*{name}"):
            asyncio.run(KafkaLog(broker.settings("SSL", **changes)).start())


def test_a_log_that_only_reads_creates_no_producer(broker: SecuredBroker) -> None:
    async def read() -> None:
        log = KafkaLog(broker.settings("SASL_PLAINTEXT", "guest0"))
        try:
            await log.start()
            assert await log.cluster_id()
        finally:
            await log.close()

    asyncio.run(read())
