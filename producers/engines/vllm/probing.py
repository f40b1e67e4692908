"""Probes of a vLLM server: its properties and whether it can be used, found by requests, never by its version."""

import asyncio
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from rollstream.eventlog.http.http_json import (
    HttpAnswer,
    HttpServer,
    Limit,
    TryAgainError,
    UnreachableError,
    excerpt,
    parsed_json,
)
from rollstream.producers.engines.vllm.answers import RefusedVersionError
from rollstream.producers.engines.vllm.asking import NO_LOGPROB
from rollstream.producers.engines.vllm.base_model import BaseModel
from rollstream.producers.engines.vllm.server_config import (
    RAW_LOGPROBS,
    SERVER_INFO,
    fault_of,
    number_in,
    read_config,
    replicas_error,
)
from rollstream.producers.engines.vllm.streamed import streams

PAUSE, IS_PAUSED = "/pause", "/is_paused"
WORKERS = "/collective_rpc"
ADAPTERS = frozenset({"/v1/load_lora_adapter", "/v1/unload_lora_adapter"})
FULL = frozenset({PAUSE, "/resume", WORKERS, "/reset_prefix_cache", "/update_weight_version", "/weight_info"})
GENERATE = "/inference/v1/generate"
WEIGHT_CHECKER = "/weight_checker"
LOAD_TRIES = 3
LOAD_PAUSE_S = 1.0
"""Seconds before the second try to load a version, a quarter of those before the third: memory may be short then."""
RESET_TRIES = 20
RESUME_TRIES = 5
POLL_S = 0.05
NUM_TOP = 5
"""Number of the likeliest ids that a probe of log-probabilities requests: the most that OpenAI's API allows."""
TOLERANCE = 1e-4
"""Tolerance of log-probabilities, in nats."""

T = TypeVar("T")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Probed:
    """Properties that a server reported."""

    paths: frozenset[str] = frozenset()
    max_length: int | None = None
    max_lora_rank: int | None = None
    streams: bool = False
    """Whether tokens are sent while they are sampled."""


class ServerCalls:
    """Calls to one server that are answered at once."""

    def __init__(self, http: HttpServer, *, health_timeout_s: float) -> None:
        self.http = http
        self.health_limit = Limit(health_timeout_s, "health_timeout_s")
        self._has_warned = False

    async def get(self, path: str, read: Callable[[Any], T]) -> T:
        """Part of the JSON of a 2xx answer that `read` takes. Raises TryAgainError, ModelError."""
        answered = await self.http.sent("GET", path, limit=self.health_limit)
        return read_from(path, read_from(path, self.http.checked(answered), parsed_json), read)

    async def post(self, path: str, body: dict[str, Any] | None = None, *, limit: Limit | None = None) -> Any:
        """JSON of a 2xx answer, {} of an empty one. `limit`: None: that of a request."""
        answered = self.http.checked(await self.http.sent("POST", path, body, limit=limit))
        return read_from(path, answered, parsed_json) if answered else {}

    async def check_health(self) -> None:
        """Raises TryAgainError, ModelError unless the server answers; its workers are not asked."""
        self.http.checked(await self.http.sent("GET", "/health", limit=self.health_limit))

    async def check_workers(self, paths: frozenset[str]) -> None:
        """Let the workers do nothing, if the server offers that; else only the server is asked.

        Raises TryAgainError, ModelError.
        """
        if WORKERS in paths:
            await self.post(WORKERS, {"method": "check_health"}, limit=self.health_limit)
        else:
            await self.check_health()

    async def load(self, path: str, body: dict[str, Any], name: str, *, limit: Limit) -> HttpAnswer:
        """Answer to the request to load a version: a 2xx, or a 4xx.

        vLLM answers 500 to nearly all that it cannot load, and goes on: only its health tells that from a failure of
        the server. Raises RefusedVersionError after several of these, TryAgainError, ModelError.
        """
        num_tries = 0
        while True:
            answered = await self.http.sent("POST", path, body, limit=limit)
            if answered.status > 500:
                self.http.checked(answered)
            if answered.status != 500:
                return answered
            await self.check_health()
            num_tries += 1
            if num_tries == LOAD_TRIES:
                fault = f"did not load {name} in {num_tries} tries: it answered 500 {excerpt(answered.body)}"
                raise RefusedVersionError(str(self.http.error(f"{fault}; look into its log")))
            await asyncio.sleep(LOAD_PAUSE_S * 4 ** (num_tries - 1))

    async def label(self) -> str:
        """Label of the full weights that it has."""
        return await self.get("/weight_info", lambda found: str(found["weight_version"]))

    async def reset_prefix_cache(self) -> None:
        """Drop what was computed of the weights before. Raises TryAgainError, ModelError."""
        path = "/reset_prefix_cache?reset_running_requests=true"
        for _ in range(RESET_TRIES):
            if read_from(path, await self.post(path), lambda found: found.get("success", True)):
                return
            await asyncio.sleep(POLL_S)
        raise self.http.error("does not drop its prefix cache, which holds the weights before; restart it")

    async def resume(self, is_down: Callable[[], bool]) -> None:
        """Let a paused server go on: as it answers nobody, it is asked several times, until it is known to be down.

        Raises TryAgainError, ModelError.
        """
        for left in reversed(range(RESUME_TRIES)):
            try:
                await self.post("/resume", limit=self.health_limit)
            except TryAgainError as error:
                if not left or isinstance(error, UnreachableError) or is_down():
                    raise  # it is resumed once it is reached again
                await asyncio.sleep(POLL_S)
            else:
                return

    async def weight_sums(self) -> dict[str, str]:
        """sha256 by parameter, of all workers. Raises TryAgainError, ModelError."""
        found = await self.post(WEIGHT_CHECKER, {"action": "checksum"})
        try:
            return {str(name): str(value) for name, value in found["checksums"].items()}
        except (AttributeError, LookupError, TypeError) as error:
            raise self.http.error(
                f"gave no sums of its weights: {excerpt(found)}; leave engine.check_weights out"
            ) from error

    async def adapters(self) -> dict[str, str]:
        """Folder by name."""
        return {one["id"]: str(one.get("root")) for one in await self._cards() if one.get("parent")}

    async def _cards(self) -> list[Mapping[str, Any]]:
        """Descriptions of its models, each with an `id`."""
        return await self.get("/v1/models", lambda found: [{"id": str(one["id"]), **one} for one in found["data"]])

    async def probe(self, base: BaseModel, *, is_lora: bool) -> Probed:
        """Ask what it can do, and let it go on if it stands still.

        Raises TryAgainError while it does not answer, ModelError if it cannot be used.
        """
        paths, sends_events = await self.get(
            "/openapi.json", lambda found: (frozenset(found["paths"]), streams(found["paths"].get(GENERATE)))
        )
        lacking = (ADAPTERS if is_lora else FULL) - paths
        if lacking:
            remedy = (
                "start it with --enable-lora, VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 and one API server"
                if is_lora
                else "start it with VLLM_SERVER_DEV_MODE=1, where only the producers reach it"
            )
            raise self.http.error(f"does not offer {', '.join(sorted(lacking))}; {remedy}")
        cards = [one for one in await self._cards() if not one.get("parent")]
        if base.path not in [one.get("root") for one in cards]:
            served = ", ".join(str(one.get("root")) for one in cards) or "no model"
            raise self.http.error(f"serves {served}; the run's base model is {base.path}: start it with that path")
        card = next(one for one in cards if one.get("root") == base.path)
        if card["id"] != base.path:
            raise self.http.error(f"calls its model {card['id']}; leave --served-model-name out")
        await self._check_replicas(paths)
        await self._resume_paused(paths)
        await self.check_workers(paths)
        await self._check_logprobs(base, may_be_paused=PAUSE in paths and IS_PAUSED not in paths)
        max_length = card.get("max_model_len")
        return Probed(paths, max_length if isinstance(max_length, int) else None, streams=sends_events)

    async def check_config(self, probed: Probed, *, max_loras: int | None) -> Probed:
        """Check how a server that we did not start was started. Raises ModelError if it cannot be used."""
        config: Mapping[str, Any] | str = f"it does not offer {SERVER_INFO}"
        if SERVER_INFO in probed.paths:
            config = await read_config(self.http, limit=self.health_limit)
        if isinstance(config, str):
            if not self._has_warned:
                logger.warning(
                    "server %s does not report how it was started (%s), so it could not be verified that it has one "
                    "API server process%s; set VLLM_SERVER_DEV_MODE=1 for it",
                    self.http.url,
                    config,
                    "" if max_loras is None else f" and --max-loras {max_loras} or more",
                )
            self._has_warned = True
            return probed
        if fault := fault_of(config, max_loras=max_loras):
            raise self.http.error(fault)
        return replace(probed, max_lora_rank=number_in(config, "lora_config", "max_lora_rank"))

    async def _resume_paused(self, paths: frozenset[str]) -> None:
        """Resume a server that was paused for a reload by a process that was killed before the end. The server's label
        shows that its weights are not to be used.
        """
        if IS_PAUSED in paths and await self.get(IS_PAUSED, lambda found: bool(found["is_paused"])):
            await self.post("/resume", limit=self.health_limit)

    async def _check_replicas(self, paths: frozenset[str]) -> None:
        if "/get_world_size" not in paths:
            return
        every, one = [
            await self.get(f"/get_world_size?include_dp={flag}", lambda found: int(found["world_size"]))
            for flag in ("true", "false")
        ]
        if every != one:
            raise self.http.error(replicas_error(every // max(1, one)))

    async def _check_logprobs(self, base: BaseModel, *, may_be_paused: bool) -> None:
        """Refuse log-probabilities of the distribution before sampling's limits.

        The look waits in the server's queue behind everyone's requests, so it may take as long as one of them.
        `may_be_paused`: it may stand still, and nothing tells: then it is not waited for longer than for its health.

        top_k=1 leaves the ids of the largest logit, one or several equal ones: each has probability 1 / their number,
        and every other id has 0.
        """
        body = {
            "model": base.path,
            "prompt": [base.end_ids[0]],
            "max_tokens": 1,
            "logprobs": NUM_TOP,
            "top_k": 1,
            "return_tokens_as_token_ids": True,  # two ids can have one text
        }
        path = "/v1/completions"
        found = await self.post(path, body, limit=self.health_limit if may_be_paused else None)
        if not is_limited_to_largest(*read_from(path, found, _first_logprobs)):
            raise self.http.error(RAW_LOGPROBS)


def read_from(path: str, found: Any, read: Callable[[Any], T]) -> T:
    """Part of an answer that `read` takes. Raises TryAgainError for one of another form: a proxy, or a server that
    starts, can answer 200 in vLLM's place.
    """
    try:
        return read(found)
    except (AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise TryAgainError(f"gave an answer of another form than vLLM's to {path}: {excerpt(found)}") from error


def _first_logprobs(found: Any) -> tuple[float, list[float]]:
    """Log-probability of the one token of a completion, and those of its likeliest ids."""
    logprobs = found["choices"][0]["logprobs"]
    (logprob,) = logprobs["token_logprobs"]
    top = next(iter(logprobs.get("top_logprobs") or ()), None) or {"": logprob}
    return float(logprob), [float(one) for one in top.values()]


def is_limited_to_largest(logprob: float, top: Sequence[float]) -> bool:
    """Whether a token sampled with top_k=1 has its log-probability under what top_k left, not under all ids.

    `top`: of the NUM_TOP likeliest ids. If all of them are equal, more may be, and their number is not known.
    """
    left = [one for one in top if one > NO_LOGPROB]
    are_equal = all(abs(one - logprob) <= TOLERANCE for one in left)
    return are_equal and (len(left) >= NUM_TOP or abs(logprob + math.log(max(1, len(left)))) <= TOLERANCE)
