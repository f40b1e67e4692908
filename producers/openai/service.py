"""The endpoint process: engine, weight follower and OpenAI-compatible endpoint of one model group, to shutdown."""

import asyncio
import contextlib
import json
import logging
import os
from pathlib import Path

from rollstream.eventlog.artifacts import ArtifactStore
from rollstream.eventlog.files import write_whole
from rollstream.eventlog.log import EventLog
from rollstream.producers.engines.base import Engine
from rollstream.producers.engines.routed import WatchedEngine
from rollstream.producers.engines.table import new_engine
from rollstream.producers.engines.weight_follower import WeightFollower
from rollstream.producers.openai.keys import token_file, token_of
from rollstream.producers.openai.server import Endpoint, listening_again
from rollstream.schemas.errors import first_error
from rollstream.schemas.permissions import Permissions
from rollstream.schemas.services import EndpointSettings, in_workspace

logger = logging.getLogger(__name__)


async def serve(settings: EndpointSettings) -> None:
    """Run until cancelled. Raises RollstreamError for a port in use or a token that is missing."""
    from rollstream.eventlog.kafka.log import KafkaLog

    token = token_of(settings, os.environ)
    async with contextlib.AsyncExitStack() as stack:
        log = await stack.enter_async_context(KafkaLog(settings.connection, client_id=settings.name))
        engine = new_engine(in_workspace(settings.engine, settings), os.environ)
        stack.push_async_callback(engine.close)
        await engine.start()
        await run(settings, log, engine, token)


async def run(settings: EndpointSettings, log: EventLog, engine: Engine, token: str | None = None) -> None:
    """Follow the model group and answer until cancelled; the port in use is in `endpoint_file`, and stays there for
    the process after this one.

    Raises ModelError for a version that the engine cannot load: whoever trains waits until it is served here;
    DeviceLostError if this process cannot use the engine's GPU any more.
    """
    watched = WatchedEngine(engine)
    permissions = Permissions.of(settings.allow, os.environ)
    store = ArtifactStore(settings.artifact_uri)
    follower = WeightFollower(log, store, watched, engine_id=settings.name, permissions=permissions, must_load=True)
    endpoint = Endpoint(watched, follower, settings, token)
    path = endpoint_file(settings.workspace, settings.name)
    async with listening_again(endpoint, settings.host, settings.port, path) as port:
        _record_address(path, settings.host, port, os.getpid())
        logger.info(
            "ready (OpenAI-compatible, http://%s:%d/v1, model %s, %s)",
            settings.host,
            port,
            settings.model_name,
            _access(settings, token),
        )
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(watched.watch())
                tasks.create_task(follower.run())
                # Asked for at once, so that the first version is loaded before the first request.
                tasks.create_task(follower.wait_for(settings.model_group, 0))
        except BaseExceptionGroup as failed:
            raise first_error(failed) from failed
        finally:
            try:
                _record_address(path, settings.host, port, None)
            except OSError as error:  # the disk is full; without the file the next start takes another port
                logger.warning("%s is removed, as it cannot be written: %s", path, error.strerror)
                path.unlink(missing_ok=True)


def _record_address(path: Path, host: str, port: int, pid: int | None) -> None:
    """`pid`: of the process that listens there; None: of none any more."""
    write_whole(path, json.dumps({"host": host, "port": port, "pid": pid}), is_private=False)


def _access(settings: EndpointSettings, token: str | None) -> str:
    """Form of access, without the token itself."""
    if token is None:
        return "without a token"
    path = token_file(settings.workspace, settings.name)
    is_ours = settings.token is None and settings.token_file is None and path.exists()
    return f"API key in {path}" if is_ours else "API key as set"


def endpoint_file(workspace: Path, name: str) -> Path:
    """The file with the address of an endpoint, and the `pid` of its process while it runs."""
    return workspace / f"{name}.json"
