"""`rollstream validate`: the checks of `finetune` alone, and that they leave nothing behind."""

import copy
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from rollstream.harness.config import file as config_file
from rollstream.harness.config.jobs import RunLocation, services_of
from rollstream.harness.runs.run_context import RunRequest, check_run
from rollstream.harness.validate import validate
from rollstream.learner.tiny_model import make_tiny_model
from rollstream.schemas.errors import ConfigError
from rollstream.schemas.kafka import KafkaSettings
from rollstream.schemas.services import ProducerSettings
from tests.rigs.sources.source_tree import ROOT

Write = Callable[[dict[str, Any]], Path]
DATASET = {"_type": "jsonl", "file_path": str(ROOT / "examples/data/guess_number.jsonl")}


def entries(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*"))


def rollstream(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("ROLLSTREAM_")}
    command = [sys.executable, "-m", "rollstream.harness.cli.main", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=env, cwd=folder)


@pytest.mark.slow
def test_an_example_is_valid_and_nothing_is_written(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "tiny")
    before = entries(tmp_path)
    changes = (
        *("-o", "trainer_adapters.learner.model.path", str(model)),
        *("-o", "finetuning.num_epochs", "7"),
        *("-o", "finetuning.curriculum_learning.expansion_interval", "2"),
        *("-o", "finetuning.curriculum_learning.enabled", "false"),
    )
    example = ROOT / "examples/arithmetic.yaml"
    done = rollstream(tmp_path, "validate", "--config_file", str(example), *changes)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        f"{example} is valid",
        "workflow     arithmetic, 64 examples",
        f"model groups policy ({model})",
        "algorithm    sft as a warm start, then grpo",
        "training     12 epochs x 16 tasks x 8 generations; then 7 epochs x 16 tasks x 8 generations",
        "engine       transformers",
    ]
    assert done.stderr.startswith("WARNING: finetuning.curriculum_learning: expansion_interval: accepted, but ignored")
    assert entries(tmp_path) == before


@pytest.mark.slow
def test_an_error_is_one_line_and_fails(tmp_path: Path, written: dict[str, Any], write: Write) -> None:
    written["finetuning"]["reward_function"] = {"name": "judge"}
    done = rollstream(tmp_path, "validate", "--config_file", str(write(written)))
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert "judge" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def unknown_reward(written: dict[str, Any]) -> None:
    written["finetuning"]["reward_function"] = {"name": "judge"}


def unknown_evaluator(written: dict[str, Any]) -> None:
    written["eval"] = {"evaluators": {"sum": {"_type": "numeric_macth"}}}
    written["finetuning"]["reward_function"] = {"name": "sum"}


def unknown_engine(written: dict[str, Any]) -> None:
    written["trajectory_builders"]["b"]["engine"] = {"kind": "transfomers"}


def missing_dataset(written: dict[str, Any]) -> None:
    written["eval"] = {"general": {"dataset": {**DATASET, "file_path": "nowhere.jsonl"}}}


def missing_column(written: dict[str, Any]) -> None:
    written["workflow"] = "single_turn"


def misspelt_key(written: dict[str, Any]) -> None:
    written["trainer_adapters"]["a"]["max_stalenes"] = 1


def missing_model(written: dict[str, Any]) -> None:
    written["trainer_adapters"]["a"]["model"]["path"] = "./nowhere"


def missing_template(written: dict[str, Any]) -> None:
    model = Path(written["trainer_adapters"]["a"]["model"]["path"])
    (model / "tokenizer_config.json").write_text("{}")


def missing_module(written: dict[str, Any]) -> None:
    written["trajectory_builders"]["b"]["modules"] = ["no_such_module"]


def too_large_group(written: dict[str, Any]) -> None:
    written["trajectory_builders"]["b"]["num_generations"] = 1000


def incomplete_kafka(written: dict[str, Any]) -> None:
    kafka = {"security_protocol": "SASL_SSL", "username": "me"}
    written["trajectory_builders"]["b"] |= {"bootstrap_servers": "kafka.example:9092", "kafka": kafka}


def output_in_a_file(written: dict[str, Any]) -> None:
    written["finetuning"]["output_dir"] = f"{written['trainer_adapters']['a']['model']['path']}/config.json/output"


def output_where_no_folder_can_be(written: dict[str, Any]) -> None:
    written["finetuning"]["output_dir"] = "/proc/x/y"


def missing_gpu(written: dict[str, Any]) -> None:
    written["trainer_adapters"]["a"]["model"]["device"] = "cuda:99"


def missing_gpu_of_engine(written: dict[str, Any]) -> None:
    written["trajectory_builders"]["b"]["engine"] = {"kind": "transformers", "device": "cuda:99"}


def unknown_modules(written: dict[str, Any]) -> None:
    model = written["trainer_adapters"]["a"]["model"]
    model["path"] = str(make_tiny_model(Path(model["path"]).parent / "tiny"))
    model["lora"] = {"target_modules": ["q_prj"]}


def unknown_store(written: dict[str, Any]) -> None:
    written["trainer_adapters"]["a"]["artifact_uri"] = "foo://x/y"


def wrapped_store_in_memory(written: dict[str, Any]) -> None:
    written["trainer_adapters"]["a"]["artifact_uri"] = "dir::memory://a"


def store_in_memory(written: dict[str, Any]) -> None:
    written["trainer_adapters"]["a"]["artifact_uri"] = "memory://a"


def store_without_its_package(written: dict[str, Any]) -> None:
    written["trainer_adapters"]["a"]["artifact_uri"] = "oss://bucket/artifacts"


@pytest.mark.parametrize(
    ("spoil", "reported"),
    [
        (unknown_reward, "judge"),
        (unknown_evaluator, r"numeric_macth"),
        (unknown_engine, r"trajectory_builders\.b\.engine.*transfomers"),
        (missing_dataset, r"nowhere\.jsonl"),
        (missing_column, r"guess_number\.jsonl: example 'secret-0' has no key 'question'.*its keys are: secret;"),
        (misspelt_key, r"max_stalenes.*did you mean max_staleness\?"),
        (missing_model, r"trainer_adapters\.a\.model\.path: folder \./nowhere does not exist"),
        (missing_template, "has no chat template"),
        (missing_module, "no_such_module"),
        (too_large_group, "a group of 1000 trajectories"),
        (incomplete_kafka, r"trajectory_builders\.b\.kafka.*needs password"),
        (
            unknown_store,
            r"trainer_adapters\.a\.artifact_uri: artifact store foo://x/y: .*; give a URI that",
        ),
        (
            store_in_memory,
            r"trainer_adapters\.a\.artifact_uri: memory://a is in the memory of each process alone; give",
        ),
        (
            wrapped_store_in_memory,
            r"trainer_adapters\.a\.artifact_uri: dir::memory://a is in the memory of each process",
        ),
        (store_without_its_package, r"trainer_adapters\.a\.artifact_uri: artifact store oss://.*; install ossfs where"),
        (output_where_no_folder_can_be, r"finetuning\.output_dir: /proc/x/y cannot be used: no folder can be made in"),
        (missing_gpu, r"trainer_adapters\.a\.model\.device is cuda:99 and .*; set "),
        (missing_gpu_of_engine, r"trajectory_builders\.b\.engine\.device is cuda:99 and .*; set "),
        (unknown_modules, r"trainer_adapters\.a\.model\.lora\.target_modules: .* no module q_prj; its .* v_proj; corr"),
        (output_in_a_file, r"finetuning\.output_dir: .* cannot be used: .*config\.json is not a folder"),
    ],
)
def test_a_configuration_that_finetune_refuses_is_refused(
    tmp_path: Path, written: dict[str, Any], write: Write, spoil: Callable[[dict[str, Any]], None], reported: str
) -> None:
    written["eval"] = {"general": {"dataset": DATASET}}
    spoil(written)
    path = write(written)
    before = entries(tmp_path)
    with pytest.raises(ConfigError, match=reported):
        validate(path, tmp_path / "w")
    assert entries(tmp_path) == before


def test_names_and_lengths_that_a_local_model_does_not_have_are_warned_of(
    tmp_path: Path, written: dict[str, Any], write: Write, caplog: pytest.LogCaptureFixture
) -> None:
    model = written["trainer_adapters"]["a"]["model"]
    model["path"] = str(make_tiny_model(tmp_path / "tiny"))
    model["lora"] = {"target_modules": ["q_proj", "v_prj"]}
    positions = json.loads((tmp_path / "tiny" / "config.json").read_text())["max_position_embeddings"]
    written["trajectory_builders"]["b"]["sampling"] = {"max_new_tokens": positions}
    validate(write(written), tmp_path / "w")
    assert "has no module v_prj; its linear layers are" in caplog.text
    assert f"sampling.max_new_tokens: {positions} are all positions of model " in caplog.text
    caplog.clear()
    written["trajectory_builders"]["b"]["sampling"] = {"max_new_tokens": positions + 1}
    reported = (
        rf"^trajectory_builders\.b\.sampling\.max_new_tokens: {positions + 1} is above the {positions} positions of"
    )
    with pytest.raises(ConfigError, match=reported):
        validate(write(written), tmp_path / "w")
    caplog.clear()
    model["lora"] = {"target_modules": ["q_proj", "layers.0.mlp.up_proj"]}
    written["trajectory_builders"]["b"]["sampling"] = {"max_new_tokens": 40}
    validate(write(written), tmp_path / "w")
    assert "linear layers" not in caplog.text
    assert "positions" not in caplog.text


def test_options_change_the_configuration_as_in_finetune(tmp_path: Path, written: dict[str, Any], write: Write) -> None:
    path = write(written)
    before = entries(tmp_path)
    found = validate(
        path,
        tmp_path / "w",
        (("trainer_adapters.a.algorithm.name", "sft"), ("finetuning.num_epochs", "3")),
        {"dataset": DATASET["file_path"]},
    )
    assert found["workflow"] == "guess_number, 10 examples"
    assert found["algorithm"] == "sft"
    assert found["training"].startswith("3 epochs x ")
    with pytest.raises(ConfigError, match="nowhere"):
        validate(path, tmp_path / "w", (), {"validation_dataset": "nowhere.jsonl"})
    with pytest.raises(ConfigError, match=r"validation_config_file: .*none\.yaml"):
        validate(path, tmp_path / "w", (), {"validation_config_file": str(tmp_path / "none.yaml")})
    own = tmp_path / "own.json"
    own.write_text(json.dumps({**written, "finetuning": {**written["finetuning"], "num_epochs": True}}))
    with pytest.raises(ConfigError, match=r"validation_config_file .*own\.json: finetuning\.num_epochs: is true; give"):
        validate(
            path, tmp_path / "w", (), {"validation_config_file": str(own), "validation_dataset": DATASET["file_path"]}
        )
    judged = {"evaluators": {"sum": {"_type": "numeric_match", "tolerance": True}}}
    own.write_text(json.dumps({**written, "eval": judged}))
    with pytest.raises(ConfigError, match=r"own\.json: eval\.evaluators\.sum\.tolerance: is true; give a number"):
        validate(
            path, tmp_path / "w", (), {"validation_config_file": str(own), "validation_dataset": DATASET["file_path"]}
        )
    own.unlink()
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"workspace .* is not writable: .*file is not a folder; give another"):
        validate(path, tmp_path / "file" / "w")
    (tmp_path / "file").unlink()
    assert entries(tmp_path) == before


def test_several_model_groups_are_listed(tmp_path: Path, written: dict[str, Any], write: Write) -> None:
    builder, adapter = written["trajectory_builders"]["b"], written["trainer_adapters"]["a"]
    written["workflow"] = "bit_proof"
    builder["agents"] = {"prover": "prover", "verifier": "verifier"}
    adapter["model_groups"] = {"verifier": {"algorithm": {"name": "sft"}}}
    found = validate(write(written), tmp_path / "w")
    model = adapter["model"]["path"]
    assert found["model groups"] == f"prover ({model}), verifier ({model})"
    assert found["algorithm"] == "prover: grpo, verifier: sft"
    adapter["model_groups"] = {"verifier": {"frozen": True}}
    assert (
        validate(write(written), tmp_path / "w")["model groups"] == f"prover ({model}), verifier ({model}, not trained)"
    )


MODULE = """
from rollstream.harness import register_environment
from rollstream.producers import Session

@register_environment("for_validation_alone")
async def play(session: Session) -> None:
    await session.reward(1.0)
"""


def test_the_file_of_the_validation_is_checked_with_its_modules(
    tmp_path: Path, written: dict[str, Any], write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "validation_module.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    path, own = write(written), tmp_path / "validation.yaml"
    options: dict[str, Any] = {"dataset": DATASET["file_path"], "validation_config_file": str(own)}
    validated = copy.deepcopy(written) | {"workflow": "for_validation_alone", "eval": {"general": {"dataset": DATASET}}}
    validated["trajectory_builders"]["b"]["modules"] = ["validation_module"]
    own.write_text(yaml.safe_dump(validated))
    validate(path, tmp_path / "w", (), options)
    config = config_file.load(path, options=options).config
    location = RunLocation(KafkaSettings(bootstrap_servers="h:1"), "a", tmp_path)
    producers = services_of(config, location, "run-1", validation=config_file.validation_config(config))["producers-1"]
    assert isinstance(producers, ProducerSettings)
    assert producers.modules == ("validation_module",)
    unknown_reward(validated)
    own.write_text(yaml.safe_dump(validated))
    with pytest.raises(ConfigError, match=r"validation_config_file .*validation\.yaml: finetuning\..*'judge'"):
        validate(path, tmp_path / "w", (), options)
    loaded = config_file.load(path, options=options)
    check_run(RunRequest(loaded, tmp_path / "w", "run", resume="run-1"))
