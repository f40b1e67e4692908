"""Environments and reward functions by name, or by `python:module.attribute`. Built-in ones are imported on demand."""

import functools
import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

from pydantic import JsonValue

from rollstream.producers.rollout.environment import Environment, FunctionEnvironment
from rollstream.producers.rollout.rewards import RewardFunction
from rollstream.producers.rollout.user_code import OURS, failed_imports_hint
from rollstream.schemas.errors import ConfigError, describe, nearest
from rollstream.schemas.permissions import CODE, COMMAND, Permissions, below, environment_path
from rollstream.schemas.users_code import check_name, import_named, register

BUILT_IN = (
    "arithmetic",
    "bit_proof",
    "gateway",
    "guess_number",
    "recorded",
    "remote_workflow",
    "single_turn",
    "tic_tac_toe",
    "tic_tac_toe_self_play",
)
"""Modules of `producers.environments`; each registers its environment under its own name."""

_T = TypeVar("_T", bound=Callable[..., Any])
_environments: dict[str, Callable[..., Any]] = {}
_rewards: dict[str, RewardFunction] = {}


def register_environment(name: str) -> Callable[[_T], _T]:
    """Decorator: an Environment class, or an async function of a session, under `name`."""
    check_name("register_environment", name)
    return lambda value: register(_environments, "environment", name, value)


def register_reward(name: str) -> Callable[[_T], _T]:
    """Decorator: a reward function (see `rewards.RewardFunction`) under `name`."""
    check_name("register_reward", name)
    return lambda value: register(_rewards, "reward", name, value)


def environment(name: str, permissions: Permissions) -> Callable[..., Any]:
    """The environment class or async function called `name`; nothing else is handed out, and nothing is called here.

    Raises NotAllowedError before anything is imported, ConfigError naming the nearest known name.
    """
    permissions.check_code(name, "environment")
    if name.startswith(COMMAND):
        found = importlib.import_module("rollstream.producers.environments.program").environment_of(name)
        return cast("Callable[..., Any]", found)
    if name not in _environments and name in BUILT_IN:
        importlib.import_module(f"rollstream.producers.environments.{name}")
    found = _find(_environments, "environment", name, BUILT_IN)
    is_class = inspect.isclass(found) and issubclass(found, Environment)
    if not is_class and not inspect.iscoroutinefunction(found):
        raise ConfigError(
            f"environment {name} is neither an Environment class nor an async function of a session; name one of those"
        )
    return found


def reward(name: str, permissions: Permissions) -> RewardFunction:
    """The reward function called `name`.

    Raises NotAllowedError before anything is imported, ConfigError naming the nearest known name.
    """
    permissions.check_code(name, "reward")
    found = _find(_rewards, "reward", name)
    if inspect.isclass(found):
        raise ConfigError(f"reward {name} is a class; give a function of a finished rollout")
    return found


def environment_config(name: str, config: Mapping[str, JsonValue], permissions: Permissions) -> dict[str, Any]:
    """The configuration of environment `name` with its `${ENV}` expanded, which happens here and nowhere else.

    Raises NotAllowedError for a variable, a URL in one of the environment's `URLS`, or code in one of its `CODE`, that
    is not allowed.
    """
    found = environment(name, permissions)
    urls: tuple[str, ...] = getattr(found, "URLS", ())
    code: tuple[str, ...] = getattr(found, "CODE", ())
    path = environment_path(name)
    expanded = {
        key: permissions.expand(value, f"environment_config.{key}", below(path, key)) for key, value in config.items()
    }
    for key in urls:
        value = expanded.get(key)
        if isinstance(value, str):
            permissions.check_url(value, f"environment_config.{key}")
    for key in code:
        value = expanded.get(key)
        named = value.get("name") if isinstance(value, Mapping) else value
        if isinstance(named, str):
            permissions.check_code(named, f"environment_config.{key}")
    return expanded


def build_environment(name: str, config: Mapping[str, JsonValue], permissions: Permissions) -> Environment:
    """A fresh environment.

    Raises NotAllowedError as `environment_config` does, ConfigError for an unknown name or configuration key, or a
    value that the constructor refuses.
    """
    found = environment(name, permissions)
    expanded = environment_config(name, config, permissions)
    if inspect.iscoroutinefunction(found):
        _check_keys(name, found, tuple(expanded), num_positional=1)
        return FunctionEnvironment(found, expanded)
    _check_keys(name, found, tuple(expanded), num_positional=0)
    try:
        built: Environment = found(**expanded)
    except (TypeError, ValueError) as error:
        is_ours = found.__module__.startswith(OURS)  # whose messages name the key themselves
        reason = str(error) if is_ours or isinstance(error, ConfigError) else describe(error)
        raise ConfigError(f"environment {name}: environment_config: {reason}") from error
    return built


def _find(known: Mapping[str, Any], what: str, name: str, more: tuple[str, ...] = ()) -> Any:
    if name.startswith(CODE):
        found = import_named(name, what, "attribute")
        if not callable(found):
            raise ConfigError(f"{what}: {name} is a {type(found).__name__}; give a class or a function")
        return found
    if name in known:
        return known[name]
    names = sorted({*known, *more})
    near = nearest(name, names)
    listed = ", ".join(names) or "none is registered"
    hint = f"did you mean {near}?" if near is not None else f"known names: {listed}; or give python:module.attribute"
    raise ConfigError(f"{what} {name!r} is unknown; {hint}{failed_imports_hint()}")


@functools.lru_cache(maxsize=64)
def _check_keys(name: str, found: Callable[..., Any], keys: tuple[str, ...], *, num_positional: int) -> None:
    """Raises ConfigError for a key that an environment does not take, or one that it misses."""
    signature = inspect.signature(found)
    try:
        signature.bind(*[None] * num_positional, **dict.fromkeys(keys))
    except TypeError as error:
        parameters = list(signature.parameters)[num_positional:]
        unknown = [key for key in keys if key not in parameters]
        if not unknown:
            raise ConfigError(f"environment {name}: {error}; see environment_config") from error
        near = nearest(unknown[0], parameters)
        hint = f"did you mean {near}?" if near is not None else f"known keys: {', '.join(parameters) or 'none'}"
        raise ConfigError(f"environment {name}: environment_config.{unknown[0]}: unknown key; {hint}") from error
