"""Answers that clients and chat templates give back in other words than they were sampled still count as used."""

import contextlib
import json
from collections.abc import Callable
from typing import Any

import openai
import pytest

from rollstream.processors.assemble.sequences import dead_branches, join_calls
from rollstream.schemas import tokens
from tests.producers.conftest import answers
from tests.producers.gateway.gateway_rig import assembled_calls, play_outside
from tests.rigs.families import qwen3_tokenizer

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "add", "strict": True, "parameters": {"type": "object", "additionalProperties": False}},
}


def talk(change: Callable[[str], str] = str, turns: int = 3, **options: Any) -> Any:
    """An agent that gives each answer back, changed, and asks on."""

    async def agent(one: Any) -> None:
        messages: list[Any] = [{"role": "user", "content": "which?"}]
        for turn in range(turns):
            answer = (await one.chat(*messages, **options))["choices"][0]["message"]
            messages += [answer | {"content": change(answer["content"])}, {"role": "user", "content": f"result {turn}"}]
        await one.reward(1.0)
        await one.end()

    return agent


def assert_continued(first: Any, second: Any) -> None:
    """The second call goes on from all ids of the first one."""
    ids = [*tokens.decode_ids(first.llm.prompt_ids), *tokens.decode_ids(first.llm.completion_ids)]
    assert (second.llm.prefix.step_index, second.llm.prefix.length) == (first.step_index, len(ids))


def test_every_call_of_a_model_that_reasons_is_trained(tmp_path):
    script = answers(*[f"<think>\nLet me think, {n}.\n</think>\n\nThe answer to this is {n}." for n in range(4)])
    tokenizer = qwen3_tokenizer(tmp_path / "model")
    played = play_outside(
        tmp_path, talk(turns=4), script=script, tokenizer=tokenizer, sampling={"max_new_tokens": 300}, max_turns=4
    )
    calls = assembled_calls(played)
    assert len(calls) == 4
    assert dead_branches(calls) == set()
    assert len(join_calls(calls, without=dead_branches(calls))) == 4


def test_every_call_of_a_client_that_strips_answers_is_trained(tmp_path):
    script = answers(*[f"Look at the thing number {n}.\n" for n in range(3)])
    calls = assembled_calls(play_outside(tmp_path, talk(str.strip), script=script, max_turns=3))
    assert dead_branches(calls) == set()


@pytest.mark.parametrize("stop", ["Observation:", "</answer>"])
def test_every_call_that_a_stop_text_ended_is_trained(tmp_path, stop):
    script = answers(*[f"Action {n} {stop} and more" for n in range(3)])
    calls = assembled_calls(play_outside(tmp_path, talk(stop=[stop]), script=script, max_turns=3))
    assert len(calls) == 3
    assert dead_branches(calls) == set()


def test_an_answer_that_is_not_given_back_is_a_dead_branch(tmp_path):
    script = answers("Go left", "Go right", "Go on")
    calls = assembled_calls(play_outside(tmp_path, talk(lambda text: "nothing"), script=script, max_turns=3))
    assert dead_branches(calls) == {call.step_index for call in calls[:2]}


@pytest.mark.parametrize("way", ["create", "parse", "stream"])
def test_a_tool_call_is_recognised_as_each_helper_of_the_openai_sdk_gives_it_back(tmp_path, way):
    async def agent(one: Any) -> None:
        asked: dict[str, Any] = {"model": "policy", "messages": [{"role": "user", "content": "3?"}], "tools": [TOOL]}
        async with contextlib.AsyncExitStack() as stack:
            client = openai.AsyncOpenAI(base_url=f"{one.rollout['base_url']}/v1", api_key=one.rollout["key"])
            chat = (await stack.enter_async_context(client)).chat.completions
            if way == "stream":
                stream = await stack.enter_async_context(chat.stream(**asked))
                answer = (await stream.get_final_completion()).choices[0].message
            else:
                answer = (await getattr(chat, way)(**asked)).choices[0].message
            assert answer.tool_calls
            given = {"role": "tool", "tool_call_id": answer.tool_calls[0].id, "content": "4"}
            again: dict[str, Any] = asked | {"messages": [*asked["messages"], answer.to_dict(), given]}
            await chat.create(**again)
        await one.reward(1.0)
        await one.end()

    script = answers('<tool_call>\n{"name": "add", "arguments": {"a": 3}}\n</tool_call>', "done")
    first, second = assembled_calls(play_outside(tmp_path, agent, script=script, sampling={"max_new_tokens": 200}))
    assert second.llm.prefix.step_index == first.step_index
    assert dead_branches([first, second]) == set()


@pytest.mark.parametrize(
    ("written", "given_back"), [("5.0", "5"), ("1e3", "1000"), ("12345678901234567890", "12345678901234567000")]
)
def test_numbers_that_javascript_writes_otherwise_are_those_of_the_answer(tmp_path, written, given_back):
    async def agent(one: Any) -> None:
        asked = {"tools": [TOOL]}
        answer = (await one.chat("3?", **asked))["choices"][0]["message"]
        (call,) = answer["tool_calls"]
        function = call["function"] | {"arguments": f'{{"a":{given_back}}}'}
        assert function["arguments"] != call["function"]["arguments"]
        back = {"role": "assistant", "content": None, "tool_calls": [call | {"function": function}]}
        await one.chat("3?", back, {"role": "tool", "tool_call_id": call["id"], "content": "4"}, **asked)
        await one.reward(1.0)
        await one.end()

    script = answers(f'<tool_call>\n{{"name": "add", "arguments": {{"a": {written}}}}}\n</tool_call>', "done")
    first, second = assembled_calls(play_outside(tmp_path, agent, script=script, sampling={"max_new_tokens": 200}))
    assert_continued(first, second)


def test_arguments_that_are_nested_too_deeply_for_a_record_stay_a_text(tmp_path):
    deep = '{"a":' * 1000 + "1" + "}" * 1000

    async def agent(one: Any) -> None:
        call = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": deep}}
        back = {"role": "assistant", "content": None, "tool_calls": [call]}
        await one.chat("3?", back, {"role": "tool", "tool_call_id": "call_1", "content": "4"}, tools=[TOOL])
        await one.reward(1.0)
        await one.end()

    played = play_outside(tmp_path, agent)
    played.assert_complete()
    (step,) = [step for step in played.steps if step.llm is not None]
    recorded = json.loads(json.dumps(step.data))["input"][1]["tool_calls"][0]["function"]["arguments"]
    assert recorded == deep


@pytest.mark.parametrize(
    "arguments",
    ['{"input": "ls"}', '{"command": "ls"}', '{"input": "ls", "timeout": 5}'],
    ids=["input", "other", "more"],
)
def test_a_custom_tool_call_is_the_models_own_whatever_arguments_it_wrote(tmp_path, arguments):
    async def agent(one: Any) -> None:
        async with openai.AsyncOpenAI(base_url=f"{one.rollout['base_url']}/v1", api_key=one.rollout["key"]) as client:
            asked: dict[str, Any] = {"model": "policy", "tools": [{"type": "custom", "name": "shell"}]}
            first = await client.responses.create(**asked, input="list")
            call: Any = first.output[-1]
            assert call.type == "custom_tool_call"
            given = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "a.txt"}
            items: Any = [{"role": "user", "content": "list"}, *[item.to_dict() for item in first.output], given]
            await client.responses.create(**asked, input=items)
        await one.reward(1.0)
        await one.end()

    script = answers(f'<tool_call>\n{{"name": "shell", "arguments": {arguments}}}\n</tool_call>', "done")
    first, second = assembled_calls(play_outside(tmp_path, agent, script=script, sampling={"max_new_tokens": 200}))
    assert_continued(first, second)


def test_a_clients_own_text_does_not_count_as_an_answer_with_reasoning(tmp_path):
    async def agent(one: Any) -> None:
        example = {"role": "assistant", "content": "OK"}
        await one.chat("first task", tools=[TOOL])
        await one.chat("an example", example, "second task", tools=[TOOL])
        await one.reward(1.0)
        await one.end()

    script = answers("<think>\nA plan.\n</think>\n\nOK", "done")
    tokenizer = qwen3_tokenizer(tmp_path / "model")
    played = play_outside(tmp_path, agent, script=script, tokenizer=tokenizer, sampling={"max_new_tokens": 300})
    steps: list[Any] = [step for step in played.steps if step.llm is not None]
    assert steps[1].data["input"][1]["content"] == "OK"


@pytest.mark.parametrize("tool", [{"type": "function", "name": "look"}, {"name": "look", "input_schema": {}}], ids=str)
def test_tools_in_the_form_of_another_api_are_answered(tmp_path, tool):
    async def agent(one: Any) -> None:
        await one.chat("a", tools=[tool])
        await one.reward(1.0)
        await one.end()

    script = answers('<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>')
    play_outside(tmp_path, agent, script=script, sampling={"max_new_tokens": 100}).assert_complete()
