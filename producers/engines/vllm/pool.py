"""Servers behind one base model: which of them may serve, which one a request goes to, and how versions reach them.

A server serves a model group once it has proven the version that is wanted of it, and leaves the pool
(`pending_weights`, `down`) as soon as a look says otherwise, or requests cannot reach it. A version is wanted once one
server has proven it: the others get it while that one serves. A server that fails a request keeps the others: the
request goes elsewhere, and the workers are asked whether they live. Versions come from the log alone, so a server that
was restarted cannot bring old ones.
"""

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import suppress
from typing import TypeVar

from rollstream.eventlog.blocking_calls import in_own_thread
from rollstream.eventlog.http.http_json import TryAgainError, UnreachableError
from rollstream.producers.engines.base import Generation, GenerationRequest, max_new_tokens_of
from rollstream.producers.engines.vllm.answers import LostVersionError, RefusedVersionError
from rollstream.producers.engines.vllm.base_model import BaseModel
from rollstream.producers.engines.vllm.child import Child
from rollstream.producers.engines.vllm.open_calls import LeftError
from rollstream.producers.engines.vllm.pool_members import PoolMember, WantedVersions, choose, wait_for
from rollstream.producers.engines.vllm.streamed import GivenTokens
from rollstream.producers.engines.vllm.version_files import Version, restore
from rollstream.producers.engines.vllm.vllm_server import Server
from rollstream.schemas import ids
from rollstream.schemas.engine_settings import VllmSettings
from rollstream.schemas.errors import ModelError, describe

MAX_TRIES = 8
"""Maximum tries of one request, on servers that fail."""
MAX_FAILED = 3
"""Maximum consecutive failed requests of a server before it is taken out of use."""
RETRY_S = 0.5
"""Wait before a request goes again to a server that has failed it; doubled each time."""
STARTING_S = 0.2
"""Wait between two checks of a server that is starting."""

T = TypeVar("T")

logger = logging.getLogger(__name__)


class Pool:
    """Servers of one base model."""

    def __init__(
        self, base: BaseModel, servers: Sequence[tuple[Server, Child | None]], settings: VllmSettings, *, is_lora: bool
    ) -> None:
        self.base = base
        self.is_lora = is_lora
        self._members = [PoolMember(server, child) for server, child in servers]
        self._settings = settings
        self._wanted = WantedVersions(max_adapters=settings.max_loras if is_lora else None)
        self._taking = asyncio.Lock()
        """Lock by which one version is loaded at a time."""
        self._fatal: ModelError | None = None
        self._changed = asyncio.Condition()
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin to look after the servers."""
        loops = (self._keep, self._watch, *((self._unload_unused,) if self.is_lora else ()))
        self._tasks = [asyncio.create_task(self._repeat(loop, member)) for member in self._members for loop in loops]

    async def close(self) -> None:
        """Stop servers that we started; take our versions from the others. Requests in progress fail."""
        for task in self._tasks:
            task.cancel()
        for server in self._servers:
            server.leave("down", "no longer used")
            server.requests.end(server.reason)
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._fatal = ModelError(f"the servers of model {self.base.path} are no longer used; load a version again")
        await self._notify()
        for member in self._members:
            server = member.server
            if member.child is None and self.is_lora:
                for name in list(server.names):
                    with suppress(TryAgainError, ModelError):
                        await server.drop_adapter(name)
            await server.http.close()
            if member.child is not None:
                await member.child.stop()

    def states(self) -> dict[str, str]:
        """State of each server by its address, with the reason unless it is ready."""
        return {
            server.http.url: server.state if server.state == "ready" else f"{server.state}: {server.reason}"
            for server in self._servers
        }

    async def take(self, version: Version) -> None:
        """Let servers be given a version, until one of them has it: then it is wanted, and the others get it too.

        Raises ModelError if no server takes it: then the version before it stays wanted.
        """
        async with self._taking:
            self._wanted.check_capacity(version)
            try:
                with self._wanted.arriving(version):
                    await self._until_wanted(version)
                    await self._notify()
            finally:
                self._recheck()

    async def drop(self, model_group: str) -> None:
        """A model group is not wanted any more."""
        self._wanted.by_group.pop(model_group, None)
        self._recheck()
        await self._notify()

    def uses(self, version: Version) -> bool:
        """Whether a request or a server may still need its files."""
        name = version.name
        return self._wanted.is_kept(name) or any(
            name in server.names or name in server.versions or name == server.loading or server.open[name]
            for server in self._servers
        )

    async def generate(self, request: GenerationRequest) -> Generation:
        """Generate with the newest version. Raises ModelError, PromptTooLongError."""
        last: Exception | None = None
        given = None if request.on_tokens is None else GivenTokens(request.on_tokens)
        tried: set[PoolMember] = set()
        for number in range(MAX_TRIES):
            member, version = await self._wait(lambda: self._chosen(request, tried))
            if member in tried:
                await asyncio.sleep(RETRY_S * 2 ** (number - 1))
                tried.clear()
                member, version = await self._wait(lambda: self._chosen(request, tried))
            server = member.server
            limits = [limit for limit in (self.base.max_length, server.max_length) if limit is not None]
            max_new_tokens = max_new_tokens_of(request, min(limits, default=None), f"model {self.base.path}")
            try:
                answer = await server.generate(request, version, max_new_tokens, given)
            except LeftError as error:
                last = server.http.error(str(error))
            except (UnreachableError, LostVersionError) as error:
                last = server.http.error(str(error))
                await self._leave(member, error)
            except TryAgainError as error:
                last = server.http.error(str(error))
                tried.add(member)
                await self._fail(member, error)
            else:
                server.num_failed = 0
                if given is not None:
                    given.check(answer.token_ids)
                return answer
        raise ModelError(f"no vLLM server answers: {last} ({MAX_TRIES} tries); look into the servers' logs") from last

    # ---- versions ----

    async def _until_wanted(self, version: Version) -> None:
        """Servers that cannot be reached are waited for; how long is counted from the first failure."""
        give_up_at: float | None = None
        while True:
            await self._wait(lambda: self._there() or None)
            self._wanted.refusals.clear()
            self._wanted.accept(self._members)
            self._recheck()
            errors = await self._wait(lambda: self._wanted.errors(version, self._there()), math.inf)
            if not errors:
                return
            give_up_at = give_up_at or time.monotonic() + self._settings.start_timeout_s
            refusals = [error for error in errors if isinstance(error, ModelError)]
            if refusals or time.monotonic() > give_up_at:
                found = refusals[0] if refusals else ModelError(f"{'; '.join(map(str, errors))}; see the servers' logs")
                raise ModelError(f"{version.name} is not loaded: {found}") from found
            await asyncio.sleep(STARTING_S)

    def _recheck(self) -> None:
        """Other versions are wanted."""
        for member in self._members:
            member.server.recheck()
            member.work.set()

    async def _unload_unused(self, member: PoolMember) -> None:
        """Unload names that another version has followed, or whose model group went, once no request uses them.

        What fails is tried again after the next look.
        """
        server = member.server
        while True:
            await server.unused.wait()
            server.unused.clear()
            if server.state == "down":
                continue
            try:
                await server.unload_unused(self._wanted.is_kept)
            except (TryAgainError, ModelError) as error:
                logger.info("server %s has not unloaded an adapter: %s", server.http.url, error)

    # ---- servers ----

    @property
    def _servers(self) -> list[Server]:
        return [member.server for member in self._members]

    def _described(self) -> str:
        return "; ".join(f"{url} {state}" for url, state in self.states().items())

    def _there(self) -> list[PoolMember]:
        """Those that can be given a version."""
        return [member for member in self._members if member.server.state != "down"]

    def _chosen(self, request: GenerationRequest, tried: Collection[PoolMember]) -> tuple[PoolMember, Version] | None:
        """A server, and the version that it is asked for. Raises ModelError for a group that went."""
        version = self._wanted.by_group.get(request.model_group)
        if version is None:
            raise ModelError(f"model group {request.model_group} was unloaded; load a version again")
        found = choose(self._members, version, ids.group_of(request.rollout_id), tried, time.monotonic())
        return None if found is None else (found, version)

    async def _repeat(self, loop: Callable[[PoolMember], Awaitable[None]], member: PoolMember) -> None:
        """Run a loop again after an error that it does not know: without it, its server would not be used again."""
        while True:
            try:
                await loop(member)
            except Exception as error:
                logger.exception("server %s: looking after it failed", member.server.http.url)
                failure = f"cannot be looked after: {describe(error)}; report it with the log of the producers"
                await self._refuse(member, member.server.http.error(failure))
            await asyncio.sleep(self._settings.health_interval_s)

    async def _keep(self, member: PoolMember) -> None:
        """Reach it and give it what it lacks. `_watch` asks its health meanwhile: a load may take minutes."""
        while True:
            has_failed = True
            try:
                await self._bring_up(member)
                has_failed = False
            except LeftError:
                logger.debug("server %s left while it was given a version", member.server.http.url)
            except (TryAgainError, LostVersionError) as error:
                await self._leave(member, error)
            except ModelError as error:
                await self._refuse(member, error)
            await self._sleep(member, has_failed=has_failed)

    async def _bring_up(self, member: PoolMember) -> None:
        server, child = member.server, member.child
        async with member.process:
            if child is not None and child.start_if_due():
                server.leave("down", "starting")
                server.http.url = server.http.name = f"http://127.0.0.1:{child.port}"
        if server.state == "down":
            await self._connect(member)
        async with server.until_down.until_ended():
            while (version := self._wanted.lacking(member)) is not None:
                await self._give(member, version)
                self._wanted.admit(server)
                await self._notify()
        self._wanted.admit(server)
        self._fatal = None
        server.unused.set()
        await self._notify()

    async def _connect(self, member: PoolMember) -> None:
        """Connect to it, and find out what it can do. A child process that does not answer is ended: nothing else
        checks a server that is down.
        """
        server, child = member.server, member.child
        async with server.changing():
            server.forget()
            try:
                await server.connect(self.base, is_lora=self.is_lora, is_joined=child is None)
            except TryAgainError as error:
                if child is not None and child.must_answer and not error.is_busy:
                    await member.stop_process()
                server.requests.end(str(error))
                raise
            server.state, server.reason = "pending_weights", "has proven no version yet"
        if child is not None:
            child.served()

    async def _watch(self, member: PoolMember) -> None:
        """Ask its health, also while it loads a version."""
        server = member.server
        while True:
            await wait_for(member.doubt, self._settings.health_interval_s)
            if server.state == "down":
                continue
            try:
                async with server.until_down.until_ended():
                    await server.check()
            except LeftError:
                continue
            except TryAgainError as error:
                await member.stop_process()
                await self._leave(member, error)
                server.requests.end(str(error))
            except LostVersionError as error:
                await self._leave(member, error)
            except ModelError as error:
                await self._refuse(member, error)
            await asyncio.sleep(STARTING_S)  # failures set `doubt` again and again

    async def _give(self, member: PoolMember, version: Version) -> None:
        """Let a server take over a version. Raises TryAgainError, LostVersionError, ModelError.

        An adapter that is coming and does not fit is not an error: the server serves those that it has.
        """
        server, server.loading = member.server, version.name
        try:
            with suppress(OSError):
                await in_own_thread(restore, version)  # else the server says what it lacks
            if version.is_lora:
                await server.add_adapter(version, self._wanted.is_kept)
            else:
                async with server.changing():
                    await server.reload(version)
            if server.state == "down":
                raise TryAgainError(server.reason)
        except (TryAgainError, LostVersionError, ModelError) as error:
            is_coming = self._wanted.awaits(member, version)
            if is_coming:
                named = TryAgainError(str(server.http.error(str(error))))
                self._wanted.refusals[member] = error if isinstance(error, ModelError) else named
            is_unfit = isinstance(error, ModelError) and (is_coming or isinstance(error, RefusedVersionError))
            if not version.is_lora and is_unfit:
                raise TryAgainError(str(error)) from error
            if not version.is_lora or not isinstance(error, ModelError):
                raise
            if not is_coming:
                raise LostVersionError(str(error)) from error  # the next version may be one that it can have
        finally:
            server.loading = None
        if self._wanted.accept(self._members):
            self._recheck()

    async def _refuse(self, member: PoolMember, error: ModelError) -> None:
        """It cannot be used."""
        member.server.leave("down", str(error))
        if member.child is not None or len(self._members) == 1:
            self._fatal = error
        else:
            logger.error("server %s is not used: %s", member.server.http.url, error)
        await self._notify()

    async def _leave(self, member: PoolMember, error: Exception) -> None:
        """It serves nothing until it has proven the wanted versions again."""
        server, reason = member.server, str(error)
        if server.state == "ready":
            logger.warning("server %s is taken out of use: %s", server.http.url, reason)
        server.leave("pending_weights" if isinstance(error, LostVersionError) else "down", reason)
        member.work.set()
        await self._notify()

    async def _fail(self, member: PoolMember, error: TryAgainError) -> None:
        """It has failed a request: it rests as long as it asks for, and its workers are asked whether they live."""
        server = member.server
        server.rests_until = max(server.rests_until, time.monotonic() + error.after_s)
        if error.is_busy:
            return
        server.num_failed += 1
        if server.num_failed >= MAX_FAILED:
            await self._leave(member, error)
        member.doubt.set()

    async def _sleep(self, member: PoolMember, *, has_failed: bool) -> None:
        if has_failed:
            await asyncio.sleep(STARTING_S)
        is_starting = member.child is not None and member.server.state == "down"
        await wait_for(member.work, STARTING_S if is_starting else self._settings.health_interval_s)

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _wait(self, found: Callable[[], T | None], limit_s: float | None = None) -> T:
        """Wait until `found` returns something other than None, and return that.

        `limit_s`: None: `start_timeout_s`, for each wait by itself. Raises ModelError at the limit, or at once if the
        pool has failed for good.
        """
        deadline = time.monotonic() + (limit_s or self._settings.start_timeout_s)
        async with self._changed:
            while (result := found()) is None:
                if self._fatal is not None:
                    raise ModelError(str(self._fatal)) from self._fatal
                now = time.monotonic()
                left = deadline - now
                if left <= 0:
                    raise ModelError(
                        f"no vLLM server is ready within start_timeout_s: {self._described()}; see the servers' logs, "
                        "or raise it"
                    )
                rests = [server.rests_until - now for server in self._servers if server.rests_until > now]
                with suppress(TimeoutError):
                    async with asyncio.timeout(min([left, *rests])):
                        await self._changed.wait()
            return result
