"""Follows published weights: of each model group that tasks ask for, the engine gets the newest version, verified.

A model group is loaded once a task waits for it, and followed until its run ends. Each group's versions are loaded one
after the other, different groups' side by side: a server that hangs delays its own. What cannot be loaded leaves the
version before it; an artifact that is missing or torn is looked at again, since storage may come back. One that went
while it was loaded, because newer versions were published and it was collected, is not an error: the newest is taken.
"""

import asyncio
import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from rollstream.eventlog import terms
from rollstream.eventlog.artifacts import ArtifactStore
from rollstream.eventlog.blocking_calls import in_own_thread
from rollstream.eventlog.codec import kind_of
from rollstream.eventlog.disk_space import is_outage
from rollstream.eventlog.log import EventLog, LogReader, Record, TopicPartition
from rollstream.eventlog.reading import decode_or_none, read_to_end
from rollstream.eventlog.recent_set import RecentSet
from rollstream.eventlog.run_offsets import start_offsets_of
from rollstream.eventlog.terms import Owner
from rollstream.producers.engines.base import Engine, base_model_of
from rollstream.schemas import ids
from rollstream.schemas.base import Event
from rollstream.schemas.errors import (
    ArtifactError,
    ConfigError,
    ModelError,
    NotAllowedError,
    RollstreamError,
)
from rollstream.schemas.events import LearnerClaimed, RunEnded, WeightsLoaded, WeightsPublished
from rollstream.schemas.permissions import Permissions

logger = logging.getLogger(__name__)

WEIGHTS, GROUPS = TopicPartition("weights", 0), TopicPartition("groups", 0)
READ_KINDS = ("learner_claimed", "weights_published", "run_ended", None)
"""All others are passed over undecoded."""
POLL_S = 1.0
MAX_REFUSED = 1000
"""Versions that are remembered as refused."""
RETRY_S = 5.0


@dataclass(slots=True)
class Followed:
    """The state of one model group by `weights`, and the version wanted of it here."""

    owner: Owner | None = None
    newest: WeightsPublished | None = None
    versions: set[int] = field(default_factory=set)
    """Published since the last load."""
    loaded: WeightsPublished | None = None
    is_known: bool = False
    """Whether the log has been read to its end at the time of the first request."""
    is_wanted: bool = False
    """A task has asked for it, and its run goes on."""
    is_over: bool = False
    refusal: str | None = None
    """Reason why the newest version may not be loaded."""
    unloadable: tuple[int, str] | None = None
    """The newest version, if the engine cannot load it, and why; None once a newer one is published."""
    waiting: "dict[asyncio.Future[None], int]" = field(default_factory=dict)
    """Version that each waiter wants."""


class WeightFollower:
    """Keeps an engine at the newest weights while `run` runs."""

    def __init__(
        self,
        log: EventLog,
        artifacts: ArtifactStore,
        engine: Engine,
        *,
        engine_id: str,
        retry_s: float = RETRY_S,
        permissions: Permissions,
        must_load: bool = False,
    ) -> None:
        """`engine_id`: of WeightsLoaded; after `retry_s` a bad artifact is looked at again. `permissions`: which base
        models may be loaded. `must_load`: `run` raises for a version that the engine cannot load, if nobody else serves
        the model, so that callers would wait for it without end.
        """
        self._log = log
        self._artifacts = artifacts
        self._engine = engine
        self._engine_id = engine_id
        self._retry_s = retry_s
        self._permissions = permissions
        self._must_load = must_load
        self._groups: dict[str, Followed] = {}
        self._refused = RecentSet(MAX_REFUSED)
        """Event ids of versions that could not be loaded, until they are tried again."""
        self._named = RecentSet(MAX_REFUSED)
        """Event ids of those whose error was logged."""
        self._asked = asyncio.Event()
        """A model group is wanted that is not known yet."""
        self._changed = asyncio.Event()
        """Something may have become loadable."""
        self._loading: dict[str, asyncio.Task[None]] = {}
        """Loads in progress by model group."""
        self._making_room = asyncio.Lock()
        self._leaving: str | None = None
        """Model group that is being unloaded."""

    async def run(self) -> None:
        """Follow until cancelled. Raises LogError if the log cannot be read or written, ModelError (`must_load`)."""
        ends = {where: (await self._log.end_offsets(where.topic))[0] for where in (WEIGHTS, GROUPS)}
        reader = await self._log.reader(ends)
        try:
            # Not a TaskGroup: its error would come wrapped.
            reading = asyncio.create_task(self._read(reader))
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
        """Return once the engine holds at least that version of the model group.

        Raises NotAllowedError if the newest one's base model is not allowed here, ModelError if it is this version or a
        later one, and the engine cannot load it: another may never come, as it would be trained on what waits here.
        """
        if self._engine.version(model_group) >= version:
            return
        group = self._group(model_group)
        if group.refusal is not None:
            raise NotAllowedError(group.refusal)
        if group.unloadable is not None and version <= group.unloadable[0]:
            raise ModelError(group.unloadable[1])
        if not group.is_wanted:
            group.is_wanted = True
            (self._changed if group.is_known else self._asked).set()
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        group.waiting[answer] = version
        try:
            await answer
        finally:  # a caller may give up long before anything is loaded
            group.waiting.pop(answer, None)

    async def _read(self, reader: LogReader) -> None:
        polling: asyncio.Task[list[Record]] | None = None
        asked = asyncio.create_task(self._asked.wait())
        try:
            while True:
                polling = polling or asyncio.create_task(reader.poll(timeout_s=POLL_S))
                await asyncio.wait({polling, asked}, return_when=asyncio.FIRST_COMPLETED)
                if polling.done():
                    self._take(polling.result())
                    polling = None
                if asked.done():
                    self._asked.clear()
                    asked = asyncio.create_task(self._asked.wait())
                    await self._look_up(reader)
        finally:
            for task in (polling, asked):
                if task is not None:
                    task.cancel()

    async def _look_up(self, reader: LogReader) -> None:
        """Read what the log holds of model groups that are wanted, from the beginning of their run.

        What comes in meanwhile is taken in after it, at most twice, which changes nothing.
        """
        for name in [name for name, group in self._groups.items() if group.is_wanted and not group.is_known]:
            begin, end = (await self._log.begin_offsets("weights"))[0], reader.position(WEIGHTS)
            start = (await start_offsets_of(self._log, ids.run_of(name))).get("weights", begin)
            async for record in read_to_end(self._log, "weights", {0: min(start, end)}, {0: end}):
                if record.key == name.encode() and (event := _event(record)) is not None:
                    self._apply(event)
            self._group(name).is_known = True
            self._changed.set()

    def _take(self, records: Iterable[Record]) -> None:
        for record in records:
            group = self._groups.get((record.key or b"").decode(errors="replace"))
            if record.topic == "weights" and (group is None or not group.is_known):
                continue  # what is looked up later is read then
            event = _event(record)
            if event is not None:
                self._apply(event)

    def _apply(self, event: Event) -> None:
        if isinstance(event, RunEnded):
            for name in [name for name in self._groups if ids.run_of(name) == event.run_id]:
                self._groups[name].is_wanted, self._groups[name].is_over = False, True
        elif isinstance(event, LearnerClaimed):
            group = self._group(event.model_group)
            group.owner = terms.claimed(group.owner, event)
        elif isinstance(event, WeightsPublished):
            self._publish(event)

    def _publish(self, event: WeightsPublished) -> None:
        group = self._group(event.model_group)
        if terms.is_void(group.owner, event):
            logger.warning(
                "passing over model_group=%s version=%d: published under term %d, and term %d has taken over",
                *(event.model_group, event.version, event.term, terms.term_of(group.owner)),
            )
            return
        group.versions.add(event.version)
        if group.newest is None or event.version > group.newest.version:
            group.newest, group.unloadable = event, None
            self._changed.set()

    async def _load_newest(self) -> None:
        """Load what becomes loadable, of each model group one version at a time."""
        try:
            while True:
                await self._changed.wait()
                self._changed.clear()
                for name in [name for name, task in self._loading.items() if task.done()]:
                    self._loading.pop(name).result()
                for group, published in self._loadable():
                    task = asyncio.create_task(self._load(group, published))
                    task.add_done_callback(lambda _: self._changed.set())
                    self._loading[published.model_group] = task
        finally:
            for task in self._loading.values():
                task.cancel()
            await asyncio.gather(*self._loading.values(), return_exceptions=True)

    def _loadable(self) -> list[tuple[Followed, WeightsPublished]]:
        """The newest version of each model group that wants it, lacks it and loads no other."""
        found: list[tuple[Followed, WeightsPublished]] = []
        for name, group in self._groups.items():
            newest = group.newest
            if newest is None or not group.is_known or not group.is_wanted or newest.event_id in self._refused:
                continue
            is_busy = name in self._loading or name == self._leaving
            if newest.version > self._engine.version(name) and not is_busy:
                found.append((group, newest))
        return found

    async def _load(self, group: Followed, published: WeightsPublished) -> None:
        """1. Verify and load, 2. let waiting tasks go, 3. say so in the log."""
        held = self._engine.version(published.model_group)
        if held < 0:
            await self._unload_ended()
        began = time.perf_counter()
        try:
            base_model, path = await in_own_thread(self._fetched, published)
            try:
                await self._engine.load(published.model_copy(update={"base_model": base_model}), path)
            except BaseException:
                self._artifacts.drop_copy(published.artifact)
                raise
        except (ArtifactError, ModelError, ConfigError, OSError) as error:
            if isinstance(error, OSError) and not is_outage(error):
                raise
            if isinstance(error, NotAllowedError):
                _refuse_waiting(group, str(error))
            if _is_collected(group, published, error):
                logger.info(
                    "passing over model_group=%s version=%d: %s", published.model_group, published.version, error
                )
                self._refused.add(published.event_id)
            elif self._must_load and not isinstance(error, (ArtifactError, OSError)):
                raise
            else:
                self._refuse(published, error)
            return
        seconds = time.perf_counter() - began
        if group.loaded is not None:
            self._artifacts.drop_copy(group.loaded.artifact)
        group.loaded, group.refusal = published, None
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

    def _fetched(self, published: WeightsPublished) -> tuple[str, Path]:
        """The base model, and local path of a version that fits it. Runs in another thread."""
        permissions = self._permissions if self._engine.capabilities.loads_models else None
        return base_model_of(published, permissions), self._artifacts.fetch(published.artifact)

    def _refuse(self, published: WeightsPublished, error: RollstreamError | OSError) -> None:
        self._refused.add(published.event_id)
        if published.event_id not in self._named:
            self._named.add(published.event_id)
            held = self._engine.version(published.model_group)
            stays = f"version {held} stays until the next is published"
            if isinstance(error, OSError):
                stays = f"it is read again every {self._retry_s:g} s"
            logger.error(
                "not loaded: model_group=%s version=%d: %s; %s",
                *(published.model_group, published.version, error, stays),
            )
        if isinstance(error, (ArtifactError, OSError)):
            asyncio.get_running_loop().call_later(self._retry_s, self._look_again, published.event_id)
        else:
            _fail_waiting(self._group(published.model_group), published.version, str(error))

    def _look_again(self, event_id: str) -> None:
        self._refused.discard(event_id)
        self._changed.set()

    async def _unload_ended(self) -> None:
        """Make room before another model group comes; by then rollouts of ended runs are no longer under way."""
        async with self._making_room:
            for name, group in list(self._groups.items()):
                if not group.is_over or group.is_wanted or name in self._loading:
                    continue
                if self._engine.version(name) >= 0:
                    self._leaving = name
                    try:
                        await self._engine.unload(name)
                    except ModelError as error:  # as all that waited when the engine failed
                        logger.warning("not unloaded, to be tried again: model_group=%s: %s", name, error)
                        continue
                    finally:
                        self._leaving = None
                        self._changed.set()  # it may be wanted again
                if not group.is_wanted:
                    self._groups.pop(name, None)
                    if group.loaded is not None:
                        self._artifacts.drop_copy(group.loaded.artifact)

    def _group(self, model_group: str) -> Followed:
        return self._groups.setdefault(model_group, Followed())


def _release(group: Followed, version: int) -> None:
    for answer, wanted in group.waiting.items():
        if wanted <= version and not answer.done():
            answer.set_result(None)


def _refuse_waiting(group: Followed, reason: str) -> None:
    group.refusal = reason
    for answer in group.waiting:
        if not answer.done():
            answer.set_exception(NotAllowedError(reason))


def _fail_waiting(group: Followed, version: int, reason: str) -> None:
    """Raise for waiters of a version that the engine cannot load; later versions may still be loaded."""
    if group.newest is not None and group.newest.version > version:
        return
    group.unloadable = (version, reason)
    for answer, wanted in group.waiting.items():
        if wanted <= version and not answer.done():
            answer.set_exception(ModelError(reason))


def _is_collected(group: Followed, published: WeightsPublished, error: Exception) -> bool:
    """Whether a version cannot be loaded because it is gone, and a newer one is there by now."""
    is_newest = group.newest is None or group.newest.version <= published.version
    is_gone = isinstance(error, ArtifactError) or isinstance(error.__cause__, FileNotFoundError)
    return is_gone and not is_newest


def _event(record: Record) -> Event | None:
    if kind_of(record) not in READ_KINDS:
        return None
    received = decode_or_none(record, warns=True)
    return None if received is None else received.event
