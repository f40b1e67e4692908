"""Components by the type of their configuration: trainers, trajectory builders, trainer adapters.

A component is registered as an async generator that yields it; the `_type` in a file is the `name=` of its
configuration's class. Packages register theirs in modules named by the entry point group `rollstream.components`.
"""

import importlib
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from rollstream.producers.rollout.user_code import import_installed
from rollstream.schemas.errors import ConfigError
from rollstream.schemas.finetuning import (
    ComponentConfig,
    TrainerAdapterConfig,
    TrainerConfig,
    TrajectoryBuilderConfig,
)
from rollstream.schemas.users_code import path_of, registered_twice

BUILT_IN = "rollstream.harness.builtin"
Build = TypeVar("Build", bound=Callable[..., Any])
ConfigType = type[ComponentConfig]
Registered = dict[ConfigType, Callable[..., Any]]

trainers: Registered = {}
trajectory_builders: Registered = {}
trainer_adapters: Registered = {}
_discovered: set[str] = set()


def register_trainer(config_type: type[TrainerConfig]) -> Callable[[Build], Build]:
    """Decorator: registers the factory of trainers for a configuration type (`async def build(config, builder): yield
    it`)."""
    return _register(trainers, "trainer", TrainerConfig, config_type)


def register_trajectory_builder(config_type: type[TrajectoryBuilderConfig]) -> Callable[[Build], Build]:
    """Decorator: registers the factory of trajectory builders for a configuration type."""
    return _register(trajectory_builders, "trajectory builder", TrajectoryBuilderConfig, config_type)


def register_trainer_adapter(config_type: type[TrainerAdapterConfig]) -> Callable[[Build], Build]:
    """Decorator: registers the factory of trainer adapters for a configuration type."""
    return _register(trainer_adapters, "trainer adapter", TrainerAdapterConfig, config_type)


def registered(section: str) -> Registered:
    """Registered components of a section of the file (`trainers`, `trajectory_builders`, `trainer_adapters`)."""
    discover()
    by_section = {
        "trajectory_builders": trajectory_builders,
        "trainer_adapters": trainer_adapters,
        "trainers": trainers,
    }
    return by_section[section]


def config_types(section: str) -> dict[str, ConfigType]:
    """Configuration classes of a section by their `_type`."""
    return {str(config_type.STATIC_TYPE): config_type for config_type in registered(section)}


def discover(*, again: bool = False) -> None:
    """Import our own components and the entry points of installed packages, once per process unless `again`.

    A package that cannot be imported is logged and skipped; only files that name its types fail.
    """
    if _discovered and not again:
        return
    _discovered.add(BUILT_IN)
    importlib.import_module(BUILT_IN)
    import_installed()


def _register(known: Registered, what: str, base: ConfigType, config_type: ConfigType) -> Callable[[Build], Build]:
    if not (inspect.isclass(config_type) and issubclass(config_type, base)):
        decorator = f"register_{what.replace(' ', '_')}"
        raise ConfigError(
            f"@{decorator} needs a subclass of {base.__name__}, not {path_of(config_type)}; write "
            f"@{decorator}(YOUR_CLASS)"
        )

    def add(build: Build) -> Build:
        _check(known, what, config_type, build)
        known[config_type] = build
        return build

    return add


def _check(known: Registered, what: str, config_type: ConfigType, build: Callable[..., Any]) -> None:
    location = path_of(build)
    name = config_type.__dict__.get("STATIC_TYPE")
    if not name:
        shown = config_type.__name__
        raise ConfigError(f"{what} {location}: {shown} has no name; define class {shown}(..., name='its_type')")
    if not inspect.isasyncgenfunction(build):
        raise ConfigError(
            f"{what} {location}: must be an async generator that yields one component: "
            "`async def build(config, builder)` with `yield` instead of `return`"
        )
    names = ", ".join(sorted(str(other.STATIC_TYPE) for other in known))
    for other, earlier in known.items():
        if name == other.STATIC_TYPE and earlier is not build:
            raise ConfigError(f"{registered_twice(what, str(name), earlier, build)} (registered: {names})")
