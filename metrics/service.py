"""The metrics process: projects the log into the workspace's DuckDB file and answers SQL about it."""

import asyncio
import logging
import os
from pathlib import Path

from rollstream.eventlog.log import ReadableLog
from rollstream.eventlog.private import make_private
from rollstream.metrics.projection.connection import metrics_file
from rollstream.metrics.projection.database import Database
from rollstream.metrics.projection.projector import Projector
from rollstream.metrics.sql.service import SqlService, listening, make_token
from rollstream.schemas.errors import RollstreamError
from rollstream.schemas.services import MetricsSettings

NICENESS = 10
"""Rollouts and training come first on a shared machine."""
END_TIMEOUT_S = 15.0
"""Maximum seconds to read the rest of the log when the service is asked to end."""
SILENCE_S = 1.5
"""Maximum seconds for each answer of the log then: its broker may be away."""
MAX_LEFT = 20_000
"""Records that are still projected then; a service that is catching up goes on at its next start."""
logger = logging.getLogger(__name__)


async def serve(settings: MetricsSettings) -> None:
    """Run until cancelled. Raises RollstreamError for a file or port in use, a workspace without write permission."""
    from rollstream.eventlog.kafka.log import KafkaLog

    os.nice(NICENESS)
    async with KafkaLog(settings.connection, client_id=settings.name) as log:
        await run(log, settings.workspace, port=settings.port)


async def run(log: ReadableLog, workspace: Path, *, port: int = 0) -> None:
    """Project and answer until cancelled; then project what is left, close the file and take the port file away."""
    token = _prepare(workspace)
    database = await asyncio.to_thread(Database, metrics_file(workspace))
    try:
        projector = Projector(log, database)
        async with listening(SqlService(database, projector, token), workspace, port) as taken:
            projecting = asyncio.create_task(projector.run())
            logger.info("ready (SQL on port %d)", taken)
            try:
                await asyncio.shield(projecting)
            finally:
                await _finish(projector, projecting)
    finally:
        await asyncio.to_thread(database.close)


async def _finish(projector: Projector, projecting: "asyncio.Task[None]") -> None:
    projector.stop(max_left=MAX_LEFT, silence_s=SILENCE_S)
    done, _ = await asyncio.wait({projecting}, timeout=END_TIMEOUT_S)
    if not done:
        logger.warning("the log's end was not reached within %.0f s; the next start continues there", END_TIMEOUT_S)
        projecting.cancel()
        await asyncio.wait({projecting})
    elif projecting.exception() is not None:
        logger.error("projection ended: %s", projecting.exception())


def _prepare(workspace: Path) -> str:
    """The workspace's token. Raises RollstreamError if the folder cannot be written."""
    try:
        make_private(workspace)
        return make_token(workspace)
    except OSError as error:
        raise RollstreamError(
            f"workspace {workspace} is not writable ({error.strerror}); correct its permissions, or give another "
            f"--workspace"
        ) from error
