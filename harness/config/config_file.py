"""Reads a run's YAML file: overrides, `${ENV}`, its blocks' models, errors that name the path and the remedy."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import JsonValue, ValidationError, create_model

from rollstream.harness.config import overrides as given
from rollstream.harness.config.config_errors import explain
from rollstream.harness.config.config_model import import_modules, model_of
from rollstream.harness.config.config_values import check_values
from rollstream.harness.config.finetune_config import run_config_of
from rollstream.harness.config.yaml_reading import read_yaml
from rollstream.schemas.config import OURS, ConfigFile, RunConfig, RunConfigurationSection
from rollstream.schemas.environment import expand
from rollstream.schemas.errors import ConfigError
from rollstream.schemas.finetuning import CurriculumLearningConfig, FinetuneConfig, FinetuneRunConfig
from rollstream.schemas.settings import CurriculumSettings

_MORE: dict[str, Any] = {
    name: (field.annotation, field)
    for name, field in CurriculumSettings.model_fields.items()
    if name not in CurriculumLearningConfig.model_fields
}
Curriculum = create_model("Curriculum", __base__=CurriculumLearningConfig, **_MORE)
"""NAT's curriculum with what ours has beyond it."""


class Loaded(NamedTuple):
    """A configuration as it is used, and as it was written (`${ENV}` not expanded): only the latter may be stored."""

    config: RunConfig
    written: dict[str, JsonValue]
    finetune: FinetuneConfig
    """The same for the three components; the file itself stands at `run_configuration.config_file`."""


def load(
    path: Path,
    overrides: Sequence[tuple[str, str]] = (),
    environ: Mapping[str, str] | None = None,
    options: Mapping[str, JsonValue] | None = None,
) -> Loaded:
    """The configuration in a file. Raises ConfigError naming the file, the path of the key and the remedy.

    `options`: those of the command line by the names of `finetuning.run_configuration`; none: the file decides.
    """
    written = read_yaml(path)
    given.apply(written, overrides)
    given.with_run_options(written, options or {})
    try:
        check_values(written)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    return resolve(written, environ)


def validation_config(config: RunConfig) -> RunConfig | None:
    """What a run validates by, none if it does not: its `validation.config`, else its own configuration.

    Of the former it is the environment, rewards and dataset that count. Raises ConfigError.
    """
    validation = config.validation
    if validation is None:
        return None
    found = config
    if validation.config is not None:
        try:
            found = load(validation.config).config
        except ConfigError as error:
            raise ConfigError(f"validation_config_file: {error}") from error
    examples = validation.dataset or (found.dataset if validation.config else None)
    if examples is None:
        raise ConfigError(f"validation_config_file {validation.config}: eval.general.dataset: missing; name examples")
    return found.model_copy(update={"dataset": examples})


def resolve(written: dict[str, JsonValue], environ: Mapping[str, str] | None = None) -> Loaded:
    """The configuration in a dictionary as written. Raises ConfigError."""
    expanded = expand(written, os.environ if environ is None else environ)
    assert isinstance(expanded, dict)
    model = model_of(expanded)
    try:
        file = model.model_validate(_usable(expanded, written))
    except ValidationError as error:
        raise ConfigError(explain(error, model, written)) from error
    if not file.finetuning.enabled:
        raise ConfigError("finetuning.enabled: is false; set it to true to train")
    finetune = _finetune(file)
    return Loaded(run_config_of(finetune), written, finetune)


def _usable(expanded: dict[str, Any], written: Mapping[str, Any]) -> dict[str, Any]:
    """What is validated: `expanded`, but for free-form values, which are sent in events and so keep their `${ENV}`."""
    usable = _restored(expanded, written, ("eval", "evaluators"))
    builders = usable.get("trajectory_builders")
    for name in builders if isinstance(builders, dict) else ():
        usable = _restored(usable, written, ("trajectory_builders", name, "environment_config"))
    workflow = usable.get("workflow")
    if isinstance(workflow, str):
        return {**usable, "workflow": {"environment": workflow}}
    if isinstance(workflow, dict) and workflow.get("_type", OURS) != OURS:
        if len(workflow) > 1:
            import_modules(expanded)
        return {**usable, "workflow": {**written["workflow"], "_type": workflow["_type"]}}
    return usable


def _restored(expanded: dict[str, Any], written: Mapping[str, Any], path: Sequence[str]) -> dict[str, Any]:
    """`expanded` with what `written` has at `path`, if that leads anywhere in both."""
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
