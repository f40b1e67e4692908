"""The gateway over a rollout engine: OpenAI's chat completions, completions and models, and Anthropic's messages, for
one model group.

Every answer tells the exact token ids and the weight version (`protocol`). A prompt is the rendered chat,
tokenised afresh at every call; a stream begins when its answer is whole. Neither messages nor token are ever logged.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Any, Protocol

import orjson
from aiohttp import web

from rollstream.producers.engines.base import Engine, Generation, GenerationRequest
from rollstream.producers.openai import anthropic, completions
from rollstream.producers.openai.access import Access
from rollstream.producers.openai.protocol import Answer, answer_of, chunks, completion
from rollstream.producers.openai.requests import (
    ChatRequest,
    Refusal,
    SampledRequest,
    checked_request,
    json_of,
    parse_request,
)
from rollstream.schemas import ids
from rollstream.schemas.errors import ModelError, NotAllowedError, PromptTooLongError, RollstreamError
from rollstream.schemas.services import EndpointSettings
from rollstream.schemas.settings import Sampling

MIN_VERSION_HEADER = "X-Min-Version"
"""A weight version that the answer waits for; `min_version` in the body wins."""
MESSAGES = "/v1/messages"
MAX_BODY_BYTES = 2 * 1024 * 1024
"""Some 500,000 tokens: what a larger body holds fits no model, and is tokenised in the event loop."""

logger = logging.getLogger(__name__)


class ServedWeights(Protocol):
    """Who says when a weight version is there."""

    async def wait_for(self, model_group: str, version: int) -> None:
        """Return once the engine holds at least that version of the model group."""
        ...


class Endpoint:
    """Answers requests from a started engine whose weights are followed by another."""

    def __init__(
        self, engine: Engine, weights: ServedWeights, settings: EndpointSettings, token: str | None = None
    ) -> None:
        """With a `token`, requests must bear it."""
        self._engine = engine
        self._weights = weights
        self._settings = settings
        self._access = Access(settings, token)
        self._names = (settings.model_name, settings.model_group)
        self._has_told = False

    def application(self) -> web.Application:
        """The routes, with errors in OpenAI's shape, and in Anthropic's on its own."""
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[self._checked])
        app.router.add_get("/v1/models", self.models)
        app.router.add_get("/v1/models/{model:.+}", self.model)
        app.router.add_post("/v1/chat/completions", self.chat)
        app.router.add_post("/v1/completions", self.complete)
        app.router.add_post(MESSAGES, self.message)
        app.router.add_post(f"{MESSAGES}/count_tokens", self.count_tokens)
        return app

    async def models(self, request: web.Request) -> web.Response:
        """The one model, with its model group and the version that answers now (-1 before the first)."""
        return _json({"object": "list", "data": [self._model()]})

    async def model(self, request: web.Request) -> web.Response:
        """The same by its name."""
        self._check_name(request.match_info["model"])
        return _json(self._model())

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """One chat completion, of the newest weights or of `min_version` and later."""
        asked = parse_request(await request.read())
        answers = await self._answers(request, asked, lambda: self._chat_ids(asked), asked.tools_for_template())
        head = self._head("chatcmpl", asked, answers)
        if not asked.stream:
            return _json(completion(head, answers))
        return await _stream(request, chunks(head, answers, include_usage=asked.stream_options.include_usage))

    async def complete(self, request: web.Request) -> web.StreamResponse:
        """One completion of a text or of token ids, which are taken as they are."""
        asked = checked_request(completions.CompletionRequest, json_of(await request.read()))
        answers = await self._answers(request, asked, lambda: self._plain_ids(asked.content))
        head = self._head("cmpl", asked, answers)
        if not asked.stream:
            return _json(completions.completion(head, answers))
        pieces = completions.chunks(head, answers, include_usage=asked.stream_options.include_usage)
        return await _stream(request, pieces)

    async def message(self, request: web.Request) -> web.StreamResponse:
        """One message of Anthropic's kind."""
        given = anthropic.parse_messages(json_of(await request.read()))
        asked = given.chat()
        (answer,) = await self._answers(request, asked, lambda: self._chat_ids(asked), asked.tools_for_template())
        name = f"msg_{secrets.token_hex(12)}"
        if not given.stream:
            return _json(anthropic.message(name, asked.model, answer))
        return await _stream(request, anthropic.events(name, asked.model, answer), is_named=True)

    async def count_tokens(self, request: web.Request) -> web.Response:
        """How many tokens the prompt of a message has."""
        asked = anthropic.parse_count(json_of(await request.read())).chat()
        self._check_name(asked.model)
        await self._wait(0)
        return _json({"input_tokens": len(self._chat_ids(asked))})

    def _head(self, kind: str, asked: SampledRequest, answers: list[Answer]) -> dict[str, Any]:
        return {
            "id": f"{kind}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": asked.model,
            "system_fingerprint": f"{self._settings.model_group}@{answers[0].version}",
        }

    def _sampling(self, asked: SampledRequest) -> Sampling:
        """How an answer is sampled: by the trained model's name as the loss takes it, by its group's name freely."""
        settings = self._settings
        trained_at = settings.temperature if asked.model == settings.model_name else None
        sampling = asked.sampling(settings.max_new_tokens, trained_at)
        if trained_at is not None and not self._has_told and (sampling.top_p < 1 or sampling.top_k):
            self._has_told = True
            logger.warning(
                "requests ask for top_p %g, top_k %d: grpo compares a truncated distribution with the full one, so "
                "its ratios start below 1; remove both",
                sampling.top_p,
                sampling.top_k,
            )
        return sampling

    async def _answers(
        self,
        request: web.Request,
        asked: SampledRequest,
        prompt: Callable[[], list[int]],
        tools: list[dict[str, Any]] | None = None,
    ) -> list[Answer]:
        """`n` answers to the prompt, whose ids are asked for once the weights are there."""
        self._check_name(asked.model)
        sampling = self._sampling(asked)
        await self._wait(asked.min_version if asked.min_version is not None else _min_version(request))
        prompt_ids = prompt()
        group = self._settings.model_group
        seed = secrets.randbits(63) if asked.seed is None else asked.seed
        generations = await self._generate(
            [GenerationRequest(group, prompt_ids, sampling, ids.derive_seed(seed, index)) for index in range(asked.n)],
            param="messages" if isinstance(asked, ChatRequest) else "prompt",
        )
        tokenizer = self._engine.tokenizer(group)
        return [
            answer_of(generation, tokenizer, prompt_ids=prompt_ids, stop=asked.stop, has_tools=tools is not None)
            for generation in generations
        ]

    def _chat_ids(self, asked: ChatRequest) -> list[int]:
        found = self._plain_ids(self._render(asked))
        if not found:
            raise Refusal(400, "messages: the chat template makes no token of them", param="messages")
        return found

    def _plain_ids(self, content: str | list[int]) -> list[int]:
        if not isinstance(content, str):
            return content
        return self._engine.tokenizer(self._settings.model_group).encode(content, add_special_tokens=False)

    async def _generate(self, requests: list[GenerationRequest], *, param: str) -> list[Generation]:
        calls = [asyncio.ensure_future(self._engine.generate(request)) for request in requests]
        try:
            return list(await asyncio.gather(*calls))
        except ModelError as error:
            code = "context_length_exceeded" if isinstance(error, PromptTooLongError) else None
            raise Refusal(400, str(error), param=param, code=code) from error
        finally:
            for call in calls:
                call.cancel()

    def _render(self, asked: ChatRequest) -> str:
        messages = [message.for_template() for message in asked.messages]
        tools = asked.tools_for_template()
        options: dict[str, Any] = {} if tools is None else {"tools": tools}
        render = self._engine.tokenizer(self._settings.model_group).apply_chat_template
        try:
            text: str = render(messages, tokenize=False, add_generation_prompt=True, **options)
        except Exception as error:  # templates are programs of the model's maker and raise what they like
            line = " ".join(str(error).split())[:300]
            raise Refusal(400, f"messages: the chat template refuses them: {line}", param="messages") from error
        return text

    async def _wait(self, version: int) -> None:
        group, timeout_s = self._settings.model_group, self._settings.wait_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                await self._weights.wait_for(group, version)
        except NotAllowedError as error:
            raise Refusal(503, str(error)) from error
        except TimeoutError as error:
            held = self._engine.version(group)
            has = "no weights yet" if held < 0 else f"version {held}"
            raise Refusal(
                503, f"model group {group} has {has}; version {version} was not loaded within {timeout_s:g} s"
            ) from error

    def _check_name(self, name: str) -> None:
        if name not in self._names:
            known = " or ".join(repr(known) for known in self._names)
            raise Refusal(404, f"model {name!r} is not served here; use {known}", param="model", code="model_not_found")

    def _model(self) -> dict[str, Any]:
        group = self._settings.model_group
        return {
            "id": self._settings.model_name,
            "object": "model",
            "created": 0,
            "owned_by": "rollstream",
            "model_group": group,
            "version": self._engine.version(group),
        }

    @web.middleware
    async def _checked(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        try:
            self._access.check(request.method, request.headers)
            return await handler(request)
        except Refusal as refused:
            headers = {"WWW-Authenticate": "Bearer"} if refused.status == HTTPStatus.UNAUTHORIZED else None
            return _json(_error_body(request, refused), status=refused.status, headers=headers)
        except web.HTTPException as error:
            refused = Refusal(error.status, f"{request.method} {request.path}: {error.reason}")
            return _json(_error_body(request, refused), status=error.status)


@asynccontextmanager
async def listening(endpoint: Endpoint, host: str, port: int) -> AsyncIterator[int]:
    """Serve while inside; gives the port taken. Raises RollstreamError if the port cannot be had."""
    runner = web.AppRunner(
        endpoint.application(), access_log=None, handler_cancellation=True, shutdown_timeout=2.0, keepalive_timeout=600
    )
    await runner.setup()
    try:
        site = web.TCPSite(runner, host, port)
        try:
            await site.start()
        except OSError as error:
            raise port_in_use(host, port, error) from error
        yield int(runner.addresses[0][1])
    finally:
        await runner.cleanup()


def port_in_use(host: str, port: int, error: OSError) -> RollstreamError:
    """The error of a port that cannot be had."""
    reason = error.strerror or str(error)
    return RollstreamError(f"endpoint: port {port} of {host} cannot be used ({reason}); set another endpoint.port")


def _min_version(request: web.Request) -> int:
    given = request.headers.get(MIN_VERSION_HEADER, "0")
    if not given.isdecimal() or len(given) > 18:
        raise Refusal(400, f"header {MIN_VERSION_HEADER}: {given[:20]!r} is not a version", param=MIN_VERSION_HEADER)
    return int(given)


def _error_body(request: web.Request, refused: Refusal) -> dict[str, Any]:
    return anthropic.error_body(refused) if request.path.startswith(MESSAGES) else refused.body()


async def _stream(request: web.Request, pieces: list[dict[str, Any]], *, is_named: bool = False) -> web.StreamResponse:
    """`is_named`: each event is named by its `type`, and nothing follows the last, as Anthropic streams."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(request)
    for piece in pieces:
        name = f"event: {piece['type']}\n".encode() if is_named else b""
        await response.write(name + b"data: " + orjson.dumps(piece) + b"\n\n")
    if not is_named:
        await response.write(b"data: [DONE]\n\n")
    await response.write_eof()
    return response


def _json(body: object, *, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(body=orjson.dumps(body), status=status, headers=headers, content_type="application/json")
