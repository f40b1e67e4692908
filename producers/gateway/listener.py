"""The gateway of a producers process: rollouts that are open to programs outside, and the routes by which they play.

A rollout is named by the URL's path (`/rollouts/ID/v1/...`), by its own key, or by the header `X-Rollout-Id` beside the
token of the gateway. It listens from the start if it is set, else from the first rollout on that is opened.
"""

import asyncio
import contextlib
import json
import logging
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import quote

from aiohttp import web
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat
from yarl import URL

from rollstream.eventlog.failpoints import failpoint
from rollstream.eventlog.files import read_json, write_whole
from rollstream.eventlog.private import token_in
from rollstream.eventlog.recent_set import RecentSet
from rollstream.producers.engines.base import Engine
from rollstream.producers.gateway.call_keys import (
    KEY_PREFIX,
    LEARNER_BEHIND,
    CallIdentity,
    RolloutKeys,
    address_file,
    token_file,
)
from rollstream.producers.gateway.played import PlayedRollout, ended
from rollstream.producers.openai.access import TOKEN_CALLER, Access, KeyLimits, check_is_json, keys_of, no_key
from rollstream.producers.openai.completions import CompletionRequest
from rollstream.producers.openai.requests import ChatRequest, Refusal, json_of, validated
from rollstream.producers.openai.routes import Routes, json_response
from rollstream.producers.openai.server import listening_again
from rollstream.producers.openai.stream_words import Answered
from rollstream.producers.openai.streaming import OnText
from rollstream.producers.rollout.rewards import MAX_REWARD
from rollstream.producers.rollout.session import Session
from rollstream.schemas.errors import RollstreamError
from rollstream.schemas.services import GatewaySection

SECTION = "gateway"
"""The gateway's section of the settings."""
ROLLOUT_HEADER = "X-Rollout-Id"
MAX_ENDED = 10_000
"""Rollouts that are remembered after their end, for a clear answer."""

_NAMED = web.RequestKey("named", str)
"""Id of the rollout that a request is for, once its key is checked; empty if it names none."""

logger = logging.getLogger(__name__)


class _Body(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class RewardBody(_Body):
    """Body of `POST /rollouts/ID/reward`."""

    value: FiniteFloat = Field(strict=True, ge=-MAX_REWARD, le=MAX_REWARD)
    name: str = Field(default="reward", min_length=1, max_length=200)
    step_index: int | None = Field(default=None, ge=0, strict=True)
    agent: str | None = None


class EndBody(_Body):
    """Body of `POST /rollouts/ID/end`."""

    error: str | None = None
    """The agent failed; the rollout then has failed too."""


class ClaimBody(_Body):
    """Body of `POST /rollouts`."""

    wait_s: float = Field(default=0.0, ge=0, le=600, strict=True)
    """Seconds to wait for a rollout."""


class RolloutGateway(Routes):
    """Implementation of `rollout.gateway_interface.Gateway`. As a context manager, it stops listening at the exit."""

    KEEPS_RESPONSES: ClassVar[bool] = True

    def __init__(
        self,
        settings: GatewaySection,
        engine: Engine,
        *,
        workspace: Path,
        name: str,
        is_over: Callable[[str], bool] = lambda rollout_id: False,
        may_have_begun: Callable[[str], bool] = lambda rollout_id: False,
        behind_s: Callable[[], int | None] = lambda: None,
        is_listening_at_once: bool = False,
    ) -> None:
        """`is_over`: whether a rollout that had been opened, maybe by another process, has ended by the log.
        `may_have_begun`: whether one that the token's bearer names has begun by the log, or that is not known yet.
        `behind_s`: seconds after which the learner may have room for rollouts that are held back; None: none are.
        """
        self._behind_s = behind_s
        self._is_listening_at_once = is_listening_at_once
        super().__init__(KeyLimits(settings.requests_per_minute, settings.calls_per_key))
        self._settings = settings
        self._engine = engine
        self._workspace = workspace
        self._name = name
        self._rollouts: dict[str, PlayedRollout] = {}
        self._ended = RecentSet(MAX_ENDED)
        self._is_over = is_over
        self._may_have_begun = may_have_begun
        self._claimable: dict[str, PlayedRollout] = {}
        """Open rollouts that nobody has claimed, the first opened first."""
        self._claiming = asyncio.Condition()
        self._stack = contextlib.AsyncExitStack()
        self._starting = asyncio.Lock()
        self._url = ""
        self._port = 0
        self._access = Access(settings.host, settings.allowed_hosts, None, section=SECTION)
        self._keys = RolloutKeys("")

    async def __aenter__(self) -> "RolloutGateway":
        """Also after a process that was killed while it listened: its agents ask again. Raises RollstreamError if it
        has to listen and cannot.
        """
        if self._is_listening_at_once or read_json(address_file(self._workspace, self._name)).get("pid"):
            await self._listen()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._stack.aclose()
        if self._url:
            self._record_address(pid=None)

    def _record_address(self, pid: int | None) -> None:
        """`pid`: of the process that listens there; None: of none any more."""
        address = {"url": self._url, "port": self._port, "pid": pid}
        write_whole(address_file(self._workspace, self._name), json.dumps(address), is_private=False)

    @contextlib.asynccontextmanager
    async def open(self, session: Session, agent: str, *, is_claimable: bool) -> AsyncIterator[PlayedRollout]:
        """See `Gateway`. Raises RollstreamError if the port cannot be had."""
        await self._listen()
        rollout_id = session.rollout_id
        base_url = f"{self._url}/rollouts/{quote(rollout_id)}"
        key = self._keys.key_of(rollout_id)
        rollout = self._rollouts[rollout_id] = PlayedRollout(
            session,
            self._engine,
            agent,
            base_url=base_url,
            key=key,
            settings=self._settings,
            conceal=self._keys.conceal,
        )
        self._ended.discard(rollout_id)
        has_ended = True
        try:
            if is_claimable:
                await self._offer(rollout)
            yield rollout
        except asyncio.CancelledError:
            has_ended = session.is_over()  # else this process stops, or another one goes on with it
            raise
        finally:
            del self._rollouts[rollout_id]
            self._claimable.pop(rollout_id, None)
            if has_ended:
                self._ended.add(rollout_id)
            rollout.close()

    async def _offer(self, rollout: PlayedRollout) -> None:
        """Let agents claim a rollout, or whoever claimed it at a process that is gone and asks again.

        A claim that is repeated before its rollout is open again gets another one: then the first one is free.
        """
        async with self._claiming:
            free = [] if rollout.is_claimed else [rollout]
            same = [one for one in self._rollouts.values() if one.claim_key == rollout.claim_key != ""]
            if any(one.is_held for one in same):
                free += [one for one in same if not one.is_held]
            for one in free:
                one.is_claimed, one.claim_key = False, ""
                self._claimable[one.session.rollout_id] = one
            self._claiming.notify_all()

    async def _listen(self) -> None:
        async with self._starting:
            if self._url:
                return
            settings, name = self._settings, self._name
            try:
                self._workspace.mkdir(parents=True, exist_ok=True)
                token = token_in(token_file(self._workspace, name))
            except OSError as error:
                raise RollstreamError(
                    f"gateway token in {self._workspace} cannot be created: {error}; correct "
                    "the permissions of the folder"
                ) from error
            self._access = Access(settings.host, settings.allowed_hosts, token, section=SECTION)
            self._keys = RolloutKeys(token)
            file = address_file(self._workspace, name)
            listens = listening_again(self, settings.host, settings.port, file, SECTION)
            self._port = await self._stack.enter_async_context(listens)
            self._url = str(URL.build(scheme="http", host=settings.host, port=self._port))  # brackets for IPv6
            self._record_address(os.getpid())
            logger.info("gateway %s (token in %s)", self._url, token_file(self._workspace, name))

    def add_routes(self, router: web.UrlDispatcher, prefix: str = "") -> None:
        """The routes of the APIs, with the rollout in the path and without, and those of rollouts."""
        super().add_routes(router)
        super().add_routes(router, "/rollouts/{rollout:.+?}")
        router.add_post("/rollouts", self.claim)
        router.add_post("/rollouts/{rollout:.+}/reward", self.reward)
        router.add_post("/rollouts/{rollout:.+}/end", self.end)

    def check(self, request: web.Request) -> str:
        """Raises Refusal: 403 for a page, another host or another rollout's key, 401 without a key, 415."""
        self._access.check_source(request.headers)
        named = self._named(request)
        request[_NAMED] = named or ""
        check_is_json(request.method, request.headers)
        return TOKEN_CALLER if self._access.bears_token(request.headers) else f"rollout {named}"

    def _named(self, request: web.Request) -> str | None:
        """Id of the rollout that a request is for, if it names one. Raises Refusal (401, 403)."""
        named = request.match_info.get("rollout") or request.headers.get(ROLLOUT_HEADER)
        if not self._access.bears_token(request.headers):
            keys = keys_of(request.headers)
            mine = next((found for key in keys if (found := self._keys.rollout_of(key))), None)
            if mine is None:
                raise self._others_key() if any(key.startswith(KEY_PREFIX) for key in keys) else no_key()
            if named not in (None, mine):
                raise Refusal(403, f"the key is for rollout {mine}, not for {named}; use its key", code="wrong_rollout")
            named = mine
        return named

    def _others_key(self) -> Refusal:
        message = (
            f"the key is not one of producers process {self._name} in this workspace; use it at the gateway that gave"
        )
        return Refusal(401, f"{message} it, whose keys outlast restarts under the same name", code="invalid_api_key")

    def described(self, request: web.Request, name: str) -> dict[str, Any]:
        """The model of an agent of the rollout. Raises Refusal (404)."""
        return self._rollout(request).model.described(name)

    def served(self, request: web.Request) -> list[dict[str, Any]]:
        """The models of the rollout's agents, the default one first."""
        return self._rollout(request).model.all_described()

    async def count(self, request: web.Request, asked: ChatRequest) -> int:
        """Number of the prompt's tokens. Raises Refusal."""
        return self._rollout(request).model.count(asked)

    async def answer(
        self, request: web.Request, asked: ChatRequest | CompletionRequest, on_text: OnText | None = None
    ) -> Answered:
        """The answers, once the log has acknowledged them as steps. Raises Refusal."""
        route = request.path.rpartition("/v1/")[2]
        return await self._rollout(request).call(
            asked, CallIdentity.of(request.headers, route, await request.read()), on_text
        )

    async def too_many(self, request: web.Request) -> None:
        """See `Routes`."""
        rollout = self._rollouts.get(request[_NAMED])
        if rollout is not None and "/v1/" in request.path:
            route = request.path.rpartition("/v1/")[2]
            rollout.too_many(CallIdentity.of(request.headers, route, await request.read()))

    async def reward(self, request: web.Request) -> web.Response:
        """Give a reward to the rollout, or to one of its steps; the same again changes nothing."""
        body = validated(RewardBody, json_of(await request.read()))
        rollout = self._rollout(request)
        await rollout.reward(body.value, body.name, body.step_index, body.agent)
        failpoint("gateway/after-reward-before-answer")
        return json_response({"rollout_id": rollout.session.rollout_id, **body.model_dump()})

    async def end(self, request: web.Request) -> web.Response:
        """The agent is done; again changes nothing."""
        body = validated(EndBody, json_of(await request.read() or b"{}"))
        named = request[_NAMED]
        if not named or not self._has_ended(request, named):
            await self._rollout(request).end(body.error)
        failpoint("gateway/after-end-before-answer")
        return json_response({"rollout_id": named, "status": "ended"})

    async def claim(self, request: web.Request) -> web.Response:
        """The next rollout that nobody plays, its task and its key; 204 if there is none in time."""
        if not self._access.bears_token(request.headers):
            raise Refusal(403, "only the gateway's token claims rollouts; send that one", code="wrong_key")
        body = validated(ClaimBody, json_of(await request.read() or b"{}"))
        key = CallIdentity.of(request.headers, "rollouts", b"").key_sha256 or ""
        try:
            async with asyncio.timeout(body.wait_s):
                rollout = await self._next(key)
        except TimeoutError:
            after_s = self._behind_s()
            if after_s is not None:
                raise Refusal(
                    429,
                    f"the learner is behind, so rollouts are held back (follow_lag); try again in {after_s} s",
                    code=LEARNER_BEHIND,
                    retry_after_s=after_s,
                ) from None
            return web.Response(status=204, headers={"Retry-After": "1"})
        await rollout.claim(key)
        description = rollout.description()
        if asked := request.headers.get("Host"):  # the address that reaches this process from there: a published port
            scheme = "https" if request.headers.get("X-Forwarded-Proto", "").lower() == "https" else "http"
            description["base_url"] = f"{scheme}://{asked}/rollouts/{quote(rollout.session.rollout_id)}"
        return json_response(description)

    async def _next(self, key: str) -> PlayedRollout:
        """`key`: a client that asks again under it gets the same rollout, as does one that waits under it twice."""
        async with self._claiming:
            while (rollout := self._claimed_under(key)) is None and not self._claimable:
                await self._claiming.wait()
            if rollout is None:
                rollout = self._claimable.pop(next(iter(self._claimable)))
                rollout.claim_key = key
                self._claiming.notify_all()
            rollout.is_given = True
            return rollout

    def _claimed_under(self, key: str) -> PlayedRollout | None:
        return next((one for one in self._rollouts.values() if key and one.claim_key == key), None)

    def _has_ended(self, request: web.Request, named: str) -> bool:
        if named in self._rollouts or named in self._ended:
            return named in self._ended
        return self._is_known(request, named) and self._is_over(named)

    def _is_known(self, request: web.Request, named: str) -> bool:
        """Its own key shows that a rollout was opened once, maybe by a process that is gone; else the log has to."""
        return not self._access.bears_token(request.headers) or self._may_have_begun(named)

    def _rollout(self, request: web.Request) -> PlayedRollout:
        named = request[_NAMED]
        if not named:
            raise Refusal(400, f"no rollout is named; use its key, its path or the header {ROLLOUT_HEADER}")
        found = self._rollouts.get(named)
        if self._has_ended(request, named):
            raise ended(named)
        if found is None:
            raise _not_open(named, self._name, is_known=self._is_known(request, named))
        return found


def _not_open(rollout_id: str, name: str, *, is_known: bool) -> Refusal:
    """`is_known`: the process before may have had it; Clients of OpenAI's and Anthropic's APIs repeat a request after
    503.
    """
    message = f"rollout {rollout_id[:200]!r} is not open here"
    if is_known:
        remedy = f"try again in 1 s; if that stays so, another process than {name} plays on: claim the next rollout"
        return Refusal(503, f"{message}; {remedy}", code="rollout_not_found", retry_after_s=1)
    remedy = "correct its id, or bear the key of its claim in place of the gateway's token"
    return Refusal(404, f"{message} and not known to have begun; {remedy}", code="rollout_not_found")
