"""Configurations of rollstream's components as NAT registers them: NAT's base classes with the fields of ours."""

from nat.data_models.finetuning import TrainerAdapterConfig, TrainerConfig, TrajectoryBuilderConfig
from nat.data_models.function import FunctionBaseConfig
from pydantic import ConfigDict

from rollstream.harness.config.rollstream_config import OurAdapterFields, OurBuilderFields, OurTrainerFields
from rollstream.schemas.config import OURS

_STRICT = ConfigDict(extra="forbid")


class NatTrajectoryBuilderConfig(OurBuilderFields, TrajectoryBuilderConfig, name=OURS):
    """`trajectory_builders.X._type: rollstream`."""

    model_config = _STRICT


class NatTrainerAdapterConfig(OurAdapterFields, TrainerAdapterConfig, name=OURS):
    """`trainer_adapters.X._type: rollstream`."""

    model_config = _STRICT


class NatTrainerConfig(OurTrainerFields, TrainerConfig, name=OURS):
    """`trainers.X._type: rollstream`."""

    model_config = _STRICT


class NatWorkflowConfig(FunctionBaseConfig, name=OURS):
    """`workflow._type: rollstream`: an environment, which the producers of the log play."""

    model_config = _STRICT

    environment: str
