"""One vLLM server: which versions it has, and how tokens are asked of it."""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any, Literal

from rollstream.eventlog.http.http_json import HttpServer, Limit, TryAgainError, excerpt
from rollstream.producers.engines.base import Generation, GenerationRequest
from rollstream.producers.engines.vllm.answers import (
    LostVersionError,
    NamedVersions,
    choice_of,
    generation_of,
    parsed_answer,
    reading,
    spans_of,
)
from rollstream.producers.engines.vllm.asking import (
    TooFewToldError,
    asked,
    completed,
    generated,
    max_bytes_of,
    nums_requested,
)
from rollstream.producers.engines.vllm.base_model import BaseModel
from rollstream.producers.engines.vllm.open_calls import Gate, LeftError, OpenCalls, finished, loaded_in_time
from rollstream.producers.engines.vllm.probing import GENERATE, WEIGHT_CHECKER, WORKERS, Probed, ServerCalls
from rollstream.producers.engines.vllm.streamed import EVENT_BYTES, GivenTokens, StreamedAnswer
from rollstream.producers.engines.vllm.version_files import Client, Version
from rollstream.producers.engines.vllm.weight_sums import WeightSums
from rollstream.schemas.errors import ModelError

UNLABELLED = "default"
"""Label of the weights that a server began with."""
LOADING = "-loading"
"""Ends the label of weights that are being replaced, or whose replacement failed."""

logger = logging.getLogger(__name__)


class Server:
    """Requests to one server. `state` is set by its pool."""

    def __init__(
        self,
        http: HttpServer,
        client: Client,
        *,
        max_loras: int,
        load_timeout_s: float,
        health_timeout_s: float,
        sums: WeightSums | None = None,
    ) -> None:
        """`sums`: sums to compare full weights with, common to all servers of a pool."""
        self.http = http
        self.state: Literal["down", "pending_weights", "ready"] = "down"
        self.reason = "not asked yet"
        self.open: Counter[str] = Counter()
        """Requests in progress by version name."""
        self.versions: dict[str, Version] = {}
        """Versions that it was given and has proven, by name; of full weights the newest alone."""
        self.names: dict[str, None] = {}
        """Adapters that it has from rollstream, proven or left by an earlier process: each takes a slot. By age."""
        self._named = NamedVersions()
        self._unnamed = Gate()
        """Requests of full weights whose answers do not name them: the weights are replaced while there are none."""
        self.requests = OpenCalls()
        """Ended when the server is found dead: they can be made elsewhere."""
        self.until_down = OpenCalls()
        """Loads and checks: they end when the server goes down."""
        self.loading: str | None = None
        """Name of the version that it is loading, set by its pool."""
        self.unused = asyncio.Event()
        """Set when a version may have become unneeded."""
        self.num_failed = 0
        """Number of consecutive failed requests."""
        self.rests_until = 0.0
        """Monotonic time until which the server asked for a pause (Retry-After)."""
        self._calls = ServerCalls(http, health_timeout_s=health_timeout_s)
        self._probed = Probed()
        self._client = client
        self._max_loras = max_loras
        self._load_timeout_s = load_timeout_s
        self._load_limit = Limit(2 * load_timeout_s, "load_timeout_s")
        self._sums = sums
        self._changed = asyncio.Event()
        """Set when an adapter was unloaded, the state changed, or other versions are wanted."""
        self._lock = asyncio.Lock()
        self._parsing = asyncio.Lock()
        self._num_changing = 0
        """Number of tasks that hold the lock or wait for it."""

    @property
    def num_open(self) -> int:
        """Requests in progress."""
        return self.open.total()

    @property
    def max_length(self) -> int | None:
        """Maximum length of a sequence, in tokens, that it was started for."""
        return self._probed.max_length

    def forget(self) -> None:
        """Forget its versions: it may be another process from now on."""
        self.versions.clear()
        self.names.clear()
        self._probed = Probed()
        self._changed.set()

    def leave(self, state: Literal["down", "pending_weights"], reason: str) -> None:
        """It has to prove its versions again. Requests in progress go on, under names that it may still have."""
        self.state, self.reason = state, reason
        self.num_failed = 0
        self.versions.clear()
        self._changed.set()
        if state == "down":
            self.until_down.end(reason)

    def has(self, version: Version) -> bool:
        """Whether it was given the version, and has proven it."""
        return version.name in self.versions and version.name != self.loading

    def recheck(self) -> None:
        """Other versions are wanted: unload what is not, and do not wait for room for it."""
        self.unused.set()
        self._changed.set()

    @asynccontextmanager
    async def changing(self) -> AsyncIterator[None]:
        """Alone while versions come and go. A version that waits for room does so outside."""
        self._num_changing += 1
        try:
            async with self._lock:
                yield
        finally:
            self._num_changing -= 1

    # ---- looks ----

    async def connect(self, base: BaseModel, *, is_lora: bool, is_joined: bool) -> None:
        """Ask what it can do, and how it was started unless we did that.

        Raises TryAgainError while it does not answer, ModelError if it cannot be used.
        """
        probed = await self._calls.probe(base, is_lora=is_lora)
        if is_joined:
            probed = await self._calls.check_config(probed, max_loras=self._max_loras if is_lora else None)
        if self._sums is not None and WEIGHT_CHECKER not in probed.paths:
            raise self.http.error(f"does not offer {WEIGHT_CHECKER}; leave engine.check_weights out")
        self._probed = probed
        if is_lora:
            self.names = dict.fromkeys(filter(self._client.owns, await self._calls.adapters()))

    async def check(self) -> None:
        """Let the workers do nothing, and look whether the server still has its versions.

        While versions come and go, only the server is asked: its workers do one thing after the other, and loads have a
        limit of their own. Raises TryAgainError if it does not answer in time, LostVersionError.
        """
        if self._num_changing:
            await self._calls.check_health()
            return
        async with self.changing():
            await self._calls.check_workers(self._probed.paths)
            await self.prove()

    async def prove(self) -> None:
        """Raises LostVersionError if it does not have what it was given."""
        if not self.versions:
            return
        if all(one.is_lora for one in self.versions.values()):
            roots = await self._calls.adapters()
            self.names = dict.fromkeys(filter(self._client.owns, roots))
            lost = [name for name, one in self.versions.items() if roots.get(name) != str(one.folder)]
        else:
            label = await self._calls.label()
            lost = [name for name in self.versions if name != label]
        if lost:
            raise LostVersionError(f"no longer has {', '.join(lost)}")

    # ---- versions ----

    async def add_adapter(self, version: Version, is_kept: Callable[[str], bool]) -> None:
        """Load an adapter under its own name, once there is room, unless it is not kept by then.

        Raises ModelError, TryAgainError.
        """
        while is_kept(version.name):
            async with self.changing():
                if version.name in self.names or len(self.names) < self._max_loras:
                    async with loaded_in_time(version.name, self._load_timeout_s):
                        await self._load(version)
                    return
                self._changed.clear()
            self.unused.set()
            await self._changed.wait()
            if self.state == "down":
                raise TryAgainError(self.reason)

    async def unload_unused(self, is_kept: Callable[[str], bool]) -> None:
        """Unload rollstream's adapters that no request uses and nothing keeps. Raises ModelError, TryAgainError."""
        async with self.changing():
            for name in list(self.names):
                if not self.open[name] and not is_kept(name):
                    await self.drop_adapter(name)

    async def drop_adapter(self, name: str) -> None:
        """Unload a name that no request uses. Raises ModelError, TryAgainError."""
        self.versions.pop(name, None)
        body, limit = {"lora_name": name}, self._calls.health_limit
        answered = await self.http.sent("POST", "/v1/unload_lora_adapter", body, limit=limit)
        if answered.status != 404:
            self.http.checked(answered)
        self.names.pop(name, None)
        self._changed.set()

    async def reload(self, version: Version) -> None:
        """Take over full weights while requests in progress stand still, once those are over whose answers do not name
        weights; the limit of a request is that of this wait. Raises ModelError, TryAgainError, LostVersionError.

        1. pause, 2. take the label away, 3. load, 4. drop the prefix cache, 5. name the version, 6. go on, whatever
        happened. What raises in between leaves weights of which nothing is known, under a label that no version has:
        neither an answer nor a later look takes them for the version before.
        """
        if await self._calls.label() == version.name and not await self._differing(version):
            self._hold(version)
            return
        async with self._unnamed.closed():
            await self._reload_paused(version)
            await self.prove()

    async def _reload_paused(self, version: Version) -> None:
        mode = "keep" if GENERATE in self._probed.paths else "wait"  # only the former tells which tokens are whose
        limit = self._calls.health_limit if mode == "keep" else None
        is_cancelled = False
        try:
            await self._calls.post(f"/pause?mode={mode}", limit=limit)
            self._hold(version)
            async with loaded_in_time(version.name, self._load_timeout_s):
                await self._replace(version)
        except asyncio.CancelledError:
            is_cancelled = True
            raise
        finally:  # to its end: a late resume would disturb the next reload
            with suppress(*((TryAgainError, ModelError) if is_cancelled else ())):
                await finished(self._calls.resume(lambda: self.state == "down"))

    async def _replace(self, version: Version) -> None:
        await self._calls.post("/update_weight_version", {"new_version": f"{version.name}{LOADING}"})
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(version.folder)}}
        self.http.checked(await self._calls.load(WORKERS, body, version.name, limit=self._load_limit))
        await self._calls.reset_prefix_cache()
        if differing := await self._differing(version):
            raise self.http.error(
                f"has other weights than another server of {version.name}, such as {differing[0]}; start all with "
                "equal arguments on equal devices, or leave engine.check_weights out"
            )
        await self._calls.post("/update_weight_version", {"new_version": version.name})

    async def _differing(self, version: Version) -> list[str]:
        if self._sums is None:
            return []
        return self._sums.differing(version.name, await self._calls.weight_sums())

    # ---- tokens ----

    async def generate(
        self, request: GenerationRequest, version: Version, max_new_tokens: int, given: GivenTokens | None = None
    ) -> Generation:
        """`given`: gets the tokens while they are sampled, if the server sends them so.

        Raises TryAgainError or LostVersionError if another try may succeed, here or elsewhere, else ModelError.
        """
        *fewer, most = nums_requested(request, version.base)
        self.open[version.name] += 1
        try:
            async with self.requests.until_ended():
                for num_told in fewer:
                    try:
                        return await self._sampled(request, version, max_new_tokens, num_told, given)
                    except TooFewToldError:
                        logger.debug("server %s: more than %d ids were left to sample from", self.http.url, num_told)
                return await self._sampled(request, version, max_new_tokens, most, given)
        except TooFewToldError as error:
            raise self.http.error(str(error)) from error
        finally:
            self.open -= Counter((version.name,))
            if not self.open[version.name]:
                self.unused.set()

    async def _sampled(
        self,
        request: GenerationRequest,
        version: Version,
        max_new_tokens: int,
        num_told: int,
        given: GivenTokens | None,
    ) -> Generation:
        """Raises TooFewToldError if `num_told` ids are not all that were left to sample from."""
        sampling = asked(request, version.base, max_new_tokens, num_told)
        if GENERATE in self._probed.paths:
            return await self._generate(request, version, sampling, given)
        return await self._complete(request, version, sampling)

    async def _generate(
        self, request: GenerationRequest, version: Version, sampling: dict[str, Any], given: GivenTokens | None
    ) -> Generation:
        sampling = sampling | {"detokenize": False}
        body = {"model": version.model, "token_ids": list(request.prompt_ids), "sampling_params": sampling}
        streamed = StreamedAnswer(self.http, given) if given is not None and self._probed.streams else None
        max_bytes = max_bytes_of(request, sampling["logprobs"])
        read = await self._choice(GENERATE, body, request, version, max_bytes, streamed)
        choice, tokens = await parsed_answer(self.http, self._parsing, read, generated, request, version.base)
        with reading(self.http, choice):
            spans = spans_of(self.http, request, version, self._named, len(tokens.ids), choice.get("weight_versions"))
        return generation_of(self.http, tokens, spans, choice)

    async def _complete(self, request: GenerationRequest, version: Version, sampling: dict[str, Any]) -> Generation:
        body = sampling | {
            "model": version.model,
            "prompt": list(request.prompt_ids),
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        }
        max_bytes = max_bytes_of(request, sampling["logprobs"])
        async with self._unchanged(version) as sampled_by:
            read = await self._choice("/v1/completions", body, request, version, max_bytes)
        choice, tokens = await parsed_answer(self.http, self._parsing, read, completed, request, version.base)
        spans = spans_of(self.http, request, sampled_by, self._named, len(tokens.ids), None)
        return generation_of(self.http, tokens, spans, choice)

    @asynccontextmanager
    async def _unchanged(self, version: Version) -> AsyncIterator[Version]:
        """The version that samples in the block: full weights may have been replaced since the request was sent here.

        Raises LeftError if it has none by now, LostVersionError if it has others at the end, after a restart.
        """
        if version.is_lora:
            yield version
            return
        async with self._unnamed.within():
            if not self.versions:
                raise LeftError(self.reason)
            (newest,) = self.versions.values()
            yield newest
            if await self._calls.label() != newest.name:
                raise LostVersionError(f"no longer has {newest.name}")

    async def _choice(
        self,
        path: str,
        body: dict[str, Any],
        request: GenerationRequest,
        version: Version,
        max_bytes: int,
        streamed: StreamedAnswer | None = None,
    ) -> Callable[[], Any]:
        """The function that parses the choice of an answer."""
        if streamed is None:
            answered = await self.http.sent("POST", path, body, max_bytes=max_bytes)
        else:
            max_bytes += EVENT_BYTES * request.sampling.max_new_tokens
            body = body | {"stream": True}
            answered = await self.http.sent("POST", path, body, max_bytes=max_bytes, on_part=streamed.feed)
            if streamed.failure is None and streamed.has_begun:
                return lambda: streamed.choice
            answered = streamed.failure or answered
        if answered.status == 404 and version.is_lora:
            raise LostVersionError(f"no longer has {version.name}")
        whole = self.http.checked(answered)
        return lambda: choice_of(self.http, whole)

    def _hold(self, version: Version) -> None:
        """Have these full weights instead of those before."""
        self._named.add(version, self.open)
        self.versions = {version.name: version}

    async def _load(self, version: Version) -> None:
        if "/weight_info" in self._probed.paths and (label := await self._calls.label()) != UNLABELLED:
            raise self.http.error(f"has the full weights {label} below its adapters; restart it")
        most, rank = self._probed.max_lora_rank, (version.config or {}).get("r", 0)
        if most is not None and rank > most:
            raise self.http.error(f"takes adapters up to rank {most}; start it with --max-lora-rank {rank} or more")
        body = {"lora_name": version.name, "lora_path": str(version.folder)}
        answered = await self._calls.load("/v1/load_lora_adapter", body, version.name, limit=self._load_limit)
        roots = await self._calls.adapters()
        if version.name in roots:
            self.names[version.name] = None
        if roots.get(version.name) != str(version.folder):
            raise self.http.error(
                f"did not load {version.name} from {version.folder}: {excerpt(answered.body)}; it must see that folder "
                "by the same path (engine.folder)"
            )
        self.versions[version.name] = version
