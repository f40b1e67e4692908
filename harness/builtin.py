"""Our own components, registered as `_type: rollstream` and by the names that NAT's packages gave theirs.

Their code is imported when one is built.
"""

from collections.abc import AsyncIterator
from typing import Any

from rollstream.harness.components.interfaces import Trainer, TrainerAdapter, TrajectoryBuilder
from rollstream.harness.config.components import (
    RollstreamTrainerAdapterConfig,
    RollstreamTrainerConfig,
    RollstreamTrajectoryBuilderConfig,
)
from rollstream.harness.config.nat_aliases import ArtAdapterConfig, ArtBuilderConfig, ArtTrainerConfig, DpoBuilderConfig
from rollstream.harness.config.registry import register_trainer, register_trainer_adapter, register_trajectory_builder
from rollstream.harness.config.resolve import nat_workflow_of


@register_trajectory_builder(config_type=ArtBuilderConfig)
@register_trajectory_builder(config_type=RollstreamTrajectoryBuilderConfig)
async def build_trajectory_builder(
    config: RollstreamTrajectoryBuilderConfig | ArtBuilderConfig, builder: Any
) -> AsyncIterator[TrajectoryBuilder]:
    """Rollouts on the log; of a NAT workflow, as NAT plays it."""
    if nat_workflow_of(builder.config) is not None:
        from rollstream.harness.nat.workflow_builder import NatWorkflowBuilder

        yield NatWorkflowBuilder(trajectory_builder_config=config)
        return
    from rollstream.harness.components.builder import RollstreamTrajectoryBuilder

    yield RollstreamTrajectoryBuilder(trajectory_builder_config=config)


@register_trainer_adapter(config_type=ArtAdapterConfig)
@register_trainer_adapter(config_type=RollstreamTrainerAdapterConfig)
async def build_trainer_adapter(
    config: RollstreamTrainerAdapterConfig | ArtAdapterConfig, builder: Any
) -> AsyncIterator[TrainerAdapter]:
    """Training by the learner."""
    from rollstream.harness.components.adapter import RollstreamTrainerAdapter

    yield RollstreamTrainerAdapter(adapter_config=config)


@register_trainer(config_type=ArtTrainerConfig)
@register_trainer(config_type=RollstreamTrainerConfig)
async def build_trainer(config: RollstreamTrainerConfig | ArtTrainerConfig, builder: Any) -> AsyncIterator[Trainer]:
    """Epochs, validation, curriculum."""
    from rollstream.harness.components.trainer import RollstreamTrainer

    yield RollstreamTrainer(trainer_config=config)


@register_trajectory_builder(config_type=DpoBuilderConfig)
async def build_dpo_builder(config: DpoBuilderConfig, builder: Any) -> AsyncIterator[TrajectoryBuilder]:
    """Preference pairs out of scored candidates."""
    from rollstream.harness.components.pair_builder import DpoTrajectoryBuilder

    yield DpoTrajectoryBuilder(trajectory_builder_config=config)
