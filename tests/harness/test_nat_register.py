"""rollstream's components as NAT finds and builds them: by the entry point, under NAT's own loader and builder."""

import asyncio
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from nat.builder.workflow_builder import WorkflowBuilder
from nat.cli.type_registry import GlobalTypeRegistry
from nat.data_models.config import Config
from nat.data_models.evaluator import EvalInput, EvalInputItem
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

ROOT = Path(__file__).resolve().parents[2]
FILE = {
    "workflow": {"_type": "rollstream", "environment": "guess_number"},
    "trajectory_builders": {"rollouts": {"_type": "rollstream", "num_generations": 3}},
    "trainer_adapters": {"learner": {"_type": "rollstream", "model": {"path": "none"}, "endpoint": {"port": 0}}},
    "trainers": {"trainer": {"_type": "rollstream", "planning": "submitted"}},
    "eval": {
        "evaluators": {
            "exact": {"_type": "exact_match", "ignore_case": True},
            "pattern": {"_type": "regex", "pattern": "^4"},
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
    with pytest.raises(ValidationError, match="num_generation\n"):
        Config.model_validate({"trajectory_builders": {"b": {"_type": "rollstream", "num_generation": 3}}})


def test_names_are_unique_and_none_is_taken_from_others():
    registry = GlobalTypeRegistry.get()
    for infos, ours in (
        (registry.get_registered_trainers(), {"rollstream"}),
        (registry.get_registered_trainer_adapters(), {"rollstream"}),
        (registry.get_registered_trajectory_builders(), {"rollstream"}),
        (registry.get_registered_functions(), {"rollstream"}),
        (registry.get_registered_evaluators(), set(MODELS)),
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
def test_what_nat_imports_loads_nothing_heavy():
    code = (
        "import sys, rollstream.harness.nat.register\n"
        "heavy = {'torch', 'faust', 'duckdb', 'transformers', 'aiokafka', 'matplotlib', 'openai'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_evaluators_score_what_a_workflow_of_nats_answered():
    config = Config.model_validate(FILE)

    def item(number, output):
        entry = {"question": "6*7", "answer": "42 OK", "id": number}
        return EvalInputItem(
            id=number, input_obj="6*7", expected_output_obj="42 OK", output_obj=output, full_dataset_entry=entry
        )

    async def evaluate(name):
        block = config.eval.evaluators[name]
        info = GlobalTypeRegistry.get().get_evaluator(type(block))
        async with info.build_fn(block, None) as evaluator:  # pyright: ignore[reportArgumentType]
            answer: Any = evaluator.evaluate_fn  # NAT awaits it, and declares it as a plain function
            items = [item(1, "42 ok"), item(2, "4"), item(3, None)]
            return await answer(EvalInput(eval_input_items=items))

    exact, pattern = asyncio.run(evaluate("exact")), asyncio.run(evaluate("pattern"))
    assert [found.score for found in exact.eval_output_items] == [1.0, 0.0, None]
    assert (exact.average_score, pattern.average_score) == (0.5, 1.0)
    assert "no answer" in exact.eval_output_items[2].error
