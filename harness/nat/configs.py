"""Configurations of rollstream's components for NAT: NAT's base classes with our fields."""

from collections.abc import Mapping
from typing import Any, ClassVar, Self

from nat.data_models.finetuning import (
    CurriculumLearningConfig,
    TrainerAdapterConfig,
    TrainerConfig,
    TrajectoryBuilderConfig,
)
from nat.data_models.function import FunctionBaseConfig
from pydantic import BaseModel, ConfigDict, ModelWrapValidatorHandler, ValidationError, create_model, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError

from rollstream.harness.config.components import OurAdapterFields, OurBuilderFields, OurTrainerFields
from rollstream.harness.config.errors import explain
from rollstream.harness.nat.command import file_of_command
from rollstream.schemas.config import OURS
from rollstream.schemas.settings import CurriculumSettings

_STRICT = ConfigDict(extra="forbid")
_MORE: dict[str, Any] = {
    name: (field.annotation, field)
    for name, field in CurriculumSettings.model_fields.items()
    if name not in CurriculumLearningConfig.model_fields
}
NatCurriculum = create_model("NatCurriculum", __base__=CurriculumLearningConfig, **_MORE)
"""NAT's curriculum with rollstream's additional keys."""


class Explained(BaseModel):
    """Reports an error in a block as one line that names the key; NAT would name only the section."""

    SECTION: ClassVar[str] = ""

    @model_validator(mode="wrap")
    @classmethod
    def _explain(cls, values: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        try:
            return handler(values)
        except ValidationError as error:
            path, written = _as_written(cls.SECTION, values)
            explained = f"{path}.{explain(error, cls, written)}"
            kind = PydanticCustomError("rollstream", "{explained}", {"explained": explained})
            hidden = InitErrorDetails(
                type=kind, loc=(), input=None
            )  # the block itself may contain expanded `${ENV}` values
            raise ValidationError.from_exception_data(cls.__name__, [hidden]) from None


class NatTrajectoryBuilderConfig(OurBuilderFields, TrajectoryBuilderConfig, Explained, name=OURS):  # pyright: ignore[reportIncompatibleMethodOverride]
    """`trajectory_builders.X._type: rollstream`."""

    model_config = _STRICT
    SECTION = "trajectory_builders"


class NatTrainerAdapterConfig(OurAdapterFields, TrainerAdapterConfig, Explained, name=OURS):  # pyright: ignore[reportIncompatibleMethodOverride]
    """`trainer_adapters.X._type: rollstream`."""

    model_config = _STRICT
    SECTION = "trainer_adapters"


class NatTrainerConfig(OurTrainerFields, TrainerConfig, Explained, name=OURS):  # pyright: ignore[reportIncompatibleMethodOverride]
    """`trainers.X._type: rollstream`."""

    model_config = _STRICT
    SECTION = "trainers"


class NatWorkflowConfig(Explained, FunctionBaseConfig, name=OURS):
    """`workflow._type: rollstream`: an environment, which the producers run."""

    model_config = _STRICT
    SECTION = "workflow"

    environment: str


def _as_written(section: str, values: Any) -> tuple[str, Mapping[str, Any]]:
    """Path of a block and its value in the command's file; without a command, the section and the block itself."""
    found: Any = file_of_command()
    for part in section.split("."):
        found = found.get(part) if isinstance(found, dict) else None
    given: Mapping[str, Any] = values if isinstance(values, dict) else {}
    blocks = {section: found} if section == "workflow" else _under(section, found)
    alike = [
        (path, block) for path, block in blocks.items() if isinstance(block, dict) and block.keys() == given.keys()
    ]
    return alike[0] if len(alike) == 1 else (section, given)


def _under(section: str, blocks: Any) -> dict[str, Any]:
    return {f"{section}.{name}": block for name, block in blocks.items()} if isinstance(blocks, dict) else {}
