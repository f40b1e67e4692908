"""The endpoint process: engine, weight follower and OpenAI-compatible endpoint of one model group, to shutdown."""

import asyncio
import contextlib
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path

from rollstream.eventlog.artifacts import ArtifactStore
from rollstream.eventlog.log import EventLog
from rollstream.producers.engine import Engine
from rollstream.producers.openai_endpoint import Endpoint, listening
from rollstream.producers.service import new_engine
from rollstream.producers.weight_follower import WeightFollower
from rollstream.producers.worker import first_error
from rollstream.schemas.errors import ConfigError
from rollstream.schemas.services import EndpointSettings

TOKEN_VARIABLE = "ROLLSTREAM_ENDPOINT_TOKEN"
LOOPBACK = ("127.0.0.1", "::1", "localhost")

logger = logging.getLogger(__name__)


async def serve(settings: EndpointSettings) -> None:
    """Run until cancelled. Raises RollstreamError for a port in use or a token that is missing."""
    from rollstream.eventlog.kafka_log import KafkaLog

    token = token_of(settings, os.environ)
    async with contextlib.AsyncExitStack() as stack:
        log = KafkaLog(settings.bootstrap_servers, client_id=settings.name)
        stack.push_async_callback(log.close)
        await log.start()
        engine = new_engine(settings.engine)
        stack.push_async_callback(engine.close)
        await engine.start()
        await run(settings, log, engine, token)


async def run(settings: EndpointSettings, log: EventLog, engine: Engine, token: str | None = None) -> None:
    """Follow the model group and answer until cancelled; meanwhile the port taken stands in `endpoint_file`."""
    follower = WeightFollower(log, ArtifactStore(settings.artifact_uri), engine, engine_id=settings.name)
    endpoint = Endpoint(engine, follower, settings, token)
    place = endpoint_file(settings.workspace, settings.name)
    async with listening(endpoint, settings.host, settings.port) as port:
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(json.dumps({"host": settings.host, "port": port, "pid": os.getpid()}), encoding="utf-8")
        logger.info("ready (OpenAI-compatible, http://%s:%d/v1, model %s)", settings.host, port, settings.model_name)
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(follower.run())
                # Asked for at once, so that the first version is loaded before the first request.
                tasks.create_task(follower.wait_for(settings.model_group, 0))
        except BaseExceptionGroup as failed:
            raise first_error(failed) from failed
        finally:
            place.unlink(missing_ok=True)


def endpoint_file(workspace: Path, name: str) -> Path:
    """Where the address of a running endpoint stands."""
    return workspace / f"{name}.json"


def token_of(settings: EndpointSettings, environ: Mapping[str, str]) -> str | None:
    """The token that requests must bear, from `token_file` or the environment. Raises ConfigError."""
    token = environ.get(TOKEN_VARIABLE, "").strip()
    if settings.token_file is not None:
        try:
            token = settings.token_file.read_text(encoding="utf-8").strip()
        except OSError as error:
            raise ConfigError(
                f"endpoint.token_file {settings.token_file}: cannot be read ({error.strerror})"
            ) from error
        if not token:
            raise ConfigError(f"endpoint.token_file {settings.token_file}: is empty")
    if not token and settings.host not in LOOPBACK:
        raise ConfigError(
            f"endpoint.host {settings.host} can be reached from outside: set endpoint.token_file or {TOKEN_VARIABLE}"
        )
    return token or None
