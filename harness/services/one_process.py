"""Producers, processors and a learner as tasks of one process, on any event log: for notebooks, examples and tests.

On a log in memory nothing outlives the process. The folds are those of the services, without the Faust host: each reads
its topic from the beginning and never commits.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rollstream.eventlog.artifacts import ArtifactStore
from rollstream.eventlog.log import EventLog, TopicPartition
from rollstream.schemas.permissions import Permissions
from rollstream.schemas.services import ProducerSettings

if TYPE_CHECKING:
    from rollstream.processors.assemble.shell import AssembleShell
    from rollstream.processors.curate.shell import CurateShell
    from rollstream.producers import Engine

POLL_S = 0.05


@asynccontextmanager
async def services(
    log: EventLog,
    artifact_uri: str,
    workspace: Path,
    engine: "Engine",
    *,
    allow: Iterable[str] = (),
    threads: int | None = None,
) -> AsyncIterator["asyncio.Task[None]"]:
    """Run the services until the block ends; gives the task that they run in, which ends with the first error of one.

    `engine` must be started. `allow`: what records may name, for example `model:PATH`.
    """
    allowed = tuple(allow)
    running = asyncio.create_task(_run(log, artifact_uri, workspace, engine, allowed, threads))
    try:
        yield running
    finally:
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running


async def learn(
    log: EventLog, artifact_uri: str, workspace: Path, *, allow: Iterable[str] = (), threads: int | None = None
) -> None:
    """Run a learner until cancelled."""
    from rollstream.learner.worker import Worker

    await Worker(
        log,
        ArtifactStore(artifact_uri),
        name="learner-1",
        checkpoints=workspace / "checkpoints",
        threads=threads,
        permissions=Permissions.of(allow, {}),
    ).run()


async def roll_out_and_plan(
    log: EventLog, artifact_uri: str, workspace: Path, engine: "Engine", *, allow: Iterable[str] = ()
) -> None:
    """Run producers and processors until cancelled."""
    from rollstream.processors.assemble.shell import AssembleShell
    from rollstream.processors.curate.shell import CurateShell
    from rollstream.producers.service import run

    artifacts = ArtifactStore(artifact_uri)
    settings = ProducerSettings(
        bootstrap_servers="none",
        artifact_uri=artifact_uri,
        workspace=workspace,
        name="producers-1",
        num_partitions=await log.num_partitions("tasks"),
        allow=tuple(allow),
    )
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(run(settings, log, engine))
        tasks.create_task(_pump(log, AssembleShell(log, artifacts, service="processors-1")))
        tasks.create_task(_pump(log, CurateShell(log, artifacts, service="processors-1")))


async def _run(
    log: EventLog, artifact_uri: str, workspace: Path, engine: "Engine", allow: tuple[str, ...], threads: int | None
) -> None:
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(roll_out_and_plan(log, artifact_uri, workspace, engine, allow=allow))
        tasks.create_task(learn(log, artifact_uri, workspace, allow=allow, threads=threads))


async def _pump(log: EventLog, shell: "AssembleShell | CurateShell") -> None:
    """Hand every record of a shell's topic to it."""
    from rollstream.processors.assemble.shell import AssembleShell
    from rollstream.processors.host.app import Batch

    begins = await log.begin_offsets(shell.topic)
    for partition, begin in begins.items():
        await shell.prepare(partition, begin)
    reader = await log.reader({TopicPartition(shell.topic, number): begin for number, begin in begins.items()})
    try:
        while True:
            records = await reader.poll(timeout_s=POLL_S)
            for partition in sorted({record.partition for record in records}):
                await shell.take(Batch(partition, 1, [one for one in records if one.partition == partition]))
            if records and isinstance(shell, AssembleShell):
                await shell.drain()
    finally:
        await reader.close()
