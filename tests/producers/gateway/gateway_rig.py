"""Tasks that agents outside play: attempts with a gateway of their own, and clients that play them."""

import asyncio
import contextlib
import io
import itertools
import json
import os
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import aiohttp
from openai import AsyncOpenAI

from examples.agents import shop
from rollstream.eventlog import codec
from rollstream.eventlog.log import Encoded
from rollstream.processors.assemble.state import Call
from rollstream.producers import GatewayClient
from rollstream.producers.attempt import record_rollout
from rollstream.producers.gateway.call_keys import address_file, token_file
from rollstream.producers.gateway.listener import RolloutGateway
from rollstream.producers.rollout.continuing import RecordedAttempt
from rollstream.schemas.permissions import Permissions, named_by
from rollstream.schemas.services import GatewaySection
from tests.producers.conftest import Played, scripted, task_of

NAME = "producers-1"
Agent = Callable[["Outside"], Awaitable[None]]
Program = Callable[[Path], Coroutine[Any, Any, None]]
"""Is told the workspace."""


async def shop_player(workspace: Path) -> None:
    """The example agent shop.py, for one rollout."""
    async with GatewayClient.of_workspace(workspace) as gateway:
        rollout = await gateway.claim(wait_s=10)
        assert rollout is not None
        async with rollout, AsyncOpenAI(api_key="of the rollout") as client:
            await shop.play(rollout, client)


class Outside:
    """An agent outside: it knows a rollout's URL and key, and speaks HTTP."""

    def __init__(self, http: aiohttp.ClientSession, url: str, token: str) -> None:
        self.http = http
        self.url = url
        self.token = token
        self.rollout: dict[str, Any] = {}
        self.headers: Any = {}
        """Headers of the last answer."""

    async def claim(self, wait_s: float = 10.0, *, key: str = "claim") -> dict[str, Any]:
        """The next rollout; `key`: its Idempotency-Key."""
        body, headers = {"wait_s": wait_s}, {"Idempotency-Key": key}
        self.rollout = await self.post(f"{self.url}/rollouts", body, key=self.token, status=200, **headers)
        return self.rollout

    async def assert_none_is_claimable(self) -> None:
        """No rollout is open that nobody has claimed."""
        await self.post(f"{self.url}/rollouts", {"wait_s": 0.0}, key=self.token, status=204)

    async def post(self, url: str, body: Any, *, key: str | None = None, status: int = 200, **headers: str) -> Any:
        """The JSON of an answer; `url` may be the end of the rollout's."""
        url = url if url.startswith("http") else self.rollout["base_url"] + url
        bears = {"Authorization": f"Bearer {key or self.rollout['key']}"}
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        sent = {"Content-Type": "application/json"} | bears | headers
        async with self.http.post(url, data=io.BytesIO(data), headers=sent) as response:
            text, self.headers = await response.text(), response.headers
            assert response.status == status, (response.status, text)
            return json.loads(text) if text else None

    async def chat(
        self, *messages: dict[str, Any] | str, status: int = 200, headers: Any = None, **options: Any
    ) -> Any:
        sent = [{"role": "user", "content": one} if isinstance(one, str) else one for one in messages]
        body = {"model": "policy", "messages": sent, **options}
        return await self.post("/v1/chat/completions", body, status=status, **(headers or {}))

    async def reward(self, value: Any, *, status: int = 200, **options: Any) -> Any:
        return await self.post("/reward", {"value": value, **options}, status=status)

    async def end(self, **body: Any) -> Any:
        return await self.post("/end", body)


@contextlib.asynccontextmanager
async def outside(workspace: Path):
    """An agent, once the gateway listens."""
    address, token = address_file(workspace, NAME), token_file(workspace, NAME)
    while not address.exists():
        await asyncio.sleep(0.005)
    async with aiohttp.ClientSession() as http:
        yield Outside(http, json.loads(address.read_text())["url"], token.read_text().strip())


class Killed(Exception):
    """Raised by an agent: the process that it plays at is gone."""


def recorded_of(played: Played) -> RecordedAttempt:
    """Records of an attempt on the log, for the process after it."""
    steps = {step.step_index: (step, codec.content_digest(step)) for step in played.steps}
    rewards = {reward.reward_index: (reward, codec.content_digest(reward)) for reward in played.rewards}
    return RecordedAttempt(steps, rewards)


def assembled_calls(played: Played) -> list[Any]:
    """Calls of a rollout in their order, as assembly joins them."""
    return sorted(Call(step.step_index, step.agent, step.llm) for step in played.steps if step.llm is not None)


def play_outside(
    folder: Path, agent: Agent | None = None, *, program: Program | None = None, script: Any = None, **settings: Any
) -> Played:
    """One attempt in the environment `gateway` (or another one), which `agent` or a `program` of its own plays.

    `before`: what another process played of it, whose events come first; its agent goes on with the claimed rollout.
    `max_length`: tokens that the model takes. `delay_s`: what each answer takes.
    `tokenizer`: of the model, in place of the scripted one.
    `behind_s`, `is_over`, `may_have_begun`: of the gateway.
    """
    limits = ("max_concurrent_calls", "calls_per_key")
    section = GatewaySection(**{name: settings.pop(name) for name in limits if name in settings})
    before: Played | None = settings.pop("before", None)
    tokenizer = settings.pop("tokenizer", None)
    options = {"max_length": settings.pop("max_length", None), "delay_s": settings.pop("delay_s", 0.0)}
    asked = ("behind_s", "is_over", "may_have_begun")
    of_log: dict[str, Any] = {name: settings.pop(name) for name in asked if name in settings}
    task = task_of(settings.pop("environment", "gateway"), **settings)
    events: list[Any] = [] if before is None else [*before.events]

    async def emit(encoded: Encoded) -> None:
        events.append(codec.parse(encoded.topic, encoded.value)[0])

    async def scenario() -> None:
        engine = await scripted(folder, script, **options)
        counter = itertools.count(max((event.time_ms + 1 for event in events), default=1000))
        engine._tokenizer = tokenizer or engine._tokenizer
        async with RolloutGateway(section, engine, workspace=folder / "w", name=NAME, **of_log) as gateway:
            rollout = record_rollout(
                task,
                member=0,
                attempt=0,
                is_last=False,
                engine=engine,
                emit=emit,
                clock=lambda: next(counter),
                permissions=Permissions.of(named_by(task.settings), os.environ),
                gateway=gateway,
                before=None if before is None else recorded_of(before),
            )
            async with asyncio.TaskGroup() as both:
                both.create_task(rollout)
                if agent is not None:
                    both.create_task(_play(agent, folder / "w"))
                if program is not None:
                    both.create_task(program(folder / "w"))

    address_file(folder / "w", NAME).unlink(missing_ok=True)  # that of the process before
    try:
        asyncio.run(scenario())
    except* Killed:
        pass
    return Played(events)


async def _play(agent: Agent, workspace: Path) -> None:
    async with outside(workspace) as one:
        await one.claim()
        await agent(one)
