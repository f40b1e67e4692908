"""Command `match`."""

import asyncio
import sys
from contextlib import ExitStack
from pathlib import Path

import click

from rollstream.harness.cli.shared_options import BOOTSTRAP_SERVERS, RUN, TRUST, WORKSPACE
from rollstream.harness.services.optional_dependencies import skip_unused_libraries
from rollstream.harness.services.workspace import Workspace


@click.command()
@RUN
@click.option("--task", required=True, metavar="EPOCH/INDEX", help="The match's task, also by the id of its group.")
@click.option("--member", type=click.IntRange(min=0), default=0, show_default=True, help="Which rollout of the task.")
@click.option(
    "--versions",
    default="",
    metavar="SEAT=PLAYER,...",
    help="Other players: VERSION, RUN@VERSION, RUN/GROUP@VERSION, or the name of a scripted player.",
)
@click.option(
    "--export",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    help="Read this export instead of the topics.",
)
@TRUST
@BOOTSTRAP_SERVERS
@WORKSPACE
def match(
    run: str,
    task: str,
    member: int,
    versions: str,
    export: Path | None,
    trust: bool,
    bootstrap_servers: str | None,
    workspace: Path,
) -> None:
    """Play a recorded match again, with the same or other players.

    Writes nothing. With the recorded players the moves are compared with the recorded ones; the exit status is 1 if
    they differ.
    """
    from rollstream.eventlog.artifacts import ArtifactStore
    from rollstream.harness.replays import rematch
    from rollstream.harness.services.workspace import broker_of
    from rollstream.replay.source import Source, check_export

    skip_unused_libraries()
    wanted = rematch.read_versions(versions)
    layout = Workspace(workspace)
    with ExitStack() as held:
        source = Source(export=export)
        if export is None:
            source = Source(held.enter_context(broker_of(layout, bootstrap_servers)))
        else:
            check_export(export, run)
        played = asyncio.run(
            rematch.play_recorded(
                source,
                ArtifactStore(layout.artifact_uri()),
                run,
                task=task,
                member=member,
                versions=wanted,
                trust=trust,
            )
        )
    for line in rematch.lines_of(played):
        click.echo(line)
    if played.first_difference is not None:
        sys.exit(1)
