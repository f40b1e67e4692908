"""`trainers.X.trackers`: experiment trackers that show a run's metrics while it trains."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, cast

from pydantic import Discriminator, Field, JsonValue, Tag

from rollstream.schemas.base import Settings, UserPath
from rollstream.schemas.permissions import CODE

CUSTOM = "python"
"""Tag of trackers from elsewhere."""


class TrackerSettings(Settings):
    """Keys common to all trackers."""

    kind: str
    poll_interval_s: float = Field(default=10.0, gt=0)
    """Seconds between queries for new values."""

    def target(self) -> str:
        """Text that is equal for equal trackers: all keys but the interval."""
        return self.model_dump_json(exclude={"poll_interval_s"})


class TensorBoardSettings(TrackerSettings):
    """Event files for TensorBoard, in `log_dir/JOB_ID`."""

    kind: Literal["tensorboard"] = "tensorboard"  # pyright: ignore[reportIncompatibleVariableOverride]
    log_dir: UserPath = Path("tensorboard")
    """Relative to the folder that the command is started in."""

    @property
    def folder(self) -> Path:
        """The folder, whatever the current one is later."""
        return self.log_dir.absolute()

    def target(self) -> str:
        """As of all trackers, with the whole path."""
        return self.model_copy(update={"log_dir": self.folder}).model_dump_json(exclude={"poll_interval_s"})


class WandbSettings(TrackerSettings):
    """Weights & Biases: one of its runs a job, in a group named like our run. Its key is in WANDB_API_KEY."""

    kind: Literal["wandb"] = "wandb"  # pyright: ignore[reportIncompatibleVariableOverride]
    project: str = "rollstream"
    """Project that gets the runs."""
    entity: str | None = None
    """User or team; None: the key's default."""
    mode: Literal["online", "offline"] = "online"
    """`offline` writes files in the workspace, which `wandb sync` sends later."""
    tags: tuple[Annotated[str, Field(min_length=1, max_length=64)], ...] = ()
    """Tags of each run there."""


class CustomTrackerSettings(TrackerSettings):
    """A tracker from elsewhere: `kind: python:module.Name`, called with the job, `options` and what it kept."""

    options: dict[str, JsonValue] = Field(default_factory=dict)
    """Passed to it; `${NAME}` in a text is expanded."""


BUILT_IN: Mapping[str, type[TrackerSettings]] = {"tensorboard": TensorBoardSettings, "wandb": WandbSettings}
UNKNOWN = f"unknown kind; write {', '.join(BUILT_IN)} or {CODE}module.Name"


def settings_class(kind: Any) -> type[TrackerSettings] | None:
    """The class of a tracker's settings; None for an unknown kind."""
    if isinstance(kind, str) and kind.startswith(CODE):
        return CustomTrackerSettings
    return BUILT_IN.get(kind) if isinstance(kind, str) else None


def _tag(value: Any) -> str | None:
    kind = cast("dict[str, Any]", value).get("kind") if isinstance(value, dict) else getattr(value, "kind", None)
    found = settings_class(kind)
    return None if found is None else CUSTOM if found is CustomTrackerSettings else str(kind)


Tracker = Annotated[
    Annotated[TensorBoardSettings, Tag("tensorboard")]
    | Annotated[WandbSettings, Tag("wandb")]
    | Annotated[CustomTrackerSettings, Tag(CUSTOM)],
    Discriminator(_tag, custom_error_type="unknown_tracker", custom_error_message=UNKNOWN),
]
