"""Resolves the harness configuration (`FinetuneConfig`, ours or NAT's) to the parts that one run uses.

Reads the named blocks from the object at `run_configuration.config_file`. Our blocks and those derived from them have
a `section()`; defaults replace those of other packages. Pure.
"""

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, JsonValue

from rollstream.harness.config import dataset, nat_workflows
from rollstream.harness.config.checks import check_trainer, warn, warn_meaningless
from rollstream.harness.config.rewards import ENVIRONMENT
from rollstream.harness.config.unused_keys import Blocks, of_evaluation, unused_keys
from rollstream.schemas import ids
from rollstream.schemas.algorithm_settings import ENTRY_POINTS
from rollstream.schemas.algorithms import BUILT_IN, OF_PAIRS, AlgorithmSettings, CustomSettings
from rollstream.schemas.config import (
    OURS,
    AdapterSection,
    BuilderSection,
    ConfigFile,
    EvalSection,
    FinetuningSection,
    ForeignBlock,
    RewardFunctionSection,
    RunConfig,
    TrainerSection,
    ValidationSection,
)
from rollstream.schemas.errors import ConfigError
from rollstream.schemas.evaluators import DatasetSection, Evaluator, kind_of
from rollstream.schemas.events.recorded import MADE_ELSEWHERE, RECORDED
from rollstream.schemas.finetuning import FinetuneConfig, adapter_path, builder_path
from rollstream.schemas.kafka import KafkaSection
from rollstream.schemas.permissions import Permissions, named_by_algorithm
from rollstream.schemas.settings import EXTERNAL, CurriculumSettings, ModelSettings
from rollstream.schemas.users_code import installed_entry

ART_BUILDER = "openpipe_art_traj_builder"
OUR_TYPES = (
    OURS,
    "openpipe_art_trainer",
    ART_BUILDER,
    "openpipe_art_trainer_adapter",
    "dpo_traj_builder",
)
"""Values that select our own three components."""
_PLAIN = KafkaSection()
_Section = TypeVar("_Section", BuilderSection, TrainerSection)
_Values = TypeVar("_Values", bound=BaseModel)


def run_config_of(finetune: FinetuneConfig) -> RunConfig:
    """The parts that one run uses.

    Raises ConfigError naming the path of a missing or inconsistent key. Rollouts of another package's builder are
    `recorded`. If one of the three components is from another package, or another harness conducts them, they submit
    the batches (planning `submitted`). Ours stream if the staleness bound lets epochs overlap.
    """
    run = finetune.run_configuration
    file: Any = None if run is None else run.config_file
    if run is None or not hasattr(file, "trajectory_builders"):
        raise ConfigError("finetuning.run_configuration.config_file must be a parsed configuration, not a path")
    blocks = {role: block_of(finetune, role) for role in ("trajectory_builder", "trainer_adapter", "trainer")}
    builder = _section(blocks["trajectory_builder"], _foreign_builder(blocks["trainer_adapter"]))
    builder = nat_workflows.with_temperature(builder, nat_workflows.asked_llms(finetune).values())
    nat_workflow = nat_workflow_of(finetune)
    builder = _with_nat(finetune, builder, file) if nat_workflow else _with_workflow(builder, file.workflow)
    builder = _with_log(finetune, nat_workflows.at_endpoint(builder, finetune), blocks["trainer_adapter"])
    trainer = _section(blocks["trainer"], TrainerSection(planning="submitted"))
    adapter = _adapter(finetune, blocks["trainer_adapter"], blocks["trajectory_builder"])
    is_ours_alone = isinstance(file, ConfigFile) and nat_workflow is None and all(map(is_ours, blocks.values()))
    trainer = trainer.model_copy(update={"planning": _planning(trainer, adapter, is_foreign=not is_ours_alone)})
    check_trainer(finetune, trainer)
    reward = finetune.reward_function
    environment = _environment(finetune, builder, file.workflow)
    builder = _with_kept_ids(builder_path(finetune), builder, adapter, environment)
    is_external = not hasattr(blocks["trainer_adapter"], "section")
    if is_external:
        _check_external(finetune, environment)
    examples = dataset_of(file.eval)
    config = RunConfig(
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
        served=None if is_external else nat_workflows.served_by(blocks["trainer_adapter"], nat_workflow),
        is_external=is_external,
        nat_workflow=nat_workflow,
    )
    _check_groups(finetune, config)
    return config


def nat_workflow_of(finetune: FinetuneConfig) -> str | None:
    """The `_type` of the NAT workflow that the run's built-in builder runs; None otherwise."""
    run = finetune.run_configuration
    assert run is not None
    block = block_of(finetune, "trajectory_builder")
    return nat_workflows.workflow_of(block, run.config_file, run.endpoint)


def _with_nat(finetune: FinetuneConfig, builder: BuilderSection, file: Any) -> BuilderSection:
    """The builder of a NAT workflow's rollouts, which are `recorded`. Raises ConfigError for a missing component."""
    run, reward = finetune.run_configuration, finetune.reward_function
    assert run is not None
    adapter = block_of(finetune, "trainer_adapter")
    if not hasattr(adapter, "section"):
        raise ConfigError(
            f"{adapter_path(finetune)}: trains with another backend, so the llms of the workflow "
            f"cannot be redirected; write a trajectory builder for it, or serve the workflow and give --endpoint"
        )
    if builder.services == "external":
        raise ConfigError(
            f"{builder_path(finetune, 'services')}: external services have no endpoint for the "
            f"llms of a NAT workflow; use managed services, or serve the workflow and give --endpoint"
        )
    nat_workflows.check(
        file,
        reward.name if reward else None,
        has_dataset=bool(run.dataset or dataset_of(file.eval)),
        validates_by_file=bool(run.validation_config_file),
    )
    llms = nat_workflows.trained_llms(file, adapter)
    return nat_workflows.with_temperature(builder.model_copy(update={"environment": RECORDED}), llms.values())


def _planning(trainer: TrainerSection, adapter: AdapterSection, *, is_foreign: bool) -> Literal["stream", "submitted"]:
    if is_foreign:
        return "submitted"
    return "stream" if adapter.max_staleness else trainer.planning


def _with_kept_ids(block: str, builder: BuilderSection, adapter: AdapterSection, environment: str) -> BuilderSection:
    """The builder with `record_kept_ids` where a loss with ratios needs it. Warns if its engine cannot record them."""
    sampling = builder.sampling
    algorithms = [adapter.algorithm, *(group.algorithm for group in adapter.model_groups.values() if group.algorithm)]
    ratios = next((one.name for one in algorithms if one.needs.behaviour), None)
    if ratios is None or not (sampling.top_p < 1 or sampling.top_k):
        return builder
    known = builder.engine.RECORDS_KEPT_IDS
    can_record = (sampling.record_kept_ids if known is None else known) and environment not in MADE_ELSEWHERE
    if sampling.record_kept_ids is False or not can_record:
        why = "record_kept_ids is off" if can_record else "the engine does not record the ids that they leave"
        warn(
            f"{block}.sampling: top_p {sampling.top_p:g}, top_k {sampling.top_k}: {why}, so {ratios} compares a "
            f"truncated distribution with the full one, and its ratios start below 1; set top_p: 1 and top_k: 0"
        )
        return builder
    return builder.model_copy(update={"sampling": sampling.model_copy(update={"record_kept_ids": True})})


def warn_unused(config: RunConfig, finetune: FinetuneConfig, section: FinetuningSection) -> None:
    """Warn, once per process, of every key that has no effect. `section`: `finetuning` as in the file."""
    roles = ("trajectory_builder", "trainer_adapter", "trainer")
    found = [block_of(finetune, role) for role in roles]
    unused = unused_keys(config, Blocks(*found, *map(is_ours, found)), section)
    evaluation = getattr(getattr(finetune.run_configuration, "config_file", None), "eval", None)
    if isinstance(evaluation, EvalSection):  # another harness runs its own evaluation
        unused.append(of_evaluation(evaluation, config.nat_workflow))
    for one in unused:
        warn_meaningless(one.location, one.names, one.why)


def block_of(finetune: FinetuneConfig, role: str) -> Any:
    """The block of `finetuning.ROLE` (trainer, trainer_adapter, trajectory_builder). Raises ConfigError."""
    assert finetune.run_configuration is not None
    blocks: Mapping[str, Any] = getattr(finetune.run_configuration.config_file, f"{role}s")
    name = getattr(finetune, role)
    if name not in blocks:
        known = ", ".join(sorted(blocks)) or "none"
        raise ConfigError(f"finetuning.{role}: {role} {name!r} is not defined; choose one of: {known}")
    return blocks[name]


def is_ours(block: Any) -> bool:
    """Whether a block's component is one of our own three, not a derived one."""
    return hasattr(block, "section") and block.type in OUR_TYPES


def _section(block: Any, default: _Section) -> _Section:
    return block.section() if hasattr(block, "section") else default


def _foreign_builder(adapter: Any) -> BuilderSection:
    """The builder section of another package's builder, from the adapter's fields on writing trajectories."""
    config: dict[str, JsonValue] = {"retokenise": True} if getattr(adapter, "retokenise", False) else {}
    return BuilderSection(environment=RECORDED, environment_config=config)


def _with_log(finetune: FinetuneConfig, builder: BuilderSection, adapter: Any) -> BuilderSection:
    """The builder with the adapter's `bootstrap_servers` and `kafka:`, if set.

    Raises ConfigError if both blocks set one of them differently.
    """
    if not hasattr(adapter, "section"):
        return builder  # these keys have another meaning there
    found = {name: getattr(adapter, name, None) for name in ("bootstrap_servers", "kafka")}
    changes = {name: value for name, value in found.items() if value not in (None, _PLAIN)}
    for name, value in changes.items():
        mine = getattr(builder, name)
        if name in builder.model_fields_set and mine not in (value, _PLAIN):
            raise ConfigError(
                f"{adapter_path(finetune, name)}: differs from {builder_path(finetune, name)}; a run has one log, so "
                "set it in only one of them"
            )
    return builder.model_copy(update=changes)


def _adapter(finetune: FinetuneConfig, block: Any, builder: Any) -> AdapterSection:
    if not hasattr(block, "section"):
        return AdapterSection(model=ModelSettings(path=EXTERNAL))
    section: AdapterSection = block.section()
    location = adapter_path(finetune)
    algorithm = _own_settings(section.algorithm, f"{location}.algorithm")
    groups = dict(section.model_groups)
    for name, one in groups.items():
        if one.algorithm is not None:
            own = _own_settings(one.algorithm, f"{location}.model_groups.{name}.algorithm")
            groups[name] = one.model_copy(update={"algorithm": own})
    return section.model_copy(update={"algorithm": _of_pairs(finetune, algorithm, builder), "model_groups": groups})


def _check_groups(finetune: FinetuneConfig, config: RunConfig) -> None:
    """Raises ConfigError for model groups that do not fit the agents, or that a run cannot have."""
    location = adapter_path(finetune, "model_groups")
    groups, named = config.adapter.model_groups, config.by_group()
    for name, group in groups.items():
        if name not in named:
            raise ConfigError(
                f"{location}.{name}: no agent speaks through this model group (in use: {', '.join(named)}); set "
                f"{builder_path(finetune, 'agents')} to {{AGENT: {name}}}, or remove the block"
            )
        if group.endpoint is not None and (group.model is not None or group.version is not None):
            raise ConfigError(f"{location}.{name}.endpoint: others hold this model's weights; remove model and version")
        if group.version is not None and ids.parsed_version(group.version) is None:
            raise ConfigError(f"{location}.{name}.version: write RUN@VERSION, for example demo-1a2b3c@12")
    if not config.trained():
        raise ConfigError(f"{location}: all model groups are frozen ({', '.join(named)}); leave one to be trained")
    is_streamed = config.trainer.planning == "stream" and config.served is None and not config.is_external
    if len(named) > 1 and not is_streamed:
        raise ConfigError(
            f"{builder_path(finetune, 'agents')}: several model groups ({', '.join(named)}) need "
            "a streamed run of rollstream's own components without an endpoint; set planning: stream, or name the "
            "agents in a list"
        )


def _own_settings(algorithm: AlgorithmSettings, location: str) -> AlgorithmSettings:
    """The settings as the class that the algorithm has for them. Raises ConfigError."""
    if not isinstance(algorithm, CustomSettings):
        is_built_in = type(algorithm) in BUILT_IN.values()
        installed_entry(ENTRY_POINTS, algorithm.name, f"{location}.name", is_built_in=is_built_in)
        return algorithm
    from rollstream.learner.algorithms import table

    if "declared" in algorithm.model_fields_set:  # it is the algorithm's to say, in records only
        options = {**algorithm.options, "declared": algorithm.declared.model_dump()}
        algorithm = algorithm.model_copy(update={"options": options})
    local = Permissions(named_by_algorithm(algorithm.name))  # the user's own file names it
    return table.settings_of(algorithm, local, location)


def _check_external(finetune: FinetuneConfig, environment: str) -> None:
    """Raises ConfigError for an environment that needs a local model if another training backend holds it."""
    if environment in (RECORDED, nat_workflows.REMOTE):
        return
    block = block_of(finetune, "trainer_adapter")
    raise ConfigError(
        f"{adapter_path(finetune, '_type')}: {getattr(block, 'type', None)!r} trains with another "
        f"backend, so environment {environment} has no local model; use your own trajectory builder or --endpoint "
        f"URL, or derive the adapter's configuration from RollstreamTrainerAdapterConfig"
    )


def _of_pairs(finetune: FinetuneConfig, algorithm: AlgorithmSettings, builder: Any) -> AlgorithmSettings:
    """The algorithm with the pair settings of a builder of preference pairs, which its own settings override."""
    wanted: Mapping[str, Any] | None = getattr(builder, "pairs", None)
    if wanted is None:
        return algorithm
    if algorithm.pair_settings is None:
        raise ConfigError(
            f"{adapter_path(finetune, 'algorithm.name')}: is {algorithm.name!r}; "
            f"{builder_path(finetune)} builds preference pairs; set it to an algorithm that "
            f"trains on them ({', '.join(OF_PAIRS)}, or your own)"
        )
    left = {name: value for name, value in wanted.items() if name not in algorithm.model_fields_set}
    return algorithm.model_copy(update=left)


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
    """A model from the fields of `found` with the same names."""
    return kind(**{name: getattr(found, name) for name in kind.model_fields if hasattr(found, name)})


def dataset_of(evaluation: Any) -> DatasetSection | None:
    """The dataset of an `eval` section, ours or another harness's; None if it has none."""
    found = getattr(getattr(evaluation, "general", None), "dataset", None)
    if found is None or isinstance(found, DatasetSection):
        return found
    values = found.model_dump(mode="json", by_alias=True, exclude_unset=True)  # NAT's defaults require nothing
    known = {field.alias or name for name, field in DatasetSection.model_fields.items()}
    return DatasetSection.model_validate({key: value for key, value in values.items() if key in known})


def _evaluators(evaluation: Any) -> dict[str, dict[str, JsonValue]]:
    found: Mapping[str, BaseModel] = getattr(evaluation, "evaluators", {})
    return {
        name: block.model_dump(mode="json", by_alias=True) for name, block in found.items() if not _is_others(block)
    }


def _is_others(block: Any) -> bool:
    """Whether another harness has parsed a block as another package's type that has a built-in type's name."""
    return not isinstance(block, ForeignBlock | Evaluator) and kind_of(block.type) is not None


def _with_workflow(builder: BuilderSection, workflow: Any) -> BuilderSection:
    """A workflow block `_type: X` of our file names environment X and passes it the keys that X accepts."""
    if builder.environment is not None or not isinstance(workflow, ForeignBlock):
        return builder
    given = workflow.model_extra or {}
    extra = {key: value for key, value in given.items() if _takes(workflow.type, key)}
    warn_meaningless("workflow", sorted(given.keys() - extra.keys()), f"environment {workflow.type} does not take it")
    return builder.model_copy(
        update={"environment": workflow.type, "environment_config": {**extra, **builder.environment_config}}
    )


def _takes(environment: str, key: str) -> bool:
    """Whether an environment has this parameter. An unknown environment accepts all; its name is refused later."""
    from rollstream.producers.rollout import registry

    try:
        local = Permissions(frozenset({environment}))  # the user's own file names it
        parameters = inspect.signature(registry.environment(environment, local)).parameters
    except ConfigError:
        return True
    is_open = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return is_open or key in parameters


def _environment(finetune: FinetuneConfig, builder: BuilderSection, workflow: Any) -> str:
    """The builder's environment, else the workflow's; `recorded` if another harness runs the workflow."""
    found = builder.environment or getattr(workflow, "environment", None)
    if found is not None:
        return found
    if workflow is None:
        location = builder_path(finetune, "environment")
        raise ConfigError(f"{location}: missing; name an environment here or in workflow")
    return RECORDED


def _rewards(builder: BuilderSection, environment: str, name: str | None) -> tuple[str, ...]:
    """Reward functions to run; `environment` names the environment's own. Recorded rollouts have rewards already."""
    if name is None or name == ENVIRONMENT or name in builder.rewards or environment == RECORDED:
        return builder.rewards
    return (*builder.rewards, name)


def _validation(finetune: FinetuneConfig, examples: DatasetSection | None) -> ValidationSection | None:
    """Enabled if a validation dataset or configuration is given. Its columns are those of the run's examples."""
    run = finetune.run_configuration
    assert run is not None
    if not run.validation_dataset and not run.validation_config_file:
        return None
    named = run.validation_dataset
    return ValidationSection(
        dataset=dataset.validation_section(Path(named), examples) if named else None,
        interval=run.validation_interval,
        config=Path(run.validation_config_file) if run.validation_config_file else None,
    )
