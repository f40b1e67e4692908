"""Follows published weights: of each model group that tasks ask for, the engine gets the newest version, verified.

A model group is loaded once a task waits for it, and followed until its run ends. What cannot be loaded leaves the
version before it; an artifact that is missing or torn is looked at again, since storage may come back.
"""

import asyncio
import logging
import time
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from rollstream.eventlog.artifacts import ArtifactStore
from rollstream.eventlog.codec import decode
from rollstream.eventlog.log import EventLog, LogReader, Record, TopicPartition
from rollstream.producers.engine import Engine
from rollstream.schemas.base import Event
from rollstream.schemas.errors import ArtifactError, DecodeError, ModelError
from rollstream.schemas.events import LearnerClaimed, RunEnded, WeightsLoaded, WeightsPublished

logger = logging.getLogger(__name__)

WEIGHTS, GROUPS = TopicPartition("weights", 0), TopicPartition("groups", 0)
READ_KINDS = (b"rollstream.learner_claimed.", b"rollstream.weights_published.", b"rollstream.run_ended.")
"""All others are passed over undecoded."""
POLL_S = 1.0
RETRY_S = 5.0


@runtime_checkable
class Unloader(Protocol):
    """An engine that can forget a model group."""

    async def unload(self, model_group: str) -> None:
        """Free what the model group takes."""
        ...


@dataclass(slots=True)
class Followed:
    """What `weights` says of one model group, and what is wanted of it here."""

    run_id: str = ""
    term: int = 0
    """Highest claimed; published under a lower one is void from there on."""
    newest: WeightsPublished | None = None
    versions: set[int] = field(default_factory=set)
    """Published since the last load."""
    is_wanted: bool = False
    """A task has asked for it, and its run goes on."""
    is_over: bool = False
    waiting: "list[tuple[int, asyncio.Future[None]]]" = field(default_factory=list)


class WeightFollower:
    """Keeps an engine at the newest weights while `run` runs."""

    def __init__(
        self, log: EventLog, artifacts: ArtifactStore, engine: Engine, *, engine_id: str, retry_s: float = RETRY_S
    ) -> None:
        """`engine_id` stands in WeightsLoaded; after `retry_s` a bad artifact is looked at again."""
        self._log = log
        self._artifacts = artifacts
        self._engine = engine
        self._engine_id = engine_id
        self._retry_s = retry_s
        self._groups: dict[str, Followed] = {}
        self._refused: set[str] = set()
        """Event ids of versions that could not be loaded, until they are tried again."""
        self._named: set[str] = set()
        """Event ids of those whose error was logged."""
        self._has_caught_up = False
        self._changed = asyncio.Event()
        """Something may have become loadable."""

    async def run(self) -> None:
        """Follow until cancelled. Raises LogError if the log cannot be read or written."""
        end = (await self._log.end_offsets("weights"))[0]
        groups_end = (await self._log.end_offsets("groups"))[0]
        reader = await self._log.reader({WEIGHTS: -1, GROUPS: groups_end})
        try:
            # Not a TaskGroup: its error would come wrapped.
            reading = asyncio.create_task(self._read(reader, end))
            loading = asyncio.create_task(self._load_newest())
            try:
                done, _ = await asyncio.wait({reading, loading}, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
            finally:
                reading.cancel()
                loading.cancel()
                await asyncio.wait({reading, loading})
        finally:
            await reader.close()

    async def wait_for(self, model_group: str, version: int) -> None:
        """Return once the engine holds at least that version of the model group."""
        if self._engine.version(model_group) >= version:
            return
        group = self._group(model_group)
        if not group.is_wanted:
            group.is_wanted = True
            self._changed.set()
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        group.waiting.append((version, answer))
        await answer

    async def _read(self, reader: LogReader, end: int) -> None:
        while True:
            if not self._has_caught_up and reader.position(WEIGHTS) >= end:
                self._has_caught_up = True
                self._changed.set()
            for record in await reader.poll(timeout_s=POLL_S):
                event = _event(record)
                if event is not None:
                    self._apply(event)

    def _apply(self, event: Event) -> None:
        if isinstance(event, RunEnded):
            for group in self._groups.values():
                if group.run_id == event.run_id:
                    group.is_wanted, group.is_over = False, True
        elif isinstance(event, LearnerClaimed):
            group = self._group(event.model_group)
            group.term = max(group.term, event.term)
        elif isinstance(event, WeightsPublished):
            self._publish(event)

    def _publish(self, event: WeightsPublished) -> None:
        group = self._group(event.model_group)
        if event.term < group.term:
            logger.warning(
                "passing over model_group=%s version=%d: published under term %d, and term %d has taken over",
                *(event.model_group, event.version, event.term, group.term),
            )
            return
        group.run_id = event.run_id
        group.versions.add(event.version)
        if group.newest is None or event.version >= group.newest.version:
            group.newest = event
            self._changed.set()

    async def _load_newest(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            while self._has_caught_up and (found := self._next()) is not None:
                await self._load(*found)

    def _next(self) -> tuple[Followed, WeightsPublished] | None:
        for name, group in self._groups.items():
            newest = group.newest
            if newest is None or not group.is_wanted or newest.event_id in self._refused:
                continue
            if newest.version > self._engine.version(name):
                return group, newest
        return None

    async def _load(self, group: Followed, published: WeightsPublished) -> None:
        """1. Verify and load, 2. let waiting tasks go, 3. say so in the log."""
        held = self._engine.version(published.model_group)
        if held < 0:
            await self._unload_ended()
        began = time.perf_counter()
        try:
            path = await asyncio.to_thread(self._artifacts.fetch, published.artifact)
            await self._engine.load(published, path)
        except (ArtifactError, ModelError) as error:
            self._refuse(published, error)
            return
        seconds = time.perf_counter() - began
        skipped = {version for version in group.versions if version < published.version} if held >= 0 else set()
        group.versions = {version for version in group.versions if version > published.version}
        _release(group, published.version)
        await self._log.send(
            WeightsLoaded(
                run_id=published.run_id,
                time_ms=published.time_ms,
                model_group=published.model_group,
                version=published.version,
                engine=self._engine_id,
                num_skipped=len(skipped),
                seconds=seconds,
            )
        )
        logger.info("loaded model_group=%s version=%d", published.model_group, published.version)

    def _refuse(self, published: WeightsPublished, error: ArtifactError | ModelError) -> None:
        self._refused.add(published.event_id)
        if published.event_id not in self._named:
            self._named.add(published.event_id)
            logger.error(
                "not loaded: model_group=%s version=%d: %s; version %d stays until the next is published",
                *(published.model_group, published.version, error, self._engine.version(published.model_group)),
            )
        if isinstance(error, ArtifactError):
            asyncio.get_running_loop().call_later(self._retry_s, self._look_again, published.event_id)

    def _look_again(self, event_id: str) -> None:
        self._refused.discard(event_id)
        self._changed.set()

    async def _unload_ended(self) -> None:
        """Make room before another model group comes; by then rollouts of ended runs are no longer under way."""
        if not isinstance(self._engine, Unloader):
            return
        for name, group in list(self._groups.items()):
            if group.is_over and not group.is_wanted and self._engine.version(name) >= 0:
                await self._engine.unload(name)

    def _group(self, model_group: str) -> Followed:
        return self._groups.setdefault(model_group, Followed())


def _release(group: Followed, version: int) -> None:
    for wanted, answer in group.waiting:
        if wanted <= version and not answer.done():
            answer.set_result(None)
    group.waiting = [(wanted, answer) for wanted, answer in group.waiting if not answer.done()]


def _event(record: Record) -> Event | None:
    kind = dict(record.headers).get("ce_type", READ_KINDS[0])
    if not kind.startswith(READ_KINDS):
        return None
    try:
        return decode(record).event
    except DecodeError as error:
        logger.warning("passing over %s offset %d: %s", record.topic, record.offset, error)
        return None
