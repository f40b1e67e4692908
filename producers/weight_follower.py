"""Keeps an engine at the newest weight version of every model group that it is asked to generate for.

The `weights` topic is read from its beginning; a version of a lower term than its group's newest claim is void. A group
is loaded once a task waits for it, and followed from then on. An artifact with the wrong hash is never loaded.
"""

import asyncio
import logging
import time
from dataclasses import dataclass

from rollstream.eventlog.artifacts import ArtifactStore
from rollstream.eventlog.codec import decode
from rollstream.eventlog.log import EventLog, Received, TopicPartition
from rollstream.producers.engine import Engine
from rollstream.schemas.base import Event
from rollstream.schemas.errors import ArtifactError, DecodeError, ModelError
from rollstream.schemas.events import LearnerClaimed, WeightsLoaded, WeightsPublished

WHERE = TopicPartition("weights", 0)
POLL_S = 1.0
RETRY_S = 5.0

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Known:
    """What is known of a model group's weights."""

    term: int = 0
    newest: WeightsPublished | None = None


def evolve(known: dict[str, Known], event: Event) -> bool:
    """Fold an event of `weights`; whether it brought a newer version of its group."""
    if isinstance(event, LearnerClaimed):
        group = known.setdefault(event.model_group, Known())
        group.term = max(group.term, event.term)
        return False
    if not isinstance(event, WeightsPublished):
        return False
    group = known.setdefault(event.model_group, Known())
    if event.term < group.term or (group.newest is not None and event.version <= group.newest.version):
        return False
    group.newest = event
    return True


class WeightFollower:
    """Follows `weights` for one engine."""

    def __init__(self, log: EventLog, artifacts: ArtifactStore, engine: Engine, *, engine_id: str) -> None:
        self._log = log
        self._artifacts = artifacts
        self._engine = engine
        self._engine_id = engine_id
        self._known: dict[str, Known] = {}
        self._wanted: set[str] = set()
        self._refused: set[tuple[str, int, int]] = set()
        self._news = asyncio.Event()
        self._loaded = asyncio.Condition()

    async def run(self) -> None:
        """Read and load until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._read())
            tasks.create_task(self._load_what_is_new())

    async def wait_for(self, model_group: str, version: int) -> None:
        """Return once the engine holds at least `version` of the group; from now on the group is followed."""
        if model_group not in self._wanted:
            self._wanted.add(model_group)
            self._news.set()
        async with self._loaded:
            await self._loaded.wait_for(lambda: self._engine.version(model_group) >= version)

    async def _read(self) -> None:
        reader = await self._log.reader({WHERE: -1})
        end = (await self._log.end_offsets("weights"))[0]
        try:
            while True:
                is_new = False
                for record in await reader.poll(timeout_s=POLL_S):
                    try:
                        received: Received = decode(record)
                    except DecodeError as error:
                        logger.warning("passing over weights offset %d: %s", record.offset, error)
                        continue
                    is_new |= evolve(self._known, received.event)
                if is_new and reader.position(WHERE) >= end:
                    self._news.set()
        finally:
            await reader.close()

    async def _load_what_is_new(self) -> None:
        while True:
            await self._news.wait()
            self._news.clear()
            for model_group in sorted(self._wanted):
                published = self._known.get(model_group, Known()).newest
                if published is not None and published.version > self._engine.version(model_group):
                    await self._load(published)

    async def _load(self, published: WeightsPublished) -> None:
        before = self._engine.version(published.model_group)
        began = time.monotonic()
        try:
            path = await asyncio.to_thread(self._artifacts.fetch, published.artifact)
            await self._engine.load(published, path)
        except (ArtifactError, ModelError) as error:
            self._refuse(published, error)
            return
        async with self._loaded:
            self._loaded.notify_all()
        await self._log.send(
            WeightsLoaded(
                run_id=published.run_id,
                time_ms=published.time_ms,
                model_group=published.model_group,
                version=published.version,
                engine=self._engine_id,
                num_skipped=max(0, published.version - before - 1) if before >= 0 else 0,
                seconds=time.monotonic() - began,
            )
        )

    def _refuse(self, published: WeightsPublished, error: Exception) -> None:
        """Say once what is wrong, keep the version that is held, and look again later."""
        key = (published.model_group, published.version, published.term)
        if key not in self._refused:
            self._refused.add(key)
            logger.error("version %d of %s is not loaded: %s", published.version, published.model_group, error)
        asyncio.get_running_loop().call_later(RETRY_S, self._news.set)
