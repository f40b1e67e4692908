"""Streams in which nothing is sampled for a while."""

import asyncio
from typing import Any

import pytest

from rollstream.producers.engines.scripted import ScriptedEngine
from rollstream.producers.openai import routes
from rollstream.schemas.errors import ModelError
from tests.producers.conftest import answers
from tests.producers.gateway.gateway_rig import play_outside
from tests.producers.openai.endpoint_rig import ASK

BODIES: dict[str, dict[str, Any]] = {
    "chat/completions": {"messages": ASK},
    "messages": {"messages": ASK, "max_tokens": 20},
    "responses": {"input": "a"},
}


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("is_failing", [False, True])
def test_a_pause_is_filled_so_that_clients_do_not_give_up(tmp_path, monkeypatch, path, is_failing):
    generate = ScriptedEngine.generate
    monkeypatch.setattr(routes, "KEEP_ALIVE_S", 0.05)

    async def slow(self: ScriptedEngine, request: Any) -> Any:
        await asyncio.sleep(0.3)
        if is_failing:
            raise ModelError("the engine broke")
        return await generate(self, request)

    monkeypatch.setattr(ScriptedEngine, "generate", slow)

    async def agent(one: Any) -> None:
        headers = {"Authorization": f"Bearer {one.rollout['key']}"}
        body = {"model": "policy", "stream": True} | BODIES[path]
        async with one.http.post(f"{one.rollout['base_url']}/v1/{path}", json=body, headers=headers) as response:
            assert response.status == 200
            assert await response.content.readuntil(b"\n\n") == b": keep-alive\n\n"
            text = await response.text()
        assert ("the engine broke" if is_failing else '"7"') in text
        await one.reward(1.0)
        await one.end()

    play_outside(tmp_path, agent, script=answers("7"), sampling={"max_new_tokens": 64})
