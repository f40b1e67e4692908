"""rollstream's components as NAT finds and builds them: by the entry point, under NAT's own loader and builder."""

import asyncio
import subprocess
import sys
import tomllib
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from nat.builder.workflow_builder import WorkflowBuilder
from nat.cli.register_workflow import register_evaluator
from nat.cli.type_registry import GlobalTypeRegistry
from nat.data_models.config import Config
from nat.data_models.evaluator import EvalInput, EvalInputItem, EvaluatorBaseConfig
from nat.finetuning.interfaces.finetuning_runner import Trainer
from nat.finetuning.interfaces.trainer_adapter import TrainerAdapter
from nat.finetuning.interfaces.trajectory_builder import TrajectoryBuilder
from nat.runtime.loader import PluginTypes, discover_and_register_plugins
from pydantic import ValidationError

from rollstream.harness.nat.configs import (
    NatTrainerAdapterConfig,
    NatTrainerConfig,
    NatTrajectoryBuilderConfig,
    NatWorkflowConfig,
)
from rollstream.schemas.evaluators import MODELS
from tests.rigs.services.judge_server import JudgeServer

SECRET = "sk-very-secret-4711"
ROOT = Path(__file__).resolve().parents[3]
BUILDER: Any = SimpleNamespace(get_max_concurrency=lambda: 8)
FILE = {
    "workflow": {"_type": "rollstream", "environment": "guess_number"},
    "trajectory_builders": {"rollouts": {"_type": "rollstream", "num_generations": 3}},
    "trainer_adapters": {"learner": {"_type": "rollstream", "model": {"path": "none"}, "endpoint": {"port": 0}}},
    "trainers": {"trainer": {"_type": "rollstream", "planning": "submitted"}},
    "eval": {
        "evaluators": {
            "exact": {"_type": "exact_match", "ignore_case": True},
            "pattern": {"_type": "regex", "pattern": "^4"},
            "schema": {"_type": "json_schema", "schema": {"type": "object", "required": ["answer"]}},
        }
    },
}


@pytest.fixture(scope="module", autouse=True)
def _discovered():
    discover_and_register_plugins(PluginTypes.CONFIG_OBJECT)


def test_the_entry_point_is_declared():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["nat.components"] == {"rollstream": "rollstream.harness.nat.register"}


def test_a_file_of_ours_is_a_configuration_of_nats():
    config = Config.model_validate(FILE)
    builder, adapter = config.trajectory_builders["rollouts"], config.trainer_adapters["learner"]
    trainer, workflow = config.trainers["trainer"], config.workflow
    assert isinstance(builder, NatTrajectoryBuilderConfig)
    assert builder.section().num_generations == 3
    assert isinstance(adapter, NatTrainerAdapterConfig)
    assert adapter.section().model.path == "none"
    assert isinstance(trainer, NatTrainerConfig)
    assert trainer.section().planning == "submitted"
    assert isinstance(workflow, NatWorkflowConfig)
    assert workflow.environment == "guess_number"


@pytest.mark.parametrize(
    ("section", "name", "block", "message"),
    [
        (
            "trajectory_builders",
            "b",
            {"num_generation": 3},
            "num_generation: unknown key; did you mean num_generations?",
        ),
        ("trainer_adapters", "a", {"model": {"path": "m", "lora": {"rnk": 1}}}, "model.lora.rnk: unknown key; did you"),
        ("trainers", "t", {"planing": "stream"}, "planing: unknown key; did you mean planning?"),
        ("eval", "evaluators", {"e": {"_type": "exact_match", "ignore_cas": True}}, "ignore_cas: unknown key; did you"),
        ("workflow", "environmnt", "x", "environmnt: unknown key; did you mean environment?"),
    ],
)
def test_an_unknown_key_is_named_with_the_nearest_one_and_no_secret_beside_it(
    section: str, name: str, block: Any, message: str
) -> None:
    if section in ("trajectory_builders", "trainer_adapters"):
        block = {"kafka": {"password": SECRET}, **block}
    if name in ("b", "a", "t"):
        block = {"_type": "rollstream", **block}
    content = {"_type": "rollstream", name: block} if section == "workflow" else {name: block}
    with pytest.raises(ValidationError) as reported:
        Config.model_validate({section: content})
    assert message in reported.value.errors()[0]["msg"]
    assert SECRET not in str(reported.value)


def test_names_are_unique_and_none_is_taken_from_others():
    registry = GlobalTypeRegistry.get()
    for infos, ours in (
        (registry.get_registered_trainers(), {"rollstream"}),
        (registry.get_registered_trainer_adapters(), {"rollstream"}),
        (registry.get_registered_trajectory_builders(), {"rollstream"}),
        (registry.get_registered_functions(), {"rollstream"}),
        (registry.get_registered_evaluators(), {name for kind in MODELS for name in (kind, f"rollstream_{kind}")}),
    ):
        names = [info.config_type.static_type() for info in infos]
        assert len(set(names)) == len(names)
        assert ours == {n for n, info in zip(names, infos, strict=True) if info.full_type.startswith("rollstream")}


def test_components_are_built_again_and_again_and_are_nats():
    async def build():
        async with WorkflowBuilder.from_config(config=Config.model_validate(FILE)) as builder:
            found = await builder.get_trajectory_builder("rollouts"), await builder.get_trainer_adapter("learner")
            trainer = await builder.get_trainer("trainer", trajectory_builder=found[0], trainer_adapter=found[1])
            return (*found, trainer)

    for _ in range(2):
        made = asyncio.run(build())
        for component, kind in zip(made, (TrajectoryBuilder, TrainerAdapter, Trainer), strict=True):
            assert isinstance(component, kind)


@pytest.mark.slow
def test_the_module_that_nat_imports_loads_no_heavy_library():
    code = (
        "import sys\n"
        "sys.path[:] = [path for path in sys.path if path]\n"
        "import rollstream.harness.nat.register\n"
        "heavy = {'torch', 'faust', 'duckdb', 'transformers', 'aiokafka', 'matplotlib', 'openai'}\n"
        "print(sorted(heavy & set(sys.modules)), sys.path.count(''))"
    )
    out = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[] 0", "and other commands of NAT search no more folders than before"


def item_of(number: int, output: Any, answer: Any) -> EvalInputItem:
    entry = {"question": "6*7", "answer": answer, "id": number}
    return EvalInputItem(
        id=number, input_obj="6*7", expected_output_obj=answer, output_obj=output, full_dataset_entry=entry
    )


def evaluated(name: str, *items: EvalInputItem) -> Any:
    block: Any = Config.model_validate(FILE).eval.evaluators[name]

    async def evaluate() -> Any:
        async with GlobalTypeRegistry.get().get_evaluator(type(block)).build_fn(block, BUILDER) as evaluator:
            answer: Any = evaluator.evaluate_fn  # NAT awaits it, and declares it as a plain function
            return await answer(EvalInput(eval_input_items=[*items]))

    return asyncio.run(evaluate())


def test_evaluators_score_what_a_workflow_of_nats_answered():
    items = [item_of(number, output, "42 OK") for number, output in enumerate(["42 ok", "4", None])]
    exact, pattern = evaluated("exact", *items), evaluated("pattern", *items)
    assert [found.score for found in exact.eval_output_items] == [1.0, 0.0, None]
    assert (exact.average_score, pattern.average_score) == (0.5, 1.0)
    assert "no answer" in exact.eval_output_items[2].error


@pytest.mark.parametrize("result", [{"answer": True}, ["4", "2"], True, 42])
def test_a_result_that_is_not_text_is_scored_as_json_as_the_right_answer_is(result):
    assert evaluated("exact", item_of(1, result, result)).average_score == 1.0


def test_a_result_that_is_not_text_is_the_json_that_a_schema_describes():
    found = evaluated("schema", item_of(1, {"answer": "4"}, None), item_of(2, {"found": "4"}, None))
    assert [one.score for one in found.eval_output_items] == [1.0, 0.0]


class OthersExactMatch(EvaluatorBaseConfig, name="exact_match"):
    strict: bool = True


def test_a_short_name_is_another_packages_where_both_have_it_and_ours_has_a_long_one() -> None:
    async def build(config: Any, builder: Any) -> AsyncIterator[Any]:
        yield config

    def read(block: dict[str, Any]) -> Any:
        Config.rebuild_annotations()
        Config.model_rebuild(force=True)
        return Config.model_validate({"eval": {"evaluators": {"e": block}}}).eval.evaluators["e"]

    assert read({"_type": "exact_match", "ignore_case": True}).ignore_case
    try:
        with GlobalTypeRegistry.push():
            register_evaluator(config_type=OthersExactMatch)(build)
            assert isinstance(read({"_type": "exact_match", "strict": False}), OthersExactMatch)
            for name in ("rollstream_exact_match", "rollstream.harness.nat/exact_match"):
                assert read({"_type": name, "ignore_case": True}).ignore_case
            with pytest.raises(ValidationError, match="did you mean ignore_case"):
                read({"_type": "rollstream_exact_match", "ignore_cas": True})
    finally:
        assert read({"_type": "exact_match", "ignore_case": True}).ignore_case


def test_a_judges_key_is_shown_by_no_dump_and_sent_to_the_judge(monkeypatch):
    monkeypatch.setenv("TEST_JUDGE_KEY", SECRET)
    block = {"_type": "llm_judge", "model": "m", "prompt": "{response}", "api_key": SECRET, "retries": 0}

    async def evaluate():
        async with JudgeServer("1") as server:
            config = Config.model_validate({"eval": {"evaluators": {"judge": {**block, "base_url": server.base_url}}}})
            found = config.eval.evaluators["judge"]
            shown = f"{config} {config!r} {found.model_dump()} {found.model_dump_json()}"
            async with GlobalTypeRegistry.get().get_evaluator(type(found)).build_fn(found, BUILDER) as evaluator:
                answer: Any = evaluator.evaluate_fn
                item = EvalInputItem(
                    id=1, input_obj="?", expected_output_obj="1", output_obj="1", full_dataset_entry={}
                )
                output = await answer(EvalInput(eval_input_items=[item]))
            return shown, output, server.requests

    shown, output, requests = asyncio.run(evaluate())
    assert SECRET not in shown
    assert output.average_score == 1.0
    assert requests[0][0]["Authorization"] == f"Bearer {SECRET}"


def test_the_whole_file_of_the_guide_is_one_of_nats() -> None:
    text = (ROOT / "docs" / "migrating-from-nat.md").read_text()
    files = [yaml.safe_load(block.split("```")[0]) for block in text.split("```yaml\n")[1:]]
    config = Config.model_validate(files[-1])
    assert isinstance(config.trajectory_builders["rollouts"], NatTrajectoryBuilderConfig)
    assert isinstance(config.trainer_adapters["learner"], NatTrainerAdapterConfig)
    assert isinstance(config.trainers["trainer"], NatTrainerConfig)
    assert isinstance(config.workflow, NatWorkflowConfig)
