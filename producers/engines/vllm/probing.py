"""Probes of a vLLM server: its properties and whether it can be used, found by requests, never by its version."""

import asyncio
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rollstream.eventlog.http.http_json import HttpServer, TryAgainError, UnreachableError, shown
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

ADAPTERS = frozenset({"/v1/load_lora_adapter", "/v1/unload_lora_adapter"})
FULL = frozenset(
    {"/pause", "/resume", "/collective_rpc", "/reset_prefix_cache", "/update_weight_version", "/weight_info"}
)
IS_PAUSED = "/is_paused"
GENERATE = "/inference/v1/generate"
WEIGHT_CHECKER = "/weight_checker"
RESET_TRIES = 20
RESUME_TRIES = 5
POLL_S = 0.05
NUM_TOP = 5
"""Number of the likeliest ids that a probe of log-probabilities requests: the most that OpenAI's API allows."""
TOLERANCE = 1e-4
"""Tolerance of log-probabilities, in nats."""

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
        self.health_timeout_s = health_timeout_s
        self._has_warned = False

    async def get(self, path: str) -> Any:
        """JSON of a 2xx answer. Raises TryAgainError, ModelError."""
        answered = await self.http.sent("GET", path, timeout_s=self.health_timeout_s)
        return self.http.parsed(self.http.checked(answered))

    async def post(self, path: str, body: dict[str, Any] | None = None, *, timeout_s: float | None = None) -> Any:
        """JSON of a 2xx answer, {} of an empty one. `timeout_s`: None: as long as a request may take."""
        answered = self.http.checked(await self.http.sent("POST", path, body, timeout_s=timeout_s))
        return self.http.parsed(answered) if answered else {}

    async def check_health(self) -> None:
        """Raises TryAgainError, ModelError unless the server answers; its workers are not asked."""
        self.http.checked(await self.http.sent("GET", "/health", timeout_s=self.health_timeout_s))

    async def label(self) -> str:
        """Label of the full weights that it has."""
        return str((await self.get("/weight_info"))["weight_version"])

    async def reset_prefix_cache(self) -> None:
        """Drop what was computed of the weights before. Raises TryAgainError, ModelError."""
        for _ in range(RESET_TRIES):
            if (await self.post("/reset_prefix_cache?reset_running_requests=true")).get("success", True):
                return
            await asyncio.sleep(POLL_S)
        raise self.http.error("does not drop its prefix cache, which holds the weights before; restart it")

    async def resume(self, is_down: Callable[[], bool]) -> None:
        """Let a paused server go on: as it answers nobody, it is asked several times, until it is known to be down.

        Raises TryAgainError, ModelError.
        """
        for left in reversed(range(RESUME_TRIES)):
            try:
                await self.post("/resume", timeout_s=self.health_timeout_s)
            except TryAgainError as error:
                if not left or isinstance(error, UnreachableError) or is_down():
                    raise  # who reaches it again resumes it
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
                f"gave no sums of its weights: {shown(found)}; leave engine.check_weights out"
            ) from error

    async def adapters(self) -> dict[str, str]:
        """Folder by name."""
        return {one["id"]: str(one.get("root")) for one in (await self.get("/v1/models"))["data"] if one.get("parent")}

    async def probe(self, base: BaseModel, *, is_lora: bool) -> Probed:
        """Ask what it can do, and let it go on if it stands still.

        Raises TryAgainError while it does not answer, ModelError if it cannot be used.
        """
        operations: Mapping[str, Any] = (await self.get("/openapi.json"))["paths"]
        paths = frozenset(operations)
        lacking = (ADAPTERS if is_lora else FULL) - paths
        if lacking:
            remedy = (
                "start it with --enable-lora, VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 and one API server"
                if is_lora
                else "start it with VLLM_SERVER_DEV_MODE=1, where only the producers reach it"
            )
            raise self.http.error(f"does not offer {', '.join(sorted(lacking))}; {remedy}")
        cards: list[Mapping[str, Any]] = [
            one for one in (await self.get("/v1/models"))["data"] if not one.get("parent")
        ]
        if base.path not in [one.get("root") for one in cards]:
            served = ", ".join(str(one.get("root")) for one in cards) or "no model"
            raise self.http.error(f"serves {served}; the run's base model is {base.path}: start it with that path")
        card = next(one for one in cards if one.get("root") == base.path)
        if card["id"] != base.path:
            raise self.http.error(f"calls its model {card['id']}; leave --served-model-name out")
        await self._check_replicas(paths)
        await self._resume_paused(paths)
        await self._check_logprobs(base)
        return Probed(paths, card.get("max_model_len"), streams=streams(operations.get(GENERATE)))

    async def check_config(self, probed: Probed, *, max_loras: int | None) -> Probed:
        """Check how a server that we did not start was started. Raises ModelError if it cannot be used."""
        config: Mapping[str, Any] | str = f"it does not offer {SERVER_INFO}"
        if SERVER_INFO in probed.paths:
            config = await read_config(self.http, timeout_s=self.health_timeout_s)
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
        if IS_PAUSED in paths and (await self.get(IS_PAUSED))["is_paused"]:
            await self.post("/resume", timeout_s=self.health_timeout_s)

    async def _check_replicas(self, paths: frozenset[str]) -> None:
        if "/get_world_size" not in paths:
            return
        every, one = [
            (await self.get(f"/get_world_size?include_dp={flag}"))["world_size"] for flag in ("true", "false")
        ]
        if every != one:
            raise self.http.error(replicas_error(every // one))

    async def _check_logprobs(self, base: BaseModel) -> None:
        """Refuse log-probabilities of the distribution before sampling's limits.

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
        found = await self.post("/v1/completions", body, timeout_s=self.health_timeout_s)
        logprobs = found["choices"][0]["logprobs"]
        (logprob,) = logprobs["token_logprobs"]
        top = next(iter(logprobs.get("top_logprobs") or ()), None) or {"": logprob}
        if not is_limited_to_largest(logprob, list(top.values())):
            raise self.http.error(RAW_LOGPROBS)


def is_limited_to_largest(logprob: float, top: Sequence[float]) -> bool:
    """Whether a token sampled with top_k=1 has its log-probability under what top_k left, not under all ids.

    `top`: of the NUM_TOP likeliest ids. If all of them are equal, more may be, and their number is not known.
    """
    left = [one for one in top if one > NO_LOGPROB]
    are_equal = all(abs(one - logprob) <= TOLERANCE for one in left)
    return are_equal and (len(left) >= NUM_TOP or abs(logprob + math.log(max(1, len(left)))) <= TOLERANCE)
