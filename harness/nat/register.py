"""Registers `_type: rollstream` in NAT's sections; NAT imports it through the entry point group `nat.components`.

NAT builds all components again for every evaluation, so a factory only creates an object: nothing is connected, started
or written before `initialize()`. It also conceals the command's secrets, because another package's component may be
initialized first and raise. Types of other packages are not registered.
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
    from rollstream.harness.nat.handover import conceal_command

    conceal_command()
    yield NatTrajectoryBuilder(config)


@register_trainer_adapter(config_type=NatTrainerAdapterConfig)
async def trainer_adapter(config: NatTrainerAdapterConfig, builder: Any) -> AsyncIterator[Any]:
    """Training by the learner of the log."""
    from rollstream.harness.nat.components import NatTrainerAdapter
    from rollstream.harness.nat.handover import conceal_command

    conceal_command()
    yield NatTrainerAdapter(config, builder)


@register_trainer(config_type=NatTrainerConfig)
async def trainer(config: NatTrainerConfig, builder: Any) -> AsyncIterator[Any]:
    """The epochs of a run."""
    from rollstream.harness.nat.components import NatTrainer
    from rollstream.harness.nat.handover import conceal_command

    conceal_command()
    yield NatTrainer(config)


@register_function(config_type=NatWorkflowConfig)
async def workflow(config: NatWorkflowConfig, builder: Any) -> AsyncIterator[FunctionInfo]:
    """An environment as a workflow, so that NAT can read and build a configuration that names one."""

    async def play(question: str) -> str:
        """Raises ConfigError, because NAT itself cannot run it."""
        raise ConfigError(
            f"workflow: environment {config.environment} can only be run by a trajectory builder of _type "
            f"rollstream, not by NAT's evaluation; use such a builder, or a NAT workflow with an llm at the run's "
            f"endpoint"
        )

    yield FunctionInfo.from_fn(play, description=f"environment {config.environment}")


evaluators.register()
