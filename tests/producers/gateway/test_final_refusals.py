"""Refusals that no other try changes: clients are told so, and an agent stops at the first of them."""

import asyncio
from typing import Any

import openai
import pytest

from rollstream.producers.engines.base import Generation, GenerationRequest
from rollstream.producers.engines.scripted import ScriptedEngine
from rollstream.producers.gateway.rollout_client import RemoteRollout, RolloutTask
from rollstream.producers.openai.requests import SHOULD_RETRY
from rollstream.schemas.errors import GatewayError, ModelError
from rollstream.schemas.events import RolloutFailed
from tests.producers.gateway.gateway_rig import play_outside

MESSAGE = {"role": "user", "content": "a"}
MESSAGES = {"model": "policy", "max_tokens": 4, "messages": [MESSAGE]}


def test_a_call_after_the_end_and_a_reward_with_another_value_are_not_to_be_tried_again(tmp_path):
    async def agent(one: Any) -> None:
        await one.chat("a")
        assert SHOULD_RETRY not in one.headers
        await one.reward(1.0)
        await one.reward(0.5, status=409)
        assert one.headers[SHOULD_RETRY] == "false"
        await one.end()
        for url, body in (("/v1/chat/completions", MESSAGES), ("/v1/messages", MESSAGES), ("/reward", {"value": 2.0})):
            await one.post(url, body, status=409)
            assert one.headers[SHOULD_RETRY] == "false"

    play_outside(tmp_path, agent).assert_complete()


def test_a_call_that_is_one_too_many_may_be_tried_again(tmp_path, monkeypatch):
    has_begun, go_on, generate = asyncio.Event(), asyncio.Event(), ScriptedEngine.generate

    async def held(engine: ScriptedEngine, request: GenerationRequest) -> Generation:
        has_begun.set()
        await go_on.wait()
        return await generate(engine, request)

    async def agent(one: Any) -> None:
        first = asyncio.create_task(one.chat("a"))
        await has_begun.wait()
        async with asyncio.timeout(30):
            await one.chat("b", status=429)
        assert SHOULD_RETRY not in one.headers
        go_on.set()
        await first
        await one.reward(1.0)
        await one.end()

    monkeypatch.setattr(ScriptedEngine, "generate", held)
    play_outside(tmp_path, agent, max_concurrent_calls=1).assert_complete()


class BrokenError(Exception):
    """An unforeseen error of a part of an engine."""


def failing(error: Exception, asked: list[str]) -> Any:
    """A script that answers the first prompt alone."""

    def script(prompt: str, rng: Any, version: int) -> tuple[str, float]:
        asked.append(prompt)
        if len(asked) > 1:
            raise error
        return "7", -0.5

    return script


@pytest.mark.parametrize(
    ("error", "reason"),
    [(ModelError("the GPU is gone"), "the GPU is gone"), (BrokenError("a secret"), "see the log of the producers")],
)
def test_after_an_error_of_the_engine_every_further_call_is_refused_for_good(tmp_path, error, reason):
    asked: list[str] = []

    async def agent(one: Any) -> None:
        await one.chat("a", headers={"Idempotency-Key": "k"})
        await one.chat("b", status=500)
        assert (one.headers.get(SHOULD_RETRY) == "false") == isinstance(error, ModelError)
        for url in ("/v1/chat/completions", "/v1/messages"):
            refused = (await one.post(url, MESSAGES | {"stream": True}, status=500))["error"]
            assert refused["message"] == (
                f"rollout {one.rollout['rollout_id']} has failed by an error of its engine ({reason}); end it"
            )
            assert one.headers[SHOULD_RETRY] == "false"
        await one.chat("a", headers={"Idempotency-Key": "k"})
        await one.reward(1.0)
        await one.end()

    last = play_outside(tmp_path, agent, script=failing(error, asked)).last
    assert isinstance(last, RolloutFailed)
    assert last.cause == "engine_error"
    assert len(asked) == 2


def test_openais_and_our_client_stop_at_an_error_of_the_engine_however_often_they_would_try_again(tmp_path):
    asked: list[str] = []

    async def agent(one: Any) -> None:
        base_url, key = one.rollout["base_url"], one.rollout["key"]
        async with openai.AsyncOpenAI(base_url=f"{base_url}/v1", api_key=key, max_retries=10) as client:
            ask = client.chat.completions.create
            await ask(model="policy", messages=[{"role": "user", "content": "a"}])
            for _ in range(2):
                with pytest.raises(openai.InternalServerError, match="the GPU is gone"):
                    await ask(model="policy", messages=[{"role": "user", "content": "b"}])
        rollout = RemoteRollout(RolloutTask.model_validate(one.rollout), base_url, key)
        with pytest.raises(GatewayError, match="the GPU is gone"):
            await rollout.chat([MESSAGE])
        await rollout.close()
        await one.end()

    last = play_outside(tmp_path, agent, script=failing(ModelError("the GPU is gone"), asked)).last
    assert isinstance(last, RolloutFailed)
    assert len(asked) == 2
