"""No secret in a configuration, in its stored form, and in messages about it."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollstream.harness.config import file as config_file
from rollstream.harness.config.checks import check_values
from rollstream.harness.config.jobs import RunLocation, allowed_by, jobs_of, services_of
from rollstream.harness.services.concealing import ConcealingRecord
from rollstream.harness.validate import validate
from rollstream.schemas.errors import ConfigError
from rollstream.schemas.kafka import KafkaSettings
from rollstream.schemas.variables import conceal, conceal_variables, variables_in
from tests.rigs.sources.source_tree import ROOT

EXAMPLES = {"file_path": str(ROOT / "examples/data/guess_number.jsonl")}

SECRETS: list[dict[str, Any]] = [
    {"token": "abcdefgh"},
    {"HF_TOKEN": "hf_abc"},
    {"authorization": "Bearer abc123"},
    {"headers": {"Authorization": "Bearer ${T:-abc123def}"}},
    {"headers": ["Authorization: Bearer abc"]},
    {"x-api-key": "abc"},
    {"api_key": "${K:-sk-123456}"},
    {"api_key": "sk-secretsecretsecret${X}"},
    {"password": 12345},
    {"where": "postgresql://u:pw@h/db"},
    {"where": "postgresql://u:${PW:-pw}@h/db"},
    {"where": "redis://:hunter2@h:1"},
    {"where": "https://ghp_123@github.com/x"},
    {"where": "http://h/x?api_key=abc"},
    {"where": "http://h/?token=${T:-lit}"},
    {"dsn": "host=h user=u password=hunter2"},
    {"dsn": "Server=a;Password=hunter2;User=x"},
]
NONE: list[dict[str, Any]] = [
    {"token": "${T}"},
    {"authorization": "Bearer ${T}"},
    {"api_key": "${K:-dummy}"},
    {"api_key": "${K:-}"},
    {"api_key": "empty"},
    {"api_key": "sk-${X}"},
    {"secret": 3},
    {"max_tokens": 5, "pad_token": "<pad>", "token_file": "token.txt"},
    {"where": "postgresql://u:${PW}@h/db"},
    {"where": "postgresql://u@h/db"},
    {"where": "https://${T}@github.com/x"},
    {"where": "http://h:80/x?y=1"},
    {"where": "http://h/?token=${T}"},
    {"dsn": "host=h password=${PW}"},
    {"prompt": "The password: hunter2. Say token=x if {response}"},
    {"tolerance": "${TOLERANCE:-0.5}"},
]


@pytest.mark.parametrize("value", SECRETS, ids=str)
def test_a_secret_in_the_file_is_refused_without_repeating_it(value: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="secrets are not allowed in the file") as refused:
        check_values({"a": [value]})
    assert str(refused.value).startswith("a.0.")
    for text in ("abc", "hunter2", "pw@", "sk-", "12345"):
        assert text not in str(refused.value)


@pytest.mark.parametrize("value", NONE, ids=str)
def test_values_without_a_secret_are_accepted(value: dict[str, Any]) -> None:
    check_values(value)


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "s3cr3t-model").mkdir()
    return {
        "MODEL_DIR": str(tmp_path / "s3cr3t-model"),
        "STORE": str(tmp_path / "s3cr3t-store"),
        "WORKFLOW": "http://user:s3cr3t-password@127.0.0.1:9/x",
        "TARGET": "s3cr3t-target",
    }


def test_events_and_services_have_variables_unexpanded(
    written: dict[str, Any], env: dict[str, str], tmp_path: Path
) -> None:
    written["trainer_adapters"]["a"] |= {"model": {"path": "${MODEL_DIR}/m"}, "artifact_uri": "${STORE}/artifacts"}
    written["finetuning"] |= {"run_configuration": {"endpoint": "${WORKFLOW}"}, "target_model": "${TARGET}"}
    config = config_file.resolve(written, env).config
    assert config.adapter.artifact_uri == "${STORE}/artifacts"
    assert config.endpoint == "${WORKFLOW}"
    jobs = jobs_of(config, "run-1")
    assert jobs[0].job.model.path == "${MODEL_DIR}/m"
    assert jobs[0].rollout.environment_config["endpoint"] == "${WORKFLOW}"
    assert jobs[0].rollout.environment_config["target_model"] == "${TARGET}"
    location = RunLocation(KafkaSettings(bootstrap_servers="h:1"), str(config.adapter.artifact_uri), tmp_path)
    services = services_of(config, location, "run-1")
    as_json = "".join(one.model_dump_json() for job in jobs for one in (job.job, job.plan, job.rollout))
    assert "s3cr3t" not in as_json + "".join(one.model_dump_json() for one in services.values())
    assert {name for entry in allowed_by(config) for name in variables_in(entry)} >= {"MODEL_DIR", "WORKFLOW", "TARGET"}
    assert not {"${MODEL_DIR}", "${WORKFLOW}", "${TARGET}"} & set(allowed_by(config)), "each in its place only"
    assert services["producers-1"].allow == services["learner-1"].allow == allowed_by(config)


def test_variables_of_equal_values_are_kept_where_they_were_written(
    written: dict[str, Any], env: dict[str, str], tmp_path: Path
) -> None:
    env |= {"OTHER": env["MODEL_DIR"], "TEACHER": env["MODEL_DIR"], "STORE": env["MODEL_DIR"]}
    written["trainer_adapters"]["a"] |= {
        "model": {"path": "${MODEL_DIR}"},
        "artifact_uri": "${STORE}",
        "algorithm": {"name": "opd", "teacher": "${TEACHER}"},
        "model_groups": {"critic": {"model": {"path": "${OTHER}"}}},
    }
    written["trajectory_builders"]["b"]["agents"] = {"guesser": "policy", "other": "critic"}
    written["finetuning"] |= {
        "output_dir": "${OTHER}",
        "target_model": "${OTHER}",
        "run_configuration": {"endpoint": env["WORKFLOW"], "result_json_path": "${WORKFLOW}"},
    }
    config = config_file.resolve(written, env).config
    adapter = config.adapter
    assert (adapter.model.path, adapter.artifact_uri) == ("${MODEL_DIR}", "${STORE}")
    assert adapter.algorithm.texts() == {"teacher": "${TEACHER}"}
    assert adapter.of_group("critic").model.path == "${OTHER}"
    assert config.endpoint == env["WORKFLOW"]
    given = config.builder.environment_config
    assert (given["target_model"], given["result_json_path"]) == ("${OTHER}", "${WORKFLOW}")
    written["trainer_adapters"]["a"]["model"]["path"] = env["MODEL_DIR"]
    assert config_file.resolve(written, env).config.adapter.model.path == env["MODEL_DIR"]


def test_logs_and_messages_show_the_names_of_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_CONCEALED", "s3cr3t-value")
    monkeypatch.setenv("TEST_CONCEALED_PASSWORD", "s3cr3t-value-that-is-longer")
    monkeypatch.setenv("TEST_SHORT", "9")
    conceal_variables(["TEST_CONCEALED", "TEST_SHORT"])
    assert conceal("9 s3cr3t-value s3cr3t-value-that-is-longer") == ("9 ${TEST_CONCEALED} ${TEST_CONCEALED_PASSWORD}")
    monkeypatch.setenv("PWD", "/home/someone/project")
    assert conceal("/home/someone/project/game.py") == "/home/someone/project/game.py"
    try:
        raise ValueError("it was s3cr3t-value")
    except ValueError as error:
        info = (ValueError, error, error.__traceback__)
    record = ConcealingRecord("x", logging.ERROR, "", 1, "failed with %s", ("s3cr3t-value",), info)
    line = logging.Formatter("%(message)s").format(record)
    assert "s3cr3t" not in line
    assert line.startswith("failed with ${TEST_CONCEALED}\nTraceback")


def test_an_error_of_the_configuration_names_the_variable(
    written: dict[str, Any], write: Callable[[dict[str, Any]], Path], env: dict[str, str]
) -> None:
    written["finetuning"]["run_configuration"] = {"endpoint": "${TARGET}"}
    with pytest.raises(ConfigError) as refused:
        config_file.load(write(written), (), env)
    assert "s3cr3t" not in str(refused.value)


@pytest.mark.parametrize("where", ["text", "block", "builder", "validation"])
def test_a_command_with_a_variable_is_refused_because_tasks_carry_it_expanded(
    tmp_path: Path,
    written: dict[str, Any],
    write: Callable[[dict[str, Any]], Path],
    monkeypatch: pytest.MonkeyPatch,
    where: str,
) -> None:
    monkeypatch.setenv("MY_TOKEN", "s3cr3t-token-value")
    command, options = "command:true --token ${MY_TOKEN}", {}
    if where == "validation":
        own = tmp_path / "validation.yaml"
        own.write_text(json.dumps(written | {"workflow": command, "eval": {"general": {"dataset": EXAMPLES}}}))
        options = {"validation_config_file": str(own)}
    elif where == "builder":
        written["trajectory_builders"]["b"]["environment"] = command
    else:
        written["workflow"] = command if where == "text" else {"environment": command}
    with pytest.raises(ConfigError) as refused:
        validate(write(written), tmp_path / "w", (), options)
    assert "trajectory_builders.b.environment: command:true --token ${MY_TOKEN}: tasks carry" in str(refused.value)
    assert "s3cr3t" not in str(refused.value)


def test_a_command_that_is_written_out_is_accepted(
    tmp_path: Path, written: dict[str, Any], write: Callable[[dict[str, Any]], Path]
) -> None:
    written["workflow"] = "command:true --token_file ~/.token"
    assert validate(write(written), tmp_path / "w", (), {"dataset": EXAMPLES["file_path"]})
