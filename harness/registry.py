"""Components by the type of their configuration: trainers, trajectory builders, trainer adapters."""

from collections.abc import Callable
from typing import Any, TypeVar

from rollstream.schemas.errors import ConfigError
from rollstream.schemas.finetuning import (
    ComponentConfig,
    TrainerAdapterConfig,
    TrainerConfig,
    TrajectoryBuilderConfig,
)

Build = TypeVar("Build", bound=Callable[..., Any])
Registered = dict[type[ComponentConfig], Callable[..., Any]]

trainers: Registered = {}
trajectory_builders: Registered = {}
trainer_adapters: Registered = {}


def register_trainer(config_type: type[TrainerConfig]) -> Callable[[Build], Build]:
    """Decorator: what builds a trainer from a configuration of this type (`async def build(config, builder)`)."""
    return _register(trainers, config_type)


def register_trajectory_builder(config_type: type[TrajectoryBuilderConfig]) -> Callable[[Build], Build]:
    """Decorator: what builds a trajectory builder from a configuration of this type."""
    return _register(trajectory_builders, config_type)


def register_trainer_adapter(config_type: type[TrainerAdapterConfig]) -> Callable[[Build], Build]:
    """Decorator: what builds a trainer adapter from a configuration of this type."""
    return _register(trainer_adapters, config_type)


def _register(known: Registered, config_type: type[ComponentConfig]) -> Callable[[Build], Build]:
    def add(build: Build) -> Build:
        if known.get(config_type, build) is not build:
            raise ConfigError(f"component {config_type.__name__} is registered twice")
        known[config_type] = build
        return build

    return add
