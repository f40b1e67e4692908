"""`base.Engine` over vLLM servers: one that it starts for a base model, or some that run already.

LoRA versions are loaded beside those that requests are generated with, and no request waits or changes its version.
Full weights are replaced in place while requests stand still; the server tells whose tokens are whose.
"""

import asyncio
import itertools
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from rollstream.eventlog.blocking_calls import in_own_thread
from rollstream.eventlog.http.http_json import HttpServer
from rollstream.producers.engines.base import (
    CLOSED,
    Capabilities,
    Generation,
    GenerationRequest,
    Tokenizer,
    check_prompt,
)
from rollstream.producers.engines.vllm.asking import check_temperature
from rollstream.producers.engines.vllm.base_model import BaseModel, read_base_model
from rollstream.producers.engines.vllm.child import Child, check_settings
from rollstream.producers.engines.vllm.pool import Pool
from rollstream.producers.engines.vllm.version_files import Client, Version, make_version, remove
from rollstream.producers.engines.vllm.vllm_server import Server
from rollstream.producers.engines.vllm.weight_sums import WeightSums
from rollstream.schemas.engine_settings import VllmSettings
from rollstream.schemas.errors import ModelError
from rollstream.schemas.events import WeightsPublished

Served = tuple[str, str | None]
"""A base model, and the model group whose full weights take its place; None: adapters of any group."""


class VllmEngine:
    """Model groups by the servers of their base models."""

    def __init__(self, settings: VllmSettings, env: Mapping[str, str] = os.environ) -> None:
        """Raises ModelError if the variable of the key is not set."""
        self._settings = settings
        self._key = _key_of(settings, env)
        self._folder: Path = settings.folder or Path(tempfile.mkdtemp(prefix="rollstream-vllm-"))
        self._client: Client | None = None
        self._bases = WeakValueDictionary[str, BaseModel]()
        """Base models by path, as long as a version or a server of them exists."""
        self._pools: dict[Served, Pool] = {}
        self._held: dict[str, Version] = {}
        self._past: list[Version] = []
        """Versions whose files may still be needed."""
        self._locks = WeakValueDictionary[str, asyncio.Lock]()
        """Locks by model group, as long as a load or unload of it holds or awaits them."""
        self._coming: list[Version] = []
        """Versions that are being loaded."""
        self._writing = asyncio.Lock()
        """Held while files of versions are written or removed: a version that comes again has the same folder."""
        self._log_numbers = itertools.count(1)
        self._calls: set[asyncio.Task[Generation]] = set()
        self._slots = asyncio.Semaphore(settings.max_concurrent)
        self._is_closed = False

    @property
    def capabilities(self) -> Capabilities:
        """Samples from the models whose weights are published."""
        return Capabilities(loads_models=True)

    async def start(self) -> None:
        """Servers are started and asked with the first version: it names the base model. Raises ConfigError, and
        ModelError for a folder that cannot be written to.
        """
        check_settings(self._settings)
        self._client = await in_own_thread(Client, self._folder)
        await in_own_thread(self._client.remove_leftovers)

    async def close(self) -> None:
        """Cancel calls in progress, stop the servers that were started, and remove a folder that no setting names."""
        self._is_closed = True
        for call in self._calls:
            call.cancel()
        await asyncio.gather(*(pool.close() for pool in self._pools.values()))
        self._pools.clear()
        for version in (*self._held.values(), *self._past):
            await in_own_thread(remove, version)
        if self._client is not None:
            self._client.close()
        if self._settings.folder is None:
            await in_own_thread(shutil.rmtree, self._folder, ignore_errors=True)

    async def generate(self, request: GenerationRequest) -> Generation:
        """Raises ModelError as the protocol says, and if no server is ready within `start_timeout_s`."""
        if self._is_closed:
            raise ModelError(CLOSED)
        version = self._version(request.model_group)
        check_temperature(request.sampling)
        check_prompt(request, num_token_ids=version.base.num_token_ids)
        pool = self._pools.get(_served(version.published))
        if pool is None:
            raise ModelError(f"model group {request.model_group} is being unloaded; load a version again")
        call = asyncio.create_task(self._generate(request, pool))
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        try:
            return await call
        finally:
            call.cancel()

    def tokenizer(self, model_group: str) -> Tokenizer:
        """Tokenizer of the group's base model. Raises ModelError if the group has no weights."""
        tokenizer: Tokenizer = self._version(model_group).base.tokenizer
        return tokenizer

    def version(self, model_group: str) -> int:
        """Weight version held; -1 before the first."""
        held = self._held.get(model_group)
        return -1 if held is None else held.published.version

    def states(self) -> dict[str, str]:
        """State of each server by its address, with the reason unless it is ready."""
        return {url: state for pool in self._pools.values() for url, state in pool.states().items()}

    async def load(self, published: WeightsPublished, path: Path) -> None:
        """Generate new requests with this version once one server has it; the others get it while that one serves.

        Raises ModelError if it does not fit, or no server takes it; then the version before it stays. Raises it
        once closed, too.
        """
        if self._is_closed:
            raise ModelError(CLOSED)
        group = published.model_group
        async with self._locks.setdefault(group, asyncio.Lock()):
            base = await self._base(published.base_model)
            async with self._writing:
                version = await in_own_thread(
                    make_version,
                    published,
                    path,
                    base,
                    folder=self._folder,
                    client=self._own_client().id,
                    max_lora_rank=self._settings.max_lora_rank,
                )
                self._coming.append(version)
            try:
                await self._take(version)
            except ModelError:
                await self._remove_files()
                raise
            await self._remove_files()

    async def unload(self, model_group: str) -> None:
        """Forget a model group; servers that were started for it alone are stopped."""
        async with self._locks.setdefault(model_group, asyncio.Lock()):
            held = self._held.pop(model_group, None)
            if held is not None:
                await self._leave(held)
                self._past.append(held)

    async def _take(self, version: Version) -> None:
        """Let the servers of its base model take a version over, in place of the one before it."""
        published, served = version.published, _served(version.published)
        try:
            await self._pool(published, version.base).take(version)
        except BaseException:
            self._past.append(version)
            raise
        else:
            before = self._held.get(published.model_group)
            self._held[published.model_group] = version
        finally:
            self._coming.remove(version)
            await self._close_unused(served)
        if before is not None:
            if _served(before.published) != served:
                await self._leave(before)
            if before.name != version.name:
                self._past.append(before)

    async def _generate(self, request: GenerationRequest, pool: Pool) -> Generation:
        async with self._slots:
            return await pool.generate(request)

    async def _base(self, path: str) -> BaseModel:
        base = self._bases.get(path)
        if base is None:
            self._bases[path] = base = await in_own_thread(read_base_model, path)
        return base

    def _version(self, model_group: str) -> Version:
        held = self._held.get(model_group)
        if held is None:
            raise ModelError(f"model group {model_group} has no weights yet; wait for a version to be published")
        return held

    def _pool(self, published: WeightsPublished, base: BaseModel) -> Pool:
        served = _served(published)
        if served in self._pools:
            return self._pools[served]
        settings, is_lora = self._settings, served[1] is None
        if settings.base_urls and self._pools:
            (other,) = self._pools
            what = "adapters" if other[1] is None else f"the full weights of {other[1]}"
            raise ModelError(
                f"the servers of engine.base_urls have {what} on {other[0]}, and not {published.model_group} on "
                f"{base.path} too; train all groups as adapters of one base model, or leave base_urls out"
            )
        sums = WeightSums() if settings.check_weights and not is_lora else None
        servers = [(self._server(url.rstrip("/"), sums), None) for url in settings.base_urls]
        log = self._folder / "logs" / f"server-{next(self._log_numbers)}.log"
        child = Child(settings, base.path, is_lora=is_lora, log=log)
        started = [] if servers else [(self._server("a server", sums), child)]
        pool = Pool(base, [*servers, *started], settings, is_lora=is_lora)
        self._pools[served] = pool
        pool.start()
        return pool

    def _server(self, url: str, sums: WeightSums | None) -> Server:
        settings = self._settings
        http = HttpServer(url, timeout_s=settings.timeout_s, key=self._key, key_variable=settings.api_key_variable)
        client = self._own_client()
        return Server(
            http,
            client,
            max_loras=settings.max_loras,
            load_timeout_s=settings.load_timeout_s,
            health_timeout_s=settings.health_timeout_s,
            sums=sums,
        )

    def _own_client(self) -> Client:
        if self._client is None:
            raise ModelError("the rollout engine has not started; await start() first")
        return self._client

    async def _leave(self, version: Version) -> None:
        """A version is not held any more, and none of its model group that the same servers have."""
        served = _served(version.published)
        if served in self._pools:
            await self._pools[served].drop(version.published.model_group)
        await self._close_unused(served)

    async def _close_unused(self, served: Served) -> None:
        """Close servers of which no version is held or being loaded."""
        if any(_served(one.published) == served for one in (*self._held.values(), *self._coming)):
            return
        if (pool := self._pools.pop(served, None)) is not None:
            await pool.close()

    async def _remove_files(self) -> None:
        """Files outlive names: they go after no server has the name and one more version has come."""
        async with self._writing:
            used = {version.folder for version in (*self._held.values(), *self._coming)}
            kept = used | {one.folder for one in self._past[-1:]}
            unused = [
                one
                for one in self._past
                if one.folder not in kept and not any(pool.uses(one) for pool in self._pools.values())
            ]
            held = {version.folder for version in self._held.values()}
            self._past = [one for one in self._past if one not in unused and one.folder not in held]
            for one in unused:
                await in_own_thread(remove, one)


build: Any = VllmEngine
"""Function of `EngineKind` that `table` calls."""


def _served(published: WeightsPublished) -> Served:
    return published.base_model, None if published.weights_format == "lora" else published.model_group


def _key_of(settings: VllmSettings, env: Mapping[str, str]) -> str:
    variable = settings.api_key_variable
    if variable is None:
        return ""
    key = env.get(variable, "").strip()
    if not key or not key.isprintable():
        raise ModelError(f"engine.api_key_variable: the variable {variable} holds no key; export it")
    return key
