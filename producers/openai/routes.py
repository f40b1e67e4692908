"""OpenAI's and Anthropic's routes, whatever computes the answers: requests parsed, answers formatted and streamed,
errors in the form of each API. Access, sampling and recording are up to the subclass.
"""

import asyncio
import contextlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any, ClassVar

import orjson
from aiohttp import web

from rollstream.producers.openai import anthropic, completions, responses
from rollstream.producers.openai.access import CountedCall, KeyLimits
from rollstream.producers.openai.completions import CompletionRequest
from rollstream.producers.openai.protocol import completion
from rollstream.producers.openai.requests import (
    SHOULD_RETRY,
    ChatRequest,
    Refusal,
    checked_request,
    json_of,
    parse_request,
)
from rollstream.producers.openai.responses import ResponseWords
from rollstream.producers.openai.stream_words import (
    Answered,
    ChatWords,
    CompletionWords,
    MessageWords,
    StreamWords,
    head_of,
)
from rollstream.producers.openai.streaming import OnText
from rollstream.schemas.errors import describe

MESSAGES = "/v1/messages"
MAX_BODY_BYTES = 2 * 1024 * 1024
"""Some 500,000 tokens: what a larger body holds fits no model, and is tokenised in the event loop."""

KEEP_ALIVE_S = 15.0
"""Longest pause in a stream."""
KEEP_ALIVE = b": keep-alive\n\n"
"""A comment of server-sent events, which clients pass over."""
_PAUSE = (-1, "")
"""In place of a piece that did not come in time."""

_COUNTED = web.RequestKey("counted", CountedCall)
"""Count of a request by the limits of its key."""

logger = logging.getLogger(__name__)


class Routes(ABC):
    """The routes of one service."""

    KEEPS_RESPONSES: ClassVar[bool] = False
    """A response may go on from an earlier one by its id."""

    def __init__(self, limits: KeyLimits) -> None:
        """`limits`: of requests to the APIs' own routes, by key."""
        self._limits = limits

    @abstractmethod
    def check(self, request: web.Request) -> str:
        """Returns who calls, for the limits by key. Raises Refusal for a request that is not answered at all."""

    @abstractmethod
    async def answer(
        self, request: web.Request, asked: ChatRequest | CompletionRequest, on_text: OnText | None = None
    ) -> Answered:
        """`n` answers; `on_text` is told their texts while they are sampled. Raises Refusal."""

    @abstractmethod
    async def count(self, request: web.Request, asked: ChatRequest) -> int:
        """Number of the prompt's tokens. Raises Refusal."""

    @abstractmethod
    def served(self, request: web.Request) -> list[dict[str, Any]]:
        """The models, in OpenAI's words. Raises Refusal."""

    @abstractmethod
    def described(self, request: web.Request, name: str) -> dict[str, Any]:
        """One of them. Raises Refusal (404) for a name that no model has."""

    @abstractmethod
    async def too_many(self, request: web.Request) -> None:
        """Note that a request was refused because of a limit (429); its client sends it again later. May raise what
        reading its body raises.
        """

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
        router.add_post(f"{prefix}/v1/responses", self.respond)
        router.add_post(f"{prefix}{MESSAGES}", self.message)
        router.add_post(f"{prefix}{MESSAGES}/count_tokens", self.count_tokens)

    async def models(self, request: web.Request) -> web.Response:
        """All models, each with its model group and the version that answers now (-1 before the first)."""
        return json_response({"object": "list", "data": self.served(request)})

    async def model(self, request: web.Request) -> web.Response:
        """One of them by its name."""
        return json_response(self.described(request, request.match_info["model"]))

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """One chat completion, of the newest weights or of `min_version` and later."""
        asked = parse_request(await request.read())
        request[_COUNTED].raise_to(asked.n)
        if asked.stream:
            return await self._streamed(request, asked, ChatWords(asked))
        answered = await self.answer(request, asked)
        return json_response(completion(head_of("chatcmpl", asked, answered), answered.answers))

    async def complete(self, request: web.Request) -> web.StreamResponse:
        """One completion of a text or of token ids, which are taken as they are."""
        asked = checked_request(CompletionRequest, json_of(await request.read()))
        request[_COUNTED].raise_to(asked.n)
        if asked.stream:
            return await self._streamed(request, asked, CompletionWords(asked))
        answered = await self.answer(request, asked)
        return json_response(completions.completion(head_of("cmpl", asked, answered), answered.answers))

    async def message(self, request: web.Request) -> web.StreamResponse:
        """One message of Anthropic's kind."""
        given = anthropic.parse_messages(json_of(await request.read(), anthropic.EXACT))
        asked = given.chat()
        if given.stream:
            return await self._streamed(request, asked, MessageWords(asked, await self.count(request, asked)))
        answered = await self.answer(request, asked)
        return json_response(anthropic.message(f"msg_{answered.call_id}", asked.model, answered.answers[0]))

    async def respond(self, request: web.Request) -> web.StreamResponse:
        """One response of OpenAI's kind."""
        given = responses.parse(json_of(await request.read()))
        if given.previous_response_id is not None and not self.KEEPS_RESPONSES:
            raise Refusal(
                400,
                "previous_response_id: no response is stored here; send the earlier messages as input",
                param="previous_response_id",
                code="unsupported_parameter",
            )
        asked = given.chat()
        if asked.references and not self.KEEPS_RESPONSES:
            raise responses.unknown_item(next(iter(asked.references.values())))
        if given.stream:
            return await self._streamed(request, asked, ResponseWords(given, asked))
        return json_response(responses.response(given, await self.answer(request, asked)))

    async def count_tokens(self, request: web.Request) -> web.Response:
        """Number of tokens of a message's prompt."""
        asked = anthropic.parse_count(json_of(await request.read(), anthropic.EXACT)).chat()
        return json_response({"input_tokens": await self.count(request, asked)})

    async def _streamed(
        self, request: web.Request, asked: ChatRequest | CompletionRequest, words: StreamWords
    ) -> web.StreamResponse:
        """Pieces as they are sampled, then the rest and the end, once the whole is answered.

        What is refused at once is refused as any request; after the first piece or pause, the stream ends with the
        error. Clients give up on a connection on which nothing comes for long, so that pauses are filled.
        """
        pieces: asyncio.Queue[tuple[int, str] | None] = asyncio.Queue()
        answering = asyncio.ensure_future(self.answer(request, asked, lambda *piece: pieces.put_nowait(piece)))
        answering.add_done_callback(lambda _: pieces.put_nowait(None))
        try:
            piece = await _next_of(pieces)
            if piece is None:
                answering.result()
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
            with contextlib.suppress(ConnectionResetError):  # the client has hung up
                await response.prepare(request)
                while piece is not None:
                    await response.write(KEEP_ALIVE if piece == _PAUSE else words.piece(*piece))
                    piece = await _next_of(pieces)
                try:
                    end = words.end(answering.result())
                except Exception as error:  # noqa: BLE001 -- the status is sent: the stream has to end with the error
                    refused = error if isinstance(error, Refusal) else _unexpected(request, error)
                    end = words.event(_error_body(request, refused))
                await response.write(end)
                await response.write_eof()
            return response
        finally:
            answering.cancel()

    @web.middleware
    async def _checked(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        try:
            caller = self.check(request)
            if request.method != "POST" or "/v1/" not in request.path:
                return await handler(request)
            with self._limits.call(caller) as request[_COUNTED]:
                return await handler(request)
        except Refusal as refused:
            if refused.status == HTTPStatus.TOO_MANY_REQUESTS:
                with contextlib.suppress(Refusal, web.HTTPException, web.RequestPayloadError):
                    await self.too_many(request)
            headers = {"WWW-Authenticate": "Bearer"} if refused.status == HTTPStatus.UNAUTHORIZED else {}
            headers |= {} if refused.retry_after_s is None else {"Retry-After": str(refused.retry_after_s)}
            headers |= {SHOULD_RETRY: "false"} if refused.is_final else {}
            return json_response(_error_body(request, refused), status=refused.status, headers=headers)
        except web.HTTPRequestEntityTooLarge:
            refused = Refusal(413, f"the body has more than {MAX_BODY_BYTES} bytes; send less", code="body_too_large")
            return json_response(_error_body(request, refused), status=refused.status)
        except web.RequestPayloadError:
            refused = Refusal(400, "the body cannot be decoded; correct it or its header Content-Encoding")
            return json_response(_error_body(request, refused), status=refused.status)
        except web.HTTPException as error:
            refused = Refusal(error.status, f"{request.method} {request.path}: {error.reason}")
            return json_response(_error_body(request, refused), status=error.status)
        except Exception as error:  # noqa: BLE001 -- aiohttp would answer in plain text, which no client reads
            refused = _unexpected(request, error)
            return json_response(_error_body(request, refused), status=refused.status)


async def _next_of(pieces: "asyncio.Queue[tuple[int, str] | None]") -> tuple[int, str] | None:
    """The next piece of an answer, or a pause; None after the last one."""
    try:
        async with asyncio.timeout(KEEP_ALIVE_S):
            return await pieces.get()
    except TimeoutError:
        return _PAUSE


def _unexpected(request: web.Request, error: Exception) -> Refusal:
    """The response to an unforeseen error. Only the log shows the error itself, which may contain secrets."""
    logger.error("%s %s: %s", request.method, request.path, describe(error), exc_info=error)
    return Refusal(500, "the gateway could not process this request; see its log", code="internal_error")


def _error_body(request: web.Request, refused: Refusal) -> dict[str, Any]:
    is_anthropic = request.path.endswith((MESSAGES, f"{MESSAGES}/count_tokens"))
    return anthropic.error_body(refused) if is_anthropic else refused.body()


def json_response(body: object, *, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    """A response with a body that orjson encodes."""
    return web.Response(body=orjson.dumps(body), status=status, headers=headers, content_type="application/json")
