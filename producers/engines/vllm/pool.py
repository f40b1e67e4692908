"""Servers behind one base model: which of them may serve, which one a request goes to, and how versions reach them.

A server serves once it has proven the wanted versions, and leaves the pool (`pending_weights`, `down`) as soon as an
answer or a look says otherwise. Versions come from the log alone, so a server that was restarted cannot bring old ones.
"""

import asyncio
import hashlib
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeVar

from rollstream.eventlog.http.http_json import TryAgainError
from rollstream.producers.engines.base import Generation, GenerationRequest, max_new_tokens_of
from rollstream.producers.engines.vllm.base_model import BaseModel
from rollstream.producers.engines.vllm.child import Child
from rollstream.producers.engines.vllm.version_files import Version, restore
from rollstream.producers.engines.vllm.vllm_server import LostVersionError, Server
from rollstream.schemas import ids
from rollstream.schemas.errors import ModelError
from rollstream.schemas.services import VllmSettings

IMBALANCE = 8
"""Requests that a group's own server may have more than the least busy one before others of the group go there."""
MAX_TRIES = 8
"""Of one request, on servers that fail."""
STARTING_S = 0.2
"""Between two looks at a server that is starting."""

T = TypeVar("T")

logger = logging.getLogger(__name__)


class Pool:
    """Servers of one base model."""

    def __init__(
        self, base: BaseModel, servers: Sequence[tuple[Server, Child | None]], settings: VllmSettings, *, is_lora: bool
    ) -> None:
        self.base = base
        self.is_lora = is_lora
        self._servers = list(servers)
        self._settings = settings
        self._wanted: dict[str, Version] = {}
        """By model group: what a server must have."""
        self._fatal: ModelError | None = None
        self._changed = asyncio.Condition()
        self._wakes = {id(server): asyncio.Event() for server, _ in servers}
        self._keepers: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin to look after the servers."""
        self._keepers = [asyncio.create_task(self._keep(server, child)) for server, child in self._servers]

    async def close(self) -> None:
        """Stop servers that we started; take our versions from the others."""
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        for server, child in self._servers:
            if child is None and self.is_lora:
                for name in list(server.versions):
                    with suppress(TryAgainError, ModelError):
                        await server.drop_adapter(name)
            await server.http.close()
            if child is not None:
                await child.stop()

    def states(self) -> dict[str, str]:
        """State of each server by its address, with the reason unless it is ready."""
        return {
            server.http.url: server.state if server.state == "ready" else f"{server.state}: {server.reason}"
            for server, _ in self._servers
        }

    async def take(self, version: Version) -> None:
        """Give a version to every server that is there; those that fail leave the pool.

        Raises ModelError if no server takes it: then the version before it stays wanted.
        """
        deadline = time.monotonic() + self._settings.start_timeout_s
        while True:
            there = await self._wait(lambda: self._there() or None, deadline)
            errors = await asyncio.gather(*(self._give(server, version) for server in there))
            if None in errors:
                break
            refusals = [error for error in errors if isinstance(error, ModelError)]
            if refusals or time.monotonic() > deadline:
                found = refusals[0] if refusals else ModelError("; ".join(map(str, errors)))
                raise ModelError(f"{version.name} is not loaded: {found}") from found
        self._wanted[version.published.model_group] = version
        for server, error in zip(there, errors, strict=True):
            if error is None and all(one.name in server.versions for one in self._wanted.values()):
                server.state = "ready"
        self._wake()
        await self._notify()

    async def drop(self, model_group: str) -> None:
        """A model group is not wanted any more."""
        version = self._wanted.pop(model_group, None)
        if version is not None and self.is_lora:
            for server, _ in self._servers:
                async with server.lock:
                    if version.name in server.versions and not server.open[version.name]:
                        with suppress(TryAgainError, ModelError):
                            await server.drop_adapter(version.name)

    def uses(self, version: Version) -> bool:
        """Whether a request or a server may still need its files."""
        is_wanted = self._wanted.get(version.published.model_group) is version
        return is_wanted or any(version.name in server.versions for server, _ in self._servers)

    async def generate(self, request: GenerationRequest) -> Generation:
        """Of the newest version. Raises ModelError, PromptTooLongError."""
        deadline = time.monotonic() + self._settings.start_timeout_s
        last: Exception | None = None
        for _ in range(MAX_TRIES):
            server = await self._wait(lambda: self._chosen(request), deadline)
            version = self._wanted[request.model_group]
            limits = [limit for limit in (self.base.max_length, server.max_length) if limit is not None]
            room = max_new_tokens_of(request, min(limits, default=None), f"model {self.base.path}")
            try:
                return await server.generate(request, version, room)
            except (TryAgainError, LostVersionError) as error:
                last = error
                await self._leave(server, error)
        raise ModelError(f"no vLLM server answers: {last} ({MAX_TRIES} tries); look into the servers' logs") from last

    # ---- servers ----

    def _there(self) -> list[Server]:
        """Those that can be given a version."""
        return [server for server, _ in self._servers if server.state != "down"]

    def _chosen(self, request: GenerationRequest) -> Server | None:
        """The group's own server, for its prefix cache, unless it is much busier than another one."""
        ready = [server for server, _ in self._servers if server.state == "ready"]
        if not ready:
            return None
        least = min(ready, key=lambda server: server.num_open)
        group = ids.group_of(request.rollout_id)
        if not group:
            return least
        own = max(ready, key=lambda one: hashlib.sha256(f"{one.http.url} {group}".encode()).digest())
        return own if own.num_open <= least.num_open + IMBALANCE else least

    async def _keep(self, server: Server, child: Child | None) -> None:
        while True:
            try:
                await self._look(server, child)
            except (TryAgainError, LostVersionError) as error:
                await self._leave(server, error)
            except ModelError as error:
                server.state, server.reason = "down", str(error)
                if child is not None or len(self._servers) == 1:
                    self._fatal = error
                else:
                    logger.error("server %s is not used: %s", server.http.url, error)
                await self._notify()
            await self._sleep(server, child)

    async def _look(self, server: Server, child: Child | None) -> None:
        async with server.lock:
            if child is not None and child.look():
                server.forget()
                server.state, server.reason = "down", "starting"
                server.http.url = server.http.name = f"http://127.0.0.1:{child.port}"
            if server.state == "down":
                server.forget()
                await server.connect(self.base, is_lora=self.is_lora)
                server.state, server.reason = "pending_weights", "has proven no version yet"
            else:
                await self._check(server, child)
            if child is not None:
                child.served()
        for version in list(self._wanted.values()):
            if version.name not in server.versions:
                error = await self._give(server, version)
                if isinstance(error, ModelError) and version.is_lora:
                    raise LostVersionError(str(error)) from error  # the next version may be one that it can have
                if error is not None:
                    raise error
        if server.state != "ready" and self._wanted:
            async with server.lock:
                await server.prove()
            server.state = "ready"
            logger.info("server %s is ready: %s", server.http.url, ", ".join(server.versions))
        self._fatal = None
        await self._notify()

    async def _check(self, server: Server, child: Child | None) -> None:
        try:
            await server.check()
        except TryAgainError:
            if child is not None and child.is_running:
                await child.stop()  # it lives, and its workers do not
            raise

    async def _give(self, server: Server, version: Version) -> Exception | None:
        """Let a server take over a version; returns why it did not."""
        try:
            with suppress(OSError):
                await asyncio.to_thread(restore, version)  # else the server says what it lacks
            async with server.lock:
                if version.is_lora:
                    await server.add_adapter(version)
                else:
                    await server.reload(version)
        except (TryAgainError, LostVersionError) as error:
            await self._leave(server, error)
            return error
        except ModelError as error:
            if not version.is_lora:
                await self._leave(server, error)
            return error
        return None

    async def _leave(self, server: Server, error: Exception) -> None:
        """It serves nothing until it has proven the wanted versions again."""
        reason = str(error)
        if server.state == "ready":
            logger.warning("server %s is taken out of use: %s", server.http.url, reason)
        is_alive = isinstance(error, LostVersionError)
        server.state, server.reason = "pending_weights" if is_alive else "down", reason
        server.versions.clear()
        self._wakes[id(server)].set()
        await self._notify()

    async def _sleep(self, server: Server, child: Child | None) -> None:
        wake = self._wakes[id(server)]
        is_starting = child is not None and server.state == "down"
        with suppress(TimeoutError):
            await asyncio.wait_for(wake.wait(), STARTING_S if is_starting else self._settings.health_interval_s)
            await asyncio.sleep(STARTING_S)  # who is woken by failures must not ask without end
        wake.clear()

    def _wake(self) -> None:
        for server, _ in self._servers:
            if server.state != "ready":
                self._wakes[id(server)].set()

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _wait(self, found: Callable[[], T | None], deadline: float) -> T:
        """What `found` returns once it is not None. Raises ModelError after the deadline, or if there is no hope."""
        async with self._changed:
            while (result := found()) is None:
                if self._fatal is not None:
                    raise ModelError(str(self._fatal)) from self._fatal
                left = deadline - time.monotonic()
                if left <= 0:
                    states = "; ".join(f"{url} {state}" for url, state in self.states().items())
                    raise ModelError(f"no vLLM server is ready within start_timeout_s: {states}")
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), left)
            return result
