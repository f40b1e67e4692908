"""A run's YAML file in NAT's shape: what is accepted, what becomes of it, and one clear error for each mistake."""

import json
from collections.abc import Callable
from math import inf
from pathlib import Path
from typing import Any

import pytest

from rollstream.harness.config import file as config_file
from rollstream.harness.config.resolve import block_of, run_config_of
from rollstream.harness.config.yaml import read_yaml
from rollstream.harness.runs import preflight
from rollstream.schemas.errors import ConfigError
from rollstream.schemas.finetuning import FinetuneConfig, TrainerConfig

pytestmark = pytest.mark.usefixtures("registered_alone")
Write = Callable[[dict[str, Any]], Path]
NATS_SECTIONS = {
    "general": {"telemetry": {"logging": {"console": {"_type": "console", "level": "INFO"}}}},
    "functions": {"choose": {"_type": "choose_move", "llm": "model"}},
    "function_groups": {},
    "middleware": {"m": {"_type": "cache"}},
    "llms": {"model": {"_type": "openai", "model_name": "m", "api_key": "default", "logprobs": True}},
    "embedders": {"e": {"_type": "nim"}},
    "memory": {},
    "object_stores": {},
    "optimizer": {"numeric": {"enabled": True}},
    "retrievers": {},
    "ttc_strategies": {"s": {"_type": "best_of_n_selection"}},
    "authentication": {},
}


def loaded(written: dict[str, Any], **env: str) -> config_file.Loaded:
    return config_file.resolve(written, env)


def refused(written: dict[str, Any], **env: str) -> str:
    with pytest.raises(ConfigError) as error:
        loaded(written, **env)
    return str(error.value)


# What is accepted


def test_sections_that_only_nat_uses_are_kept_unchanged(written: dict[str, Any]) -> None:
    found = loaded(written | NATS_SECTIONS)
    assert found.finetune.run_configuration is not None
    file = found.finetune.run_configuration.config_file
    assert {name: getattr(file, name) for name in NATS_SECTIONS} == NATS_SECTIONS


def test_a_placeholder_api_key_is_not_a_secret(written: dict[str, Any], write: Write) -> None:
    config_file.load(write(written | NATS_SECTIONS))
    secret = {"llms": {"model": {"_type": "openai", "api_key": "sk-123"}}}
    with pytest.raises(ConfigError, match=r"llms.model.api_key: secrets are not allowed in the file"):
        config_file.load(write(written | secret))


def test_a_type_may_come_from_the_modules_that_a_builder_names(
    written: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = FOREIGN.replace("trajectory_builder", "trainer").replace("TrajectoryBuilder", "Trainer")
    (tmp_path / "foreign_trainers.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    written["trajectory_builders"]["b"]["modules"] = ["foreign_trainers"]
    written["trainers"]["t"] = {"_type": "foreign_for_a_test"}
    assert loaded(written).config.trainer.planning == "submitted"
    written["trajectory_builders"]["b"]["modules"] = ["none_of_that_name"]
    written["trainers"]["t"] = {"_type": "unheard_of"}
    assert refused(written).startswith("trajectory_builders.b.modules: module none_of_that_name cannot be imported: ")


def test_the_finetuning_section_reaches_components_in_nats_shape(written: dict[str, Any]) -> None:
    curriculum = {"enabled": True, "explore_share": 0.5}
    written["finetuning"] |= {"num_epochs": 3, "curriculum_learning": curriculum, "output_dir": "~/out"}
    found = loaded(written)
    assert isinstance(found.finetune, FinetuneConfig)
    assert (found.finetune.num_epochs, found.finetune.target_functions) == (3, ["<workflow>"])
    assert found.finetune.output_dir == found.config.finetuning.output_dir == Path.home() / "out"
    assert found.finetune.curriculum_learning.initial_percentile == 0.3
    assert found.config.finetuning.curriculum_learning.explore_share == 0.5
    assert isinstance(block_of(found.finetune, "trainer"), TrainerConfig)
    assert run_config_of(found.finetune) == found.config


@pytest.mark.parametrize(
    "workflow", ["guess_number", {"environment": "guess_number"}, {"_type": "guess_number"}, {"_type": "${GAME}"}]
)
def test_the_workflow_names_the_environment(written: dict[str, Any], workflow: Any) -> None:
    assert loaded(written | {"workflow": workflow}, GAME="guess_number").config.environment == "guess_number"


def test_fields_of_the_workflow_block_are_passed_to_the_environment(written: dict[str, Any]) -> None:
    written["workflow"] = {"_type": "guess_number", "high": "${HIGH}", "low": 1, "player_model": "model"}
    written["trajectory_builders"]["b"]["environment_config"] = {"low": 2}
    config = loaded(written, HIGH="7").config
    assert config.builder.environment_config == {"high": "${HIGH}", "low": 2}


def test_free_form_values_keep_their_variables(written: dict[str, Any]) -> None:
    written["trajectory_builders"]["b"]["environment_config"] = {"high": "${HIGH:-9}"}
    written["eval"] = {"evaluators": {"judge": {"_type": "llm_judge", "api_key": "${KEY}"}}}
    config = loaded(written, KEY="s3cr3t").config
    assert config.builder.environment_config == {"high": "${HIGH:-9}"}
    assert config.evaluators == {"judge": {"_type": "llm_judge", "api_key": "${KEY}"}}


def test_a_foreign_builder_plays_recorded_rollouts_and_is_submitted(
    written: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "foreign_builders.py").write_text(FOREIGN)
    monkeypatch.syspath_prepend(str(tmp_path))
    written["trajectory_builders"]["b"] = {"_type": "python:foreign_builders.Foreign", "depth": 2}
    config = loaded(written | {"workflow": {"_type": "their_agent"}}).config
    assert (config.environment, config.trainer.planning) == ("recorded", "submitted")
    assert config.builder.environment_config == {}
    written["trainer_adapters"]["a"]["retokenise"] = True
    config = loaded(written | {"workflow": {"_type": "their_agent"}}).config
    assert config.builder.environment_config == {"retokenise": True}
    written["trajectory_builders"]["b"]["depth"] = "deep"
    assert "trajectory_builders.b.depth: is 'deep'" in refused(written)


FOREIGN = """
from rollstream.harness import register_trajectory_builder
from rollstream.schemas.finetuning import TrajectoryBuilderConfig


class Foreign(TrajectoryBuilderConfig, name="foreign_for_a_test"):
    depth: int = 1


@register_trajectory_builder(config_type=Foreign)
async def build(config, builder):
    yield None
"""


# Options and overrides


def test_options_of_the_command_line_win_over_the_file(written: dict[str, Any], write: Write) -> None:
    written["finetuning"]["run_configuration"] = {"validation_interval": 3, "endpoint": "http://a", "dataset": "a.json"}
    options: dict[str, Any] = {"endpoint": "http://b", "validation_dataset": "v.csv", "endpoint_timeout": None}
    found = config_file.load(write(written), options=options)
    config, run = found.config, found.finetune.run_configuration
    assert run is not None
    assert (config.endpoint, config.endpoint_timeout, run.endpoint) == ("http://b", 300, "http://b")
    assert config.dataset is not None
    assert (config.dataset.file_path, config.dataset.type) == (Path("a.json"), "json")
    assert config.validation is not None
    assert config.validation.dataset is not None
    assert (config.validation.interval, config.validation.dataset.type) == (3, "csv")
    assert config_file.resolve(found.written).config == config


def test_validation_may_have_a_file_of_its_own(written: dict[str, Any], write: Write, tmp_path: Path) -> None:
    own = tmp_path / "validation.yaml"
    own.write_text(json.dumps(written | {"eval": {"general": {"dataset": {"file_path": "v.jsonl"}}}}))
    config = config_file.load(write(written), options={"validation_config_file": str(own)}).config
    found = config_file.validation_config(config)
    assert found is not None
    assert found.dataset is not None
    assert found.dataset.file_path == Path("v.jsonl")
    own.write_text(json.dumps(written))
    with pytest.raises(ConfigError, match=r"validation.yaml: eval.general.dataset: missing"):
        config_file.validation_config(config)
    own.unlink()
    with pytest.raises(ConfigError, match=r"validation_config_file: .*validation.yaml: cannot be read"):
        config_file.validation_config(config)


def test_a_file_stands_on_its_base(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "prompt.md").write_text("Play well.\n")
    (tmp_path / "inner" / "first.yml").write_text("a: {x: 1, y: [1, 2]}\nb: 'file://prompt.md'\n")
    (tmp_path / "second.yml").write_text("base: inner/first.yml\na: {y: [3]}\n")
    (tmp_path / "third.yml").write_text("base: second.yml\nc: ['file://inner/prompt.md']\n")
    assert read_yaml(tmp_path / "third.yml") == {
        "a": {"x": 1, "y": [3]},
        "b": "Play well.\n",
        "c": ["Play well.\n"],
    }


# Mistakes: one clear error each, which names the path in the file


@pytest.mark.parametrize("section", ["trainers", "trajectory_builders", "trainer_adapters"])
def test_an_unknown_type_is_named_with_the_known_ones(written: dict[str, Any], section: str) -> None:
    written[section]["other"] = {"_type": "rolstream"}
    reported = refused(written)
    location, _, known = reported.partition("; known types: ")
    assert location == f"{section}.other._type: 'rolstream' is not known"
    assert "openpipe_art_tra" in known
    assert "rollstream" in known.split(", ")


@pytest.mark.parametrize("role", ["trainer", "trajectory_builder", "trainer_adapter"])
def test_a_reference_to_nothing_is_named_with_what_is_defined(written: dict[str, Any], role: str) -> None:
    written["finetuning"][role] = "nobody"
    defined = next(iter(written[f"{role}s"]))
    assert refused(written) == f"finetuning.{role}: {role} 'nobody' is not defined; choose one of: {defined}"


def test_a_missing_reference_is_named(written: dict[str, Any]) -> None:
    del written["finetuning"]["trainer"]
    assert refused(written) == "finetuning.trainer: missing; this key is required"


@pytest.mark.parametrize(
    ("path", "mistyped", "reported"),
    [
        (("finetuning",), "finetunning", "finetunning: unknown key; did you mean finetuning? (and 1 more)"),
        (("trainer_adapters", "a", "model"), "modell", "trainer_adapters.a.modell: unknown key; did you mean model?"),
    ],
)
def test_a_mistyped_key_is_named_before_the_one_that_it_leaves_missing(
    written: dict[str, Any], path: tuple[str, ...], mistyped: str, reported: str
) -> None:
    block = written
    for part in path[:-1]:
        block = block[part]
    block[mistyped] = block.pop(path[-1])
    assert refused(written).startswith(reported)


@pytest.mark.parametrize(
    ("path", "value", "reported"),
    [
        ("finetuning.num_epochs", "many", "finetuning.num_epochs: is 'many'; "),
        ("finetuning.num_epochs", 0, "finetuning.num_epochs: is 0; "),
        ("finetuning.curriculum_learning.initial_percentile", 2, "finetuning.curriculum_learning.initial_percentile: "),
        ("finetuning.run_configuration.endpoint", "host", "finetuning.run_configuration.endpoint: 'host' is not a URL"),
        ("finetuning.num_epoch", 1, "finetuning.num_epoch: unknown key; did you mean num_epochs?"),
        ("trainers.t.plannning", "x", "trainers.t.plannning: unknown key; did you mean planning?"),
        ("trainers.t.run_idle_timeout_s", 1e306, "trainers.t.run_idle_timeout_s: is 1e+306; input should be less than"),
        ("trainers.t.planning", "x", "trainers.t.planning: is 'x'; "),
        ("trainer_adapters.a.model.pth", "x", "trainer_adapters.a.model.pth: unknown key; did you mean path?"),
        ("trainer_adapters.a.model", None, "trainer_adapters.a.model: is None; expected a mapping of "),
        (
            "trainer_adapters.a.optimizer",
            {"max_grad_norm": inf},
            "trainer_adapters.a.optimizer.max_grad_norm: is inf",
        ),
        ("trainer_adapters.a.optimizer", {"betas": [0.9, 1.0]}, "trainer_adapters.a.optimizer.betas.1: is 1.0; "),
        (
            "trainer_adapters.a.algorithm",
            None,
            "trainer_adapters.a.algorithm: is None; expected a mapping; give its name, ",
        ),
        ("trajectory_builders.b.session_timeout_s", 1e9, "trajectory_builders.b.session_timeout_s: is 1000000000.0; "),
        ("trajectory_builders.b.group_timeout_s", inf, "trajectory_builders.b.group_timeout_s: is inf; "),
        ("trajectory_builders.b.min_generations", 99, "trajectory_builders.b: min_generations 99 exceeds"),
        ("trajectory_builders.b.rewards", "x", "trajectory_builders.b.rewards: is 'x'; input should be a list"),
        ("trainers.t", 3, "trainers.t: is 3; "),
        ("trainers", [], "trainers: is []; "),
        ("workflow.enviroment", "x", "workflow.enviroment: unknown key; did you mean environment?"),
        ("evall.x", {}, "evall: unknown key; did you mean eval?"),
        ("trainer_adapters.a.lerning_rate", 1, "trainer_adapters.a.lerning_rate: unknown key; known keys: "),
        ("trainer_adapters.a.min_delta", 1, "trainer_adapters.a.min_delta: unknown key; known keys: "),
        ("eval.general.dataset._type", "xls", "eval.general.dataset: _type 'xls' is not supported; save "),
        ("eval.general.dataset._type", "yaml", "eval.general.dataset._type: is 'yaml'; "),
        ("eval.general.dataset.s3", {"bucket": "b"}, "eval.general.dataset: s3 is not supported; download "),
        ("eval.evaluators.judge", {}, "eval.evaluators.judge._type: missing; "),
        (
            "trainers.t._type",
            "python:nowhere.X",
            "trainers.t._type: python:nowhere.X: module nowhere cannot be imported: ",
        ),
        (
            "trainers.t._type",
            "python:json.JSONDecoder",
            "trainers.t._type: python:json.JSONDecoder is not registered for trainers; register it there with ",
        ),
    ],
)
def test_a_wrong_value_or_key_is_named_by_its_path(
    written: dict[str, Any], path: str, value: Any, reported: str
) -> None:
    written["workflow"] = {"environment": "guess_number"}
    written["eval"] = {"general": {"dataset": {"file_path": "d.jsonl"}}}
    *above, last = path.split(".")
    block = written
    for part in above:
        block = block.setdefault(part, {})
    block[last] = value
    assert refused(written).startswith(reported)


def test_a_workspace_may_be_below_the_home_folder(
    written: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    written["trajectory_builders"]["b"]["workspace"] = "~/work"
    loaded = config_file.resolve(written)
    assert block_of(loaded.finetune, "trajectory_builder").workspace == tmp_path / "work"


def test_a_truth_value_in_place_of_a_number_is_refused(written: dict[str, Any]) -> None:
    written["trainer_adapters"]["a"]["optimizer"] = {"betas": [0.9, False]}
    with pytest.raises(ConfigError, match=r"^trainer_adapters\.a\.optimizer\.betas\.1: is false; give a number$"):
        config_file.resolve(written)
    written["finetuning"]["num_epochs"] = True
    with pytest.raises(ConfigError, match=r"finetuning\.num_epochs: is true; give a number$"):
        config_file.resolve(
            {**written, "trainer_adapters": {"a": {**written["trainer_adapters"]["a"], "optimizer": {}}}}
        )


@pytest.mark.parametrize("value", [".inf", "-.inf", ".nan", str(2**64), str(-(2**63) - 1)])
def test_a_number_that_no_event_can_carry_is_refused(written: dict[str, Any], write: Write, value: str) -> None:
    with pytest.raises(ConfigError, match=r"trainer_adapters.a.seed: is .*; give a (finite|number of at most 64 bits)"):
        config_file.load(write(written), [("trainer_adapters.a.seed", value)])


@pytest.mark.parametrize("given", ["${SEED}", f"'{2**64}'"])
def test_a_seed_of_more_than_64_bits_is_refused_wherever_it_comes_from(
    written: dict[str, Any], write: Write, given: str
) -> None:
    with pytest.raises(ConfigError, match=r"trainer_adapters.a.seed: is .*; input should be less than 18446744073709"):
        config_file.load(write(written), [("trainer_adapters.a.seed", given)], {"SEED": str(2**64)})


@pytest.mark.parametrize(
    ("text", "reported"),
    [
        ("base: second.yml", r"second.yml: base: first.yml is circular: .*first.yml -> .*second.yml"),
        ("base: none.yml", r"first.yml: base: file .*none.yml does not exist"),
        ("base: 3", r"first.yml: base: is 3; give the path of a YAML file"),
        ("a: {b: 'file://none.md'}", r"first.yml: a.b: file://none.md: cannot be read"),
        ("a: ['file://code.py']", r"first.yml: a.0: file://code.py: only text files can be included"),
    ],
)
def test_a_base_or_text_that_cannot_be_read_is_named(tmp_path: Path, text: str, reported: str) -> None:
    (tmp_path / "first.yml").write_text(text)
    (tmp_path / "second.yml").write_text("base: first.yml")
    with pytest.raises(ConfigError, match=reported):
        read_yaml(tmp_path / "first.yml")


@pytest.mark.parametrize(
    ("name", "content", "reported"),
    [
        ("none.jsonl", None, r"eval.general.dataset or --dataset: dataset .*none.jsonl: cannot be read: "),
        ("none.parquet", None, r"dataset .*none.parquet: cannot be read"),
        ("empty.jsonl", "", r"dataset .*empty.jsonl is empty"),
        ("empty.json", "[]", r"dataset .*empty.json is empty"),
        ("head.csv", "id,question\n", r"dataset .*head.csv is empty"),
        ("a.jsonl", '{"id": 1, "q": 2}\n{"q": 1}', r"dataset .*a.jsonl line 2 has no key .id.; .*dataset.id_key"),
        ("a.json", '[{"id": null, "q": 1}]', r"dataset .*a.json item 1 has no key .id."),
        ("a.jsonl", '{"id": 1}', r"dataset .*a.jsonl line 1 has no key .q.; .*dataset.structure.question_key"),
        ("a.csv", "id,q\n1,2,3\n", r"dataset .*a.csv line 2 must have 2 values, one per column"),
        ("a.csv", 'id,q\n1,"a"b\n', r"dataset .*a.csv line 2: not valid CSV"),
        ("a.parquet", "PAR", r"dataset .*a.parquet: cannot be read as Parquet"),
        ("a.jsonl", "{", r"dataset .*a.jsonl line 1: not valid JSON"),
    ],
)
def test_a_dataset_that_cannot_be_used_is_named_before_the_run(
    written: dict[str, Any], tmp_path: Path, name: str, content: str | None, reported: str
) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_text(content)
    kind = {".jsonl": "jsonl", ".json": "json", ".csv": "csv", ".parquet": "parquet"}[path.suffix]
    dataset = {"_type": kind, "file_path": str(path), "structure": {"question_key": "q"}}
    config = loaded(written | {"eval": {"general": {"dataset": dataset}}}).config
    with pytest.raises(ConfigError, match=reported):
        preflight.check_datasets(config, is_new=True)
    preflight.check_datasets(config, is_new=False)
