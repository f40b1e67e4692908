"""Servers behind one base model: which of them may serve, which one a request goes to, and how versions reach them.

A server serves once it has proven the wanted versions, and leaves the pool (`pending_weights`, `down`) as soon as a
look says otherwise, or requests cannot reach it. One that fails a request keeps the others: the request goes elsewhere,
and the workers are asked whether they live. Versions come from the log alone, so a server that was restarted cannot
bring old ones.
"""

import asyncio
import hashlib
import logging
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import TypeVar

from rollstream.eventlog.http.http_json import TryAgainError, UnreachableError
from rollstream.producers.engines.base import Generation, GenerationRequest, max_new_tokens_of
from rollstream.producers.engines.vllm.base_model import BaseModel
from rollstream.producers.engines.vllm.child import Child
from rollstream.producers.engines.vllm.streamed import GivenTokens
from rollstream.producers.engines.vllm.version_files import Version, restore
from rollstream.producers.engines.vllm.vllm_server import LostVersionError, Server
from rollstream.schemas import ids
from rollstream.schemas.errors import ModelError
from rollstream.schemas.services import VllmSettings

IMBALANCE = 8
"""Requests that a group's own server may have more than the least busy one before others of the group go there."""
MAX_TRIES = 8
"""Of one request, on servers that fail."""
MAX_FAILED = 3
"""Requests that a server may fail one after the other before it is taken out of use."""
RETRY_S = 0.5
"""Before a request goes to a server that has failed it again; doubled each time."""
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
        self._coming: Version | None = None
        """Which servers are being given."""
        self._taking = asyncio.Lock()
        """Of two versions that wait for room on two servers, each could have what the other one waits for."""
        self._fatal: ModelError | None = None
        self._changed = asyncio.Condition()
        self._wakes = {id(server): asyncio.Event() for server, _ in servers}
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin to look after the servers."""
        self._tasks = [asyncio.create_task(self._keep(server, child)) for server, child in self._servers]
        if self.is_lora:
            self._tasks += [asyncio.create_task(self._unload_unused(server)) for server, _ in self._servers]

    async def close(self) -> None:
        """Stop servers that we started; take our versions from the others. Requests in progress fail."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._fatal = ModelError(f"the servers of model {self.base.path} are no longer used; load a version again")
        for server, _ in self._servers:
            server.leave("down", "no longer used")
        await self._notify()
        for server, child in self._servers:
            if child is None and self.is_lora:
                for name in list(server.names):
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
        async with self._taking:
            self._check_capacity(version)
            self._coming = version
            try:
                await self._take(version)
            finally:
                self._coming = None
                self._unload()
        await self._notify()

    async def drop(self, model_group: str) -> None:
        """A model group is not wanted any more."""
        self._wanted.pop(model_group, None)
        self._unload()

    def uses(self, version: Version) -> bool:
        """Whether a request or a server may still need its files."""
        name = version.name
        return self._is_kept(name) or any(
            name in server.names or name in server.versions or server.open[name] for server, _ in self._servers
        )

    async def generate(self, request: GenerationRequest) -> Generation:
        """Of the newest version. Raises ModelError, PromptTooLongError."""
        deadline = time.monotonic() + self._settings.start_timeout_s
        last: Exception | None = None
        given = None if request.on_tokens is None else GivenTokens(request.on_tokens)
        tried: set[int] = set()
        for number in range(MAX_TRIES):
            server = await self._wait(lambda: self._chosen(request, tried), deadline)
            if id(server) in tried:
                await asyncio.sleep(RETRY_S * 2 ** (number - 1))
                tried.clear()
                server = await self._wait(lambda: self._chosen(request, tried), deadline)
            version = self._wanted.get(request.model_group)
            if version is None:
                raise ModelError(f"model group {request.model_group} was unloaded; load a version again")
            limits = [limit for limit in (self.base.max_length, server.max_length) if limit is not None]
            max_new_tokens = max_new_tokens_of(request, min(limits, default=None), f"model {self.base.path}")
            try:
                answer = await server.generate(request, version, max_new_tokens, given)
            except (UnreachableError, LostVersionError) as error:
                last = error
                await self._leave(server, error)
            except TryAgainError as error:
                last = error
                tried.add(id(server))
                await self._fail(server, error)
            else:
                server.num_failed = 0
                if given is not None:
                    given.check(answer.token_ids)
                return answer
        raise ModelError(f"no vLLM server answers: {last} ({MAX_TRIES} tries); look into the servers' logs") from last

    # ---- versions ----

    def _is_kept(self, name: str) -> bool:
        """Whether servers must have it, though no request is open."""
        return any(one.name == name for one in (*self._wanted.values(), self._coming) if one is not None)

    def _check_capacity(self, version: Version) -> None:
        """Raises ModelError if the newest versions and one that is to follow cannot be there at once."""
        needed = {one.name for one in self._wanted.values()} | {version.name}
        most = self._settings.max_loras
        if self.is_lora and len(needed) > most:
            groups = ", ".join(sorted({*self._wanted, version.published.model_group}))
            raise ModelError(
                f"{version.name} is not loaded: engine.max_loras is {most}, and the newest versions of {groups} take "
                f"{len(needed)} with it; raise it"
            )

    async def _take(self, version: Version) -> None:
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
            await asyncio.sleep(STARTING_S)
        self._wanted[version.published.model_group] = version
        for server, error in zip(there, errors, strict=True):
            if error is None and all(one.name in server.versions for one in self._wanted.values()):
                server.state = "ready"
        self._wake()

    def _unload(self) -> None:
        for server, _ in self._servers:
            server.unused.set()

    async def _unload_unused(self, server: Server) -> None:
        """Unload names that another version has followed, or whose model group went, once no request uses them.

        What fails is tried again after the next look.
        """
        while True:
            await server.unused.wait()
            server.unused.clear()
            if server.state == "down":
                continue
            try:
                await server.unload_unused(self._is_kept)
            except (TryAgainError, ModelError) as error:
                logger.info("server %s has not unloaded an adapter: %s", server.http.url, error)

    # ---- servers ----

    def _there(self) -> list[Server]:
        """Those that can be given a version."""
        return [server for server, _ in self._servers if server.state != "down"]

    def _chosen(self, request: GenerationRequest, tried: Collection[int]) -> Server | None:
        """The group's own server, for its prefix cache, unless it is much busier than another one.

        One of those that have failed the request only if there is no other.
        """
        now = time.monotonic()
        ready = [server for server, _ in self._servers if server.state == "ready" and server.rests_until <= now]
        if not ready:
            return None
        ready = [server for server in ready if id(server) not in tried] or ready
        least = min(ready, key=lambda server: server.num_open)
        group = ids.group_of(request.rollout_id)
        if not group:
            return least
        own = max(ready, key=lambda one: hashlib.sha256(f"{one.http.url} {group}".encode()).digest())
        return own if own.num_open <= least.num_open + IMBALANCE else least

    async def _keep(self, server: Server, child: Child | None) -> None:
        while True:
            try:
                await self._bring_up(server, child)
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

    async def _bring_up(self, server: Server, child: Child | None) -> None:
        async with server.lock:
            if child is not None and child.start_if_due():
                server.forget()
                server.state, server.reason = "down", "starting"
                server.http.url = server.http.name = f"http://127.0.0.1:{child.port}"
            if server.state == "down":
                server.forget()
                await server.connect(self.base, is_lora=self.is_lora, is_joined=child is None)
                server.state, server.reason = "pending_weights", "has proven no version yet"
            else:
                await self._check(server, child)
            if child is not None:
                child.served()
        for group, version in list(self._wanted.items()):
            if version.name not in server.versions and self._wanted.get(group) is version:
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
        server.unused.set()
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
            if version.is_lora:
                await server.add_adapter(version)
            else:
                async with server.lock:
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
        server.leave("pending_weights" if is_alive else "down", reason)
        self._wakes[id(server)].set()
        await self._notify()

    async def _fail(self, server: Server, error: TryAgainError) -> None:
        """It has failed a request: it rests as long as it asks for, and its workers are asked whether they live."""
        server.rests_until = max(server.rests_until, time.monotonic() + error.after_s)
        if error.status is not None and error.status < 500:
            return  # it refused one that it has no room for
        server.num_failed += 1
        if server.num_failed >= MAX_FAILED:
            await self._leave(server, error)
        self._wakes[id(server)].set()

    async def _sleep(self, server: Server, child: Child | None) -> None:
        wake = self._wakes[id(server)]
        is_starting = child is not None and server.state == "down"
        # Not wait_for: of Python 3.11, it forgets that it was cancelled if the event is set in the same turn.
        with suppress(TimeoutError):
            async with asyncio.timeout(STARTING_S if is_starting else self._settings.health_interval_s):
                await wake.wait()
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
                now = time.monotonic()
                left = deadline - now
                if left <= 0:
                    states = "; ".join(f"{url} {state}" for url, state in self.states().items())
                    raise ModelError(
                        f"no vLLM server is ready within start_timeout_s: {states}; see the servers' logs, or raise it"
                    )
                rests = [server.rests_until - now for server, _ in self._servers if server.rests_until > now]
                with suppress(TimeoutError):
                    async with asyncio.timeout(min([left, *rests])):
                        await self._changed.wait()
            return result
