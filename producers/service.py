"""The producers process: log, artifacts, engine, weight follower and rollout worker, from settings to shutdown."""

import asyncio
import contextlib
import functools
import importlib
import logging

from rollstream.eventlog.artifacts import ArtifactStore
from rollstream.eventlog.dead_letters import send_dead_letter
from rollstream.eventlog.log import EventLog, Record
from rollstream.producers.engine import Engine
from rollstream.producers.group_run import Producer
from rollstream.producers.rollout import run_rollout
from rollstream.producers.weight_follower import WeightFollower
from rollstream.producers.worker import RolloutWorker, first_error
from rollstream.schemas.errors import ConfigError
from rollstream.schemas.services import EngineSettings, ProducerSettings

logger = logging.getLogger(__name__)


async def serve(settings: ProducerSettings) -> None:
    """Run until cancelled. Raises the first error of whatever runs in the process.

    On the way out: 1. rollouts stop and the group is left, 2. the engine stops, 3. the log is flushed and closed.
    """
    from rollstream.eventlog.kafka_log import KafkaLog

    _import_modules(settings.modules)
    async with contextlib.AsyncExitStack() as stack:
        log = KafkaLog(
            settings.bootstrap_servers, client_id=settings.name, session_timeout_s=settings.session_timeout_s
        )
        stack.push_async_callback(log.close)
        await log.start()
        await log.ensure_topics(num_partitions=settings.num_partitions)
        engine = new_engine(settings.engine)
        stack.push_async_callback(engine.close)
        await engine.start()
        await run(settings, log, engine)


async def run(settings: ProducerSettings, log: EventLog, engine: Engine) -> None:
    """Follow weights and work on tasks until cancelled, with a started log and engine."""
    artifacts = ArtifactStore(settings.artifact_uri)
    follower = WeightFollower(log, artifacts, engine, engine_id=settings.name)
    producer = Producer(
        log=log,
        engine=engine,
        weights=follower,
        rollout=run_rollout,
        dead_letter=functools.partial(_bury, log, artifacts),
        slots=asyncio.Semaphore(settings.max_concurrent_rollouts),
        name=settings.name,
    )
    worker = RolloutWorker(producer, tick_interval_s=settings.tick_interval_s)
    try:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(follower.run())
            tasks.create_task(worker.run(on_ready=lambda: logger.info("ready")))
    except BaseExceptionGroup as failed:
        raise first_error(failed) from failed


def new_engine(settings: EngineSettings) -> Engine:
    """The engine that the settings name; torch is imported only for one that needs it."""
    if settings.kind == "scripted":
        from rollstream.producers.scripted_engine import ScriptedEngine

        return ScriptedEngine()
    from rollstream.producers.transformers_engine import TransformersEngine

    return TransformersEngine(settings)


async def _bury(log: EventLog, artifacts: ArtifactStore, record: Record, error: BaseException) -> None:
    await send_dead_letter(log, record, service="producers", stage="tasks", error=error, artifacts=artifacts)


def _import_modules(names: tuple[str, ...]) -> None:
    for name in names:
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise ConfigError(f"modules: {name} cannot be imported: {error}") from error
