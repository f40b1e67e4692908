"""The producers process: log, artifacts, engine, weight follower and rollout worker, from settings to shutdown."""

import asyncio
import contextlib
import functools
import logging
import os

from rollstream.eventlog.artifacts import ArtifactStore
from rollstream.eventlog.dead_letters import send_dead_letter
from rollstream.eventlog.log import EventLog, Record
from rollstream.producers.attempt import record_rollout, refusal
from rollstream.producers.engines.base import Engine
from rollstream.producers.engines.routed import RoutedEngine, WatchedEngine
from rollstream.producers.engines.table import new_engine
from rollstream.producers.engines.weight_follower import WeightFollower
from rollstream.producers.gateway.listener import RolloutGateway
from rollstream.producers.group_execution import WorkerContext
from rollstream.producers.league.opponents import OpponentWeights
from rollstream.producers.rollout.user_code import import_installed
from rollstream.producers.slots import Pace, Slots
from rollstream.producers.worker import RolloutWorker
from rollstream.schemas.devices import tune_gc
from rollstream.schemas.errors import first_error
from rollstream.schemas.permissions import Permissions
from rollstream.schemas.services import GatewaySection, ProducerSettings, in_workspace
from rollstream.schemas.users_code import import_module

NEW_OBJECTS = 100_000
"""Growth in objects that triggers a young collection: more than hundreds of open rollouts have, so that most are freed
before one looks at them."""

logger = logging.getLogger(__name__)


async def serve(settings: ProducerSettings) -> None:
    """Run until cancelled. Raises the first error of any task in the process.

    On the way out: 1. rollouts stop and the group is left, 2. the engine stops, 3. the log is flushed and closed.
    """
    from rollstream.eventlog.kafka.log import KafkaLog

    import_installed()
    for name in settings.modules:
        import_module(name, "modules")
    async with contextlib.AsyncExitStack() as stack:
        log = await stack.enter_async_context(
            KafkaLog(settings.connection, client_id=settings.name, session_timeout_s=settings.session_timeout_s)
        )
        await log.ensure_topics(num_partitions=settings.num_partitions)
        engine = engine_of(settings)
        stack.push_async_callback(engine.close)
        await engine.start()
        tune_gc(NEW_OBJECTS)  # collections took a tenth of the processor time
        await run(settings, log, engine)


def engine_of(settings: ProducerSettings) -> Engine:
    """The process's engine, not started, with those of models that others serve. Raises ConfigError, ModelError."""
    engine = new_engine(in_workspace(settings.engine, settings), os.environ)
    others = {
        group: new_engine(served, os.environ, f"served_models.{group}")
        for group, served in settings.served_models.items()
    }
    return RoutedEngine(engine, others) if others else engine


async def run(settings: ProducerSettings, log: EventLog, engine: Engine) -> None:
    """Follow weights and work on tasks until cancelled, with a started log and engine.

    Raises DeviceLostError if this process cannot use the engine's GPU any more.
    """
    watched = WatchedEngine(engine)
    artifacts = ArtifactStore(settings.artifact_uri)
    permissions = Permissions.of(settings.allow, os.environ)
    follower = WeightFollower(log, artifacts, watched, engine_id=settings.name, permissions=permissions)
    pace = Pace(settings.pace, watched.version)
    gateway = RolloutGateway(
        settings.gateway or GatewaySection(),
        watched,
        workspace=settings.workspace,
        name=settings.name,
        is_over=lambda rollout_id: worker.is_over(rollout_id),
        may_have_begun=lambda rollout_id: worker.may_have_begun(rollout_id),
        behind_s=pace.retry_after_s,
        is_listening_at_once=settings.gateway is not None,
    )
    producer = WorkerContext(
        opponents=OpponentWeights(log, artifacts, watched, permissions=permissions),
        log=log,
        engine=watched,
        weights=follower,
        rollout=functools.partial(record_rollout, permissions=permissions, artifacts=artifacts, gateway=gateway),
        refusal=functools.partial(refusal, permissions=permissions),
        dead_letter=functools.partial(_send_dead_letter, log, artifacts),
        slots=Slots(settings.max_concurrent_rollouts),
        pace=pace,
        runs=frozenset(settings.runs),
        name=settings.name,
    )
    worker = RolloutWorker(
        producer, tick_interval_s=settings.tick_interval_s, group=settings.connection.group("producers")
    )
    try:
        async with gateway, asyncio.TaskGroup() as tasks:
            tasks.create_task(watched.watch())
            tasks.create_task(follower.run())
            if settings.pace is not None:
                tasks.create_task(pace.follow(log))
            tasks.create_task(worker.run(on_ready=lambda: logger.info("ready")))
    except BaseExceptionGroup as failed:
        raise first_error(failed) from failed


async def _send_dead_letter(log: EventLog, artifacts: ArtifactStore, record: Record, error: BaseException) -> None:
    await send_dead_letter(log, record, service="producers", stage="tasks", error=error, artifacts=artifacts)
