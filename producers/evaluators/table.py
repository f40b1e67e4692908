"""The evaluators of the file by their `_type`: how a configuration is read, checked and built.

Which evaluators a run uses is decided in the harness.
"""

import functools
import math
from collections.abc import Mapping
from typing import NamedTuple

from pydantic import JsonValue, ValidationError

from rollstream.producers.evaluators import builtin
from rollstream.producers.evaluators.judge import Judge
from rollstream.producers.rollout import registry
from rollstream.producers.rollout.rewards import Recorder, RewardError, RewardFunction
from rollstream.schemas.base import check_no_truth_values
from rollstream.schemas.errors import ConfigError, first_invalid
from rollstream.schemas.evaluators import (
    MODELS,
    SECTION,
    UNCOMPILED,
    Evaluator,
    JsonSchemaMatch,
    LlmJudge,
    PythonScore,
    answer_key,
    kind_of,
)
from rollstream.schemas.permissions import Permissions, evaluator_path
from rollstream.schemas.settings import RolloutSettings
from rollstream.schemas.variables import conceal

SECRET_KEYS = ("base_url", "api_key", "model", "prompt")
"""Keys of a judge's block that may come from `${ENV}` and must be concealed."""


class Chosen(NamedTuple):
    """A reward function and its name in errors."""

    location: str
    function: RewardFunction


def reward_of(
    name: str, settings: RolloutSettings, permissions: Permissions, recorder: Recorder | None, ends: float = math.inf
) -> Chosen:
    """The reward function called `name`: an evaluator that the settings carry, else a registered one.

    `recorder`: takes down what a judge is asked; none: no judge may be asked. `ends`: the time of `time.monotonic`
    beyond which no judge's answer is waited for. Raises ConfigError, in particular
    NotAllowedError for names in the settings without permission.
    """
    block = settings.evaluators.get(name)
    if block is None:
        return Chosen(name, registry.reward(name, permissions))
    location = f"{SECTION}.{name}"
    config = read(name, block, permissions)
    if isinstance(config, LlmJudge):
        if recorder is None:
            raise ConfigError(f"{location}: an llm_judge is not called again; its recorded scores are kept")
        block = {key: block.get(key) for key in SECRET_KEYS}
        hide = functools.partial(_hide, block=block, env=permissions.env)
        return Chosen(location, Judge(name, config, recorder, hide, ends).score)
    return Chosen(location, _build(location, config, permissions))


def read(
    name: str, block: Mapping[str, JsonValue], permissions: Permissions, *, compiles_patterns: bool = False
) -> Evaluator:
    """The configuration of an evaluator, `${ENV}` expanded. Nothing is imported, opened or asked.

    `compiles_patterns`: check regular expressions as well, which takes as long as the one who wrote them likes.
    Raises ConfigError naming the path in the file, of it NotAllowedError for a variable, function, URL or file that is
    not allowed.
    """
    location = f"{SECTION}.{name}"
    kind = kind_of(block.get("_type"))
    if kind is None:
        raise ConfigError(
            f"{location}._type: {block.get('_type')!r} is not known; known types: {', '.join(sorted(MODELS))}; "
            "or name a registered reward function"
        )
    model = MODELS[kind]
    try:
        expanded = permissions.expand({**block, "_type": kind}, location, evaluator_path(name, block))
        config = model.model_validate(expanded, context=None if compiles_patterns else UNCOMPILED)
    except ValidationError as error:
        path, message = first_invalid(error, model=model)
        where = f"{location}.{path}: " if path else f"{location}."
        concealed = conceal(message[:1].lower() + message[1:], dict(block), permissions.env)
        raise ConfigError(where + concealed) from error
    _check_allowed(location, config, permissions)
    return config


def check(name: str, block: Mapping[str, JsonValue], permissions: Permissions) -> Evaluator:
    """Build an evaluator as producers will, but for asking anybody. Returns its configuration; raises ConfigError."""
    config = read(name, block, permissions, compiles_patterns=True)
    if isinstance(config, JsonSchemaMatch):
        builtin.check_schema(f"{SECTION}.{name}", config)
    elif not isinstance(config, LlmJudge):
        _build(f"{SECTION}.{name}", config, permissions)
    return config


def check_numbers(name: str, block: Mapping[str, JsonValue], permissions: Permissions) -> None:
    """Raises ConfigError for true or false in place of a number, which a recorded block may have."""
    check_no_truth_values(block, read(name, block, permissions), f"{SECTION}.{name}")


def check_references(name: str, block: Mapping[str, JsonValue], permissions: Permissions) -> None:
    """Raises ConfigError for a JSON schema that refers to what it does not contain, where scoring needs it."""
    config = read(name, block, permissions)
    if isinstance(config, JsonSchemaMatch):
        builtin.check_references(f"{SECTION}.{name}", config)


def check_answer(location: str, config: Evaluator, inputs: Mapping[str, JsonValue]) -> None:
    """Raises ConfigError naming the location of an example's answer that the evaluator can score nothing by."""
    key = answer_key(config)
    if key is None:
        return
    try:
        builtin.check_answer(location, config, inputs[key])
    except RewardError as error:
        raise ConfigError(str(error)) from error


def _check_allowed(location: str, config: Evaluator, permissions: Permissions) -> None:
    if isinstance(config, PythonScore):
        permissions.check_code(config.function, f"{location}.function")
    elif isinstance(config, LlmJudge):
        permissions.check_url(config.base_url, f"{location}.base_url")
    elif isinstance(config, JsonSchemaMatch) and config.file is not None:
        permissions.check_file(config.file, f"{location}.file")


def _build(location: str, config: Evaluator, permissions: Permissions) -> RewardFunction:
    if isinstance(config, PythonScore):
        return _python(location, config, permissions)
    return builtin.BUILDERS[type(config)](location, config)


def _python(location: str, config: PythonScore, permissions: Permissions) -> RewardFunction:
    try:
        return registry.reward(config.function, permissions)
    except ConfigError as error:
        raise ConfigError(f"{location}.function: {error}") from error


def _hide(text: str, *, block: dict[str, JsonValue], env: Mapping[str, str]) -> str:
    hidden = conceal(text, block, env)
    return conceal(hidden, block, {name: value.strip() for name, value in env.items()})
