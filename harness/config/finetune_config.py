"""From the harness' configuration (`FinetuneConfig`, ours or NAT's) to the parts that one run uses.

The blocks that it names are read where it says that they are: in the object at `run_configuration.config_file`. A block
of ours, or derived from ours, knows its `section()`; of foreign ones nothing is known, and defaults stand for them.
"""

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, JsonValue

from rollstream.harness import dataset
from rollstream.harness.config.config_notes import tell, tell_meaningless
from rollstream.harness.remote_rollouts import at_endpoint
from rollstream.schemas.config import (
    OURS,
    AdapterSection,
    BuilderSection,
    DatasetSection,
    FinetuningSection,
    ForeignBlock,
    RewardFunctionSection,
    RunConfig,
    TrainerSection,
    ValidationSection,
)
from rollstream.schemas.errors import ConfigError
from rollstream.schemas.finetuning import FinetuneConfig
from rollstream.schemas.settings import AlgorithmSettings, CurriculumSettings

OUR_TYPES = (
    OURS,
    "openpipe_art_trainer",
    "openpipe_art_traj_builder",
    "openpipe_art_trainer_adapter",
    "dpo_traj_builder",
)
"""What is played by our own three components."""
RECORDED = "recorded"
"""The environment that plays rollouts which exist already."""
_Section = TypeVar("_Section", BuilderSection, TrainerSection)
_Values = TypeVar("_Values", bound=BaseModel)


def run_config_of(finetune: FinetuneConfig) -> RunConfig:
    """The parts that one run uses. Raises ConfigError naming the path of what is missing or does not fit.

    A foreign builder's rollouts are `recorded` ones. Where one of the three components is foreign, the harness submits
    what is trained (planning `submitted`). Ours stream where a staleness bound lets epochs overlap.
    """
    run = finetune.run_configuration
    file: Any = None if run is None else run.config_file
    if run is None or not hasattr(file, "trajectory_builders"):
        raise ConfigError("finetuning.run_configuration.config_file: a configuration that was read is needed")
    blocks = {role: block_of(finetune, role) for role in ("trajectory_builder", "trainer_adapter", "trainer")}
    builder = _section(blocks["trajectory_builder"], _foreign_builder(blocks["trainer_adapter"]))
    builder = at_endpoint(_with_workflow(builder, file.workflow), finetune)
    trainer = _section(blocks["trainer"], TrainerSection(planning="submitted"))
    adapter = _adapter(finetune, blocks["trainer_adapter"], blocks["trajectory_builder"])
    trainer = trainer.model_copy(
        update={"planning": _planning(trainer, adapter, is_foreign=not all(map(is_ours, blocks.values())))}
    )
    _check_trainer(finetune, trainer)
    _check_sampling(f"trajectory_builders.{finetune.trajectory_builder}.sampling", builder, adapter)
    reward = finetune.reward_function
    environment = _environment(finetune, builder, file.workflow)
    examples = dataset_of(file.eval)
    return RunConfig(
        builder=builder,
        adapter=adapter,
        trainer=trainer,
        finetuning=_finetuning(finetune),
        dataset=dataset.section_of(Path(run.dataset), examples) if run.dataset else examples,
        environment=environment,
        reward_functions=_rewards(builder, environment, reward.name if reward else None),
        evaluators=_evaluators(file.eval),
        validation=_validation(finetune, examples),
        endpoint=run.endpoint,
        endpoint_timeout=run.endpoint_timeout,
        result_json_path=run.result_json_path,
        served=getattr(blocks["trainer_adapter"], "endpoint", None),
    )


def _planning(trainer: TrainerSection, adapter: AdapterSection, *, is_foreign: bool) -> Literal["stream", "submitted"]:
    if is_foreign:
        return "submitted"
    return "stream" if adapter.max_staleness else trainer.planning


def _check_trainer(finetune: FinetuneConfig, trainer: TrainerSection) -> None:
    """Raises ConfigError for what a streamed run does not do; tells what waits for a validation where there is none."""
    place, run = f"trainers.{finetune.trainer}", finetune.run_configuration
    wanted = {"early_stopping": trainer.early_stopping is not None, "validation_required": trainer.validation_required}
    names = [name for name, is_wanted in wanted.items() if is_wanted]
    if names and trainer.planning == "stream":
        raise ConfigError(
            f"{place}.{names[0]}: a streamed run has no end of its own; use planning: submitted with max_staleness: 0"
        )
    assert run is not None
    if not run.validation_dataset and not run.validation_config_file:
        tell_meaningless(place, names, "nothing is validated by; give --validation_dataset or --validation_config_file")


def _check_sampling(place: str, builder: BuilderSection, adapter: AdapterSection) -> None:
    """Tells of a ratio that is not 1 where nothing was trained yet: the loss knows the temperature, no truncation."""
    sampling = builder.sampling
    if adapter.algorithm.name == "grpo" and (sampling.top_p < 1 or sampling.top_k):
        tell(
            f"{place}: top_p {sampling.top_p:g}, top_k {sampling.top_k}: grpo compares what a truncated "
            "distribution gave with the whole one, so its ratios begin below 1; set top_p: 1 and top_k: 0"
        )


def block_of(finetune: FinetuneConfig, role: str) -> Any:
    """The block of `finetuning.ROLE` (trainer, trainer_adapter, trajectory_builder). Raises ConfigError."""
    assert finetune.run_configuration is not None
    blocks: Mapping[str, Any] = getattr(finetune.run_configuration.config_file, f"{role}s")
    name = getattr(finetune, role)
    if name not in blocks:
        known = ", ".join(sorted(blocks)) or "none"
        raise ConfigError(f"finetuning.{role}: no {role} is called {name!r}; defined are: {known}")
    return blocks[name]


def is_ours(block: Any) -> bool:
    """Whether one of our own three components plays a block; what is derived from them has a class of its own."""
    return hasattr(block, "section") and block.type in OUR_TYPES


def _section(block: Any, default: _Section) -> _Section:
    return block.section() if hasattr(block, "section") else default


def _foreign_builder(adapter: Any) -> BuilderSection:
    """What stands for a builder that is none of ours: the adapter says how its trajectories are written."""
    config: dict[str, JsonValue] = {"retokenise": True} if getattr(adapter, "retokenise", False) else {}
    return BuilderSection(environment=RECORDED, environment_config=config)


def _adapter(finetune: FinetuneConfig, block: Any, builder: Any) -> AdapterSection:
    name = finetune.trainer_adapter
    if not hasattr(block, "section"):
        raise ConfigError(
            f"trainer_adapters.{name}._type: {getattr(block, 'type', None)!r} names no model that is trained here; "
            "use rollstream, or a configuration that is derived from RollstreamTrainerAdapterConfig"
        )
    section: AdapterSection = block.section()
    return section.model_copy(update={"algorithm": _of_pairs(finetune, section.algorithm, builder)})


def _of_pairs(finetune: FinetuneConfig, algorithm: AlgorithmSettings, builder: Any) -> AlgorithmSettings:
    """What a builder of preference pairs says of them, unless the algorithm, which makes them, says it itself."""
    wanted: Mapping[str, Any] | None = getattr(builder, "pairs", None)
    if wanted is None:
        return algorithm
    if algorithm.name != "dpo":
        raise ConfigError(
            f"trainer_adapters.{finetune.trainer_adapter}.algorithm.name: is {algorithm.name!r}; "
            f"trajectory_builders.{finetune.trajectory_builder} builds preference pairs, which dpo trains on"
        )
    return AlgorithmSettings(**{**wanted, **algorithm.model_dump(include=algorithm.model_fields_set)})


def _finetuning(finetune: FinetuneConfig) -> FinetuningSection:
    reward = finetune.reward_function
    return FinetuningSection(
        enabled=finetune.enabled,
        trainer=str(finetune.trainer),
        trajectory_builder=str(finetune.trajectory_builder),
        trainer_adapter=str(finetune.trainer_adapter),
        reward_function=RewardFunctionSection(name=reward.name) if reward else None,
        target_functions=tuple(finetune.target_functions),
        target_model=finetune.target_model,
        curriculum_learning=_same_fields(CurriculumSettings, finetune.curriculum_learning),
        num_epochs=finetune.num_epochs,
        output_dir=finetune.output_dir,
    )


def _same_fields(kind: type[_Values], found: Any) -> _Values:
    """A model made of the fields that `found` has of it."""
    return kind(**{name: getattr(found, name) for name in kind.model_fields if hasattr(found, name)})


def dataset_of(evaluation: Any) -> DatasetSection | None:
    """The examples that an `eval` section names, ours or another harness'; none if it names none."""
    found = getattr(getattr(evaluation, "general", None), "dataset", None)
    if found is None or isinstance(found, DatasetSection):
        return found
    values = found.model_dump(mode="json", by_alias=True, exclude_unset=True)  # NAT's own defaults demand nothing
    known = {field.alias or name for name, field in DatasetSection.model_fields.items()}
    return DatasetSection.model_validate({key: value for key, value in values.items() if key in known})


def _evaluators(evaluation: Any) -> dict[str, dict[str, JsonValue]]:
    found: Mapping[str, BaseModel] = getattr(evaluation, "evaluators", {})
    return {name: block.model_dump(mode="json", by_alias=True) for name, block in found.items()}


def _with_workflow(builder: BuilderSection, workflow: Any) -> BuilderSection:
    """A workflow block `_type: X` of a file of ours names environment X; what X takes of its other keys goes to it."""
    if builder.environment is not None or not isinstance(workflow, ForeignBlock):
        return builder
    given = workflow.model_extra or {}
    extra = {key: value for key, value in given.items() if _takes(workflow.type, key)}
    tell_meaningless("workflow", sorted(given.keys() - extra.keys()), f"environment {workflow.type} does not take it")
    return builder.model_copy(
        update={"environment": workflow.type, "environment_config": {**extra, **builder.environment_config}}
    )


def _takes(environment: str, key: str) -> bool:
    """Whether an environment has such a parameter. An unknown one is held to take all; its name is refused later."""
    from rollstream.producers import registry

    try:
        parameters = inspect.signature(registry.environment(environment)).parameters
    except ConfigError:
        return True
    is_open = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return is_open or key in parameters


def _environment(finetune: FinetuneConfig, builder: BuilderSection, workflow: Any) -> str:
    """The builder's environment, else the workflow's; a workflow that another harness runs is recorded."""
    found = builder.environment or getattr(workflow, "environment", None)
    if found is not None:
        return found
    if workflow is None:
        place = f"trajectory_builders.{finetune.trajectory_builder}.environment"
        raise ConfigError(f"{place}: missing; name an environment here or as the workflow")
    return RECORDED


def _rewards(builder: BuilderSection, environment: str, name: str | None) -> tuple[str, ...]:
    """Reward functions to run; `environment` names the environment's own rewards. Recorded rollouts have theirs."""
    if name is None or name == "environment" or name in builder.rewards or environment == RECORDED:
        return builder.rewards
    return (*builder.rewards, name)


def _validation(finetune: FinetuneConfig, examples: DatasetSection | None) -> ValidationSection | None:
    """Wanted as soon as a dataset or a configuration for it is named. Its columns are those of the run's examples."""
    run = finetune.run_configuration
    assert run is not None
    if not run.validation_dataset and not run.validation_config_file:
        return None
    alike = examples.model_copy(update={"filter": None}) if examples else None
    return ValidationSection(
        dataset=dataset.section_of(Path(run.validation_dataset), alike) if run.validation_dataset else None,
        interval=run.validation_interval,
        config=Path(run.validation_config_file) if run.validation_config_file else None,
    )
