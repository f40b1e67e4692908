"""Looks at the installed NAT beside our models and interfaces and prints, as JSON, what it finds.

A program of its own, because NAT warns while it is imported. Run by `test_like_nat.py`.
"""

import asyncio
import inspect
import json
import warnings
from pathlib import Path
from typing import Any

warnings.simplefilter("ignore")

from nat.data_models import finetuning as their_models  # noqa: E402
from nat.finetuning import interfaces as their_interfaces  # noqa: E402
from pydantic import BaseModel, ValidationError  # noqa: E402

from rollstream.harness.components import interfaces as our_interfaces  # noqa: E402
from rollstream.schemas import finetuning as our_models  # noqa: E402

INTERFACES = ("Trainer", "TrajectoryBuilder", "TrainerAdapter")
COMPONENTS = {"trainer": "t", "trajectory_builder": "b", "trainer_adapter": "a"}
MESSAGE = {"role": "user", "content": "x"}
JOB = {"run_id": "r", "backend": "b"}
INPUTS: list[tuple[str, dict[str, Any]]] = [
    ("EpisodeItem", {"role": "assistant", "content": "x"}),
    ("EpisodeItem", {"role": "assistant", "content": "x", "logprobs": {}}),
    ("EpisodeItem", {"role": "assistant", "content": "x", "logprobs": []}),
    ("EpisodeItem", {**MESSAGE, "metadata": {1: 2}}),
    ("EpisodeItem", {"role": "nobody", "content": "x"}),
    ("EpisodeItem", {"role": "user", "content": ["x"]}),
    ("EpisodeItem", {"role": "user"}),
    ("DPOItem", {"prompt": "p", "chosen_response": "c", "rejected_response": "r"}),
    ("DPOItem", {"prompt": [MESSAGE], "chosen_response": "c", "rejected_response": "r"}),
    ("DPOItem", {"prompt": [{"role": "user"}], "chosen_response": "c", "rejected_response": "r"}),
    ("Trajectory", {"episode": [], "reward": 1}),
    ("Trajectory", {"episode": [MESSAGE], "reward": "1.5", "shaped_rewards": [1, 2]}),
    ("Trajectory", {"episode": [MESSAGE]}),
    ("TrajectoryCollection", {"trajectories": [[]], "run_id": "r"}),
    ("TrajectoryCollection", {"trajectories": [], "run_id": None}),
    ("TrainingJobRef", {**JOB, "metadata": {"k": 1}, "unknown": 1}),
    ("TrainingJobStatus", {**JOB, "status": "running", "progress": 5}),
    ("TrainingJobStatus", {**JOB, "status": "cancelled"}),
    *[("CurriculumLearningConfig", {"initial_percentile": value}) for value in (0, 0.0001, 1, 1.01, -1)],
    *[("CurriculumLearningConfig", {"increment_percentile": value}) for value in (0, 1, 2)],
    *[("CurriculumLearningConfig", {"expansion_interval": value}) for value in (0, 1)],
    *[("CurriculumLearningConfig", {"random_subsample": value}) for value in (None, 0, 0.5, 7, "x")],
    ("CurriculumLearningConfig", {"min_reward_diff": -1, "unknown": 2}),
    *[("FinetuneRunConfig", {"validation_interval": value}) for value in (0, 1)],
    ("FinetuneRunConfig", {"config_file": "f.yaml", "dataset": "d.json", "override": [["a", "b"]]}),
    ("FinetuneRunConfig", {"override": [["a"]]}),
    ("FinetuneConfig", {}),
    ("FinetuneConfig", {"enabled": True}),
    ("FinetuneConfig", {"enabled": True, **COMPONENTS}),
    *[("FinetuneConfig", {"enabled": True, **COMPONENTS, name: None}) for name in COMPONENTS],
    ("FinetuneConfig", {"enabled": True, **COMPONENTS, "trainer": ""}),
    ("FinetuneConfig", {"num_epochs": 0}),
    ("FinetuneConfig", {"reward_function": {"name": "r"}, "unknown": 1, "output_dir": "o"}),
    ("FinetuneConfig", {"reward_function": {}}),
    ("TrainerConfig", {"_type": "x", "reward": {"name": "r"}, "unknown": 1}),
    ("TrainerConfig", {"type": "x"}),
]


def main() -> None:
    """Both sides of every comparison, by its name."""
    ours, theirs = (our_models, our_interfaces), (their_models, their_interfaces)
    found = {
        "names": [_names(models) for models in (their_models, our_models)],
        "fields": [_fields(models) for models in (our_models, their_models)],
        "validation": [[_validated(models, *given) for given in INPUTS] for models in (our_models, their_models)],
        "named types": [_named_types(models) for models in (our_models, their_models)],
        "signatures": [_signatures(interfaces) for interfaces in (our_interfaces, their_interfaces)],
        "behaviour": [asyncio.run(_behaviour(*side)) for side in (ours, theirs)],
        "inputs": INPUTS,
    }
    print(json.dumps(found, default=str))


def _names(models: Any) -> list[str]:
    return sorted(
        name
        for name, value in vars(models).items()
        if (inspect.isclass(value) and value.__module__ == models.__name__) or name.endswith("ConfigT")
    )


def _models(models: Any) -> dict[str, type[BaseModel]]:
    names = [name for name in _names(their_models) if not name.endswith("ConfigT")]
    return {name: getattr(models, name) for name in names if issubclass(getattr(models, name), BaseModel)}


def _fields(models: Any) -> dict[str, Any]:
    """Name, default and whether it must be given, of every field of every model."""
    return {
        f"{name}.{field}": [str(info.get_default(call_default_factory=True)), info.is_required()]
        for name, model in _models(models).items()
        for field, info in model.model_fields.items()
    }


def _validated(models: Any, name: str, given: dict[str, Any]) -> Any:
    try:
        return getattr(models, name)(**given).model_dump(mode="json", by_alias=True)
    except ValidationError:
        return "refused"


def _named_types(models: Any) -> list[Any]:
    class Named(models.TrainerConfig, name="named"):  # pyright: ignore[reportGeneralTypeIssues, reportCallIssue]
        number: int = 1

    class Further(Named, name="further"):  # pyright: ignore[reportGeneralTypeIssues, reportCallIssue]
        pass

    made = [Named(), Named(type="other"), Named(_type="other"), Further(number=2), models.TrainerConfig()]
    return [[one.type, one.model_dump(), one.model_dump(by_alias=True)] for one in made] + [Named.static_type()]


def _signatures(interfaces: Any) -> dict[str, Any]:
    """Parameters, defaults, whether asynchronous and whether abstract, of every member that NAT has."""
    found: dict[str, Any] = {}
    for name in INTERFACES:
        ours, theirs = getattr(interfaces, name), getattr(their_interfaces, name)
        for member in [member for member, value in vars(theirs).items() if inspect.isfunction(value)]:
            function = getattr(ours, member)
            parameters = [
                [parameter.name, parameter.kind.name, str(parameter.default)]
                for parameter in inspect.signature(function).parameters.values()
            ]
            is_async = inspect.iscoroutinefunction(function)
            found[f"{name}.{member}"] = [parameters, is_async, member in ours.__abstractmethods__]
    return found


async def _behaviour(models: Any, interfaces: Any) -> dict[str, Any]:
    """Behaviour of the members that are not abstract: binding, initializing, rewards, curriculum."""
    trainer = _concrete(interfaces.Trainer)(models.TrainerConfig(), extra=1)
    builder = _concrete(interfaces.TrajectoryBuilder)(models.TrajectoryBuilderConfig())
    adapter = _concrete(interfaces.TrainerAdapter)(models.TrainerAdapterConfig())
    before = [trainer.run_config, trainer.trajectory_builder, trainer.trainer_adapter, trainer.curriculum_config]
    await trainer.bind_components(builder, adapter)
    run = models.FinetuneConfig(
        reward_function={"name": "r"}, curriculum_learning={"initial_percentile": 0.5}, output_dir=Path("o")
    )
    await trainer.initialize(run)
    trainer._curriculum_state["included_groups"].add(3)
    configs = [trainer.trainer_config, builder.trajectory_builder_config, adapter.adapter_config]
    scores = [
        await builder.compute_reward(type("Item", (), {"id": "x", "score": score, "error": None})())
        for score in (2, -0.5, 1)
    ]
    try:
        trainer.apply_curriculum_learning(models.TrajectoryCollection(trajectories=[], run_id="r"), 0)
    except NotImplementedError:
        scores.append("no curriculum")
    return {
        "before": before,
        "bound": [trainer.trajectory_builder is builder, trainer.trainer_adapter is adapter],
        "run_config": [one.run_config is run for one in (trainer, builder, adapter)],
        "rewards": [config.reward.name for config in configs],
        "scores": scores,
        "curriculum": trainer.get_curriculum_state(),
    }


def _concrete(interface: type) -> type:
    return type("Concrete", (interface,), dict.fromkeys(interface.__abstractmethods__, lambda self: None))


if __name__ == "__main__":
    main()
