"""Trackers by the kind of their settings, built in and from elsewhere."""

import os
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from rollstream.metrics.trackers.points import Point, TrackedJob
from rollstream.schemas.errors import ConfigError
from rollstream.schemas.trackers import CustomTrackerSettings, TensorBoardSettings, TrackerSettings, WandbSettings
from rollstream.schemas.users_code import import_named
from rollstream.schemas.variables import expand

LIBRARIES = {"tensorboard": "tensorboard", "wandb": "wandb"}
"""The package, and the extra of rollstream, that a kind of tracker needs."""


class JobTracker(Protocol):
    """Receives the points of one training job. It is called from one thread at a time, and may take long."""

    def log(self, points: Sequence[Point], first: int) -> Mapping[str, Any]:
        """Add points, which have the numbers `first`, `first + 1`, ... of this job's points.

        Returns when a crash of this process loses none of them. If it raises, or the process is killed before the
        return is on record, the same points are given again under the same numbers, perhaps to another object. Returns
        what the next object for this job needs to know (JSON values).
        """
        ...

    def close(self, state: str | None) -> None:
        """Release everything. `state`: how the job ended (`succeeded`, `failed`, `cancelled`, `skipped`); None if it
        has not.
        """
        ...


OpenTracker = Callable[[TrackedJob, Mapping[str, Any]], JobTracker]
"""Opens the tracker of a job, given what the last `log` returned."""


def opener(settings: TrackerSettings, workspace: Path) -> OpenTracker:
    """Return a function that opens trackers with these settings. Raises ConfigError as `check_tracker` does."""
    check_tracker(settings, "tracker")
    if isinstance(settings, TensorBoardSettings):
        from rollstream.metrics.trackers.built_in import EventFile

        return lambda job, kept: EventFile(settings, job, kept, workspace)
    if isinstance(settings, WandbSettings):
        from rollstream.metrics.trackers.built_in import WandbRun

        return lambda job, kept: WandbRun(settings, job, workspace / "wandb")
    make = import_named(settings.kind, "tracker.kind")
    written = settings.options if isinstance(settings, CustomTrackerSettings) else {}
    options = expand(written, os.environ, "tracker.options")
    return lambda job, kept: make(job, options, kept)


def check_tracker(settings: TrackerSettings, location: str) -> None:
    """Raises ConfigError if a tracker's package is not installed, or its class cannot be imported."""
    if isinstance(settings, CustomTrackerSettings):
        import_named(settings.kind, f"{location}.kind")
    library = LIBRARIES.get(settings.kind)
    if library is not None and find_spec(library) is None:
        raise ConfigError(
            f"{location}: {library} is not installed: pip install '.[{library}]' in rollstream's checkout"
        )
