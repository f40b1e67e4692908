"""Connection settings: what fits together, where they come from, and that secrets show nowhere unasked."""

import json
import re
from pathlib import Path

import pytest
from pydantic import ValidationError

from rollstream.schemas.errors import ConfigError
from rollstream.schemas.kafka import (
    KafkaSection,
    KafkaSettings,
    connection,
    from_environment,
    given,
    merged,
    storable,
    with_secrets,
)
from rollstream.schemas.services import LearnerSettings

BLOCK = {"security_protocol": "SASL_SSL", "username": "learner", "password": "${KAFKA_PASSWORD}", "ca_file": "ca.pem"}


def test_a_secret_is_expanded_where_a_client_connects_and_shown_nowhere() -> None:
    kafka = connection("a:1", BLOCK, {"KAFKA_PASSWORD": "hunter2"})
    assert kafka.password is not None
    assert kafka.password.get_secret_value() == "hunter2"
    for shown in (repr(kafka), str(kafka), kafka.model_dump_json(), str(kafka.model_dump(mode="json"))):
        assert "hunter2" not in shown
    assert json.loads(with_secrets(kafka))["password"] == "hunter2"


def test_a_child_process_gets_the_secret_with_its_settings() -> None:
    kafka = connection("a:1", BLOCK, {"KAFKA_PASSWORD": "${not} a reference"})
    sent = LearnerSettings(
        bootstrap_servers=kafka.bootstrap_servers,
        kafka=kafka.section,
        artifact_uri="a",
        workspace=Path("w"),
        name="l-1",
    )
    assert "not" not in sent.model_dump_json()
    received = LearnerSettings.model_validate_json(with_secrets(sent))
    assert received.connection == kafka


def test_a_file_keeps_where_a_secret_comes_from_and_never_the_secret() -> None:
    assert storable(BLOCK)["password"] == "${KAFKA_PASSWORD}"
    assert storable(BLOCK)["ca_file"].startswith("/")
    assert "password" not in storable({**BLOCK, "password": "hunter2"})
    assert "password" not in storable({**BLOCK, "password": "${A:-hunter2}"})


def test_settings_left_out_of_a_block_come_from_the_environment() -> None:
    env = {
        "ROLLSTREAM_KAFKA_USERNAME": "other",
        "ROLLSTREAM_KAFKA_PASSWORD": "hunter2",
        "ROLLSTREAM_KAFKA_CHECK_HOSTNAME": "false",
    }
    found = from_environment(env)
    assert found["password"] == "${ROLLSTREAM_KAFKA_PASSWORD}"
    kafka = connection("a:1", merged(found, {"security_protocol": "SASL_PLAINTEXT", "username": "learner"}), env)
    assert (kafka.username, kafka.check_hostname) == ("learner", False)
    assert kafka.password is not None
    assert kafka.password.get_secret_value() == "hunter2"


def test_a_secret_replaces_the_file_of_a_block_below() -> None:
    assert merged({"password_file": "p"}, {"password": "${P}"}) == {"password": "${P}"}
    assert merged({"password": "${P}"}, {"password_file": "p"}) == {"password_file": "p"}


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ({"security_protocol": "SASL_SSL", "username": "u"}, "needs password or password_file"),
        ({"security_protocol": "SASL_SSL", "password": "p"}, "needs username"),
        ({"username": "u", "password": "p"}, "are not used with security_protocol PLAINTEXT"),
        ({"ca_file": "ca.pem"}, "are not used with security_protocol PLAINTEXT"),
        ({"security_protocol": "SSL", "key_file": "key.pem"}, "key_file needs cert_file"),
        ({"security_protocol": "TLS"}, r"kafka\.security_protocol: Input should be"),
        ({"topic_prefix": "a b"}, r"kafka\.topic_prefix"),
        ({"password_fil": "p"}, r"kafka\.password_fil: Extra inputs"),
        ({"replication_factor": 2, "min_insync_replicas": 3}, "records could not be written"),
        ({"security_protocol": "SASL_SSL", "username": "u", "password": "${NONE}"}, "variable NONE is not set"),
    ],
)
def test_inconsistent_settings_are_refused_with_the_reason(block: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        connection("a:1", block, {})
    assert "\n" not in str(caught.value)


def test_an_unknown_variable_is_named_with_those_that_are_known() -> None:
    with pytest.raises(
        ConfigError, match=r"ROLLSTREAM_KAFKA_PASSWROD: unknown variable; known variables: .*KAFKA_PASSWORD"
    ):
        from_environment({"ROLLSTREAM_KAFKA_PASSWROD": "x"})


def test_a_bare_address_has_neither_tls_nor_sasl() -> None:
    kafka = KafkaSettings.of("a:1")
    assert (kafka.uses_tls, kafka.uses_sasl, kafka.group("producers")) == (False, False, "rollstream-producers")
    assert KafkaSettings.of(kafka) is kafka
    assert given(KafkaSection()) == {}


@pytest.mark.parametrize(
    "servers",
    [
        "embedded",
        "kafka:9092",
        "kafka",
        "a:9092, b:9093",
        "127.0.0.1:1",
        "[::1]:9092",
        "::1",
        "2001:db8::1",
        "2001:db8:0:0:0:0:0:1",
        "[fe80::1%eth0]:9092",
        "k-1.lab_2:65535",
    ],
)
def test_servers_are_hosts_with_ports(servers: str) -> None:
    assert KafkaSettings(bootstrap_servers=servers).bootstrap_servers == servers


@pytest.mark.parametrize(
    ("servers", "wrong"),
    [
        *(
            (one, one)
            for one in ("a:b:c", "kafka:99999", "kafka:0", "http://kafka:9092", "a:9092 b:9092", "kafka:", "")
        ),
        *((one, one) for one in ("[kafka]:9092", "[::1]:0", "2001:db8:1")),
        ("a:9092,,b:9092", ""),
    ],
)
def test_other_servers_are_refused_by_the_wrong_one(servers: str, wrong: str) -> None:
    with pytest.raises(ValidationError, match=re.escape(f"'{wrong}' is not host:port; give host:port, several")):
        KafkaSettings(bootstrap_servers=servers)
