"""Command `merge`: a version of a model group as a whole model in a folder."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from rollstream.harness.cli.shared_options import ARTIFACT_URI, BOOTSTRAP_SERVERS, WORKSPACE

if TYPE_CHECKING:
    from rollstream.eventlog.log import ReadableLog
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
    from rollstream.harness.upkeep.merged_model import check_base, check_output, fetch_version
    from rollstream.harness.upkeep.named_version import parse_target

    wanted, layout = parse_target(target), Workspace(workspace)
    check_output(output)
    store = ArtifactStore(artifact_uri or layout.artifact_uri())

    async def find(log: "ReadableLog") -> "tuple[WeightsPublished, Path]":
        return await fetch_version(log, store, wanted, target)

    published, weights = on_log(layout, bootstrap_servers, "rollstream-merge", find)
    if base_model is not None:
        published = published.model_copy(update={"base_model": base_model})
    check_base(published.base_model, target)
    from rollstream.learner.model.export import export_merged

    export_merged(published, weights, output)
    click.echo(f"{output}: {wanted}, {published.weights_format} weights")
