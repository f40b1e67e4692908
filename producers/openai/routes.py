"""OpenAI's and Anthropic's routes over whoever answers: requests parsed, answers worded and streamed, errors in the
shape of each API. Who may ask, what is sampled and what is recorded is up to the one that answers.
"""

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import orjson
from aiohttp import web

from rollstream.producers.openai import anthropic, completions
from rollstream.producers.openai.completions import CompletionRequest
from rollstream.producers.openai.protocol import Answer, chunks, completion
from rollstream.producers.openai.requests import (
    ChatRequest,
    Refusal,
    SampledRequest,
    checked_request,
    json_of,
    parse_request,
)

MESSAGES = "/v1/messages"
MAX_BODY_BYTES = 2 * 1024 * 1024
"""Some 500,000 tokens: what a larger body holds fits no model, and is tokenised in the event loop."""


@dataclass(frozen=True, slots=True)
class Answered:
    """The answers to one request, at least one."""

    answers: list[Answer]
    call_id: str
    """Of this call; the ids in the answer are made of it."""
    created_s: int
    """Unix time."""


class Routes(ABC):
    """The routes of one service."""

    @abstractmethod
    def check(self, request: web.Request) -> None:
        """Raises Refusal for a request that is not answered, whatever it asks for."""

    @abstractmethod
    async def answer(self, request: web.Request, asked: ChatRequest | CompletionRequest) -> Answered:
        """`n` answers. Raises Refusal."""

    @abstractmethod
    async def count(self, request: web.Request, asked: ChatRequest) -> int:
        """How many tokens the prompt has. Raises Refusal."""

    @abstractmethod
    def served(self, request: web.Request) -> dict[str, Any]:
        """The one model, in OpenAI's words. Raises Refusal."""

    @abstractmethod
    def check_model(self, request: web.Request, name: str) -> None:
        """Raises Refusal (404) for a name of no model here."""

    def application(self) -> web.Application:
        """The routes, with errors in OpenAI's shape, and in Anthropic's on its own."""
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[self._checked])
        self.add_routes(app.router)
        return app

    def add_routes(self, router: web.UrlDispatcher, prefix: str = "") -> None:
        """Add all routes below a prefix."""
        router.add_get(f"{prefix}/v1/models", self.models)
        router.add_get(f"{prefix}/v1/models/{{model:.+}}", self.model)
        router.add_post(f"{prefix}/v1/chat/completions", self.chat)
        router.add_post(f"{prefix}/v1/completions", self.complete)
        router.add_post(f"{prefix}{MESSAGES}", self.message)
        router.add_post(f"{prefix}{MESSAGES}/count_tokens", self.count_tokens)

    async def models(self, request: web.Request) -> web.Response:
        """The one model, with its model group and the version that answers now (-1 before the first)."""
        return json_response({"object": "list", "data": [self.served(request)]})

    async def model(self, request: web.Request) -> web.Response:
        """The same by its name."""
        self.check_model(request, request.match_info["model"])
        return json_response(self.served(request))

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """One chat completion, of the newest weights or of `min_version` and later."""
        asked = parse_request(await request.read())
        answered = await self.answer(request, asked)
        head = _head("chatcmpl", asked, answered)
        if not asked.stream:
            return json_response(completion(head, answered.answers))
        pieces = chunks(head, answered.answers, include_usage=asked.stream_options.include_usage)
        return await _stream(request, pieces)

    async def complete(self, request: web.Request) -> web.StreamResponse:
        """One completion of a text or of token ids, which are taken as they are."""
        asked = checked_request(CompletionRequest, json_of(await request.read()))
        answered = await self.answer(request, asked)
        head = _head("cmpl", asked, answered)
        if not asked.stream:
            return json_response(completions.completion(head, answered.answers))
        pieces = completions.chunks(head, answered.answers, include_usage=asked.stream_options.include_usage)
        return await _stream(request, pieces)

    async def message(self, request: web.Request) -> web.StreamResponse:
        """One message of Anthropic's kind."""
        given = anthropic.parse_messages(json_of(await request.read()))
        asked = given.chat()
        answered = await self.answer(request, asked)
        name, (answer,) = f"msg_{answered.call_id}", answered.answers
        if not given.stream:
            return json_response(anthropic.message(name, asked.model, answer))
        return await _stream(request, anthropic.events(name, asked.model, answer), is_named=True)

    async def count_tokens(self, request: web.Request) -> web.Response:
        """How many tokens the prompt of a message has."""
        asked = anthropic.parse_count(json_of(await request.read())).chat()
        return json_response({"input_tokens": await self.count(request, asked)})

    @web.middleware
    async def _checked(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        try:
            self.check(request)
            return await handler(request)
        except Refusal as refused:
            headers = {"WWW-Authenticate": "Bearer"} if refused.status == HTTPStatus.UNAUTHORIZED else None
            return json_response(_error_body(request, refused), status=refused.status, headers=headers)
        except web.HTTPException as error:
            refused = Refusal(error.status, f"{request.method} {request.path}: {error.reason}")
            return json_response(_error_body(request, refused), status=error.status)


def _head(kind: str, asked: SampledRequest, answered: Answered) -> dict[str, Any]:
    first = answered.answers[0]
    return {
        "id": f"{kind}-{answered.call_id}",
        "created": answered.created_s,
        "model": asked.model,
        "system_fingerprint": f"{first.model_group}@{first.version}",
    }


def _error_body(request: web.Request, refused: Refusal) -> dict[str, Any]:
    is_anthropic = request.path.endswith((MESSAGES, f"{MESSAGES}/count_tokens"))
    return anthropic.error_body(refused) if is_anthropic else refused.body()


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


def json_response(body: object, *, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    """A response with a body that orjson encodes."""
    return web.Response(body=orjson.dumps(body), status=status, headers=headers, content_type="application/json")
