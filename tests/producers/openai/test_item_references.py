"""Items of earlier responses that a client names by their ids, as Vercel's AI SDK does."""

import asyncio
from typing import Any

import aiohttp
import openai
import pytest

from tests.producers.conftest import answers
from tests.producers.gateway.gateway_rig import Killed, play_outside
from tests.producers.openai.endpoint_rig import ASK, serving

TOOL: Any = {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": False}
CALL = 'I add.\n<tool_call>\n{"name": "add", "arguments": {"a": 3}}\n</tool_call>'


def client_of(one: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{one.rollout['base_url']}/v1", api_key=one.rollout["key"], max_retries=0)


def continued(items: list[Any]) -> list[Any]:
    """The next request's items: texts are named, calls are whole."""
    named = [{"type": "item_reference", "id": one.id} if one.type == "message" else one.to_dict() for one in items]
    outputs = [
        {"type": "function_call_output", "call_id": one.call_id, "output": "4"}
        for one in items
        if one.type == "function_call"
    ]
    return [{"role": "user", "content": "add"}, *named, *outputs]


@pytest.mark.parametrize("is_killed", [False, True])
@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_named_text_is_the_answer_that_was_given(tmp_path, is_streamed, is_killed):
    items: list[Any] = []

    async def begin(one: Any) -> None:
        async with client_of(one) as client:
            asked: Any = {"model": "policy", "input": "add", "tools": [TOOL]}
            if is_streamed:
                async with client.responses.stream(**asked) as stream:
                    items[:] = (await stream.get_final_response()).output
            else:
                items[:] = (await client.responses.create(**asked)).output
        if is_killed:
            raise Killed
        await go_on(one)

    async def go_on(one: Any) -> None:
        async with client_of(one) as client:
            await client.responses.create(model="policy", input=continued(items), tools=[TOOL])
        await one.reward(1.0)
        await one.end()

    options: Any = {"script": answers(CALL, "done"), "sampling": {"max_new_tokens": 200}}
    played = play_outside(tmp_path, begin, **options)
    if is_killed:
        played = play_outside(tmp_path, go_on, before=played, **options)
    played.assert_complete()
    calls: list[Any] = [step for step in played.steps if step.llm is not None]
    first, second = calls
    assert [item.type for item in items] == ["message", "function_call"]
    assert second.llm.prefix.step_index == first.step_index
    assert second.data["input"][1] == {"role": "assistant", "content": CALL}


@pytest.mark.parametrize("name", ["msg_0000", "fc_0000", None])
def test_an_item_that_is_not_kept_is_refused_with_a_remedy(tmp_path, name):
    async def agent(one: Any) -> None:
        body = {"model": "policy", "input": [{"type": "item_reference", "id": name}, {"role": "user", "content": "a"}]}
        refused = await one.post("/v1/responses", body, status=400)
        assert "send items whole (store: false)" in refused["error"]["message"]
        await one.reward(1.0)
        await one.end()

    play_outside(tmp_path, agent).assert_complete()


def test_the_gateway_that_keeps_nothing_refuses_references(tmp_path):
    async def scenario() -> Any:
        async with serving(tmp_path) as lab, aiohttp.ClientSession() as http:
            body = {"model": "policy", "input": [{"type": "item_reference", "id": "msg_1"}, *ASK]}
            async with http.post(f"{lab.url}/responses", json=body) as response:
                return response.status, await response.json()

    status, body = asyncio.run(scenario())
    assert status == 400
    assert body["error"]["code"] == "item_not_found"
