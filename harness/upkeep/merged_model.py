"""The parts of a version as a whole model: its weights, the base model of an adapter, and a folder for the result."""

import asyncio
import os
from pathlib import Path

from rollstream.eventlog.artifacts import ArtifactStore
from rollstream.eventlog.log import ReadableLog
from rollstream.harness.config.checks import is_hub_name
from rollstream.harness.runs.follower import progress_of, versions_of
from rollstream.harness.upkeep.named_version import Target
from rollstream.schemas.errors import ArtifactError, ConfigError, StoreUnavailableError
from rollstream.schemas.events import WeightsPublished
from rollstream.schemas.variables import variables_in


def check_output(output: Path) -> None:
    """Raises ConfigError if something is there."""
    if output.is_dir() and not any(output.iterdir()):
        return
    if os.path.lexists(output):
        raise ConfigError(f"--output {output}: something is there already; name a folder that is to be made")


def check_base(path: str, target: str) -> None:
    """Raises ConfigError if the base model is not here, or if its path names a variable: no record expands one."""
    names = variables_in(path)
    if names or not (Path(path).expanduser().is_dir() or is_hub_name(path)):
        why = f"names the variable {min(names)}" if names else "is not there"
        raise ConfigError(f"{target}: its base model {path} {why}; give its folder as --base_model")


async def fetch_version(
    log: ReadableLog, store: ArtifactStore, target: Target, named: str
) -> tuple[WeightsPublished, Path]:
    """A version's publication and the file of its weights; `named`: how the user named it.

    Raises ConfigError if the version or its weights do not exist, StoreUnavailableError.
    """
    published, removed = await published_version(log, target)
    try:
        return published, await asyncio.to_thread(store.fetch, published.artifact)
    except StoreUnavailableError:
        raise
    except ArtifactError as error:
        if removed:
            raise ConfigError(f"{named}: its weights do not exist: {removed}; choose another one") from error
        raise ConfigError(f"{named}: its weights cannot be read: {error}, or choose another version") from error


async def published_version(log: ReadableLog, target: Target) -> tuple[WeightsPublished, str]:
    """A version's publication, and why its weights were removed, if they were. Raises ConfigError if there is none."""
    group, collected = await versions_of(log, target.model_group, target.version)
    if target.version in group.published:
        return group.published[target.version], collected
    if group.published:
        kept = f"has {min(group.published)} to {max(group.published)}"
    else:
        others = ", ".join(sorted((await progress_of(log, target.run_id)).published))
        kept = f"has none, those of the run are {others}" if others else "has none"
    raise ConfigError(
        f"{target}: there is no such version, the model group {kept}; `rollstream jobs` lists runs and model groups"
    )
