"""Command `gc`."""

import asyncio
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rollstream.harness.commands.serve import BOOTSTRAP_SERVERS, WORKSPACE

if TYPE_CHECKING:
    from rollstream.harness.collecting import Garbage


@click.command()
@click.option("--dry-run", is_flag=True, help="Only say what would go.")
@click.option(
    "--artifact_uri",
    envvar="ROLLSTREAM_ARTIFACT_URI",
    help="The artifact store, where runs name another than the workspace's own.",
)
@BOOTSTRAP_SERVERS
@WORKSPACE
def gc(dry_run: bool, artifact_uri: str | None, bootstrap_servers: str | None, workspace: Path) -> None:
    """Remove weights that nothing needs any more.

    Of an ended run the last `keep_last` versions and every `keep_every`-th stay, and all that a job or a fork begins
    from, an engine has loaded or a checkpoint stands at. Of an open run everything stays.
    """
    from rollstream.eventlog.artifacts import ArtifactStore
    from rollstream.eventlog.kafka_log import KafkaLog
    from rollstream.harness.collecting import check_no_open_run, find, remove
    from rollstream.harness.workspace import EMBEDDED, Workspace, broker_of

    place = Workspace(workspace)
    store = ArtifactStore(artifact_uri or str(place.folder / "artifacts"))
    is_embedded = (bootstrap_servers or place.remembered_broker()) == EMBEDDED

    async def collect(address: str) -> "Garbage":
        log = KafkaLog(address, client_id="rollstream-gc")
        try:
            await log.start()
            garbage = await find(log, store, place.folder / "checkpoints")
            if not dry_run:
                if not is_embedded:
                    check_no_open_run(garbage, address)
                await remove(log, store, garbage)
            return garbage
        finally:
            await log.close()

    with ExitStack() as held:
        if not dry_run and place.folder.is_dir():
            held.enter_context(place.in_use("gc"))
        with broker_of(place, bootstrap_servers) as address:
            _tell(asyncio.run(collect(address)), store.uri, is_removed=not dry_run)
            held.close()  # the workspace is free, though others may still use the broker that was started here


def _tell(garbage: "Garbage", uri: str, *, is_removed: bool) -> None:
    from rollstream.harness.tables import table

    numbers, sizes = Counter[str](), Counter[str]()
    for stored, size_bytes in garbage.weights.values():
        numbers[stored.run_id] += 1
        sizes[stored.run_id] += size_bytes
    if numbers:
        rows = [(run_id, number, sizes[run_id]) for run_id, number in numbers.items()]
        click.echo(table(("run", "versions", "bytes"), rows))
    left = sum(leftover.size_bytes for leftover in garbage.leftovers)
    verb = "removed" if is_removed else "would remove"
    click.echo(
        f"{verb} {numbers.total()} weight files ({sizes.total():,} bytes) "
        f"and {len(garbage.leftovers)} leftovers ({left:,} bytes)"
    )
    if garbage.num_elsewhere:
        click.echo(
            f"{garbage.num_elsewhere} weight files that nothing needs do not lie in {uri} and stay: name their store "
            "with --artifact_uri",
            err=True,
        )
