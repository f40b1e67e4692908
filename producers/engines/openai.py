"""A frozen engine: a model that others serve with OpenAI's API, as an opponent, judge or teacher.

Its weights never change here. Its answers are recorded as text without the server's token ids, and never trained.
Server and key come from the process's own settings; no record names them.
"""

import asyncio
import json
import logging
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rollstream.eventlog.http.http_json import HttpServer, RefusedError, excerpt, proxy_of
from rollstream.producers.engines.base import CLOSED, Capabilities, Generation, GenerationRequest, check_prompt
from rollstream.schemas.engine_settings import OpenAISettings
from rollstream.schemas.errors import ModelError
from rollstream.schemas.events import WeightsPublished

_UNSUPPORTED = re.compile(r"Unsupported parameter: '(\w{1,40})' is not supported with this model")
"""The sentence by which OpenAI's API refuses a parameter (400); the code beside it varies."""
_NEUTRAL = {"temperature": 1, "top_p": 1}
"""The fixed settings of models that refuse these parameters."""

logger = logging.getLogger(__name__)


class TextTokenizer:
    """`base.Tokenizer` of a model whose own is elsewhere: an id is a byte of UTF-8, and 256 the end of an answer.

    A chat is its messages as JSON, one a line, so that its ids hold the messages exactly.
    """

    eos_token_id = 256
    _END = "\x00<end>"

    def __len__(self) -> int:
        return 257

    def apply_chat_template(self, conversation: list[dict[str, Any]], **options: Any) -> str:
        """The messages as JSON lines, whether an answer follows or not."""
        return "".join(f"{json.dumps(message, ensure_ascii=False)}\n" for message in conversation)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Bytes of UTF-8."""
        pieces = text.split(self._END)
        ids = list(pieces[0].encode(errors="replace"))
        for piece in pieces[1:]:
            ids += [self.eos_token_id, *piece.encode(errors="replace")]
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Text of ids."""
        end = b"" if skip_special_tokens else self._END.encode()
        return b"".join(end if one == self.eos_token_id else bytes([one]) for one in token_ids).decode(errors="replace")


class OpenAIEngine:
    """`base.Engine` of one server and model, for any model group; its version is 0 from the beginning."""

    def __init__(self, settings: OpenAISettings, env: Mapping[str, str] = os.environ) -> None:
        """Raises ModelError if the variable of the key is not set."""
        self._settings = settings
        self._server = HttpServer(
            settings.base_url.rstrip("/"),
            timeout_s=settings.timeout_s,
            key=_key_of(settings, env),
            key_variable=settings.api_key_variable,
            proxy=proxy_of(settings.base_url, env),
        )
        self._model = settings.model
        self._slots = asyncio.Semaphore(settings.max_concurrent)
        self._calls: set[asyncio.Task[Generation]] = set()
        self._limit_name = "max_tokens"
        """The server's name for the limit of an answer."""
        self._left_out: set[str] = set()
        """Parameters that the server refuses; left out where they would change nothing."""
        self._tokenizer = TextTokenizer()
        self._is_closed = False

    @property
    def capabilities(self) -> Capabilities:
        """Answers in text, with weights that are not ours."""
        return Capabilities(loads_models=False, is_frozen=True)

    async def start(self) -> None:
        """Nothing is asked before the first request: the server may come later."""

    async def close(self) -> None:
        """Cancel calls in progress and refuse later ones."""
        self._is_closed = True
        for call in self._calls:
            call.cancel()
        await self._server.close()

    async def generate(self, request: GenerationRequest) -> Generation:
        """The server's answer as text: ids of `TextTokenizer`, neither log-probabilities nor versions.

        Raises PromptTooLongError, and ModelError naming the server and a remedy: it cannot be reached, refuses the key,
        does not know the model, or gives an answer that cannot be read.
        """
        if self._is_closed:
            raise ModelError(CLOSED)
        check_prompt(request, num_token_ids=len(self._tokenizer))
        call = asyncio.create_task(self._generate(request))
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        try:
            return await call
        finally:
            call.cancel()

    def tokenizer(self, model_group: str) -> TextTokenizer:
        """A tokenizer of text, whatever the server's is."""
        return self._tokenizer

    def version(self, model_group: str) -> int:
        """Always 0: the server's weights are taken as one version."""
        return 0

    async def load(self, published: WeightsPublished, path: Path) -> None:
        """Raises ModelError."""
        raise ModelError(
            f"model group {published.model_group} is served by {self._server.url} and loads no "
            "weights; train another model group, or remove its endpoint"
        )

    async def unload(self, model_group: str) -> None:
        """There is nothing to free."""

    async def _generate(self, request: GenerationRequest) -> Generation:
        async with self._slots:
            model = self._model or await self._only_model()
            found = self._server.parsed(await self._answer(request, model))
        text, reason = self._text_of(found)
        ids = (*self._tokenizer.encode(text), *((self._tokenizer.eos_token_id,) if reason == "stop" else ()))
        if not ids:
            raise self._error("answered no text; raise max_new_tokens")
        return Generation(ids, (), (), "stop" if reason == "stop" else "length")

    async def _answer(self, request: GenerationRequest, model: str) -> bytes:
        """The answer; a request whose parameters are refused is sent again without them, where that changes nothing."""
        while True:
            path, body = self._body(request, model)
            try:
                return await self._asked("POST", path, body)
            except RefusedError as refused:
                if not self._reword(refused.body, body):
                    raise

    def _reword(self, refusal: bytes, body: Mapping[str, Any]) -> bool:
        """Whether the request can be sent again in another form, as some of OpenAI's models demand.

        The run's sampling stays: a parameter is left out only if its value is what the server does anyway, or if it is
        the seed, which servers may ignore.
        """
        match = _UNSUPPORTED.search(refusal.decode(errors="replace"))
        name = match[1] if match else ""
        if name not in body:
            return False
        if name == "max_tokens":
            self._limit_name = "max_completion_tokens"
        elif _changes_nothing(name, body[name]):
            self._left_out.add(name)
        else:
            return False
        logger.info("%s does not take %s: it is asked without it from now on", self._server.name, name)
        return True

    async def _asked(self, method: str, path: str, body: dict[str, Any] | None = None) -> bytes:
        self._server.name = f"{self._server.url} (model {self._model or 'not named'})"
        settings = self._settings
        return await self._server.asked(
            method, path, body, tries=settings.retries + 1, retry_wait_s=settings.retry_wait_s
        )

    def _body(self, request: GenerationRequest, model: str) -> tuple[str, dict[str, Any]]:
        sampling = request.sampling
        body: dict[str, Any] = {
            "model": model,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            self._limit_name: sampling.max_new_tokens,
            "seed": request.seed % 2**63,
            **({"top_k": sampling.top_k} if sampling.top_k else {}),
        }
        body = {
            name: value
            for name, value in body.items()
            if name not in self._left_out or not _changes_nothing(name, value)
        }
        messages = _messages(self._tokenizer.decode(request.prompt_ids))
        if self._settings.api == "completions":
            return "/completions", {**body, "prompt": "\n".join(str(one.get("content") or "") for one in messages)}
        return "/chat/completions", {**body, "messages": messages}

    async def _only_model(self) -> str:
        """The model that the server lists. Raises ModelError if it is not one."""
        try:
            names = [str(one["id"]) for one in self._server.parsed(await self._asked("GET", "/models"))["data"]]
        except (LookupError, TypeError) as error:
            raise self._error("lists no models; set endpoint.model") from error
        if len(names) != 1:
            raise self._error(
                f"serves {len(names)} models ({', '.join(names[:10])}); set endpoint.model to one of them"
            )
        self._model = names[0]
        return names[0]

    def _text_of(self, found: Any) -> tuple[str, str]:
        """Text and finish reason of the first choice. Raises ModelError."""
        try:
            choice = found["choices"][0]
            text = choice["text"] if self._settings.api == "completions" else choice["message"]["content"]
            text = "" if text is None else text  # of a model that was still reasoning, or is silent
            reason = choice.get("finish_reason")
        except (LookupError, TypeError, AttributeError) as error:
            raise self._error(f"gave an answer without choices: {excerpt(found)}; check base_url and api") from error
        if not isinstance(text, str) or reason not in ("stop", "length"):
            raise self._error(f"gave an answer that is not text: {excerpt(choice)}; use a model that answers in text")
        return text, reason

    def _error(self, message: str) -> ModelError:
        return self._server.error(message)


build = OpenAIEngine
"""Function of `EngineKind` that `table` calls."""


def _key_of(settings: OpenAISettings, env: Mapping[str, str]) -> str:
    variable = settings.api_key_variable
    if variable is None:
        return ""
    key = env.get(variable, "").strip()
    if not key or not key.isprintable():
        raise ModelError(f"endpoint {settings.base_url}: the variable {variable} holds no key; export it")
    return key


def _changes_nothing(name: str, value: Any) -> bool:
    """Whether a request without this parameter asks for the same sampling; the seed may be ignored anyway."""
    return name == "seed" or (name in _NEUTRAL and value == _NEUTRAL[name])


def _with_texts(message: dict[str, Any]) -> dict[str, Any]:
    """A message whose calls have arguments as JSON text, as OpenAI's API requires; chat templates take objects."""
    if not message.get("tool_calls"):
        return message
    calls = [{**call, "function": dict(call["function"])} for call in message["tool_calls"]]
    for call in calls:
        arguments = call["function"].get("arguments", "")
        if not isinstance(arguments, str):
            call["function"]["arguments"] = json.dumps(arguments, ensure_ascii=False)
    return {**message, "tool_calls": calls}


def _messages(text: str) -> list[dict[str, Any]]:
    """The messages that a prompt holds; text that is not a rendered chat is a user's."""
    lines = text[:-1].split("\n") if text.endswith("\n") else []  # messages may hold Unicode's other line ends
    found: list[dict[str, Any]] = []
    for line in lines:
        try:
            message = json.loads(line)
        except ValueError:
            return [{"role": "user", "content": text}]
        if not isinstance(message, dict) or "role" not in message:
            return [{"role": "user", "content": text}]
        found.append(_with_texts(message))
    return found or [{"role": "user", "content": text}]
