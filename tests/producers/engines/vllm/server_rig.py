"""A small HTTP server with vLLM's paths, in the test's own loop: it holds labels and adapters, and fails as it is told.

It samples nothing: every answer is the token 5 with probability one. Real vLLM is tried by `make test-vllm`.
"""

import asyncio
import json
import math
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import torch
from aiohttp import web
from safetensors.torch import load_file, save_file

from rollstream.producers.engines.base import Generation, GenerationRequest
from rollstream.producers.engines.vllm import VllmEngine
from rollstream.producers.engines.vllm.vllm_server import LOADING
from rollstream.schemas.engine_settings import VllmSettings
from rollstream.schemas.events import WeightsPublished
from rollstream.schemas.settings import Sampling
from tests.producers.engines.engine_rig import GROUP, published

FULL = ("/pause", "/resume", "/is_paused", "/collective_rpc", "/reset_prefix_cache", "/update_weight_version")
ADAPTERS = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")
ASKED_OF = ("/weight_info", "/get_world_size", "/server_info", "/weight_checker")
LOADS = ("/v1/load_lora_adapter", "reload_weights")
GENERATE, CHECK = "/inference/v1/generate", "check_health"
ASKED = (GENERATE, "/v1/completions")
ALL = "*"
TOKEN = 5


class StandInServer:
    """A stand-in for a vLLM server: its state, and its behaviour."""

    def __init__(self, base: Path) -> None:
        self.base = str(base)
        self.without: set[str] = set()
        """Paths that it does not offer."""
        self.num_replicas = 1
        self.config: dict[str, Any] = {}
        """Answer of `/server_info`."""
        self.logprob = 0.0
        self.top: dict[str, float] | None = None
        """Log-probabilities of the likeliest ids that a look is answered with."""
        self.left = 1
        """Ids of equal probability that each token is sampled from."""
        self.failing: dict[str, int] = {}
        """Status by path, or by method of /collective_rpc, of answers that fail."""
        self.refused = ""
        """Part of the names of versions whose load it answers with 500."""
        self.foreign: dict[str, Any] = {}
        """JSON, or HTML as bytes, by path that it answers with, status 200, in place of its own."""
        self.failing_next: dict[str, list[tuple[int, dict[str, str]]]] = {}
        """Status and headers of the next answers by path; those after them succeed."""
        self.weights = 0
        """State by which `/weight_checker` distinguishes weights."""
        self.loads = 0
        """Value of `weights` after a load."""
        self.keeps_label = False
        """Forgets which label it is given."""
        self.served_name = self.base
        self.held = asyncio.Event()
        """Tokens are answered while it is set."""
        self.held.set()
        self.sampled = [TOKEN, TOKEN]
        self.streams = True
        self.stops_after: int | None = None
        """Tokens after which a stream waits for `held`."""
        self.breaks_after: int | None = None
        """Tokens after which the next stream breaks off."""
        self.fails_after: int | None = None
        """Tokens after which the next stream has an error instead."""
        self.silent: set[str] = set()
        """Paths, or methods of /collective_rpc, that are not answered while they are here; ALL: none is."""
        self.slow_s: dict[str, float] = {}
        """Seconds by path that an answer takes."""
        self.asked: Counter[str] = Counter()
        """Requests by path, or by method of /collective_rpc."""
        self.labels: list[str] = []
        """Labels that it was given, the newest last."""
        self.begun: list[str] = []
        """Labels of the weights by which it began to sample, by request."""
        self.url = ""
        self._runner: web.AppRunner | None = None
        self.restarted()

    def restarted(self) -> None:
        """Have what a new process has: the base weights."""
        self.label = "default"
        self.adapters: dict[str, str] = {}
        self.is_paused = False

    async def start(self, port: int = 0) -> None:
        """Listen on a free port, or on the one before."""
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(app, shutdown_timeout=0.01)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", port)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def stop(self) -> None:
        """End it with all its connections."""
        if self._runner is not None:
            await self._runner.cleanup()

    async def return_(self) -> None:
        """Another process at the same address."""
        self.restarted()
        await self.start(int(self.url.rpartition(":")[2]))

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        path = request.path
        body: dict[str, Any] = await request.json() if request.can_read_body else {}
        called = str(body.get("method", path))
        self.asked[called] += 1
        while self.silent & {called, ALL}:
            await asyncio.sleep(0.01)
        await asyncio.sleep(self.slow_s.get(called, 0.0))
        if path in self.without:
            return web.Response(status=404)
        if called in self.failing:
            return web.json_response({"error": "it failed"}, status=self.failing[called])
        if self.refused and called in LOADS and self.refused in json.dumps(body):
            return web.json_response({"error": "it does not fit"}, status=500)
        if called in self.foreign:
            answer = self.foreign[called]
            is_html = isinstance(answer, bytes)
            return web.Response(body=answer, content_type="text/html") if is_html else web.json_response(answer)
        if self.failing_next.get(called):
            status, headers = self.failing_next[called].pop(0)
            return web.json_response({"error": "it failed once"}, status=status, headers=headers)
        while path in ASKED and self.is_paused:
            await asyncio.sleep(0.01)
        if path in ASKED and body.get("max_tokens") != 1:
            return await self._tokens(body, request)
        return web.json_response(self._described(path, body, request))

    async def _tokens(self, body: dict[str, Any], request: web.Request) -> web.StreamResponse:
        self.begun.append(self.label)
        before = [*self.labels, self.label]
        if self.stops_after is None:
            await self.held.wait()
        model = body["model"]
        if model != self.base and model not in self.adapters:
            return web.json_response({"error": "no such model"}, status=404)
        if body.get("stream"):
            return await self._stream(before, request)
        choice = self._choice(self.sampled) | self._end(before)
        num_told = (body.get("sampling_params") or body)["logprobs"]
        top = dict.fromkeys(range(TOKEN, TOKEN + min(self.left, num_told)), -math.log(self.left))
        for one in choice["logprobs"]["content"]:
            one["top_logprobs"] = [{"token_id": token, "logprob": value} for token, value in top.items()]
        named = {f"token_id:{token}": value for token, value in top.items()}
        choice["logprobs"]["top_logprobs"] = [named] * len(self.sampled)
        choice["logprobs"]["token_logprobs"] = [0.0] * len(self.sampled)
        return web.json_response({"choices": [choice]})

    async def _stream(self, before: list[str], request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for index, token in enumerate(self.sampled):
            if index == self.stops_after:
                await self.held.wait()
            if index == self.breaks_after:
                self.breaks_after = None
                assert request.transport is not None
                request.transport.close()
                return response
            choice = self._choice([token])
            if index == len(self.sampled) - 1:
                choice |= self._end(before)
            event: dict[str, Any] = {"choices": [choice]}
            if index == self.fails_after:
                self.fails_after, event = None, {"error": {"message": "it failed", "code": 500}}
            await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
            if "error" in event:
                break
        await response.write(b"data: [DONE]\n\n")
        return response

    def _choice(self, ids: list[int]) -> dict[str, Any]:
        content: list[dict[str, Any]] = []
        for one in ids:
            name = f"token_id:{one}"
            content.append({"token": name, "token_id": one, "logprob": 0.0, "bytes": [*name.encode()]})
        return {"token_ids": ids, "logprobs": {"content": content}}

    def _end(self, before: list[str]) -> dict[str, Any]:
        """`before`: its labels when the request began. Each since then sampled one token, and the last one the rest."""
        since = [one for one in self.labels[len(before) - 1 :] if not one.endswith(LOADING)]
        names = [before[-1], *since[:-1], self.label]
        ends = [*range(1, len(names)), len(self.sampled)]
        versions = [
            {"version": one, "start": at, "end": end} for at, (one, end) in enumerate(zip(names, ends, strict=True))
        ]
        return {"finish_reason": "length", "weight_versions": versions}

    def _described(self, path: str, body: dict[str, Any], request: web.Request) -> Any:
        if path == "/openapi.json":
            offered = {*FULL, *ADAPTERS, *ASKED, *ASKED_OF} - self.without
            answers = {"200": {"content": {"text/event-stream": {}} if self.streams else {}}}
            return {"paths": {path: {"post": {"responses": answers}} for path in offered}}
        if path == "/v1/models":
            adapters = [{"id": name, "root": root, "parent": self.base} for name, root in self.adapters.items()]
            return {"data": [{"id": self.served_name, "root": self.base, "max_model_len": 512}, *adapters]}
        if path == "/server_info":
            return {"vllm_config": self.config}
        if path == "/get_world_size":
            return {"world_size": self.num_replicas if request.query["include_dp"] == "true" else 1}
        if path in ("/pause", "/resume"):
            self.is_paused = path == "/pause"
        if path == "/is_paused":
            return {"is_paused": self.is_paused}
        if path == "/weight_info":
            return {"weight_version": self.label}
        if path == "/weight_checker":
            return {"checksums": {"tp0:head": "same", "tp0:norm": str(self.weights)}}
        if body.get("method") == "reload_weights":
            self.weights = self.loads
        if path == "/update_weight_version" and not self.keeps_label:
            self.label = body["new_version"]
            self.labels.append(self.label)
        elif path == "/v1/load_lora_adapter" and Path(body["lora_path"]).is_dir():
            self.adapters[body["lora_name"]] = body["lora_path"]
        elif path == "/v1/unload_lora_adapter":
            self.adapters.pop(body["lora_name"], None)
        tops = {} if self.top is None else {"top_logprobs": [self.top]}
        return {"choices": [{"logprobs": {"token_logprobs": [self.logprob], **tops}}]}


def new_engine(folder: Path, *servers: StandInServer, **settings: Any) -> VllmEngine:
    """Not started."""
    chosen: dict[str, Any] = {"health_interval_s": 0.1, "health_timeout_s": 5.0, "start_timeout_s": 10.0} | settings
    return VllmEngine(VllmSettings(base_urls=tuple(server.url for server in servers), folder=folder, **chosen), {})


@asynccontextmanager
async def engine_over(tmp_path: Path, *servers: StandInServer, **settings: Any) -> AsyncIterator[VllmEngine]:
    """An engine over servers that have begun to listen; all end with the block."""
    for server in servers:
        await server.start()
    engine = new_engine(tmp_path / "vllm", *servers, **settings)
    try:
        await engine.start()
        yield engine
    finally:
        await engine.close()
        for server in servers:
            server.held.set()
            server.silent.clear()
            await server.stop()


def full(base: Path, tmp_path: Path, version: int) -> tuple[WeightsPublished, Path]:
    """A version of all weights."""
    path = tmp_path / f"full-{version}.safetensors"
    state = load_file(base / "model.safetensors")
    save_file({name: value + version for name, value in state.items()}, path)
    return published(base, version), path


def lora(
    base: Path, tmp_path: Path, version: int, *, group: str = GROUP, **changes: Any
) -> tuple[WeightsPublished, Path]:
    """A version of an adapter of rank 4; `changes` are of its configuration."""
    path = tmp_path / f"lora-{version}.safetensors"
    tensors: dict[str, torch.Tensor] = {}
    for name, value in load_file(base / "model.safetensors").items():
        if name.endswith("q_proj.weight"):
            stem, (width_out, width_in) = name.removesuffix(".weight"), value.shape
            tensors[f"base_model.model.{stem}.lora_A.weight"] = torch.zeros(4, width_in)
            tensors[f"base_model.model.{stem}.lora_B.weight"] = torch.zeros(width_out, 4)
    save_file(tensors, path)
    config: dict[str, Any] = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    return published(base, version, group, weights_format="lora", lora=config | changes), path


def request(
    rollout_id: str = "",
    *,
    group: str = GROUP,
    on_tokens: Callable[[Sequence[int]], None] | None = None,
    num_tokens: int = 2,
) -> GenerationRequest:
    """A request for a few tokens."""
    return GenerationRequest(group, [3, 4], Sampling(max_new_tokens=num_tokens), 1, rollout_id, on_tokens)


async def held_open(engine: VllmEngine, server: StandInServer, group: str = GROUP) -> "asyncio.Task[Generation]":
    """A request that the server has begun, and does not end."""
    server.held.clear()
    before = len(server.begun)
    call = asyncio.create_task(engine.generate(request(group=group)))
    await wait_until(lambda: len(server.begun) > before)
    return call


async def joined(engine: VllmEngine, *servers: StandInServer) -> None:
    """Until they are ready."""
    await wait_until(lambda: all(engine.states()[one.url] == "ready" for one in servers))


def versions_of(generation: Generation) -> list[int]:
    """Version by span."""
    return [span.version for span in generation.spans]


async def wait_until(is_so: Callable[[], object]) -> None:
    """Wait for it; pytest's own limit ends a test that waits in vain."""
    while not is_so():
        await asyncio.sleep(0.01)
