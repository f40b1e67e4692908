"""Command `match`."""

import asyncio
import os
import sys
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rollstream.harness.cli.shared_options import BOOTSTRAP_SERVERS, RUN, TRUST, WORKSPACE
from rollstream.harness.services.optional_dependencies import skip_unused_libraries
from rollstream.harness.services.workspace import Workspace
from rollstream.schemas.errors import ConfigError

if TYPE_CHECKING:
    from rollstream.harness.replays.rematch import Rematch
    from rollstream.replay.source import Source


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
    from rollstream.harness.services.workspace import broker_of
    from rollstream.replay.source import Source, check_export

    skip_unused_libraries()
    wanted = read_versions(versions)
    layout = Workspace(workspace)
    with ExitStack() as held:
        source = Source(export=export)
        if export is None:
            source = Source(held.enter_context(broker_of(layout, bootstrap_servers)))
        else:
            check_export(export, run)
        played = asyncio.run(_play(source, layout, run, task, member, wanted, trust=trust))
    report(played)


def read_versions(text: str) -> list[tuple[str, str]]:
    """Seats and players of `X=3,O=perfect`. Raises ConfigError."""
    pairs = [part.strip().partition("=") for part in text.split(",") if part.strip()]
    for seat, equals, player in pairs:
        if not (seat and equals and player):
            raise ConfigError(f"--versions {text}: give seats and players as SEAT=PLAYER, for example X=3,O=perfect")
    return [(seat.strip(), player.strip()) for seat, _, player in pairs]


def report(played: "Rematch") -> None:
    """Print the match. Exits with status 1 if it differs from the recorded one."""
    for line in lines_of(played):
        click.echo(line)
    if played.first_difference is not None:
        sys.exit(1)


def lines_of(played: "Rematch") -> Iterable[str]:
    """The match as text, a move a line."""
    yield f"match {played.group_id}, member {played.member}"
    for seat, player in played.players.items():
        yield f"  {seat}: {player}"
    for number, move in enumerate(played.moves, 1):
        yield f"{number:4}. {move.agent}: {move.output}"
    for name, sums in played.rewards.items():
        yield f"{name}: " + ", ".join(f"{agent} {value:g}" for agent, value in sums.items())
    if played.first_difference is not None:
        yield f"different: move {played.first_difference + 1} is not that of the recorded rollout {played.recorded}"
    elif played.changed:
        seats = ", ".join(f"{seat} by versions {versions}" for seat, versions in played.changed.items())
        yield (
            f"not compared: the weights changed during the recorded rollout {played.recorded}, which played {seats}; "
            "this match has the oldest version of each"
        )
    elif played.recorded:
        yield f"equal: {played.recorded} was recorded with the same moves, token by token"


async def _play(
    source: "Source",
    layout: Workspace,
    run: str,
    task: str,
    member: int,
    versions: list[tuple[str, str]],
    *,
    trust: bool,
) -> "Rematch":
    from rollstream.eventlog.artifacts import ArtifactStore
    from rollstream.harness.replays import rematch
    from rollstream.producers.engines.table import new_engine
    from rollstream.replay.source import read_run

    async with source.open() as (log, exported):
        events = await read_run(log, run)
        config = rematch.config_of(events, trust=trust)
        artifacts = exported or ArtifactStore(layout.artifact_uri())
        asked = rematch.task_of(events, task)
        engine = new_engine(rematch.engine_settings(config), os.environ)
        try:
            await engine.start()
            return await rematch.play(
                log, events, artifacts, engine, config, task=asked, member=member, versions=versions
            )
        finally:
            await engine.close()
