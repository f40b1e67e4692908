"""The version of a model group that a command names: `RUN@VERSION` or `RUN/NAME@VERSION`."""

from typing import NamedTuple

from rollstream.schemas import ids
from rollstream.schemas.errors import ConfigError


class Target(NamedTuple):
    """A version of a model group."""

    model_group: str
    version: int

    def __str__(self) -> str:
        """`GROUP@VERSION`, as the command takes it."""
        return ids.version_name(self.model_group, self.version)

    @property
    def run_id(self) -> str:
        """The run of the model group."""
        return ids.run_of(self.model_group)

    @property
    def fork(self) -> str:
        """Advice on beginning a new run from it, if it exists."""
        name, fork = ids.name_of(self.model_group), ids.version_name(self.run_id, self.version)
        if name != ids.MODEL_GROUP:
            return (
                f"begin a new run with `rollstream finetune --fork {fork}`, from that version of every model group, or "
                f"with `model_groups.{name}.version: {self}`, from this one alone"
            )
        return f"begin a new run from it with `rollstream finetune --fork {fork}`"


def parse_target(text: str) -> Target:
    """`RUN@VERSION` or `RUN/NAME@VERSION`. Raises ConfigError."""
    found = ids.parsed_version(text)
    if found is None:
        raise ConfigError(
            f"{text}: give a model group and a version as GROUP@VERSION, for example demo-1a2b3c@12 or "
            "demo-1a2b3c/policy@12"
        )
    run_id, name, version = found
    return Target(ids.model_group(run_id, name or ids.MODEL_GROUP), version)
