"""Environments and reward functions by name, or by `python:module.attribute`. Built-in ones are imported on demand."""

import difflib
import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from pydantic import JsonValue

from rollstream.producers.environment import Environment, FunctionEnvironment
from rollstream.producers.rewards import RewardFunction
from rollstream.schemas.environment import expand
from rollstream.schemas.errors import ConfigError

PYTHON = "python:"
BUILT_IN = ("arithmetic", "guess_number", "recorded", "remote_workflow", "tic_tac_toe")
"""Modules of `producers.environments`; each registers its environment under its own name."""

_T = TypeVar("_T", bound=Callable[..., Any])
_environments: dict[str, Callable[..., Any]] = {}
_rewards: dict[str, RewardFunction] = {}


def register_environment(name: str) -> Callable[[_T], _T]:
    """Decorator: an Environment class, or an async function of a session, under `name`."""
    return lambda value: _register(_environments, "environment", name, value)


def register_reward(name: str) -> Callable[[_T], _T]:
    """Decorator: a reward function (see `rewards.RewardFunction`) under `name`."""
    return lambda value: _register(_rewards, "reward", name, value)


def environment(name: str) -> Callable[..., Any]:
    """The environment class or function called `name`. Raises ConfigError naming the nearest known name."""
    if name not in _environments and name in BUILT_IN:
        importlib.import_module(f"rollstream.producers.environments.{name}")
    return _find(_environments, "environment", name, BUILT_IN)


def reward(name: str) -> RewardFunction:
    """The reward function called `name`. Raises ConfigError naming the nearest known name."""
    return _find(_rewards, "reward", name)


def build_environment(name: str, config: Mapping[str, JsonValue], environ: Mapping[str, str]) -> Environment:
    """A fresh environment; `${ENV}` in `config` is expanded here and nowhere else.

    Raises ConfigError for an unknown name or configuration key, or a value that the constructor refuses.
    """
    found = environment(name)
    expanded: dict[str, Any] = {
        key: expand(value, environ, f"environment_config.{key}") for key, value in config.items()
    }
    if inspect.iscoroutinefunction(found):
        _check_keys(name, found, expanded, num_positional=1)
        return FunctionEnvironment(found, expanded)
    _check_keys(name, found, expanded, num_positional=0)
    try:
        built = found(**expanded)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"environment {name}: environment_config: {error}") from error
    if not isinstance(built, Environment):
        raise ConfigError(f"environment {name}: is neither an Environment class nor an async function of a session")
    return built


def _register(known: dict[str, Any], what: str, name: str, value: _T) -> _T:
    before = known.get(name)
    if before is not None and _place(before) != _place(value):
        raise ConfigError(f"{what} {name} is registered twice: by {_place(before)} and by {_place(value)}")
    known[name] = value
    return value


def _place(value: Any) -> str:
    return f"{value.__module__}.{value.__qualname__}"


def _find(known: Mapping[str, Any], what: str, name: str, more: tuple[str, ...] = ()) -> Any:
    if name.startswith(PYTHON):
        return _import(what, name)
    if name in known:
        return known[name]
    names = sorted({*known, *more})
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    listed = ", ".join(names) or "none is registered"
    hint = f"did you mean {near[0]}?" if near else f"known are: {listed}; or give python:module.attribute"
    raise ConfigError(f"{what} {name!r} is unknown; {hint}")


def _import(what: str, name: str) -> Any:
    module_name, _, attribute = name.removeprefix(PYTHON).rpartition(".")
    if not module_name:
        raise ConfigError(f"{what} {name!r}: write python:module.attribute")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(f"{what} {name!r}: module {module_name} cannot be imported: {error}") from error
    if not hasattr(module, attribute):
        near = difflib.get_close_matches(attribute, vars(module), n=1, cutoff=0.5)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(f"{what} {name!r}: module {module_name} has no {attribute!r}{hint}")
    found = getattr(module, attribute)
    if not callable(found):
        raise ConfigError(f"{what} {name!r}: is a {type(found).__name__}, no class or function")
    return found


def _check_keys(name: str, found: Callable[..., Any], config: Mapping[str, Any], *, num_positional: int) -> None:
    signature = inspect.signature(found)
    try:
        signature.bind(*[None] * num_positional, **config)
    except TypeError as error:
        parameters = list(signature.parameters)[num_positional:]
        unknown = [key for key in config if key not in parameters]
        if not unknown:
            raise ConfigError(f"environment {name}: {error}; see environment_config") from error
        near = difflib.get_close_matches(unknown[0], parameters, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}?" if near else f"known are: {', '.join(parameters) or 'none'}"
        raise ConfigError(f"environment {name}: environment_config.{unknown[0]}: unknown key; {hint}") from error
