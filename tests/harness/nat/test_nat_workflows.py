"""A file whose workflow a NAT package registers: what of it NAT reads, which llms are the model's, what is refused."""

import copy
import importlib
import json
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from rollstream.harness.config import file as config_file
from rollstream.harness.config.jobs import jobs_of
from rollstream.harness.config.nat_workflows import called, check_sampling, hint, sections_of, trained_llms
from rollstream.harness.runs.preflight import check_names
from rollstream.harness.services.addresses import is_this_machine
from rollstream.schemas.config import RunConfig
from rollstream.schemas.errors import ConfigError

END_TO_END = Path(__file__).parents[2] / "end_to_end" / "nat"
ADAPTER = "openpipe_trainer_adapter"


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The file of the end-to-end test, whose package is imported as NAT's loader would."""
    monkeypatch.syspath_prepend(str(END_TO_END))
    monkeypatch.setattr(sys, "path", list(sys.path))
    importlib.import_module("nat_game")
    written = yaml.safe_load((END_TO_END / "nat_workflow.yml").read_text())
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "data.json").write_text(json.dumps([{"id": "x", "question": "X", "answer": "Win!"}]))
    written["trainer_adapters"][ADAPTER]["backend"]["base_model"] = str(tmp_path / "model")
    written["eval"]["general"]["dataset"]["file_path"] = str(tmp_path / "data.json")
    written["finetuning"]["output_dir"] = str(tmp_path / "output")
    return written


def resolved(written: dict[str, Any]) -> RunConfig:
    return config_file.resolve(copy.deepcopy(written)).config


def test_its_rollouts_are_recorded_ones_at_the_temperature_that_the_llm_samples_with(example: dict[str, Any]) -> None:
    loaded = config_file.resolve(example)
    config = loaded.config
    assert config.trainer.planning == "submitted"
    assert (config.nat_workflow, config.environment) == ("rl_with_openpipe_art", "recorded")
    assert config.served is not None
    assert config.served.port == 0
    assert config.reward_functions == ()
    check_names(config)
    (job,) = jobs_of(config, "run-1")
    algorithm: Any = job.job.algorithm
    assert (algorithm.temperature, algorithm.advantage) == (0.4, "batch_std")
    assert job.rollout.reward_weights == {}


def test_nat_reads_its_sections_with_variables_and_without_ours(example: dict[str, Any], monkeypatch: Any) -> None:
    monkeypatch.setenv("OTHER_SAYS", "no")
    example["functions"]["other_side"]["says"] = "${OTHER_SAYS}"
    finetune = config_file.resolve(example).finetune
    assert finetune.run_configuration is not None
    file: Any = finetune.run_configuration.config_file
    sections = sections_of(file)
    assert sections["functions"]["other_side"]["says"] == "no"
    assert sections["workflow"]["player_model"] == "openai_llm"
    assert set(sections) == {"llms", "functions", "workflow", "eval"}
    assert "dataset" not in sections["eval"]["general"]


@pytest.mark.parametrize(
    "llm",
    [
        {"model_name": "tic_tac_toe_training_run", "base_url": "http://localhost:8000/v1"},
        {"model_name": "any", "base_url": "http://localhost:7623/v1"},
        {"model_name": "any", "base_url": "http://127.0.0.1:8765/v1", "port": 8765},
        {"model_name": "policy"},
    ],
)
def test_an_llm_leads_to_the_model_by_name_or_by_port(example: dict[str, Any], llm: dict[str, Any]) -> None:
    if port := llm.pop("port", None):
        example["trainer_adapters"][ADAPTER]["endpoint"] = {"port": port}
    example["llms"]["openai_llm"] = {"_type": "openai", "api_key": "default", **llm}
    example["llms"]["judge"] = {"_type": "openai", "model_name": "gpt", "api_key": "default"}
    finetune = config_file.resolve(example).finetune
    assert finetune.run_configuration is not None
    file: Any = finetune.run_configuration.config_file
    assert set(trained_llms(file, file.trainer_adapters[ADAPTER])) == {"openai_llm"}


@pytest.mark.parametrize(
    ("path", "value", "reported"),
    [
        (
            "llms.openai_llm.model_name",
            "gpt-4",
            r"llms: none refers to the model in training; set the model_name of one to",
        ),
        ("llms.openai_llm._type", "nim", r"llms\.openai_llm\._type: is 'nim'; .* use openai"),
        (
            "finetuning.reward_function",
            {"name": "rl"},
            r"name: is 'rl'; name one of eval.evaluators, .*\(rl_accuracy\)",
        ),
        ("finetuning.reward_function", None, r"reward_function\.name: is None; name one of eval.evaluators"),
        ("eval.general.dataset", None, r"eval\.general\.dataset: missing"),
        ("eval.evaluators.rl_accuracy._type", "no_such_type", r"NAT refuses the file: .*no_such_type"),
        ("workflow.max_parser_retries", "many", r"NAT refuses the file: .*max_parser_retries"),
        (
            "finetuning.run_configuration",
            {"validation_config_file": "v.yml"},
            r"validation_config_file: a NAT workflow",
        ),
        ("trajectory_builders.openpipe_traj_builder._type", "dpo_traj_builder", r"cannot run the NAT workflow"),
        ("trajectory_builders.openpipe_traj_builder.services", "external", r"services: external services have no"),
    ],
)
def test_a_file_whose_workflow_cannot_be_run_is_refused(
    example: dict[str, Any], path: str, value: Any, reported: str
) -> None:
    *parents, key = path.split(".")
    block = example
    for name in parents:
        block = block[name]
    block[key] = value
    if value is None:
        del block[key]
    with pytest.raises(ConfigError, match=reported):
        resolved(example)


@pytest.mark.parametrize(
    "llm",
    [
        {"model_name": "a judge", "base_url": "https://judge.example.com:8000/v1"},
        {"model_name": "tic_tac_toe_training_run", "base_url": "https://api.example.com/v1"},
        {"model_name": "a judge", "base_url": "http://localhost:nowhere/v1"},
    ],
)
def test_a_model_at_another_host_is_somebody_elses(example: dict[str, Any], llm: dict[str, Any]) -> None:
    example["llms"]["judge"] = {"_type": "openai", **llm}
    run: Any = config_file.resolve(example).finetune.run_configuration
    file: Any = run.config_file
    assert set(trained_llms(file, file.trainer_adapters[ADAPTER])) == {"openai_llm"}


JUDGE = {
    "_type": "openai",
    "model_name": "gpt",
    "temperature": 0,
    "top_p": 0.5,
    "base_url": "https://judge.example.com",
}
SECOND = {"_type": "openai", "model_name": "policy"}


@pytest.mark.parametrize(
    ("llm", "second", "changes", "reported"),
    [
        ({"temperature": 0.0}, None, {}, r"^llms\.openai_llm\.temperature: 0 decodes greedily.*set it above 0$"),
        ({}, {"temperature": 0.9}, {}, r"^llms\.openai_llm\.temperature: 0\.4 differs from llms\.second\.temp.*: 0\.9"),
        (
            {},
            {},
            {},
            r"openai_llm\.temperature: 0\.4 differs from llms\.second\.temperature: 1 \(the default is 1",
        ),
        ({"top_p": 0.9}, {"temperature": 0.4}, {}, r"top_p: 0\.9 differs from llms\.second\.top_p: 1 .*same value$"),
        (
            {},
            None,
            {"trajectory_builders.openpipe_traj_builder.sampling": {"temperature": 0.7}},
            r"llm\.temperature: 0\.4 differs from trajectory_builders\.openpipe_traj_builder\.sampling\.temp.*: 0\.7",
        ),
        (
            {"top_p": 0.5},
            None,
            {"trajectory_builders.openpipe_traj_builder.sampling": {"top_p": 0.8}},
            r"llm\.top_p: 0\.5 differs from trajectory_builders\.openpipe_traj_builder\.sampling\.top_p: 0\.8",
        ),
    ],
)
def test_llms_that_grpo_cannot_compare_with_one_distribution_are_refused(
    example: dict[str, Any], llm: dict[str, Any], second: Any, changes: dict[str, Any], reported: str
) -> None:
    example["llms"]["judge"] = JUDGE
    example["llms"]["openai_llm"] |= llm
    if second is not None:
        example["llms"]["second"] = SECOND | second
    for path, value in changes.items():
        section, name, key = path.split(".")
        example[section][name][key] = value
    loaded = config_file.resolve(example)
    with pytest.raises(ConfigError, match=reported):
        check_sampling(loaded.config, loaded.finetune)


@pytest.mark.parametrize("temperature", [0.4, "0.4"])
def test_llms_with_the_sampling_of_the_blocks_are_accepted(example: dict[str, Any], temperature: Any) -> None:
    example["llms"]["judge"] = JUDGE
    example["llms"]["openai_llm"]["temperature"] = temperature
    example["llms"]["second"] = SECOND | {"temperature": 0.4, "top_p": 1}
    example["trajectory_builders"]["openpipe_traj_builder"]["sampling"] = {"temperature": 0.4}
    loaded = config_file.resolve(example)
    check_sampling(loaded.config, loaded.finetune)
    assert jobs_of(loaded.config, "run-1")[0].job.algorithm.temperature == 0.4


@pytest.mark.parametrize(
    ("target", "names", "wanted"),
    [
        (None, ("policy", "policy"), None),
        ("policy", ("run-1/policy", "policy"), "policy"),
        ("tic_tac_toe_training_run", ("policy", "run-1/policy"), "policy"),
        ("gpt", ("policy", "policy"), "gpt"),
    ],
)
def test_a_target_model_is_distinguished_from_the_other_names_of_the_model(
    example: dict[str, Any], target: str | None, names: tuple[str, str], wanted: str | None
) -> None:
    example["llms"]["judge"] = JUDGE
    example["llms"]["second"] = SECOND
    run: Any = config_file.resolve(example).finetune.run_configuration
    llms = trained_llms(run.config_file, run.config_file.trainer_adapters[ADAPTER])
    found = called(llms, target, "policy", "run-1/policy")
    assert found == ({"openai_llm": names[0], "second": names[1]}, wanted)


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_an_endpoint_on_all_addresses_is_known_by_the_name_of_this_machine(example: dict[str, Any], host: str) -> None:
    own = socket.gethostname()
    if not is_this_machine(own):
        pytest.skip("this machine does not know its own name")
    example["trainer_adapters"][ADAPTER]["backend"]["ip"] = "127.0.0.1"
    example["trainer_adapters"][ADAPTER]["endpoint"] = {"host": host, "port": 8765}
    example["llms"]["other"] = {"_type": "openai", "model_name": "any", "base_url": f"http://{own}:8765/v1"}
    run: Any = config_file.resolve(example).finetune.run_configuration
    found = trained_llms(run.config_file, run.config_file.trainer_adapters[ADAPTER])
    assert ("other" in found) == (host == "0.0.0.0")


def test_a_workflow_that_nobody_registers_is_an_unknown_environment(example: dict[str, Any]) -> None:
    example["workflow"]["_type"] = "rl_with_nothing"
    with pytest.raises(ConfigError, match=r"'rl_with_nothing' is unknown; .*no installed NAT package registers"):
        check_names(resolved(example))
    example["workflow"] = "rl_with_openpipe_art"
    with pytest.raises(ConfigError, match=r"is unknown; .* write workflow: \{_type: rl_with_openpipe_art\}"):
        check_names(resolved(example))
    assert hint("guess_number") == hint("python:mine.play") == ""


def test_a_server_or_an_environment_of_the_builder_plays_instead(example: dict[str, Any]) -> None:
    builder = example["trajectory_builders"]["openpipe_traj_builder"]
    assert resolved(
        example | {"trajectory_builders": {"openpipe_traj_builder": builder | {"environment": "arithmetic"}}}
    )
    example["finetuning"]["run_configuration"] = {"endpoint": "http://127.0.0.1:8000"}
    config = resolved(example)
    assert (config.environment, config.nat_workflow, config.served) == ("remote_workflow", None, None)
