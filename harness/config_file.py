"""Reads a run's YAML file: YAML 1.2 numbers, overrides, `${ENV}`, and errors that name the path and the remedy."""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import yaml
from pydantic import JsonValue, ValidationError

from rollstream.harness.config_errors import explain
from rollstream.harness.config_values import check_values
from rollstream.schemas.config import (
    AdapterSection,
    BuilderSection,
    ConfigFile,
    ForeignBlock,
    RunConfig,
    TrainerSection,
)
from rollstream.schemas.environment import expand
from rollstream.schemas.errors import ConfigError

Section = TypeVar("Section", BuilderSection, AdapterSection, TrainerSection)


class Loaded(NamedTuple):
    """A configuration as it is used, and as it was written (`${ENV}` not expanded): only the latter may be stored."""

    config: RunConfig
    written: dict[str, JsonValue]


class _Loader(yaml.SafeLoader):
    """Safe YAML with the scalars of YAML 1.2 (`1e-5` is a number, `2024-02-01` is text) and without doubled keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, (list, dict)):
                problem = "a key must be text (is a value missing its quotes?)"
                raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} stands twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep=deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)[eE][-+]?[0-9]+$"),
    list("-+.0123456789"),
)
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in _Loader.yaml_implicit_resolvers.items()
}


def load(path: Path, overrides: Sequence[tuple[str, str]] = (), environ: Mapping[str, str] | None = None) -> Loaded:
    """The configuration in a file. Raises ConfigError naming the file, the path of the key and the remedy."""
    written = read_yaml(path)
    for key, value in overrides:
        _override(written, key, value)
    try:
        check_values(written)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    return resolve(written, environ)


def resolve(written: dict[str, JsonValue], environ: Mapping[str, str] | None = None) -> Loaded:
    """The configuration in a dictionary as written. Raises ConfigError."""
    expanded = expand(written, os.environ if environ is None else environ)
    try:
        file = ConfigFile.model_validate(expanded)
    except ValidationError as error:
        raise ConfigError(explain(error, ConfigFile, written)) from error
    return Loaded(_chosen(file, written), written)


def read_yaml(path: Path) -> dict[str, JsonValue]:
    """The mapping in a YAML file. Raises ConfigError naming the file and the line."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    content = _parse(text, str(path))
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: the file must be a mapping of sections (llms, workflow, finetuning, ...)")
    return content


def _parse(text: str, place: str) -> Any:
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" line {mark.line + 1}" if mark else ""
        raise ConfigError(f"{place}:{line} not valid YAML: {getattr(error, 'problem', error)}") from error


def _override(written: dict[str, Any], key: str, value: str) -> None:
    parts = key.split(".")
    if not all(parts):
        raise ConfigError(f"--override {key}: a dotted path such as finetuning.num_epochs is needed")
    block: Any = written
    for depth, part in enumerate(parts[:-1], 1):
        block = block.setdefault(part, {})
        if not isinstance(block, dict):
            raise ConfigError(f"--override {key}: {'.'.join(parts[:depth])} is a value, not a section")
    block[parts[-1]] = _parse(value, f"--override {key}")


def _chosen(file: ConfigFile, written: Mapping[str, JsonValue]) -> RunConfig:
    """The blocks that `finetuning` names. Free-form values keep their `${ENV}`: they are sent in events."""
    finetuning = file.finetuning
    if not finetuning.enabled:
        raise ConfigError("finetuning.enabled: is false; set it to true to train")
    builder = _component(file.trajectory_builders, "trajectory_builder", finetuning.trajectory_builder, BuilderSection)
    adapter = _component(file.trainer_adapters, "trainer_adapter", finetuning.trainer_adapter, AdapterSection)
    trainer = _component(file.trainers, "trainer", finetuning.trainer, TrainerSection)
    environment = builder.environment or (file.workflow.environment if file.workflow else None)
    place = f"trajectory_builders.{finetuning.trajectory_builder}"
    if environment is None:
        raise ConfigError(f"{place}.environment: missing; name an environment here or as the workflow")
    raw: Any = written["trajectory_builders"]
    kept = raw[finetuning.trajectory_builder].get("environment_config") or {}
    reward = finetuning.reward_function
    return RunConfig(
        builder=builder.model_copy(update={"environment_config": kept}),
        adapter=adapter,
        trainer=trainer,
        finetuning=finetuning,
        dataset=file.eval.general.dataset,
        environment=environment,
        reward_functions=_rewards(builder, reward.name if reward else None),
    )


def _rewards(builder: BuilderSection, name: str | None) -> tuple[str, ...]:
    """Reward functions to run; `environment` names the environment's own rewards."""
    if name is None or name == "environment" or name in builder.rewards:
        return builder.rewards
    return (*builder.rewards, name)


def _component(blocks: Mapping[str, Section | ForeignBlock], role: str, name: str, kind: type[Section]) -> Section:
    if name not in blocks:
        known = ", ".join(sorted(blocks)) or "none"
        raise ConfigError(f"finetuning.{role}: no {role} is called {name!r}; defined are: {known}")
    block = blocks[name]
    if not isinstance(block, kind):
        found = block.type
        raise ConfigError(f"{role}s.{name}._type: {found!r} is not known; known are: rollstream")
    return block
