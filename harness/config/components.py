"""Configurations of our own three components, `_type: rollstream`: their sections' fields in NAT's mutable form.

Also writes the configuration of a run that was started without such a file as one. Pure.
"""

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, JsonValue

from rollstream.schemas.base import UserPath
from rollstream.schemas.config import (
    OURS,
    AdapterFields,
    AdapterSection,
    BuilderFields,
    BuilderSection,
    RunConfig,
    TrainerFields,
    TrainerSection,
)
from rollstream.schemas.finetuning import TrainerAdapterConfig, TrainerConfig, TrajectoryBuilderConfig
from rollstream.schemas.kafka import KafkaSection, Servers
from rollstream.schemas.services import EndpointSection

WORKSPACE = Path(".rollstream")
STRICT = ConfigDict(extra="forbid", populate_by_name=True)


class OurBuilderFields(BuilderFields):
    """Fields of a builder's block, whatever the base class of its configuration."""

    workspace: UserPath = WORKSPACE

    def section(self) -> BuilderSection:
        """The section as a frozen model."""
        return BuilderSection(**_values(self, BuilderFields))


class OurAdapterFields(AdapterFields):
    """Fields of an adapter's block, whatever the base class of its configuration."""

    bootstrap_servers: Servers | None = None
    """`embedded`, or host:port of a running Kafka; none: the builder's, if that is ours, else embedded."""
    kafka: KafkaSection = Field(default_factory=KafkaSection)
    """Connection settings; unless given, those of the builder's block."""
    workspace: UserPath = WORKSPACE
    endpoint: EndpointSection | None = None
    """Serve the trained model by OpenAI's chat completions."""
    retokenise: bool = False
    """Tokenize the text of trajectories whose foreign builder gives no token ids; off: reject them."""

    def section(self) -> AdapterSection:
        """The section as a frozen model."""
        return AdapterSection(**_values(self, AdapterFields))


class OurTrainerFields(TrainerFields):
    """Fields of a trainer's block, whatever the base class of its configuration."""

    def section(self) -> TrainerSection:
        """The section as a frozen model."""
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
    """Values of these fields that were set or differ from the default; unset fields remain unset."""
    return {
        name: getattr(config, name)
        for name, field in fields.model_fields.items()
        if name in config.model_fields_set or getattr(config, name) != field.get_default(call_default_factory=True)
    }


def written_of(config: RunConfig) -> dict[str, JsonValue]:
    """A dictionary that `file.resolve` turns into the same configuration, with only the parts that the run uses."""
    finetuning = config.finetuning
    builder: dict[str, Any] = {**_block(config.builder), "environment": config.environment}
    evaluation: dict[str, Any] = {}
    if config.dataset is not None:
        evaluation = {"general": {"dataset": _block(config.dataset)}}
    if config.evaluators:
        evaluation["evaluators"] = config.evaluators
    return {
        "trajectory_builders": {finetuning.trajectory_builder: builder},
        "trainer_adapters": {finetuning.trainer_adapter: _block(config.adapter)},
        "trainers": {finetuning.trainer: _block(config.trainer)},
        "finetuning": _block(finetuning),
        **({"eval": evaluation} if evaluation else {}),
    }


def _block(section: Any) -> dict[str, JsonValue]:
    """The set fields of a section, and its type if it has one."""
    given = section.model_dump(mode="json", by_alias=True, exclude_unset=True)
    return {**given, "_type": section.type} if hasattr(section, "type") else given
