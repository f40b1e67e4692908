"""Command `gc`."""

import asyncio
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rollstream.harness.cli.shared_options import ARTIFACT_URI, BOOTSTRAP_SERVERS, WORKSPACE

if TYPE_CHECKING:
    from rollstream.harness.upkeep.collecting import UnneededFiles
    from rollstream.schemas.kafka import KafkaSettings


@click.command()
@click.option("--dry-run", is_flag=True, help="Only report what would be removed.")
@ARTIFACT_URI
@BOOTSTRAP_SERVERS
@WORKSPACE
def gc(dry_run: bool, artifact_uri: str | None, bootstrap_servers: str | None, workspace: Path) -> None:
    """Remove weights that are no longer needed.

    Of an ended run, keep the last `keep_last` versions, every `keep_every`-th one, and each version that a job or fork
    starts from, an engine has loaded or a checkpoint refers to. The weights of an open run are left to its learner.
    """
    from rollstream.eventlog.artifacts import ArtifactStore
    from rollstream.eventlog.broker.lock import find_running
    from rollstream.eventlog.kafka.log import KafkaLog
    from rollstream.harness.services.workspace import ARTIFACTS, EMBEDDED, Workspace, broker_of
    from rollstream.harness.upkeep.collecting import check_no_open_run, check_store, find, remove

    layout = Workspace(workspace)
    store = ArtifactStore(artifact_uri or layout.artifact_uri())
    check_store(store, layout.folder / ARTIFACTS)
    is_embedded = (bootstrap_servers or layout.remembered_broker()) == EMBEDDED

    async def collect(kafka: "KafkaSettings", *, may_publish: bool) -> "UnneededFiles":
        async with KafkaLog(kafka, client_id="rollstream-gc") as log:
            unneeded = await find(log, store, layout.folder / "checkpoints")
            if not dry_run:
                if may_publish:
                    check_no_open_run(unneeded, kafka.bootstrap_servers)
                await remove(log, store, unneeded)
            return unneeded

    with ExitStack() as held:
        if not dry_run and layout.folder.is_dir():
            held.enter_context(layout.in_use("gc"))
        # `serve learner`, which has no lock of the workspace, may use a broker that runs already
        may_publish = not is_embedded or find_running(layout.folder) is not None
        with broker_of(layout, bootstrap_servers) as kafka:
            _print_unneeded(asyncio.run(collect(kafka, may_publish=may_publish)), store.uri, is_removed=not dry_run)
            # the workspace is released, though other processes may still use the broker that was started here
            held.close()


def _print_unneeded(unneeded: "UnneededFiles", uri: str, *, is_removed: bool) -> None:
    from rollstream.harness.upkeep.run_tables import as_table

    numbers, sizes = Counter[str](), Counter[str]()
    for stored, size_bytes in unneeded.weights.values():
        numbers[stored.run_id] += 1
        sizes[stored.run_id] += size_bytes
    if numbers:
        rows = [(run_id, number, sizes[run_id]) for run_id, number in numbers.items()]
        click.echo(as_table(("run", "versions", "bytes"), rows))
    left = sum(leftover.size_bytes for leftover in unneeded.leftovers)
    verb = "removed" if is_removed else "would remove"
    click.echo(
        f"{verb} {numbers.total()} weight files ({sizes.total():,} bytes) "
        f"and {len(unneeded.leftovers)} leftovers ({left:,} bytes)"
    )
    if unneeded.num_elsewhere:
        click.echo(
            f"{unneeded.num_elsewhere} unused weight files are outside {uri} and were kept; give their store with "
            f"--artifact_uri",
            err=True,
        )
