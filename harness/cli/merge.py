"""Command `merge`: a version of a model group as a whole model in a folder."""

import asyncio
import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rollstream.harness.cli.rollback import parse_target
from rollstream.harness.cli.shared_options import ARTIFACT_URI, BOOTSTRAP_SERVERS, WORKSPACE
from rollstream.harness.config.checks import is_hub_name
from rollstream.schemas.errors import ArtifactError, ConfigError, StoreUnavailableError
from rollstream.schemas.variables import variables_in

if TYPE_CHECKING:
    from rollstream.eventlog.log import EventLog
    from rollstream.harness.cli.rollback import Target
    from rollstream.schemas.events import WeightsPublished


@click.command()
@click.argument("target", metavar="RUN@VERSION")
@click.option(
    "--output",
    required=True,
    type=click.Path(path_type=Path, file_okay=False),
    help="A folder that does not exist yet.",
)
@click.option("--base_model", help="Where the base model is, if not where the run had it: a folder or a hub name.")
@ARTIFACT_URI
@BOOTSTRAP_SERVERS
@WORKSPACE
def merge(
    target: str,
    output: Path,
    base_model: str | None,
    artifact_uri: str | None,
    bootstrap_servers: str | None,
    workspace: Path,
) -> None:
    """Write a version as a whole model for transformers and vLLM.

    RUN@VERSION is of the model group `policy`, RUN/NAME@VERSION of another one. An adapter is merged into its base
    model, which has to be there.
    """
    from rollstream.eventlog.artifacts import ArtifactStore
    from rollstream.harness.services.workspace import Workspace, on_log

    wanted, layout = parse_target(target), Workspace(workspace)
    check_output(output)
    store = ArtifactStore(artifact_uri or layout.artifact_uri())

    async def find(log: "EventLog") -> tuple["WeightsPublished", Path]:
        published, removed = await published_version(log, wanted)
        try:
            return published, await asyncio.to_thread(store.fetch, published.artifact)
        except StoreUnavailableError:
            raise
        except ArtifactError as error:
            raise ConfigError(f"{target}: its weights do not exist: {removed or error}; choose another one") from error

    published, weights = on_log(layout, bootstrap_servers, "rollstream-merge", find)
    if base_model is not None:
        published = published.model_copy(update={"base_model": base_model})
    check_base(published.base_model, target)
    from rollstream.learner.model.export import export_merged

    export_merged(published, weights, output)
    click.echo(f"{output}: {wanted}, {published.weights_format} weights")


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


async def published_version(log: "EventLog", target: "Target") -> tuple["WeightsPublished", str]:
    """A version's publication, and why its weights were removed, if they were. Raises ConfigError if there is none."""
    from rollstream.harness.runs.follower import read_runs, versions_of

    group, collected = await versions_of(log, target.model_group, target.version)
    if target.version in group.published:
        return group.published[target.version], collected
    if group.published:
        kept = f"has {min(group.published)} to {max(group.published)}"
    else:
        runs = [progress for progress in await read_runs(log) if progress.run_id == target.run_id]
        others = ", ".join(sorted(name for progress in runs for name in progress.published))
        kept = f"has none, those of the run are {others}" if others else "has none"
    raise ConfigError(
        f"{target}: there is no such version, the model group {kept}; `rollstream jobs` lists runs and model groups"
    )
