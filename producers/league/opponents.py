"""Holds opponents' weight versions in an engine beside the newest ones, at most so many at once.

An opponent is loaded under its player's name (`GROUP@VERSION`), as a model group of its own: an engine holds one
version of each model group. A task holds its opponents from before it starts until it is settled; of those that no task
holds, the one that was held longest ago is unloaded when another one is needed.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field, replace

from rollstream.eventlog import terms
from rollstream.eventlog.artifacts import ArtifactStore
from rollstream.eventlog.codec import decode, kind_of
from rollstream.eventlog.log import EventLog, Position
from rollstream.eventlog.reading import decoded, read_to_end
from rollstream.eventlog.run_offsets import start_offsets_of
from rollstream.eventlog.terms import Owner
from rollstream.producers.engines.base import Engine, Generation, check_base_model
from rollstream.schemas import ids
from rollstream.schemas.base import Event
from rollstream.schemas.errors import ArtifactError, ModelError, StoreUnavailableError
from rollstream.schemas.events import LearnerClaimed, WeightsCollected, WeightsPublished
from rollstream.schemas.permissions import Permissions

READ_KINDS = ("learner_claimed", "weights_published", "weights_collected", None)
"""All others are passed over undecoded."""
MAX_GROUPS = 16
"""Model groups whose versions are remembered; the one that was asked for first goes first."""
RETRY_S = 5.0

logger = logging.getLogger(__name__)


def as_recorded(generation: Generation, player: str) -> Generation:
    """An answer of an opponent, whose spans name its model group in place of the name that it was loaded under."""
    found = ids.version_of(player)
    if found is None:
        return generation
    spans = tuple(span.model_copy(update={"model_group": found[0]}) for span in generation.spans)
    return replace(generation, spans=spans)


def base_model_of(published: WeightsPublished, permissions: Permissions | None) -> str:
    """The base model of an opponent's version, as an engine here loads it; without `permissions` it loads none.

    Raises NotAllowedError for one that may not be loaded, ModelError for one with another tokenizer than it had.
    """
    base_model = published.base_model
    if permissions is not None:
        base_model = permissions.model_path(base_model, "base model")
    check_base_model(published, base_model)
    return base_model


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

    def __init__(self, log: EventLog) -> None:
        self._log = log
        self._groups: dict[str, _Versions] = {}

    async def find(self, player: str) -> WeightsPublished:
        """The version that a player names. Raises ModelError if it is unknown or was collected, LogError."""
        named = ids.version_of(player)
        if named is None:
            raise ModelError(f"player {player} does not name a weight version; write GROUP@VERSION")
        group, version = named
        known = await self._known(group, version)
        if version in known.collected:
            event = await self._event(known.collected[version])
            reason = event.reason if isinstance(event, WeightsCollected) else "collected"
            raise ModelError(f"player {player}: its weights are gone: {reason}; choose a version that is kept")
        event = await self._event(known.offsets[version]) if version in known.offsets else None
        if not isinstance(event, WeightsPublished):
            newest = max(known.offsets, default=None)
            there = "no version is published" if newest is None else f"the newest version is {newest}"
            raise ModelError(f"player {player}: this version is unknown; of model group {group} {there}")
        return event

    async def _known(self, group: str, version: int) -> _Versions:
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
                received = decoded(record)
                if received is not None:
                    known.take(received.event, record.offset)
            known.next = record.offset + 1
        return known

    async def _event(self, offset: int) -> Event | None:
        for record in await self._log.fetch([Position("weights", 0, offset)]):
            return decode(record).event
        return None


class OpponentWeights:
    """The opponents that an engine holds."""

    def __init__(
        self,
        log: EventLog,
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
        self._loaded: dict[str, WeightsPublished] = {}
        """The one that was held longest ago first."""
        self._holders: Counter[str] = Counter()
        self._waiting: list[asyncio.Future[None]] = []
        self._loading = asyncio.Lock()

    @property
    def loaded(self) -> tuple[str, ...]:
        """Players whose weights the engine holds."""
        return tuple(self._loaded)

    async def hold(self, players: Collection[str], most: int) -> None:
        """Have these players' weights loaded until `release`; scripted ones need none.

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
                async with self._loading:
                    await self._load(player, max(most, len(wanted)))
        except BaseException:
            self.release(players)
            raise

    def release(self, players: Collection[str]) -> None:
        """A task that held these players is over; their weights stay until others need the room."""
        self._holders.subtract(player for player in players if ids.version_of(player) is not None)
        self._holders = +self._holders
        for waiter in self._waiting:
            if not waiter.done():
                waiter.set_result(None)

    async def _released(self) -> None:
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        try:
            await waiter
        finally:
            self._waiting.remove(waiter)

    async def _load(self, player: str, most: int) -> None:
        if player in self._loaded:
            self._loaded[player] = self._loaded.pop(player)
            return
        published = await self._versions.find(player)
        permissions = self._permissions if self._engine.capabilities.loads_models else None
        base_model = await asyncio.to_thread(base_model_of, published, permissions)
        for idle in [one for one in self._loaded if not self._holders[one]][: max(0, len(self._loaded) + 1 - most)]:
            await self._unload(idle)
        while True:
            try:
                path = await asyncio.to_thread(self._artifacts.fetch, published.artifact)
                break
            except StoreUnavailableError as error:
                logger.warning("player %s is not loaded yet: %s", player, error)
                await asyncio.sleep(self._retry_s)
            except ArtifactError as error:
                raise ModelError(f"player {player}: {error}") from error
        await self._engine.load(published.model_copy(update={"model_group": player, "base_model": base_model}), path)
        self._loaded[player] = published
        logger.info("loaded player=%s", player)

    async def _unload(self, player: str) -> None:
        published = self._loaded.pop(player)
        await self._engine.unload(player)
        self._artifacts.drop_copy(published.artifact)
