"""The processors process: assembly and curation in one Faust worker; several workers share the partitions.

Python's garbage collector runs less often here, because reference counting frees nearly all objects. With its defaults
it would traverse a fold's open groups many times before they close, and sometimes every object of all imported
libraries.
"""

import asyncio
import contextlib
import logging
from collections.abc import Coroutine
from typing import Any

from rollstream.eventlog.artifacts import ArtifactStore
from rollstream.eventlog.log import EventLog
from rollstream.processors.assemble.shell import AssembleShell
from rollstream.processors.curate.shell import CurateShell
from rollstream.processors.host import consumer
from rollstream.processors.host.app import Host, Shell
from rollstream.processors.host.host import create_host
from rollstream.processors.host.watchdog import watch
from rollstream.schemas.devices import tune_gc
from rollstream.schemas.errors import LogError
from rollstream.schemas.services import ProcessorSettings

DRAIN_TIMEOUT_S = 5.0
STOP_TIMEOUT_S = 10.0
MEMBERSHIP_CHECK_S = 1.0
NEW_OBJECTS = 50_000
"""Growth in objects that triggers a young collection: a few milliseconds, every few hundred groups."""
logger = logging.getLogger(__name__)


async def serve(settings: ProcessorSettings) -> None:
    """Run until cancelled. Raises LogError if the broker is lost, or the error of a fold's shell."""
    from rollstream.eventlog.kafka.log import KafkaLog

    tune_gc(NEW_OBJECTS)
    async with KafkaLog(settings.connection, client_id=settings.name) as log:
        await run(log, settings)


async def run(log: EventLog, settings: ProcessorSettings) -> None:
    """Host both folds over `log` until cancelled; then finish sends in progress, commit and leave the group."""
    artifacts = ArtifactStore(settings.artifact_uri)
    assembling = AssembleShell(log, artifacts, service=settings.name)
    shells: list[Shell] = [assembling, CurateShell(log, artifacts, service=settings.name)]
    host = create_host(
        settings.connection, shells, client_id=settings.name, session_timeout_s=settings.session_timeout_s
    )
    for name in ("faust", "mode", consumer.__name__):
        logging.getLogger(name).setLevel(logging.WARNING)
    try:
        await _start(host)
        logger.info("ready")
        await _until_failed(host, assembling, watch(host, log, timeout_s=settings.stall_timeout_s))
    finally:
        try:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(assembling.drain(), DRAIN_TIMEOUT_S)
        finally:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(host.stop(), STOP_TIMEOUT_S)


async def _start(host: Host) -> None:
    """Start the host. Raises LogError if Kafka denies the consumer group, because Faust would wait without limit."""
    starting = asyncio.ensure_future(host.start())
    try:
        while not (await asyncio.wait([starting, host.failed], timeout=MEMBERSHIP_CHECK_S))[0]:
            host.check_membership()
        if host.failed.done():
            await host.failed
        await starting
    finally:
        starting.cancel()


async def _until_failed(host: Host, assembling: AssembleShell, watching: Coroutine[Any, Any, None]) -> None:
    watched = asyncio.ensure_future(watching)
    crashed = asyncio.ensure_future(host.wait_until_stopped())
    unsent = asyncio.ensure_future(assembling.failed())
    try:
        await asyncio.wait([host.failed, crashed, unsent, watched], return_when=asyncio.FIRST_COMPLETED)
        if host.failed.done():
            await host.failed
        if unsent.done():
            await assembling.drain()
        if watched.done():
            await watched
        raise LogError(f"the Faust worker has stopped: {host.crash_reason!r}; start the service again")
    finally:
        watched.cancel()
        crashed.cancel()
        unsent.cancel()
        host.failed.cancel()
