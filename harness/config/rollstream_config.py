"""Configurations of our own three components, `_type: rollstream`: their sections' fields in NAT's mutable form."""

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from rollstream.schemas.config import (
    OURS,
    AdapterFields,
    AdapterSection,
    BuilderFields,
    BuilderSection,
    TrainerFields,
    TrainerSection,
)
from rollstream.schemas.finetuning import TrainerAdapterConfig, TrainerConfig, TrajectoryBuilderConfig
from rollstream.schemas.services import EndpointSection

WORKSPACE = Path(".rollstream")
STRICT = ConfigDict(extra="forbid", populate_by_name=True)


class OurBuilderFields(BuilderFields):
    """What stands in a builder's block, whatever base class its configuration has."""

    workspace: Path = WORKSPACE

    def section(self) -> BuilderSection:
        """The frozen section that a run uses."""
        return BuilderSection(**_values(self, BuilderFields))


class OurAdapterFields(AdapterFields):
    """What stands in an adapter's block, whatever base class its configuration has."""

    bootstrap_servers: str | None = None
    """`embedded`, or host:port of a running Kafka; none: the builder's, if that is ours, else embedded."""
    workspace: Path = WORKSPACE
    endpoint: EndpointSection | None = None
    """Serve the trained model by OpenAI's chat completions."""
    retokenise: bool = False
    """Make tokens from the text of trajectories whose builder, none of ours, tells no token ids; off: reject them."""

    def section(self) -> AdapterSection:
        """The frozen section that a run uses."""
        return AdapterSection(**_values(self, AdapterFields))


class OurTrainerFields(TrainerFields):
    """What stands in a trainer's block, whatever base class its configuration has."""

    def section(self) -> TrainerSection:
        """The frozen section that a run uses."""
        return TrainerSection(**_values(self, TrainerFields))


class RollstreamTrajectoryBuilderConfig(OurBuilderFields, TrajectoryBuilderConfig, name=OURS):
    """`trajectory_builders.X._type: rollstream`."""

    model_config = STRICT


class RollstreamTrainerAdapterConfig(OurAdapterFields, TrainerAdapterConfig, name=OURS):
    """`trainer_adapters.X._type: rollstream`."""

    model_config = STRICT


class RollstreamTrainerConfig(OurTrainerFields, TrainerConfig, name=OURS):
    """`trainers.X._type: rollstream`."""

    model_config = STRICT


def _values(config: BaseModel, fields: type[BaseModel]) -> dict[str, Any]:
    """Values of these fields that were given or differ from the default: what is left to it still counts as left."""
    return {
        name: getattr(config, name)
        for name, field in fields.model_fields.items()
        if name in config.model_fields_set or getattr(config, name) != field.get_default(call_default_factory=True)
    }
