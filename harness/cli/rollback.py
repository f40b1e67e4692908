"""Command `rollback`: asks for an earlier version of a model group; curation plans it and the learner publishes it."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from rollstream.harness.cli.shared_options import ARTIFACT_URI, BOOTSTRAP_SERVERS, WORKSPACE

if TYPE_CHECKING:
    from rollstream.eventlog.log import EventLog


@click.command()
@click.argument("target", metavar="GROUP@VERSION")
@click.option("--reason", default="", help="Recorded with the request.")
@ARTIFACT_URI
@BOOTSTRAP_SERVERS
@WORKSPACE
def rollback(
    target: str, reason: str, artifact_uri: str | None, bootstrap_servers: str | None, workspace: Path
) -> None:
    """Return a model group of a run to an earlier version.

    GROUP is RUN/NAME, or RUN for its model group `policy`. The version's weights and optimizer state become the next
    version; rollouts of the versions before that are not trained on.
    """
    from rollstream.eventlog.artifacts import ArtifactStore
    from rollstream.eventlog.log import wall_ms
    from rollstream.harness.services.workspace import Workspace, on_log
    from rollstream.harness.upkeep.named_version import parse_target
    from rollstream.harness.upkeep.rollback_request import rollback_request

    wanted, layout = parse_target(target), Workspace(workspace)
    store = ArtifactStore(artifact_uri or layout.artifact_uri())

    async def write(log: "EventLog") -> None:
        request = await rollback_request(log, store, wanted, reason=reason, time_ms=wall_ms())
        await log.send(request)
        click.echo(
            f"requested: {wanted.model_group} returns to version {wanted.version} with the next version that is "
            f"planned after {request.after_version}"
        )

    on_log(layout, bootstrap_servers, "rollstream-rollback", write)
