"""Our own three components, registered as `_type: rollstream`. Their code is imported when one is built."""

from collections.abc import AsyncIterator
from typing import Any

from rollstream.harness import aliases  # noqa: F401 -- registers what it has
from rollstream.harness.interfaces import Trainer, TrainerAdapter, TrajectoryBuilder
from rollstream.harness.registry import register_trainer, register_trainer_adapter, register_trajectory_builder
from rollstream.harness.rollstream_config import (
    RollstreamTrainerAdapterConfig,
    RollstreamTrainerConfig,
    RollstreamTrajectoryBuilderConfig,
)


@register_trajectory_builder(config_type=RollstreamTrajectoryBuilderConfig)
async def build_trajectory_builder(
    config: RollstreamTrajectoryBuilderConfig, builder: Any
) -> AsyncIterator[TrajectoryBuilder]:
    """Rollouts on the log."""
    from rollstream.harness.rollstream_builder import RollstreamTrajectoryBuilder

    yield RollstreamTrajectoryBuilder(trajectory_builder_config=config)


@register_trainer_adapter(config_type=RollstreamTrainerAdapterConfig)
async def build_trainer_adapter(config: RollstreamTrainerAdapterConfig, builder: Any) -> AsyncIterator[TrainerAdapter]:
    """Training by the learner."""
    from rollstream.harness.rollstream_adapter import RollstreamTrainerAdapter

    yield RollstreamTrainerAdapter(adapter_config=config)


@register_trainer(config_type=RollstreamTrainerConfig)
async def build_trainer(config: RollstreamTrainerConfig, builder: Any) -> AsyncIterator[Trainer]:
    """Epochs, validation, curriculum."""
    from rollstream.harness.rollstream_trainer import RollstreamTrainer

    yield RollstreamTrainer(trainer_config=config)
