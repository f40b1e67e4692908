"""Tasks that agents outside play: attempts with a gateway of their own, and clients that play them."""

import asyncio
import contextlib
import itertools
import json
import os
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import aiohttp

from rollstream.eventlog import codec
from rollstream.producers.attempt import run_rollout
from rollstream.producers.gateway.listener import RolloutGateway
from rollstream.producers.gateway.marks import address_file, token_file
from rollstream.schemas.permissions import Permissions, named_by
from rollstream.schemas.services import GatewaySection
from tests.producers.conftest import Played, scripted, task_of

NAME = "producers-1"
Agent = Callable[["Outside"], Awaitable[None]]
Program = Callable[[Path], Coroutine[Any, Any, None]]
"""Is told the workspace."""


class Outside:
    """An agent outside: it knows a rollout's URL and key, and speaks HTTP."""

    def __init__(self, http: aiohttp.ClientSession, url: str, token: str) -> None:
        self.http = http
        self.url = url
        self.token = token
        self.rollout: dict[str, Any] = {}

    async def claim(self, wait_s: float = 10.0) -> dict[str, Any]:
        self.rollout = await self.post(f"{self.url}/rollouts", {"wait_s": wait_s}, key=self.token)
        return self.rollout

    async def post(self, url: str, body: Any, *, key: str | None = None, status: int = 200, **headers: str) -> Any:
        """The JSON of an answer; `url` may be the end of the rollout's."""
        url = url if url.startswith("http") else self.rollout["base_url"] + url
        bears = {"Authorization": f"Bearer {key or self.rollout['key']}"}
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        sent = {"Content-Type": "application/json"} | bears | headers
        async with self.http.post(url, data=data, headers=sent) as response:
            text = await response.text()
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


def play_outside(
    folder: Path, agent: Agent | None = None, *, program: Program | None = None, script: Any = None, **settings: Any
) -> Played:
    """One attempt in the environment `gateway` (or another one), which `agent` or a `program` of its own plays."""
    section = GatewaySection(max_concurrent_calls=settings.pop("max_concurrent_calls", 64))
    max_length = settings.pop("max_length", None)
    task = task_of(settings.pop("environment", "gateway"), **settings)
    events: list[Any] = []

    async def emit(event: Any) -> None:
        encoded = codec.encode(event)
        events.append(codec.parse(encoded.topic, encoded.value)[0])

    async def scenario() -> None:
        engine, counter = await scripted(folder, script, max_length=max_length), itertools.count(1000)
        async with RolloutGateway(section, engine, workspace=folder / "w", name=NAME) as gateway:
            rollout = run_rollout(
                task,
                member=0,
                attempt=0,
                engine=engine,
                emit=emit,
                clock=lambda: next(counter),
                permissions=Permissions.of(named_by(task.settings), os.environ),
                gateway=gateway,
            )
            async with asyncio.TaskGroup() as both:
                both.create_task(rollout)
                if agent is not None:
                    both.create_task(_play(agent, folder / "w"))
                if program is not None:
                    both.create_task(program(folder / "w"))

    asyncio.run(scenario())
    return Played(events)


async def _play(agent: Agent, workspace: Path) -> None:
    async with outside(workspace) as one:
        await one.claim()
        await agent(one)
