"""A `kafka:` block on its way from file and environment to services and later commands, without its secrets."""

import io
import json
from pathlib import Path
from typing import Any

import pytest

from rollstream.eventlog.broker.credentials import USER, password_file
from rollstream.harness.config import file as config_file
from rollstream.harness.config.components import written_of
from rollstream.harness.config.jobs import RunLocation, kafka_block, services_of
from rollstream.harness.runs.run_context import block_of_run, broker_of_run
from rollstream.harness.services.serving import read_settings, settings_of
from rollstream.harness.services.workspace import Workspace, broker_of
from rollstream.schemas.errors import ConfigError
from rollstream.schemas.kafka import connection, with_secrets
from rollstream.schemas.variables import conceal

pytestmark = pytest.mark.usefixtures("registered_alone")
ADDRESS = "kafka.example:9093"
BLOCK = {
    "security_protocol": "SASL_SSL",
    "username": "${WHO}",
    "password": "${SECRET}",
    "check_hostname": "${CHECK:-no}",
}
ENV = {"WHO": "learner", "SECRET": "hunter2"}


@pytest.fixture
def secured(written: dict[str, Any]) -> dict[str, Any]:
    """A configuration whose runs are on a Kafka with TLS and SASL."""
    written["trajectory_builders"]["b"] |= {"bootstrap_servers": ADDRESS, "kafka": dict(BLOCK)}
    return written


@pytest.fixture
def plain(written: dict[str, Any]) -> dict[str, Any]:
    """A configuration whose runs are on a Kafka that others may use too."""
    written["trajectory_builders"]["b"] |= {"bootstrap_servers": ADDRESS}
    return written


def password_of(kafka: Any) -> str | None:
    return None if kafka.password is None else kafka.password.get_secret_value()


def test_the_stored_configuration_names_the_variable_and_not_the_secret(secured: dict[str, Any]) -> None:
    found = config_file.resolve(secured, ENV)
    builder: Any = found.written["trajectory_builders"]
    assert builder["b"]["kafka"] == BLOCK
    assert (found.config.builder.kafka.username, found.config.builder.kafka.check_hostname) == ("learner", False)
    for text in (repr(found.config), repr(found.finetune), found.config.model_dump_json()):
        assert "hunter2" not in text
    kafka = connection(ADDRESS, kafka_block(found.config.builder, ENV), ENV)
    assert password_of(kafka) == "hunter2"


def test_a_configuration_of_another_harness_is_stored_without_the_secret(secured: dict[str, Any]) -> None:
    secured["trajectory_builders"]["b"]["kafka"] = BLOCK | {"password": "hunter2", "username": "u"}
    stored: Any = written_of(config_file.resolve(secured, {}).config)
    assert stored["trajectory_builders"]["b"]["kafka"]["username"] == "u"
    assert "hunter2" not in json.dumps(stored)


def test_a_secret_in_plain_text_is_refused(secured: dict[str, Any], tmp_path: Path) -> None:
    secured["trajectory_builders"]["b"]["kafka"] = BLOCK | {"password": "hunter2"}
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps(secured))
    with pytest.raises(ConfigError, match=r"b\.kafka\.password: secrets are not allowed in the file") as caught:
        config_file.load(path, env=ENV)
    assert "hunter2" not in str(caught.value)


def test_the_adapters_block_counts_where_it_gives_one(written: dict[str, Any]) -> None:
    written["trainer_adapters"]["a"] |= {"bootstrap_servers": ADDRESS, "kafka": dict(BLOCK)}
    builder = config_file.resolve(written, ENV).config.builder
    assert (builder.bootstrap_servers, builder.kafka.username) == (ADDRESS, "learner")
    assert password_of(connection(ADDRESS, kafka_block(builder, ENV), ENV)) == "hunter2"


def test_services_get_the_secret_by_standard_input_and_show_it_nowhere(secured: dict[str, Any]) -> None:
    config = config_file.resolve(secured, ENV).config
    kafka = connection(ADDRESS, kafka_block(config.builder, ENV), ENV)
    for name, settings in services_of(config, RunLocation(kafka, "a", Path("w")), "run-1").items():
        assert "hunter2" not in repr(settings) + settings.model_dump_json()
        received = settings_of(name.rsplit("-", 1)[0], name, json.loads(with_secrets(settings)), {})
        assert received.connection == kafka


def test_a_service_takes_its_connection_from_the_environment(tmp_path: Path) -> None:
    password = tmp_path / "password"
    env = {
        "ROLLSTREAM_BOOTSTRAP_SERVERS": ADDRESS,
        "ROLLSTREAM_KAFKA_SECURITY_PROTOCOL": "SASL_PLAINTEXT",
        "ROLLSTREAM_KAFKA_USERNAME": "metrics",
        "ROLLSTREAM_KAFKA_PASSWORD_FILE": str(password),
    }
    found = settings_of("metrics", None, {}, env).connection
    assert (found.bootstrap_servers, found.username, found.password_file) == (ADDRESS, "metrics", password)
    with pytest.raises(ConfigError, match="security_protocol SASL_PLAINTEXT needs username"):
        settings_of("metrics", None, {}, {**env, "ROLLSTREAM_KAFKA_USERNAME": ""})


def test_a_service_expands_the_secret_of_its_settings_file_but_not_what_it_is_passed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WHO", "learner")
    monkeypatch.setenv("SECRET", "hunter2")
    text = json.dumps({"bootstrap_servers": ADDRESS, "kafka": BLOCK})
    path = tmp_path / "service.json"
    path.write_text(text)
    found = settings_of("metrics", None, read_settings(str(path)), {"ROLLSTREAM_KAFKA_USERNAME": "other"}).connection
    assert (found.username, password_of(found), found.check_hostname) == ("learner", "hunter2", False)
    assert conceal("password hunter2") == "password ${SECRET}"
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    assert read_settings("-")["kafka"] == BLOCK
    monkeypatch.delenv("SECRET")
    with pytest.raises(
        ConfigError, match=rf"--settings {path}: kafka\.password: environment variable SECRET is not set"
    ):
        read_settings(str(path))


def test_later_commands_know_how_to_connect_and_where_the_secret_comes_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workspace = Workspace(tmp_path)
    block = {**BLOCK, "username": "learner", "check_hostname": False, "ca_file": "ca.pem"}
    workspace.remember_broker(ADDRESS, block)
    assert "hunter2" not in (tmp_path / "workspace.json").read_text()
    with (
        pytest.raises(ConfigError, match=r"kafka\.password: environment variable SECRET is not set"),
        broker_of(workspace),
    ):
        pass
    monkeypatch.setenv("SECRET", "hunter2")
    with broker_of(workspace) as kafka:
        assert (kafka.bootstrap_servers, kafka.username, password_of(kafka)) == (ADDRESS, "learner", "hunter2")
        assert kafka.ca_file == Path("ca.pem").absolute()
    monkeypatch.setenv("ROLLSTREAM_KAFKA_USERNAME", "operator")
    with broker_of(workspace) as kafka:
        assert kafka.username == "operator"
    monkeypatch.delenv("ROLLSTREAM_KAFKA_USERNAME")
    with broker_of(workspace, "elsewhere:9092") as kafka:
        assert (kafka.bootstrap_servers, kafka.security_protocol) == ("elsewhere:9092", "PLAINTEXT")


def test_security_settings_for_the_embedded_broker_are_refused(secured: dict[str, Any], tmp_path: Path) -> None:
    secured["trajectory_builders"]["b"]["bootstrap_servers"] = "embedded"
    config = config_file.resolve(secured, ENV).config
    with (
        pytest.raises(ConfigError, match=r"trajectory_builders\.b\.kafka\.check_hostname: .*the embedded broker"),
        broker_of_run(config, Workspace(tmp_path)),
    ):
        pass


def test_managed_services_on_a_shared_kafka_have_topics_and_groups_of_their_workspaces_own(
    plain: dict[str, Any], tmp_path: Path
) -> None:
    config = config_file.resolve(plain, ENV).config
    found: list[tuple[str, str]] = []
    for folder in ("one", "two", "one"):
        workspace = Workspace(tmp_path / folder)
        workspace.create()
        with broker_of_run(config, workspace) as (kafka, _):
            found.append((kafka.topic_prefix, kafka.group_prefix))
        workspace.remember_broker(ADDRESS, block_of_run(config, workspace))
        with broker_of(workspace) as kafka:
            assert (kafka.topic_prefix, kafka.group_prefix) == found[-1], "later commands find the same log"
    assert found[0] == found[2] != found[1]
    assert all(topics.startswith("rollstream.") and group.startswith("rollstream-") for topics, group in found)


def test_a_workspace_whose_runs_are_on_the_usual_topics_stays_with_them(plain: dict[str, Any], tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    workspace.create()
    workspace.remember_broker(ADDRESS)
    with broker_of_run(config_file.resolve(plain, ENV).config, workspace) as (kafka, _):
        assert kafka.topic_prefix == "rollstream."


@pytest.mark.parametrize("changes", [{"services": "external"}, {"kafka": {"topic_prefix": "ours."}}])
def test_external_services_and_given_names_are_left_as_they_are(
    plain: dict[str, Any], tmp_path: Path, changes: dict[str, Any]
) -> None:
    plain["trajectory_builders"]["b"] |= changes
    with broker_of_run(config_file.resolve(plain, ENV).config, Workspace(tmp_path)) as (kafka, _):
        assert kafka.topic_prefix == changes.get("kafka", {}).get("topic_prefix", "rollstream.")
        assert kafka.group_prefix == "rollstream"


def test_a_run_whose_file_names_its_workspaces_own_broker_has_the_brokers_password(
    plain: dict[str, Any], tmp_path: Path
) -> None:
    (folder := tmp_path / "broker").mkdir()
    (folder / "broker.json").write_text(json.dumps({"bootstrap_servers": ADDRESS}))
    password_file(folder).write_text("its password")
    password_file(folder).chmod(0o600)
    plain["trajectory_builders"]["b"] |= {"services": "external"}
    config = config_file.resolve(plain, ENV).config
    with broker_of_run(config, Workspace(tmp_path)) as (kafka, _):
        assert (kafka.security_protocol, kafka.username) == ("SASL_PLAINTEXT", USER)
        assert kafka.password_file == password_file(folder).absolute()
    with broker_of_run(config, Workspace(tmp_path / "other")) as (kafka, _):
        assert kafka.security_protocol == "PLAINTEXT"
