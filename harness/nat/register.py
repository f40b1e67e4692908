"""What NAT imports by the entry point group `nat.components`: what `_type: rollstream` is in its sections.

NAT builds all components again for every evaluation, so a factory only makes an object: nothing is connected, started
or written before `initialize()`. Types of other packages are left to these.
"""

from collections.abc import AsyncIterator
from typing import Any

from nat.builder.function_info import FunctionInfo
from nat.cli.register_workflow import (
    register_function,
    register_trainer,
    register_trainer_adapter,
    register_trajectory_builder,
)

from rollstream.harness.nat import evaluators
from rollstream.harness.nat.configs import (
    NatTrainerAdapterConfig,
    NatTrainerConfig,
    NatTrajectoryBuilderConfig,
    NatWorkflowConfig,
)
from rollstream.schemas.errors import ConfigError


@register_trajectory_builder(config_type=NatTrajectoryBuilderConfig)
async def trajectory_builder(config: NatTrajectoryBuilderConfig, builder: Any) -> AsyncIterator[Any]:
    """Rollouts by the producers of the log."""
    from rollstream.harness.nat.components import NatTrajectoryBuilder

    yield NatTrajectoryBuilder(config)


@register_trainer_adapter(config_type=NatTrainerAdapterConfig)
async def trainer_adapter(config: NatTrainerAdapterConfig, builder: Any) -> AsyncIterator[Any]:
    """Training by the learner of the log."""
    from rollstream.harness.nat.components import NatTrainerAdapter

    yield NatTrainerAdapter(config)


@register_trainer(config_type=NatTrainerConfig)
async def trainer(config: NatTrainerConfig, builder: Any) -> AsyncIterator[Any]:
    """The epochs of a run."""
    from rollstream.harness.nat.components import NatTrainer

    yield NatTrainer(config)


@register_function(config_type=NatWorkflowConfig)
async def workflow(config: NatWorkflowConfig, builder: Any) -> AsyncIterator[FunctionInfo]:
    """An environment as a workflow; a configuration that names one can be read and built here too."""

    async def play(question: str) -> str:
        """Not played by NAT itself."""
        raise ConfigError(
            f"workflow: environment {config.environment} is played by a trajectory builder of _type rollstream, "
            "not by NAT's evaluation; use such a builder, or a workflow of NAT's with an llm at our endpoint"
        )

    yield FunctionInfo.from_fn(play, description=f"environment {config.environment}")


evaluators.register()
