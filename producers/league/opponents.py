"""Holds opponents' weight versions in an engine beside the newest ones, at most so many at once.

An opponent is loaded under its player's name (`GROUP@VERSION`), as a model group of its own: an engine holds one
version of each model group. A task holds its opponents from before it starts until it is settled; of those that no task
holds, the one that was held longest ago is unloaded when another one is needed, and all whose runs have ended.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from pathlib import Path

from rollstream.eventlog import terms
from rollstream.eventlog.artifacts import ArtifactStore
from rollstream.eventlog.blocking_calls import in_own_thread
from rollstream.eventlog.codec import decode, kind_of
from rollstream.eventlog.disk_space import is_outage
from rollstream.eventlog.log import Position, ReadableLog, Received
from rollstream.eventlog.reading import MOST_RECORDS, decode_or_none, read_events, read_to_end
from rollstream.eventlog.recent_set import RecentSet
from rollstream.eventlog.run_offsets import start_offsets_of
from rollstream.eventlog.terms import Owner
from rollstream.producers.engines.base import Engine, Generation, base_model_of
from rollstream.schemas import ids
from rollstream.schemas.base import Event
from rollstream.schemas.errors import ArtifactError, ModelError, RollstreamError, StoreUnavailableError
from rollstream.schemas.events import LearnerClaimed, RunEnded, RunStarted, WeightsCollected, WeightsPublished
from rollstream.schemas.permissions import Permissions
from rollstream.schemas.settings import ArtifactRef

READ_KINDS = ("learner_claimed", "weights_published", "weights_collected", None)
"""All others are passed over undecoded."""
MAX_GROUPS = 16
"""Model groups whose versions are remembered; the one that was asked for first goes first."""
RETRY_S = 5.0
MAX_ENDED = 100
"""Runs that are remembered as ended, until their last tasks have stopped."""

NAMED_RUNS = 10
"""Runs that an error names, the newest ones."""

logger = logging.getLogger(__name__)


def as_recorded(generation: Generation, player: str) -> Generation:
    """An answer of an opponent, whose spans name its model group in place of the name that it was loaded under."""
    found = ids.version_of(player)
    if found is None:
        return generation
    spans = tuple(span.model_copy(update={"model_group": found[0]}) for span in generation.spans)
    return replace(generation, spans=spans)


@dataclass(slots=True)
class _Versions:
    """Offsets of a model group's versions in `weights`, up to the offset `next`."""

    next: int
    owner: Owner | None = None
    offsets: dict[int, int] = field(default_factory=dict[int, int])
    """Offsets of WeightsPublished, by version."""
    collected: dict[int, int] = field(default_factory=dict[int, int])
    """Offsets of WeightsCollected, by version."""

    def take(self, event: Event, offset: int) -> None:
        """Take in one event of the model group."""
        if isinstance(event, LearnerClaimed):
            self.owner = terms.claimed(self.owner, event, offset)
        elif isinstance(event, WeightsPublished) and not terms.is_void(self.owner, event):
            if self.collected.pop(event.version, None) is not None or event.version not in self.offsets:
                self.offsets[event.version] = offset
        elif isinstance(event, WeightsCollected):
            self.collected.update(dict.fromkeys(event.versions, offset))


class PublishedVersions:
    """Finds weight versions by number; of each model group `weights` is read once, from the beginning of its run."""

    def __init__(self, log: ReadableLog) -> None:
        self._log = log
        self._groups: dict[str, _Versions] = {}

    async def find(self, player: str) -> WeightsPublished:
        """The version that a player names. Raises ModelError if it is unknown or was collected, LogError."""
        named = ids.version_of(player)
        if named is None:
            raise ModelError(f"player {player} does not name a weight version; write GROUP@VERSION")
        group, version = named
        known = await self._known(group)
        if version in known.collected:
            reason = await self._reason(known.collected[version])
            raise ModelError(f"player {player}: its weights are gone: {reason}; choose a version that is kept")
        event = (await self._received(known.offsets[version])).event if version in known.offsets else None
        if not isinstance(event, WeightsPublished):
            newest = max(known.offsets, default=None)
            there = (
                await self._without_versions(group, version)
                if newest is None
                else f"of model group {group} the newest version is {newest}; name one up to that"
            )
            raise ModelError(f"player {player}: this version is unknown; {there}")
        return event

    async def _without_versions(self, group: str, version: int) -> str:
        """The reason why a model group has no version, and the remedy: what the log has of its run."""
        run_id, published = ids.run_of(group), set[str]()
        async for record in read_to_end(self._log, "weights"):
            if kind_of(record) == "weights_published" and record.key is not None:
                published.add(record.key.decode())
        others = sorted(ids.name_of(one) for one in published if ids.run_of(one) == run_id and one != group)
        if others and group not in published:
            named = ids.version_name(run_id, version, "GROUP")
            return (
                f"run {run_id} has no model group {ids.name_of(group)}; it has {', '.join(others)}; name one as {named}"
            )
        runs, ended = dict[str, None](), False
        async for received in read_events(self._log, ("groups",), skipped=MOST_RECORDS):
            if isinstance(received.event, RunStarted):
                runs[received.event.run_id] = None
            ended |= isinstance(received.event, RunEnded) and received.event.run_id == run_id
        if run_id not in runs and group not in published:
            there = ", ".join(list(runs)[-NAMED_RUNS:]) or "none"
            return f"run {run_id} is not in this log or export; name a version of a run that is: {there}"
        if ended:
            return f"run {run_id} ended before it published a version of {group}; name a version of another run"
        return f"of model group {group} no version is published; wait for one"

    async def _known(self, group: str) -> _Versions:
        """Versions of a model group by the end of `weights`; those of before may have been collected since."""
        if group not in self._groups:
            begin = (await self._log.begin_offsets("weights"))[0]
            start = (await start_offsets_of(self._log, ids.run_of(group))).get("weights", begin)
            self._groups[group] = _Versions(start)
            while len(self._groups) > MAX_GROUPS:
                del self._groups[next(iter(self._groups))]
        known = self._groups[group]
        end = (await self._log.end_offsets("weights"))[0]
        async for record in read_to_end(self._log, "weights", {0: min(known.next, end)}, {0: end}):
            if record.key == group.encode() and kind_of(record) in READ_KINDS:
                received = decode_or_none(record)
                if received is not None:
                    known.take(received.event, record.offset)
            known.next = record.offset + 1
        return known

    async def _reason(self, offset: int) -> str:
        received = await self._received(offset)
        event = received.event
        return event.reason(received.timestamp_ms) if isinstance(event, WeightsCollected) else "collected"

    async def _received(self, offset: int) -> Received:
        (record,) = await self._log.fetch([Position("weights", 0, offset)])
        return decode(record)


@dataclass(slots=True)
class _Loaded:
    """A version in the engine."""

    published: WeightsPublished
    runs: set[str] = field(default_factory=set[str])
    """Runs whose tasks have held it, without those that have ended. It may be a version of none of them."""


class OpponentWeights:
    """The opponents that an engine holds."""

    def __init__(
        self,
        log: ReadableLog,
        artifacts: ArtifactStore,
        engine: Engine,
        *,
        permissions: Permissions,
        retry_s: float = RETRY_S,
    ) -> None:
        """`permissions`: which base models may be loaded. A store that does not answer is asked after `retry_s`."""
        self._artifacts = artifacts
        self._engine = engine
        self._permissions = permissions
        self._retry_s = retry_s
        self._versions = PublishedVersions(log)
        self._loaded: dict[str, _Loaded] = {}
        """The one that was held longest ago first."""
        self._holders: Counter[str] = Counter()
        self._ended = RecentSet(MAX_ENDED)
        self._changed = asyncio.Event()
        """Something may have become needless."""
        self._waiting: list[asyncio.Future[None]] = []
        self._loading = asyncio.Lock()

    @property
    def loaded(self) -> tuple[str, ...]:
        """Players whose weights the engine holds."""
        return tuple(self._loaded)

    async def hold(self, players: Collection[str], most: int, run_id: str) -> None:
        """Have these players' weights loaded for a task of a run until `release`; scripted ones need none.

        Waits until no more than `most` (or as many as one task needs, if these are more) are held. Raises ModelError
        for a version that is unknown, was collected, was trained with another tokenizer than its base model has here or
        cannot be loaded, NotAllowedError for a base model that may not be loaded here, LogError.
        """
        wanted = [player for player in players if ids.version_of(player) is not None]
        while len({*wanted, *+self._holders}) > max(most, len(wanted)):
            await self._released()
        self._holders.update(wanted)
        try:
            for player in wanted:
                await self._have(player, max(most, len(wanted)))
                if run_id not in self._ended:
                    self._loaded[player].runs.add(run_id)
        except BaseException:
            self.release(players)
            raise

    def release(self, players: Collection[str]) -> None:
        """A task that held these players is over; their weights stay until others need the room, or its run ends."""
        self._holders.subtract(player for player in players if ids.version_of(player) is not None)
        self._holders = +self._holders
        for waiter in self._waiting:
            if not waiter.done():
                waiter.set_result(None)
        self._changed.set()

    def end_run(self, run_id: str) -> None:
        """No task of this run begins any more; those that have begun release what they hold."""
        self._ended.add(run_id)
        for loaded in self._loaded.values():
            loaded.runs.discard(run_id)
        self._changed.set()

    async def unload_ended(self) -> None:
        """Until cancelled: unload what was loaded only for runs that have ended, once no task holds it."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            async with self._loading:
                while (player := self._idle(is_needless=True)) is not None:
                    try:
                        await self._unload(player, self._loaded[player].published)
                    except RollstreamError as error:
                        logger.warning("player %s is not unloaded: %s", player, error)

    async def _released(self) -> None:
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        try:
            await waiter
        finally:
            self._waiting.remove(waiter)

    async def _have(self, player: str, most: int) -> None:
        """Have a held player loaded. Only what loads waits for others that do, and none of it for the return of a store
        or of a disk.
        """
        while player not in self._loaded:
            async with self._loading:
                if player in self._loaded:
                    break
                try:
                    await self._load(player, most)
                    break
                except (StoreUnavailableError, OSError) as error:
                    if isinstance(error, OSError) and not is_outage(error):
                        raise
                    logger.warning("player %s is not loaded yet: %s", player, error)
            await asyncio.sleep(self._retry_s)
        self._loaded[player] = self._loaded.pop(player)

    async def _load(self, player: str, most: int) -> None:
        published = await self._versions.find(player)
        permissions = self._permissions if self._engine.capabilities.loads_models else None
        base_model = await in_own_thread(base_model_of, published, permissions)
        while len(self._loaded) + 1 > most and (idle := self._idle()) is not None:
            await self._unload(idle, self._loaded[idle].published)
        try:
            path = await self._fetched(published.artifact)
        except StoreUnavailableError:
            raise
        except ArtifactError as error:
            raise ModelError(f"player {player}: {error}") from error
        try:
            await self._engine.load(
                published.model_copy(update={"model_group": player, "base_model": base_model}), path
            )
        except BaseException:  # one that is cancelled may end in the engine all the same
            try:
                await self._unload(player, published)
            except RollstreamError as error:  # such as an engine that is closed
                logger.info("player %s is not unloaded: %s", player, error)
            raise
        self._loaded[player] = _Loaded(published)
        logger.info("loaded player=%s", player)

    async def _fetched(self, ref: ArtifactRef) -> Path:
        fetching = asyncio.create_task(in_own_thread(self._artifacts.fetch, ref))
        try:
            return await asyncio.shield(fetching)
        except asyncio.CancelledError:  # the thread goes on, and nobody would drop its copy
            fetching.add_done_callback(lambda done: None if done.exception() else self._artifacts.drop_copy(ref))
            raise

    def _idle(self, *, is_needless: bool = False) -> str | None:
        """The player that no task holds since the longest time; `is_needless`: of those whose runs have all ended."""
        for player, loaded in self._loaded.items():
            if not self._holders[player] and not (is_needless and loaded.runs):
                return player
        return None

    async def _unload(self, player: str, published: WeightsPublished) -> None:
        """Unload to the end, also if the caller is cancelled: what is forgotten here must not stay in the engine."""
        self._loaded.pop(player, None)
        unloading = asyncio.ensure_future(self._engine.unload(player))
        try:
            await asyncio.shield(unloading)
        except asyncio.CancelledError:
            await asyncio.wait({unloading})
            raise
        finally:
            self._artifacts.drop_copy(published.artifact)
