"""One long-running service in this process: settings, topics, heartbeat, orderly end. No service's work.

Settings come from the environment (ROLLSTREAM_*), and from a JSON file or standard input, which take precedence.
"""

import asyncio
import importlib
import json
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from rollstream.harness.services.heartbeat import beat
from rollstream.harness.services.lifeline import tie_to_parent
from rollstream.harness.topic_identity import Found, check_topics, watch_topics
from rollstream.harness.workspace import Workspace
from rollstream.schemas.errors import ConfigError
from rollstream.schemas.services import (
    EndpointSettings,
    LearnerSettings,
    MetricsSettings,
    ProcessorSettings,
    ProducerSettings,
    ServiceSettings,
)

if TYPE_CHECKING:
    from rollstream.eventlog.kafka_log import KafkaLog

KINDS: dict[str, type[ServiceSettings]] = {
    "producers": ProducerSettings,
    "processors": ProcessorSettings,
    "learner": LearnerSettings,
    "metrics": MetricsSettings,
    "endpoint": EndpointSettings,
}
MODULES = {"endpoint": "rollstream.producers.endpoint_service"}
"""Whose `serve` a service is, if it has no package of its own."""
FROM_ENVIRONMENT = {
    "bootstrap_servers": "ROLLSTREAM_BOOTSTRAP_SERVERS",
    "artifact_uri": "ROLLSTREAM_ARTIFACT_URI",
    "workspace": "ROLLSTREAM_WORKSPACE",
    "num_partitions": "ROLLSTREAM_NUM_PARTITIONS",
}
END_TIMEOUT_S = 25.0
"""How long a service may take to end after it was asked to."""
LEFT_BEHIND_S = 5.0
"""How long what a service leaves behind may take to end: an environment may ignore that it is cancelled."""
WATCH_S = 30.0
"""How often topics are looked at while a service runs."""
Serve = Callable[[Any], Awaitable[None]]

logger = logging.getLogger(__name__)


def settings_of(
    service: str, name: str | None, given: Mapping[str, Any], environ: Mapping[str, str]
) -> ServiceSettings:
    """Settings of a service. Raises ConfigError naming what is missing or wrong."""
    values: dict[str, Any] = {
        key: environ[variable] for key, variable in FROM_ENVIRONMENT.items() if variable in environ
    }
    values.setdefault("workspace", ".rollstream")
    values |= given
    values["name"] = name or values.get("name") or f"{service}-1"
    values.setdefault("artifact_uri", str(Path(values["workspace"]).absolute() / "artifacts"))
    try:
        return KINDS[service].model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        remedy = f" (set {FROM_ENVIRONMENT[key]})" if key in FROM_ENVIRONMENT else ""
        raise ConfigError(f"serve {service}: {key}: {first['msg'].lower()}{remedy}") from error


def read_settings(source: str | None) -> dict[str, Any]:
    """JSON object in a file, or on standard input if `source` is `-`. Raises ConfigError."""
    if source is None:
        return {}
    try:
        text = sys.stdin.read() if source == "-" else Path(source).read_text(encoding="utf-8")
        found = json.loads(text)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--settings {source}: cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"--settings {source}: must be a JSON object")
    return found


def serve(service: str, settings: ServiceSettings) -> None:
    """Run a service until SIGTERM or SIGINT. Raises what the service raises."""
    tie_to_parent(os.environ)
    module = importlib.import_module(MODULES.get(service, f"rollstream.{service}.service"))
    asyncio.run(leaving_nobody(service, run_until_stopped(service, settings, module.serve)))


async def leaving_nobody(service: str, work: Awaitable[None], *, within_s: float = LEFT_BEHIND_S) -> None:
    """Do the work; then the process ends, although tasks and threads that it left behind may not. Raises its error."""
    try:
        await work
    finally:
        asyncio.get_running_loop().call_later(within_s, _leave, service, sys.exception())


def _leave(service: str, error: BaseException | None) -> None:
    """End the process from within `asyncio.run`, which waits for all tasks and threads for ever."""
    level = logging.ERROR if error else logging.WARNING
    logger.log(level, "%s: ends although a task or thread does not%s", service, f": {error}" if error else "")
    os._exit(1 if error else 0)


async def run_until_stopped(service: str, settings: ServiceSettings, work: Serve, *, watch_s: float = WATCH_S) -> None:
    """Topics, heartbeat and the work itself; returns once a signal has ended it in order.

    Every `watch_s` seconds the topics are looked at. Raises TruncatedError if one was deleted, and what `work` raises.
    """
    loop = asyncio.get_running_loop()
    task = asyncio.ensure_future(_work(service, settings, work, watch_s))
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, _stop, task, service)
    with suppress(asyncio.CancelledError):
        await task


def _stop(task: "asyncio.Future[None]", service: str) -> None:
    logger.info("%s: stopping", service)
    _cancel(task)


def _cancel(task: "asyncio.Future[None]") -> None:
    """Ask the work to end in order, and end the process if it does not."""
    task.cancel()
    asyncio.get_running_loop().call_later(END_TIMEOUT_S, os._exit, 1)


async def _work(service: str, settings: ServiceSettings, work: Serve, watch_s: float) -> None:
    await _ensure_topics(settings)
    working = asyncio.current_task()
    assert working is not None
    alive = asyncio.create_task(beat(Workspace(settings.workspace).health, service, settings.name))
    watching = asyncio.create_task(watch_topics(settings.workspace, lambda: _topics(settings), every_s=watch_s))
    watching.add_done_callback(lambda told: None if told.cancelled() else _cancel(working))
    try:
        await work(settings)
    except asyncio.CancelledError:
        if watching.done():
            watching.result()
        raise
    finally:
        alive.cancel()
        watching.cancel()
        await asyncio.gather(alive, watching, return_exceptions=True)


@asynccontextmanager
async def _opened(settings: ServiceSettings) -> "AsyncIterator[KafkaLog]":
    from rollstream.eventlog.kafka_log import KafkaLog

    log = KafkaLog(settings.bootstrap_servers, client_id=settings.name)
    try:
        await log.start()
        yield log
    finally:
        await log.close()


async def _ensure_topics(settings: ServiceSettings) -> None:
    async with _opened(settings) as log:
        await log.ensure_topics(num_partitions=settings.num_partitions)
        check_topics(settings.workspace, await log.cluster_id(), await log.topic_ids())


async def _topics(settings: ServiceSettings) -> Found:
    async with _opened(settings) as log:
        return await log.cluster_id(), await log.topic_ids()
