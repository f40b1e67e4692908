"""A client of the producers' gateway for agents in Python: it claims rollouts, rewards them and ends them.

The model is asked with any client of OpenAI's or Anthropic's API, by a rollout's base URL and key, or by
`RemoteRollout.chat`. Every request bears an Idempotency-Key and is repeated until it is answered, so none is lost or
doubled when the producers are killed meanwhile.
"""

import asyncio
import json
import logging
import math
import os
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from rollstream.eventlog.http.http_json import (
    HttpAnswer,
    HttpServer,
    Limit,
    TryAgainError,
    excerpt,
    parsed_json,
    retry_after,
)
from rollstream.producers.gateway.call_keys import (
    ENDED,
    IDEMPOTENCY_KEY,
    LEARNER_BEHIND,
    MAX_ERROR_CHARS,
    address_file,
    token_file,
)
from rollstream.producers.openai.requests import SHOULD_RETRY
from rollstream.producers.rollout.reply import TurnsExhausted, is_exhaustion
from rollstream.schemas.errors import (
    ConfigError,
    GatewayError,
    ModelError,
    PromptTooLongError,
    RollstreamError,
    describe,
    first_invalid,
)
from rollstream.schemas.variables import conceal, recordable

KEY_VARIABLE = "OPENAI_API_KEY"
"""Variable in which a program of `environment: command:...` gets its rollout's key."""
FIRST_PAUSE_S, MAX_PAUSE_S = 0.1, 2.0
"""Between two tries; doubled from the first to the last."""

MAX_ANSWER_BYTES = 1024**3
"""A call for many long answers takes megabytes: each token some 100 bytes."""

Task = TypeVar("Task", bound="RolloutTask")

logger = logging.getLogger(__name__)


class Retries(BaseModel):
    """Limits on a client's repetitions of requests that are not answered."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    for_s: float = 60.0
    """Seconds from the first failed try on; a producers process that was killed is back within some seconds."""
    timeout_s: float = 600.0
    """Timeout of one try."""


class RolloutTask(BaseModel):
    """Task of an agent."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    rollout_id: str
    inputs: dict[str, Any]
    agents: tuple[str, ...]
    """Names that the model answers to; by them a model group is chosen."""
    max_turns: int
    """Calls that the rollout may make."""
    purpose: str
    """`train` or `validation`."""
    seed: int


class GatewayAddress(NamedTuple):
    """Address of requests, and the key that they carry."""

    url: str
    key: str


class _Requests:
    """POSTs that are repeated under one Idempotency-Key until they are answered."""

    def __init__(self, locate: Callable[[], GatewayAddress], retries: Retries) -> None:
        """`locate`: asked before every try. It raises TryAgainError while there is nothing to be asked yet."""
        self._locate = locate
        self._retries = retries
        self._at: tuple[GatewayAddress, HttpServer] | None = None

    async def close(self) -> None:
        """End all connections; a later request opens them again."""
        if self._at is not None:
            (_, server), self._at = self._at, None
            await server.close()

    async def post(self, path: str, body: Mapping[str, Any], key: str = "", *, for_s: float = 0.0) -> Any:
        """The JSON of the answer, None without one. Raises GatewayError, PromptTooLongError, TurnsExhausted.

        `for_s`: how long it may take the gateway beside `Retries`.
        """
        loop, pause_s = asyncio.get_running_loop(), FIRST_PAUSE_S
        began_s, deadline_s = loop.time(), math.inf
        headers = {IDEMPOTENCY_KEY: key or secrets.token_hex(16)}
        while True:
            try:
                return await self._sent(path, dict(body), headers, self._retries.timeout_s + for_s)
            except TryAgainError as error:
                cause = error.__cause__
                wait_s = max(pause_s, error.after_s)
                deadline_s = min(deadline_s, loop.time() + self._retries.for_s + for_s)
                if loop.time() + wait_s > deadline_s:
                    refused = cause if isinstance(cause, GatewayError) else GatewayError("")
                    tried_s = loop.time() - began_s
                    message = f"gateway: {error} (tried for {tried_s:.1f} s); check that the producers run"
                    raise GatewayError(message, status=refused.status, code=refused.code) from error
                logger.info("gateway: %s; tried again", error)
            await asyncio.sleep(wait_s)
            pause_s = min(2 * pause_s, MAX_PAUSE_S)

    async def _sent(self, path: str, body: dict[str, Any], headers: Mapping[str, str], timeout_s: float) -> Any:
        server = await self._server()
        limits: dict[str, Any] = {"limit": Limit(timeout_s), "max_bytes": MAX_ANSWER_BYTES}
        try:
            answer = await server.sent("POST", path, body, headers=headers, **limits)
        except ModelError as error:  # the answer is too large
            raise GatewayError(f"gateway: {error}") from error
        return _checked(answer, server.url + path)

    async def _server(self) -> HttpServer:
        address = self._locate()
        if self._at is None or self._at[0] != address:
            server = HttpServer(address.url, timeout_s=self._retries.timeout_s, key=address.key, key_variable="KEY")
            before, self._at = self._at, (address, server)
            if before is not None:
                await before[1].close()
            return server
        return self._at[1]


class RemoteRollout:
    """A rollout that this process plays; as a context manager it is ended with the block.

    An exception in the block (also SystemExit, unless its code is 0 or None) fails the rollout and goes on, except
    TurnsExhausted (also of a TaskGroup's tasks), which ends it as it ends an agent within the producers. A cancelled
    block leaves the rollout to its timeout.
    """

    def __init__(self, task: RolloutTask, base_url: str, key: str, retries: Retries | None = None) -> None:
        self.task = task
        self.base_url = base_url
        """Base URL for Anthropic's clients."""
        self.key = key
        """API key for any client, valid for this rollout alone."""
        address = GatewayAddress(base_url, key)
        self._requests = _Requests(lambda: address, retries or Retries())

    @classmethod
    def of_program(cls, env: Mapping[str, str] = os.environ) -> Self:
        """The rollout of a program that `environment: command:...` runs. Raises ConfigError in another program.

        A task that is too large for a variable is read from standard input.
        """
        try:
            url, key = env["ROLLSTREAM_ROLLOUT_URL"], env[KEY_VARIABLE]
        except KeyError as error:
            raise ConfigError(f"variable {error.args[0]} is not set; run this by environment: command:...") from error
        return cls(_read(RolloutTask, env.get("ROLLSTREAM_TASK") or sys.stdin.read()), url, key)

    @property
    def openai_base_url(self) -> str:
        """Base URL for OpenAI's clients."""
        return f"{self.base_url}/v1"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        try:
            if error is None or is_exhaustion(error) or _is_success(error):
                await self.end()
            elif isinstance(error, Exception | SystemExit):
                await self._fail(error)
        finally:
            await self.close()
        return is_exhaustion(error)

    async def chat(
        self, messages: Sequence[Mapping[str, Any]], *, idempotency_key: str = "", **options: Any
    ) -> dict[str, Any]:
        """An answer in OpenAI's words; `choices[0].logprobs` has token ids, log-probabilities and version.

        `options`: further keys of the request (`model`, `tools`, `max_tokens`, `stop`, `n`). Raises PromptTooLongError,
        TurnsExhausted, GatewayError.
        """
        body = {"model": self.task.agents[0], "messages": [dict(one) for one in messages], **options}
        answer: dict[str, Any] = await self._requests.post("/v1/chat/completions", body, idempotency_key)
        return answer

    async def reward(
        self, value: float, *, name: str = "reward", step_index: int | None = None, agent: str | None = None
    ) -> None:
        """Reward the whole, a step or an agent; the same again changes nothing.

        `step_index`: of a call, which its answer has beside `version` (of `chat`: in `choices[i].logprobs`).
        Raises GatewayError: `value` is not finite, differs from the recorded one, or comes after the end.
        """
        await self._requests.post(
            "/reward", {"value": float(value), "name": name, "step_index": step_index, "agent": agent}
        )

    async def end(self, error: str | None = None) -> None:
        """The agent is done; `error`: it failed, and so has the rollout. Again changes nothing. Raises GatewayError."""
        await self._requests.post("/end", {"error": None if error is None else recordable(error, MAX_ERROR_CHARS)})

    async def close(self) -> None:
        """End the connections, for callers outside an `async with` block; the rollout stays open."""
        await self._requests.close()

    async def _fail(self, error: BaseException) -> None:
        try:
            await self.end(conceal(describe(error), f"${{{KEY_VARIABLE}}}", {KEY_VARIABLE: self.key}))
        except RollstreamError as unsent:  # the agent's own error goes on and says more
            logger.warning("rollout=%s cannot be ended: %s", self.task.rollout_id, unsent)


def _is_success(error: BaseException) -> bool:
    return isinstance(error, SystemExit) and error.code in (None, 0)


class GatewayClient:
    """The gateway of one producers process; as a context manager it ends its connections with the block."""

    def __init__(self, locate: Callable[[], GatewayAddress], retries: Retries | None = None) -> None:
        """`locate`: see `at` and `of_workspace`; asked before every try."""
        self._retries = retries or Retries()
        self._requests = _Requests(locate, self._retries)

    @classmethod
    def at(cls, url: str, token: str, retries: Retries | None = None) -> Self:
        """Client of a gateway by its address and token, which are in `gateway-NAME.json` and `gateway-NAME.token` of
        the workspace.
        """
        address = GatewayAddress(url.rstrip("/"), token)
        return cls(lambda: address, retries)

    @classmethod
    def of_workspace(cls, workspace: Path | str, name: str = "producers-1", retries: Retries | None = None) -> Self:
        """Client of a producers process on this machine; its gateway may start later, with the first rollout."""
        return cls(lambda: _located(Path(workspace), name), retries)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._requests.close()

    async def claim(self, wait_s: float = 30.0, *, idempotency_key: str = "") -> RemoteRollout | None:
        """The next rollout that nobody plays, None if there is none within `wait_s` (0 to 600).

        A second claim under the same key gets the same rollout again. One that ends while it is claimed is passed
        over, and the time begins again. While the learner is behind (`follow_lag`), it is asked again as long as
        `Retries` says; then the answer is None. Raises GatewayError.
        """
        try:
            given = await self._requests.post("/rollouts", {"wait_s": float(wait_s)}, idempotency_key, for_s=wait_s)
        except GatewayError as refused:
            if refused.code == LEARNER_BEHIND:
                return None
            if refused.code != ENDED:
                raise
            return await self.claim(wait_s, idempotency_key=idempotency_key)
        if given is None:
            return None
        claimed = _read(_Claimed, given)
        return RemoteRollout(claimed, claimed.base_url, claimed.key, self._retries)


class _Claimed(RolloutTask):
    base_url: str
    key: str


def _located(workspace: Path, name: str) -> GatewayAddress:
    path = address_file(workspace, name)
    try:
        address: Any = json.loads(path.read_text(encoding="utf-8"))
        return GatewayAddress(address["url"], token_file(workspace, name).read_text(encoding="utf-8").strip())
    except (OSError, ValueError, LookupError, TypeError) as error:
        reason = "no rollout was opened there yet" if isinstance(error, FileNotFoundError) else str(error)
        raise TryAgainError(f"{path} cannot be read: {reason}") from error


def _checked(answer: HttpAnswer, url: str) -> Any:
    """The JSON of a 2xx answer. Raises as `_Requests.post`, and TryAgainError for errors that may pass with another
    try.
    """
    if 200 <= answer.status < 300:
        return _parsed(answer.body, url) if answer.body else None
    try:
        given = json.loads(answer.body)["error"]
        message, code = str(given["message"]), given.get("code")
    except (ValueError, LookupError, TypeError, AttributeError):
        message, code = excerpt(answer.body), None
    if code == "context_length_exceeded":
        raise PromptTooLongError(message)
    if code == "max_turns":
        raise TurnsExhausted(message)
    refused = GatewayError(f"{url} answered {answer.status}: {message}", status=answer.status, code=code)
    may_pass = answer.headers.get(SHOULD_RETRY, "") != "false"
    if may_pass and (answer.status in (408, 425, 429) or answer.status >= 500):
        raise TryAgainError(str(refused), retry_after(answer.headers)) from refused
    raise refused


def _parsed(body: bytes, url: str) -> Any:
    try:
        return parsed_json(body)
    except (ValueError, RecursionError) as error:
        raise GatewayError(f"{url} answered with invalid JSON: {excerpt(body)}; check the gateway's URL") from error


def _read(model: type[Task], given: str | bytes | dict[str, Any]) -> Task:
    try:
        return model.model_validate(given) if isinstance(given, dict) else model.model_validate_json(given)
    except ValidationError as error:
        raise ConfigError(f"task of a rollout: {first_invalid(error)}; check the version of rollstream") from error
