"""Reads a run's YAML file: applies overrides, expands `${ENV}` and validates its blocks; errors name the path and the
remedy."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import JsonValue, ValidationError, create_model

from rollstream.harness.config.blocks import import_modules, model_of
from rollstream.harness.config.checks import check_values
from rollstream.harness.config.errors import explain
from rollstream.harness.config.resolve import run_config_of, warn_unused
from rollstream.harness.config.yaml import apply_overrides, read_yaml, with_run_options
from rollstream.schemas.base import check_no_truth_values
from rollstream.schemas.config import OURS, AdapterSection, ConfigFile, RunConfig, RunConfigurationSection
from rollstream.schemas.engine_settings import ENGINES
from rollstream.schemas.errors import ConfigError
from rollstream.schemas.finetuning import CurriculumLearningConfig, FinetuneConfig, FinetuneRunConfig
from rollstream.schemas.kafka import SECRETS
from rollstream.schemas.services import ModelGroupSection
from rollstream.schemas.settings import CurriculumSettings
from rollstream.schemas.variables import as_written, conceal, conceal_variables, expand, variables_in

_MORE: dict[str, Any] = {
    name: (field.annotation, field)
    for name, field in CurriculumSettings.model_fields.items()
    if name not in CurriculumLearningConfig.model_fields
}
Curriculum = create_model("Curriculum", __base__=CurriculumLearningConfig, **_MORE)
"""NAT's curriculum with rollstream's additional keys."""


class Loaded(NamedTuple):
    """A configuration in its usable form, and as written (`${ENV}` not expanded): only the latter may be stored."""

    config: RunConfig
    written: dict[str, JsonValue]
    finetune: FinetuneConfig
    """The same for the three components; the file itself is at `run_configuration.config_file`."""


def load(
    path: Path,
    overrides: Sequence[tuple[str, str]] = (),
    env: Mapping[str, str] | None = None,
    options: Mapping[str, JsonValue] | None = None,
    *,
    is_new: bool = True,
) -> Loaded:
    """The configuration in a file. Raises ConfigError naming the file, the path of the key and the remedy.

    `options`: command-line options by their names in `finetuning.run_configuration`; they override the file.
    `is_new`: as of `resolve`.
    """
    written = read_yaml(path)
    apply_overrides(written, overrides)
    with_run_options(written, options or {})
    try:
        check_values(written)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    return resolve(written, env, is_new=is_new)


def validation_config(config: RunConfig) -> RunConfig | None:
    """The configuration of a run's validation, None without one: `validation.config`, else the run's own.

    Only the former's environment, rewards and dataset are used. Raises ConfigError.
    """
    validation = config.validation
    if validation is None:
        return None
    found = config
    if validation.config is not None:
        try:
            found = load(validation.config, is_new=False).config  # the preflight of a new run reads it as new
        except ConfigError as error:
            raise ConfigError(f"validation_config_file: {error}") from error
    examples = validation.dataset or (found.dataset if validation.config else None)
    if examples is None:
        raise ConfigError(
            f"validation_config_file {validation.config}: eval.general.dataset: missing; give the validation examples"
        )
    return found.model_copy(update={"dataset": examples})


def resolve(written: dict[str, JsonValue], env: Mapping[str, str] | None = None, *, is_new: bool = True) -> Loaded:
    """The configuration in a dictionary as written. Raises ConfigError.

    `is_new`: of no recorded run, whose configuration may have true or false in place of a number.
    """
    env = os.environ if env is None else env
    conceal_variables(variables_in(written))
    try:
        return _resolved(written, env, is_new=is_new)
    except ConfigError as error:
        texts = {
            name: value for name, value in env.items() if not value.isdigit()
        }  # the message may quote a limit that is an expanded secret
        raise type(error)(conceal(str(error), written, texts)) from error


def _resolved(written: dict[str, JsonValue], env: Mapping[str, str], *, is_new: bool) -> Loaded:
    expanded = expand(written, env)
    assert isinstance(expanded, dict)
    model = model_of(expanded)
    try:
        file = model.model_validate(usable := _usable(expanded, written))
    except ValidationError as error:
        raise ConfigError(explain(error, model, written)) from error
    if is_new:
        check_no_truth_values(usable, file)
    if not file.finetuning.enabled:
        raise ConfigError("finetuning.enabled is false; set it to true to train")
    finetune = _finetune(file)
    config = run_config_of(finetune)
    warn_unused(config, finetune, file.finetuning)
    return Loaded(unexpanded(config, written, env), written, finetune)


def unexpanded(config: RunConfig, written: dict[str, JsonValue], env: Mapping[str, str]) -> RunConfig:
    """A configuration with model path, algorithm's texts, remote workflow and artifact URI as written, for events.

    They are expanded where they are used. Names and numbers are not secrets and stay expanded.
    """

    def restored(value: Any, source: Any) -> Any:
        return as_written(value, written, env, source)

    def of_section(section: AdapterSection | ModelGroupSection, block: Mapping[str, Any]) -> dict[str, Any]:
        model, algorithm = section.model, section.algorithm
        texts = {} if algorithm is None else restored(algorithm.texts(), block.get("algorithm"))
        path = model and restored(model.path, block_at(block, "model").get("path"))
        return {
            "model": model and model.model_copy(update={"path": path}),
            "algorithm": algorithm and algorithm.model_copy(update=texts),
        }

    adapter, builder = config.adapter, config.builder
    block = block_at(written, "trainer_adapters", config.finetuning.trainer_adapter)
    groups = {
        name: one.model_copy(update=of_section(one, block_at(block, "model_groups", name)))
        for name, one in adapter.model_groups.items()
    }
    uri = restored(adapter.artifact_uri, block.get("artifact_uri"))
    adapter = adapter.model_copy(update={**of_section(adapter, block), "artifact_uri": uri, "model_groups": groups})
    run = block_at(written, "finetuning", "run_configuration")
    if config.endpoint is not None:
        given = block_at(written, "trajectory_builders", config.finetuning.trajectory_builder, "environment_config")
        sources = {**given, **block_at(written, "finetuning"), **run}  # as `nat_workflows.at_endpoint` takes them
        environment_config = restored(builder.environment_config, sources)
        builder = builder.model_copy(update={"environment_config": environment_config})
    changes = {"adapter": adapter, "builder": builder, "endpoint": restored(config.endpoint, run.get("endpoint"))}
    return config.model_copy(update=changes)


def block_at(written: Mapping[str, Any], *path: str) -> dict[str, Any]:
    """The block at a path of a configuration as written; empty if it has none."""
    for key in path:
        found = written.get(key)
        written = found if isinstance(found, Mapping) else {}
    return dict(written)


def _usable(expanded: dict[str, Any], written: Mapping[str, Any]) -> dict[str, Any]:
    """The values to validate: `expanded`, except free-form values, which are sent in events and keep their `${ENV}`."""
    usable = _restored(expanded, written, ("eval", "evaluators"))
    builders = usable.get("trajectory_builders")
    for name in builders if isinstance(builders, dict) else ():
        usable = _restored(usable, written, ("trajectory_builders", name, "environment_config"))
    usable = _with_secrets_as_written(usable, written)
    workflow = usable.get("workflow")
    if isinstance(workflow, str):
        return {**usable, "workflow": {"environment": workflow}}
    if isinstance(workflow, dict) and workflow.get("_type", OURS) != OURS:
        if len(workflow) > 1:
            import_modules(expanded)
        return {**usable, "workflow": {**written["workflow"], "_type": workflow["_type"]}}
    return usable


def _with_secrets_as_written(usable: dict[str, Any], written: Mapping[str, Any]) -> dict[str, Any]:
    """Secrets of `kafka:` and `endpoint:` blocks, and settings of installed engines, keep their `${ENV}` until used."""
    for section in ("trajectory_builders", "trainer_adapters"):
        blocks = usable.get(section)
        for name in blocks if isinstance(blocks, dict) else ():
            for secret in SECRETS:
                usable = _restored(usable, written, (section, name, "kafka", secret))
            usable = _restored(usable, written, (section, name, "endpoint", "token"))
            for path in ((section, name, "engine"), (section, name, "endpoint", "engine")):
                usable = _with_engine_as_written(usable, written, path)
    return usable


def _with_engine_as_written(usable: dict[str, Any], written: Mapping[str, Any], path: Sequence[str]) -> dict[str, Any]:
    """Any setting of an installed engine may be a secret; only its kind is expanded here."""
    block: Any = usable
    for key in path:
        block = block.get(key) if isinstance(block, dict) else None
    kind = block.get("kind") if isinstance(block, dict) else None
    for key in block if isinstance(kind, str) and kind not in ENGINES else ():
        usable = usable if key == "kind" else _restored(usable, written, (*path, key))
    return usable


def _restored(expanded: dict[str, Any], written: Mapping[str, Any], path: Sequence[str]) -> dict[str, Any]:
    """`expanded` with the value of `written` at `path`, if both have that path."""
    key, rest = path[0], path[1:]
    inner = expanded.get(key)
    if inner is None or (rest and not isinstance(inner, dict)):
        return expanded
    return {**expanded, key: _restored(inner, written[key], rest) if rest else written[key]}


def _finetune(file: ConfigFile) -> FinetuneConfig:
    """The section `finetuning` in NAT's shape, for components; `run_configuration.config_file` is the file itself."""
    section = file.finetuning
    run = section.run_configuration or RunConfigurationSection()
    values = section.model_dump(exclude={"run_configuration", "curriculum_learning"})
    return FinetuneConfig(
        **values,
        curriculum_learning=Curriculum(**section.curriculum_learning.model_dump()),
        run_configuration=FinetuneRunConfig(**{**run.model_dump(), "config_file": file}),
    )
