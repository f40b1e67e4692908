"""A run's configuration as a file of ours would say it, for runs that no file of ours was given for. Pure."""

from typing import Any

from pydantic import JsonValue

from rollstream.schemas.config import RunConfig


def written_of(config: RunConfig) -> dict[str, JsonValue]:
    """What `config_file.resolve` makes the same configuration of. Holds only what the run itself uses."""
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
    """What was given of a section, and its type if it has one."""
    given = section.model_dump(mode="json", by_alias=True, exclude_unset=True)
    return {**given, "_type": section.type} if hasattr(section, "type") else given
