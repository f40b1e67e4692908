"""Finds known keys of a file that have no effect in combination with the others.

Pure. Unknown keys are errors when the file is read; unused keys only cause a warning.
"""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from pydantic import BaseModel

from rollstream.harness.config.jobs import served_models
from rollstream.schemas.config import AdapterSection, EvalSection, FinetuningSection, RunConfig
from rollstream.schemas.engine_settings import EngineSettings
from rollstream.schemas.events.recorded import MADE_ELSEWHERE
from rollstream.schemas.finetuning import CurriculumLearningConfig, adapter_path, builder_path, trainer_path
from rollstream.schemas.settings import CurriculumSettings, OptimizerSettings

_STARTED_HERE = (
    "engine",
    "num_producers",
    "num_processors",
    "max_concurrent_rollouts",
    "follow_lag",
    "modules",
    "gateway",
)
"""Keys of the builder's block with which services are started."""
_SERVICE_LIMITS = ("session_timeout_s", "tick_interval_s")
_PAIRS_ONLY = ("ttc_step_name", "reward_from_score_diff", "require_multiple_candidates")
"""Keys of a builder of pairs for work that it does itself, and the learner does not."""
_STEERED_ONLY = ("window_versions", "explore_share", "steer")
_EPOCHWISE_ONLY = ("seeded_subsample", "groups_by_example")


class Blocks(NamedTuple):
    """The three component blocks that a run names, as their configuration classes, and whether each is ours."""

    builder: Any
    adapter: Any
    trainer: Any
    is_builder_ours: bool
    is_adapter_ours: bool
    is_trainer_ours: bool


class Unused(NamedTuple):
    """Keys at one path of the file, and why they have no effect."""

    location: str
    names: tuple[str, ...]
    why: str


def unused_keys(config: RunConfig, blocks: Blocks, finetuning: FinetuningSection) -> list[Unused]:
    """Keys without effect. `config`: the resolved configuration; `blocks` and `finetuning`: as in the file."""
    found = [
        *_of_builder(config, blocks),
        *_of_adapter(config, blocks),
        *_of_trainer(config, blocks),
        *_of_finetuning(config, blocks, finetuning),
        *_of_curriculum(config, blocks, finetuning.curriculum_learning),
        *_of_run(config, finetuning),
    ]
    return [one for one in found if one.names]


def _of_builder(config: RunConfig, blocks: Blocks) -> Iterator[Unused]:
    location, block = builder_path(config.finetuning), blocks.builder
    if not hasattr(block, "section"):
        return
    yield _reward(location, block)
    if config.builder.services == "external":
        names = given(block, (*_STARTED_HERE, *_SERVICE_LIMITS))
        yield Unused(location, names, "services are external; give it to `rollstream serve`")
    else:
        yield from of_engine(f"{location}.engine", block.engine, config)
    algorithm = config.adapter.algorithm
    if not algorithm.needs.rewards:
        yield Unused(location, given(block, ["missing_score"]), f"{algorithm.name} needs no score")
    if config.endpoint is not None:
        left = sorted(block.environment_config.keys() - config.builder.environment_config.keys())
        names = (*given(block, ["environment"]), *(f"environment_config.{name}" for name in left))
        yield Unused(location, names, "the workflow behind --endpoint runs the rollouts")
    if config.trainer.planning == "stream" and hasattr(block, "pairs"):
        names = given(block, _PAIRS_ONLY)
        yield Unused(location, names, "a streamed run forms pairs from all scored candidates; use planning: submitted")
    if not config.adapter.max_staleness:
        yield Unused(location, given(block, ["follow_lag"]), "max_staleness is 0, so each task waits for its version")
    if config.trainer.planning == "submitted" and block.drop_zero_variance:
        names = tuple(block.model_fields_set & {"drop_zero_variance"})
        yield Unused(location, names, "an epochwise run trains what its curriculum selects; see min_reward_diff there")
    if config.environment in MADE_ELSEWHERE:
        names = given(block.sampling, [name for name in type(block.sampling).model_fields if name != "temperature"])
        yield Unused(f"{location}.sampling", names, f"rollouts of {config.environment} are sampled elsewhere")


def _of_adapter(config: RunConfig, blocks: Blocks) -> Iterator[Unused]:
    location, block, adapter = adapter_path(config.finetuning), blocks.adapter, config.adapter
    if not hasattr(block, "section"):
        return
    yield _reward(location, block)
    for why, names in adapter.algorithm.unused().items():
        yield Unused(f"{location}.algorithm", names, why)
    yield from _of_optimizer(f"{location}.optimizer", adapter.optimizer)
    yield from _of_groups(f"{location}.model_groups", adapter)
    yield from _of_dropout(config)
    if adapter.warm_start is not None:
        yield from _of_optimizer(f"{location}.warm_start.optimizer", adapter.warm_start.optimizer)
    if block.endpoint is not None:
        yield from of_engine(f"{location}.endpoint.engine", block.endpoint.engine, config)
    if blocks.is_builder_ours and getattr(block, "retokenise", False):
        yield Unused(location, ("retokenise",), "it applies to builders of other packages; see environment_config")
    if why := _not_refilled(config):
        yield Unused(location, given(block, ["max_refills"]), why)
    if config.trainer.planning == "submitted":
        yield Unused(location, given(block, ["batches_per_epoch"]), "a submitted epoch is one batch")
        if config.dataset is not None or not blocks.is_builder_ours:
            yield Unused(location, given(block, ["tasks_per_epoch"]), "an epochwise run rolls out all examples")


def _not_refilled(config: RunConfig) -> str:
    """The reason why a batch is never refilled; empty if it is."""
    curriculum, adapter = config.finetuning.curriculum_learning, config.adapter
    if config.trainer.planning == "submitted":
        return "an epochwise run rolls out all examples"
    if adapter.batches_per_epoch > 1 and adapter.max_staleness:
        return "with several batches per epoch, the next one is filled with the groups of the next epoch"
    if curriculum.enabled and not curriculum.steer:
        return "a curriculum that does not steer filters the groups of a whole epoch"
    if len(config.trained()) > 1:
        return "the tasks are those of several model groups"
    builder = config.builder
    algorithm = adapter.algorithm.for_run(
        num_generations=builder.num_generations, temperature=builder.sampling.temperature
    )
    if algorithm.needs.flat_groups and "drop_zero_variance" not in builder.model_fields_set:
        return f"{algorithm.name} trains groups of equal rewards too"
    return "" if builder.drop_zero_variance else "drop_zero_variance is off"


def _of_groups(location: str, adapter: AdapterSection) -> Iterator[Unused]:
    for name, group in adapter.model_groups.items():
        where = f"{location}.{name}"
        if not group.is_trained:
            yield Unused(where, given(group, ["algorithm", "optimizer"]), "a frozen model group is not trained")
            continue
        for why, names in group.algorithm.unused().items() if group.algorithm else ():
            yield Unused(f"{where}.algorithm", names, why)
        if group.optimizer is not None:
            yield from _of_optimizer(f"{where}.optimizer", group.optimizer)


def _of_dropout(config: RunConfig) -> Iterator[Unused]:
    """Dropout of adapters that is off in every job. A warm start is supervised and has it."""
    adapter = config.adapter
    jobs: dict[str, list[AdapterSection]] = {}
    for name, one in config.trained().items():
        jobs.setdefault(config.group_path(name, "model.lora"), []).append(one.adapter)
    for where, sections in jobs.items():
        lora, algorithms = sections[0].model.lora, [one.algorithm for one in sections]
        if lora is None or adapter.warm_start is not None or not all(one.needs.compares_logprobs for one in algorithms):
            continue
        compared = " and ".join(sorted({one.name for one in algorithms}))
        why = f"{compared}: the loss compares log-probabilities that are computed without dropout; leave it out"
        yield Unused(where, given(lora, ["dropout"]), why)


def of_engine(location: str, engine: EngineSettings, config: RunConfig) -> Iterator[Unused]:
    """Those of an engine's block. `config`: its model groups, where the file tells them all, have adapters, full
    weights or both.
    """
    league, groups = config.builder.league, config.by_group()
    formats = {groups[name].adapter.model.lora is not None for name in groups.keys() - served_models(config).keys()}
    if config.is_external or (league is not None and league.frozen):
        formats = {True, False}
    for why, names in engine.unused(has_adapters=True in formats, has_full_weights=False in formats).items():
        yield Unused(location, names, why)


def _of_optimizer(location: str, optimizer: OptimizerSettings) -> Iterator[Unused]:
    if optimizer.schedule == "constant":
        yield Unused(location, given(optimizer, ["final_fraction"]), "schedule is constant")


def _of_trainer(config: RunConfig, blocks: Blocks) -> Iterator[Unused]:
    location, block = trainer_path(config.finetuning), blocks.trainer
    if not hasattr(block, "section"):
        return
    yield _reward(location, block)
    if "planning" in block.model_fields_set and block.planning != config.trainer.planning:
        why = "with another package's component, or under another command, a run is epochwise"
        if config.trainer.planning == "stream":
            why = f"max_staleness {config.adapter.max_staleness} lets epochs overlap, so the run is streamed"
        yield Unused(location, ("planning",), why)
    if config.validation is None:
        names = tuple(name for name in ("early_stopping", "validation_required") if getattr(block, name))
        yield Unused(
            location, names, "the run has no validation; give --validation_dataset or --validation_config_file"
        )


def _of_finetuning(config: RunConfig, blocks: Blocks, finetuning: FinetuningSection) -> Iterator[Unused]:
    if blocks.is_builder_ours and config.environment not in MADE_ELSEWHERE:
        names = given(finetuning, ["target_functions", "target_model"])
        yield Unused("finetuning", names, "it selects calls of a workflow that runs elsewhere (--endpoint)")


def _of_curriculum(config: RunConfig, blocks: Blocks, wanted: CurriculumSettings) -> Iterator[Unused]:
    known = CurriculumSettings.model_fields.keys()
    names: Iterable[str] = (*_EPOCHWISE_ONLY, "explore_share", "window_versions")
    why = "a streamed run without steer filters tasks before rollout, by example and by derived seeds"
    if not wanted.enabled:
        names, why = known, "enabled is false"
    elif not blocks.is_trainer_ours:
        names, why = known - CurriculumLearningConfig.model_fields.keys(), "only rollstream's own trainer supports it"
    elif config.trainer.planning == "submitted":
        names, why = _STEERED_ONLY, "an epochwise run rolls out all examples and filters afterwards"
    elif wanted.steer:
        names, why = (*_EPOCHWISE_ONLY, "filter_single_group"), "steer selects the tasks to roll out"
    if wanted.enabled and config.trainer.planning == "stream" and config.adapter.algorithm.needs.pairs:
        differs = f"{config.adapter.algorithm.name} compares answers, not rollouts; see algorithm.min_score_diff"
        yield Unused("finetuning.curriculum_learning", given(wanted, ["min_reward_diff"]), differs)
    yield Unused("finetuning.curriculum_learning", given(wanted, sorted(names)), why)


def _of_run(config: RunConfig, finetuning: FinetuningSection) -> Iterator[Unused]:
    location, run = "finetuning.run_configuration", finetuning.run_configuration
    if run is None:
        return
    yield Unused(location, given(run, ["config_file", "override"]), "they are command-line options")
    if config.endpoint is None:
        yield Unused(location, given(run, ["endpoint_timeout", "result_json_path"]), "the run has no endpoint")
    if config.validation is None:
        yield Unused(location, given(run, ["validation_interval"]), "the run has no validation")


def of_evaluation(evaluation: EvalSection, nat_workflow: str | None) -> Unused:
    """Unused keys of NAT's evaluation, which is not run here; a NAT workflow runs with its concurrency."""
    general = evaluation.general
    used = {"dataset", *(["max_concurrency"] if nat_workflow is not None else [])}
    names = [name for name in type(general).model_fields if name not in used]
    return Unused("eval.general", given(general, names), "NAT's evaluation is not run here")


def given(block: BaseModel, names: Iterable[str]) -> tuple[str, ...]:
    """The keys that were set to a value other than their default."""
    fields = type(block).model_fields
    return tuple(
        name
        for name in names
        if name in block.model_fields_set
        and getattr(block, name) != fields[name].get_default(call_default_factory=True)
    )


def _reward(location: str, block: Any) -> Unused:
    return Unused(location, given(block, ["reward"]), "finetuning.reward_function names the reward")
