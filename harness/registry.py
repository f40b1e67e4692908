"""Components by the type of their configuration: trainers, trajectory builders, trainer adapters.

What is registered is an async generator that yields one component; the `_type` in a file is the `name=` of its
configuration's class. Packages bring theirs by the entry point group `rollstream.components`, which names modules.
"""

import importlib
import inspect
import logging
from collections.abc import Callable
from importlib import metadata
from typing import Any, TypeVar

from rollstream.schemas.errors import ConfigError
from rollstream.schemas.finetuning import (
    ComponentConfig,
    TrainerAdapterConfig,
    TrainerConfig,
    TrajectoryBuilderConfig,
)

GROUP = "rollstream.components"
BUILT_IN = "rollstream.harness.builtin"
Build = TypeVar("Build", bound=Callable[..., Any])
ConfigType = type[ComponentConfig]
Registered = dict[ConfigType, Callable[..., Any]]

trainers: Registered = {}
trajectory_builders: Registered = {}
trainer_adapters: Registered = {}
failed_imports: dict[str, str] = {}
"""Why a module that an entry point names could not be imported, by the entry point's name."""

_logger = logging.getLogger(__name__)
_discovered: set[str] = set()


def register_trainer(config_type: type[TrainerConfig]) -> Callable[[Build], Build]:
    """Decorator: what builds a trainer from such a configuration (`async def build(config, builder): yield it`)."""
    return _register(trainers, "trainer", TrainerConfig, config_type)


def register_trajectory_builder(config_type: type[TrajectoryBuilderConfig]) -> Callable[[Build], Build]:
    """Decorator: what builds a trajectory builder from a configuration of this type."""
    return _register(trajectory_builders, "trajectory builder", TrajectoryBuilderConfig, config_type)


def register_trainer_adapter(config_type: type[TrainerAdapterConfig]) -> Callable[[Build], Build]:
    """Decorator: what builds a trainer adapter from a configuration of this type."""
    return _register(trainer_adapters, "trainer adapter", TrainerAdapterConfig, config_type)


def registered(section: str) -> Registered:
    """What is registered for a section of the file (`trainers`, `trajectory_builders`, `trainer_adapters`)."""
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
    """Import our own components and what packages name by entry points, once in a process unless `again`.

    A package that cannot be imported is told and passed over: only a file that names its types suffers.
    """
    if _discovered and not again:
        return
    _discovered.add(BUILT_IN)
    importlib.import_module(BUILT_IN)
    for entry_point in metadata.entry_points(group=GROUP):
        if entry_point.value in _discovered:
            continue
        _discovered.add(entry_point.value)
        try:
            entry_point.load()
        except Exception as error:  # noqa: BLE001 -- whatever a stranger's module raises
            failed_imports[entry_point.name] = f"{type(error).__name__}: {error}"
            _logger.warning("components of %s cannot be imported: %s", entry_point.name, error)


def _register(known: Registered, what: str, base: ConfigType, config_type: ConfigType) -> Callable[[Build], Build]:
    def add(build: Build) -> Build:
        _check(known, what, base, config_type, build)
        known[config_type] = build
        return build

    return add


def _check(known: Registered, what: str, base: ConfigType, config_type: ConfigType, build: Callable[..., Any]) -> None:
    place = f"{build.__module__}.{build.__qualname__}"
    if not (inspect.isclass(config_type) and issubclass(config_type, base)):
        raise ConfigError(f"{what} {place}: config_type must be a subclass of {base.__name__}, not {config_type!r}")
    name = config_type.__dict__.get("STATIC_TYPE")
    if not name:
        shown = config_type.__name__
        raise ConfigError(f"{what} {place}: {shown} has no name; write class {shown}(..., name='its_type')")
    if not inspect.isasyncgenfunction(build):
        raise ConfigError(
            f"{what} {place}: must be an async generator that yields one component: "
            "`async def build(config, builder)` with `yield` in place of `return`"
        )
    names = ", ".join(sorted(str(other.STATIC_TYPE) for other in known))
    for other, earlier in known.items():
        if name == other.STATIC_TYPE and earlier is not build:
            first = f"{earlier.__module__}.{earlier.__qualname__}"
            raise ConfigError(f"{what} {name!r} is registered twice: by {first} and by {place}; known are: {names}")
