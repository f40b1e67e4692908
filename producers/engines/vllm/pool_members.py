"""Decisions about the servers of a pool, from their state alone: the versions that they lack, and the one that a
request goes to.
"""

import asyncio
import hashlib
import logging
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from rollstream.eventlog.http.http_json import TryAgainError
from rollstream.producers.engines.vllm.child import Child
from rollstream.producers.engines.vllm.version_files import Version
from rollstream.producers.engines.vllm.vllm_server import Server
from rollstream.schemas.errors import ModelError

IMBALANCE = 8
"""Requests that a group's own server may have more than the least busy one before others of the group go there."""

logger = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class PoolMember:
    """A server of a pool, and the events that its tasks wait for."""

    server: Server
    child: Child | None
    """Its process, if we started it."""
    work: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when it may lack a version, or has to be reached again."""
    doubt: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when it has failed a request, so that its health is checked."""
    process: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while its process is started or stopped."""

    async def stop_process(self) -> None:
        """End its process, if we started it and it lives: it does not answer, or its workers do not."""
        async with self.process:
            if self.child is not None and self.child.is_running:
                await self.child.stop()

    def serves(self, version: Version) -> bool:
        """Whether requests may be sent to it. Adapters serve beside one that it still lacks."""
        server = self.server
        return server.state == "ready" or (
            server.state == "pending_weights" and version.is_lora and server.has(version)
        )


class WantedVersions:
    """Versions that servers must have, by model group, and the one that they are being given."""

    def __init__(self, *, max_adapters: int | None) -> None:
        """`max_adapters`: maximum on a server at once; None: full weights, of which there is one model group."""
        self.by_group: dict[str, Version] = {}
        self.coming: Version | None = None
        """Version being loaded; it is wanted once one server has it."""
        self.refusals: dict[PoolMember, Exception] = {}
        """Servers that refused the version that is coming, with the reason."""
        self._max_adapters = max_adapters

    def is_kept(self, name: str) -> bool:
        """Whether servers must have the version even if no request is open."""
        return any(one.name == name for one in (*self.by_group.values(), self.coming) if one is not None)

    @contextmanager
    def arriving(self, version: Version) -> Iterator[None]:
        """It is coming in the block. If that raises, the version before it is wanted, whatever servers have by then."""
        group = version.published.model_group
        before = self.by_group.get(group)
        self.coming = version
        try:
            yield
        except BaseException:
            if before is not None:
                self.by_group[group] = before
            else:
                self.by_group.pop(group, None)
            raise
        finally:
            self.coming = None
            self.refusals.clear()

    def awaits(self, member: PoolMember, version: Version) -> bool:
        """Whether it is coming, and a server's first answer to it is awaited. One whose load was given up and that
        comes again is another object of the same name.
        """
        return self.coming is not None and self.coming.name == version.name and member not in self.refusals

    def check_capacity(self, version: Version) -> None:
        """Raises ModelError if the newest versions and one that is to follow cannot be there at once."""
        needed, most = {one.name for one in self.by_group.values()} | {version.name}, self._max_adapters
        if most is not None and len(needed) > most:
            groups = ", ".join(sorted({*self.by_group, version.published.model_group}))
            raise ModelError(
                f"{version.name} is not loaded: engine.max_loras is {most}, and the newest versions of {groups} take "
                f"{len(needed)} with it; raise it"
            )

    def errors(self, version: Version, there: Iterable[PoolMember]) -> list[Exception] | None:
        """None while a server that is there may take the version that is coming; else why none did, or nothing."""
        if self.by_group.get(version.published.model_group) is version:
            return []
        if any(member not in self.refusals for member in there):
            return None
        return [*self.refusals.values()] or [TryAgainError("no server can be reached")]

    def accept(self, members: Sequence[PoolMember]) -> bool:
        """Want the version that is coming, if a server has proven it, maybe before it came. False: nothing changed.

        The others are asked nothing that needs it until they have proven it, too.
        """
        version = self.coming
        if version is None or self.by_group.get(version.published.model_group) is version:
            return False
        lacking = [member.server for member in members if not member.server.has(version)]
        if len(lacking) == len(members):
            return False
        self.by_group[version.published.model_group] = version
        for server in lacking:
            if server.state == "ready":
                server.state, server.reason = "pending_weights", f"has not proven {version.name} yet"
        return True

    def lacking(self, member: PoolMember) -> Version | None:
        """The next version to give to a server: first the one that is coming, instead of the one before it."""
        needed, coming = self.by_group, self.coming
        if coming is not None and member not in self.refusals:
            group = coming.published.model_group
            needed = {group: coming, **{name: one for name, one in needed.items() if name != group}}
        return next((one for one in needed.values() if not member.server.has(one)), None)

    def admit(self, server: Server) -> None:
        """It serves if it has proven all of them."""
        if server.state == "pending_weights" and self.by_group and all(map(server.has, self.by_group.values())):
            server.state = "ready"
            logger.info("server %s is ready: %s", server.http.url, ", ".join(server.versions))


def choose(
    members: Sequence[PoolMember], version: Version, group: str, tried: Collection[PoolMember], now: float
) -> PoolMember | None:
    """The group's own server, for its prefix cache, unless it is much busier than another one.

    One of those that have failed the request only if there is no other. `group`: of rollouts; empty: of none.
    """
    ready = [one for one in members if one.serves(version) and one.server.rests_until <= now]
    if not ready:
        return None
    ready = [member for member in ready if member not in tried] or ready
    least = min(ready, key=lambda member: member.server.num_open)
    if not group:
        return least
    own = max(ready, key=lambda one: hashlib.sha256(f"{one.server.http.url} {group}".encode()).digest())
    return own if own.server.num_open <= least.server.num_open + IMBALANCE else least


async def wait_for(event: asyncio.Event, limit_s: float) -> None:
    """Until it is set, or so long. Not asyncio.wait_for: of Python 3.11, it forgets that it was cancelled if the event
    is set in the same turn.
    """
    with suppress(TimeoutError):
        async with asyncio.timeout(limit_s):
            await event.wait()
    event.clear()
