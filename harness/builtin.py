"""Our own components, registered as `_type: rollstream` and by the names that NAT's packages gave theirs.

Their code is imported when one is built.
"""

from collections.abc import AsyncIterator
from typing import Any

from rollstream.harness.config.aliases import ArtAdapterConfig, ArtBuilderConfig, ArtTrainerConfig, DpoBuilderConfig
from rollstream.harness.config.rollstream_config import (
    RollstreamTrainerAdapterConfig,
    RollstreamTrainerConfig,
    RollstreamTrajectoryBuilderConfig,
)
from rollstream.harness.interfaces import Trainer, TrainerAdapter, TrajectoryBuilder
from rollstream.harness.registry import register_trainer, register_trainer_adapter, register_trajectory_builder


@register_trajectory_builder(config_type=ArtBuilderConfig)
@register_trajectory_builder(config_type=RollstreamTrajectoryBuilderConfig)
async def build_trajectory_builder(
    config: RollstreamTrajectoryBuilderConfig | ArtBuilderConfig, builder: Any
) -> AsyncIterator[TrajectoryBuilder]:
    """Rollouts on the log."""
    from rollstream.harness.rollstream_builder import RollstreamTrajectoryBuilder

    yield RollstreamTrajectoryBuilder(trajectory_builder_config=config)


@register_trainer_adapter(config_type=ArtAdapterConfig)
@register_trainer_adapter(config_type=RollstreamTrainerAdapterConfig)
async def build_trainer_adapter(
    config: RollstreamTrainerAdapterConfig | ArtAdapterConfig, builder: Any
) -> AsyncIterator[TrainerAdapter]:
    """Training by the learner."""
    from rollstream.harness.rollstream_adapter import RollstreamTrainerAdapter

    yield RollstreamTrainerAdapter(adapter_config=config)


@register_trainer(config_type=ArtTrainerConfig)
@register_trainer(config_type=RollstreamTrainerConfig)
async def build_trainer(config: RollstreamTrainerConfig | ArtTrainerConfig, builder: Any) -> AsyncIterator[Trainer]:
    """Epochs, validation, curriculum."""
    from rollstream.harness.rollstream_trainer import RollstreamTrainer

    yield RollstreamTrainer(trainer_config=config)


@register_trajectory_builder(config_type=DpoBuilderConfig)
async def build_dpo_builder(config: DpoBuilderConfig, builder: Any) -> AsyncIterator[TrajectoryBuilder]:
    """Preference pairs out of scored candidates."""
    from rollstream.harness.recorded.dpo_builder import DpoTrajectoryBuilder

    yield DpoTrajectoryBuilder(trajectory_builder_config=config)
