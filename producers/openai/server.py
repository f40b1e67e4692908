"""The gateway over a rollout engine: OpenAI's chat completions, completions and models, and Anthropic's messages, for
one model group.

Every answer tells the exact token ids and the weight version (`protocol`). A prompt is the rendered chat,
tokenised afresh at every call. Neither messages nor token are ever logged.
"""

import asyncio
import functools
import logging
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

from aiohttp import web

from rollstream.eventlog.files import read_json
from rollstream.producers.engines.base import Engine, Generation, GenerationRequest, plain_ids
from rollstream.producers.openai.access import Access, KeyLimits
from rollstream.producers.openai.completions import CompletionRequest
from rollstream.producers.openai.options import is_alias
from rollstream.producers.openai.protocol import answer_of
from rollstream.producers.openai.requests import ENGINE_ERROR, ChatRequest, Refusal, SampledRequest
from rollstream.producers.openai.routes import Routes
from rollstream.producers.openai.stream_words import Answered
from rollstream.producers.openai.streaming import OnText, TextStream, on_tokens_of
from rollstream.producers.rollout.gateway_interface import by_template
from rollstream.schemas import ids
from rollstream.schemas.errors import (
    ChatTemplateError,
    ModelError,
    NotAllowedError,
    PromptRefusedError,
    PromptTooLongError,
    RollstreamError,
)
from rollstream.schemas.services import EndpointSettings
from rollstream.schemas.settings import Sampling

MIN_VERSION_HEADER = "X-Min-Version"
"""A weight version that the answer waits for; `min_version` in the body wins."""

logger = logging.getLogger(__name__)
_connections = logging.getLogger(f"{__name__}.connections")
"""Requests that are not HTTP, and connections that fail."""


def _without_request(record: logging.LogRecord) -> bool:
    """Let a log record pass without the part of a request that cannot be read: it may hold a key."""
    record.exc_info = record.exc_text = None
    record.levelno, record.levelname = logging.INFO, logging.getLevelName(logging.INFO)
    return True


_connections.addFilter(_without_request)


class ServedWeights(Protocol):
    """Source of weight versions that the endpoint can wait for."""

    async def wait_for(self, model_group: str, version: int) -> None:
        """Return once the engine holds at least that version of the model group."""
        ...


class Endpoint(Routes):
    """Answers requests from a started engine whose weights are followed by another."""

    def __init__(
        self, engine: Engine, weights: ServedWeights, settings: EndpointSettings, token: str | None = None
    ) -> None:
        """With a `token`, requests must carry it."""
        super().__init__(KeyLimits(settings.requests_per_minute, settings.calls_per_key))
        self._engine = engine
        self._weights = weights
        self._settings = settings
        self._access = Access(settings.host, settings.allowed_hosts, token)
        self._names = (settings.model_name, settings.model_group)
        self._has_told = False

    def check(self, request: web.Request) -> str:
        """Raises Refusal: see `Access.check`."""
        return self._access.check(request.method, request.headers)

    async def too_many(self, request: web.Request) -> None:
        """Nothing: no answer is kept here."""

    async def count(self, request: web.Request, asked: ChatRequest) -> int:
        """Number of the prompt's tokens, once there are weights."""
        self._check_model(asked.model)
        await self._wait(0)
        return len(self._chat_ids(asked))

    def _sampling(self, asked: SampledRequest) -> Sampling:
        """Sampling settings of an answer: those that the loss assumes for the trained model's name, free ones for its
        group's name.
        """
        settings = self._settings
        trained_at = settings.temperature if asked.model == settings.model_name else None
        sampling = asked.sampling(settings.max_new_tokens, trained_at)
        is_compared = trained_at is not None and bool(settings.algorithm)
        if is_compared and not self._has_told and (sampling.top_p < 1 or sampling.top_k):
            self._has_told = True
            logger.warning(
                "requests ask for top_p %g, top_k %d: %s compares a truncated distribution with the full one, so "
                "its ratios start below 1; remove both",
                sampling.top_p,
                sampling.top_k,
                settings.algorithm,
            )
        return sampling

    async def answer(
        self, request: web.Request, asked: ChatRequest | CompletionRequest, on_text: OnText | None = None
    ) -> Answered:
        """`n` answers to the prompt, whose ids are made once the weights are there."""
        self._check_model(asked.model)
        asked.check_enforced()
        sampling = self._sampling(asked)
        await self._wait(asked.min_version if asked.min_version is not None else _min_version(request))
        is_chat = isinstance(asked, ChatRequest)
        prompt_ids = self._chat_ids(asked) if is_chat else self._plain_ids(asked.content)
        has_tools = is_chat and asked.tools_for_template() is not None
        group = self._settings.model_group
        seed = secrets.randbits(63) if asked.seed is None else asked.seed
        tokenizer = self._engine.tokenizer(group)
        streams = [TextStream(tokenizer, asked.stop, has_tools=has_tools) for _ in range(asked.n)]
        on_tokens = None if on_text is None else on_tokens_of(streams, on_text)
        generations = await self._generate(
            [
                GenerationRequest(
                    group,
                    prompt_ids,
                    sampling,
                    ids.derive_seed(seed, index),
                    on_tokens=None if on_tokens is None else functools.partial(on_tokens, index),
                )
                for index in range(asked.n)
            ],
            param=asked.PROMPT_KEY,
        )
        call_id = secrets.token_hex(12)
        made = functools.partial(
            answer_of, model_group=group, prompt_ids=prompt_ids, stop=asked.stop, has_tools=has_tools
        )
        answers = [made(one, tokenizer, salt=f"{call_id}/{index}") for index, one in enumerate(generations)]
        return Answered(answers, call_id, int(time.time()))

    def _chat_ids(self, asked: ChatRequest) -> list[int]:
        tokenizer = self._engine.tokenizer(self._settings.model_group)
        found = tokenizer.encode(self._render(asked), add_special_tokens=False)
        if not found:
            raise Refusal(400, "messages: the chat template produces no tokens for them; add content", param="messages")
        return found

    def _plain_ids(self, content: str | list[int]) -> list[int]:
        if not isinstance(content, str):
            return content
        return plain_ids(self._engine.tokenizer(self._settings.model_group), content)

    async def _generate(self, requests: list[GenerationRequest], *, param: str) -> list[Generation]:
        calls = [asyncio.ensure_future(self._engine.generate(request)) for request in requests]
        try:
            return list(await asyncio.gather(*calls))
        except PromptRefusedError as error:
            code = "context_length_exceeded" if isinstance(error, PromptTooLongError) else None
            raise Refusal(400, str(error), param=error.param or param, code=code) from error
        except ModelError as error:
            raise Refusal(500, str(error), code=ENGINE_ERROR) from error
        finally:
            for call in calls:
                call.cancel()

    def _render(self, asked: ChatRequest) -> str:
        messages = [message.for_template() for message in asked.messages]
        tools = asked.tools_for_template()
        options: dict[str, Any] = {} if tools is None else {"tools": tools}
        try:
            return by_template(messages, self._engine.tokenizer(self._settings.model_group), **options)
        except ChatTemplateError as error:
            raise Refusal(400, str(error), param="messages") from error

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
                503,
                f"model group {group} has {has}; version {version} was not loaded within {timeout_s:g} s; "
                "ask again later or for an older version",
            ) from error

    def _check_model(self, name: str) -> None:
        """Raises Refusal (404)."""
        if name not in self._names and not is_alias(name, self._settings.model_aliases):
            known = " or ".join(repr(known) for known in self._names)
            raise Refusal(404, f"model {name!r} is not served here; use {known}", param="model", code="model_not_found")

    def served(self, request: web.Request) -> list[dict[str, Any]]:
        """The one model, with its group and the version that answers now."""
        return [self.described(request, self._settings.model_name)]

    def described(self, request: web.Request, name: str) -> dict[str, Any]:
        """The same by one of its names. Raises Refusal (404)."""
        self._check_model(name)
        group = self._settings.model_group
        return {
            "id": name,
            "object": "model",
            "created": 0,
            "owned_by": "rollstream",
            "model_group": group,
            "version": self._engine.version(group),
        }


@asynccontextmanager
async def listening(endpoint: Routes, host: str, port: int, section: str = "endpoint") -> AsyncIterator[int]:
    """Serve while inside; gives the port taken. Raises RollstreamError, which names the `section` of the settings, if
    the port cannot be had.
    """
    runner = web.AppRunner(
        endpoint.application(),
        access_log=None,
        logger=_connections,
        handler_cancellation=True,
        shutdown_timeout=2.0,
        keepalive_timeout=600,
    )
    await runner.setup()
    try:
        site = web.TCPSite(runner, host, port)
        try:
            await site.start()
        except OSError as error:
            raise port_in_use(host, port, error, section) from error
        yield int(runner.addresses[0][1])
    finally:
        await runner.cleanup()


@asynccontextmanager
async def listening_again(
    endpoint: Routes, host: str, port: int, file: Path, section: str = "endpoint"
) -> AsyncIterator[int]:
    """The same, where any free port (0) is the one that the process before has left in its address `file`, so that
    clients find this one; another, if that cannot be had.
    """
    wanted = port or _port_in(file)
    async with AsyncExitStack() as stack:
        try:
            taken = await stack.enter_async_context(listening(endpoint, host, wanted, section))
        except RollstreamError:
            if port or not wanted:
                raise
            taken = await stack.enter_async_context(listening(endpoint, host, 0, section))
        yield taken


def _port_in(file: Path) -> int:
    port = read_json(file).get("port")
    return port if isinstance(port, int) and 0 < port < 65536 else 0


def port_in_use(host: str, port: int, error: OSError, section: str = "endpoint") -> RollstreamError:
    """The error of a port that cannot be had."""
    reason = error.strerror or str(error)
    return RollstreamError(f"{section}: port {port} of {host} cannot be used ({reason}); set another {section}.port")


def _min_version(request: web.Request) -> int:
    given = request.headers.get(MIN_VERSION_HEADER, "0")
    if not given.isdecimal() or len(given) > 18:
        raise Refusal(
            400,
            f"header {MIN_VERSION_HEADER}: {given[:20]!r} is not a version; send a whole number",
            param=MIN_VERSION_HEADER,
        )
    return int(given)
