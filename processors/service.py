"""The processors process: assembly and curation in one Faust worker, several of which share the partitions."""

import asyncio
import contextlib
import logging
from collections.abc import Coroutine
from typing import Any

from rollstream.eventlog.artifacts import ArtifactStore
from rollstream.eventlog.log import EventLog
from rollstream.processors import faust_consumer
from rollstream.processors.assemble_shell import AssembleShell
from rollstream.processors.curate_shell import CurateShell
from rollstream.processors.faust_app import Host, Shell
from rollstream.processors.faust_host import create_host
from rollstream.processors.garbage import collect_seldom
from rollstream.processors.watchdog import watch
from rollstream.schemas.errors import LogError
from rollstream.schemas.services import ProcessorSettings

DRAIN_TIMEOUT_S = 5.0
STOP_TIMEOUT_S = 10.0
logger = logging.getLogger(__name__)


async def serve(settings: ProcessorSettings) -> None:
    """Run until cancelled. Raises LogError if the broker is lost, or what a fold's shell raises."""
    from rollstream.eventlog.kafka_log import KafkaLog

    log = KafkaLog(settings.bootstrap_servers, client_id=settings.name)
    await log.start()
    collect_seldom()
    try:
        await run(log, settings)
    finally:
        await log.close()


async def run(log: EventLog, settings: ProcessorSettings) -> None:
    """Host both folds over `log` until cancelled; then let what is under way be sent, commit and leave the group."""
    artifacts = ArtifactStore(settings.artifact_uri)
    assembling = AssembleShell(log, artifacts, service=settings.name)
    shells: list[Shell] = [assembling, CurateShell(log, artifacts, service=settings.name)]
    host = create_host(
        settings.bootstrap_servers, shells, client_id=settings.name, session_timeout_s=settings.session_timeout_s
    )
    for name in ("faust", "mode", faust_consumer.__name__):
        logging.getLogger(name).setLevel(logging.WARNING)
    await host.start()
    logger.info("ready")
    try:
        await _until_failed(host, assembling, watch(host, log, timeout_s=settings.stall_timeout_s))
    finally:
        try:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(assembling.drain(), DRAIN_TIMEOUT_S)
        finally:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(host.stop(), STOP_TIMEOUT_S)


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
