"""Arguments of tool calls come back to the agent, into the record and into prompts as the model wrote them."""

import json
from typing import Any

import pytest

from rollstream.producers.engines.scripted import ScriptedTokenizer
from rollstream.producers.openai.requests import json_of
from rollstream.producers.rollout import call_arguments
from rollstream.schemas import tokens
from tests.producers.conftest import answers, output_of
from tests.producers.gateway.gateway_rig import Killed, play_outside
from tests.rigs.families import glm_tokenizer, qwen3_tokenizer

NUMBER = 123456789012345678901234567890
MANY = "9" * 400
ARGUMENTS = f'{{"a": -{NUMBER},  "b": [18446744073709551616, {{"c": {MANY}}}], "d": 1.10e0}}'
CALL = f'<tool_call>\n{{"name": "add", "arguments": {ARGUMENTS}}}\n</tool_call>'
GLM_CALL = f"\n<think></think>\n<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>{NUMBER}</arg_value>\n</tool_call>"
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "add", "parameters": SCHEMA}}
QUESTION = {"role": "user", "content": "3+1"}
LONG: Any = {"sampling": {"max_new_tokens": 1000}}
CHAT, MESSAGES, RESPOND = "/v1/chat/completions", "/v1/messages", "/v1/responses"


def calls_of(played: Any) -> list[Any]:
    return [step for step in played.steps if step.llm is not None]


async def by_chat(one: Any) -> str:
    message = (await one.chat(QUESTION, tools=[TOOL]))["choices"][0]["message"]
    call = message["tool_calls"][0]
    await one.chat(QUESTION, message, {"role": "tool", "tool_call_id": call["id"], "content": "4"}, tools=[TOOL])
    return call["function"]["arguments"]


async def by_responses(one: Any) -> str:
    body = {"model": "policy", "input": [QUESTION], "tools": [{"type": "function", "name": "add"}]}
    (item,) = (await one.post(RESPOND, body))["output"]
    returned = {"type": "function_call_output", "call_id": item["call_id"], "output": "4"}
    await one.post(RESPOND, body | {"input": [QUESTION, item, returned]})
    return item["arguments"]


def message_body(*messages: Any, **options: Any) -> dict[str, Any]:
    tool = {"name": "add", "input_schema": SCHEMA}
    return {"model": "policy", "max_tokens": 900, "tools": [tool], "messages": [QUESTION, *messages], **options}


async def goes_on(one: Any, block: Any) -> None:
    result = {"type": "tool_result", "tool_use_id": block["id"], "content": "4"}
    turns = {"role": "assistant", "content": [block]}, {"role": "user", "content": [result]}
    await one.post(MESSAGES, message_body(*turns))


async def by_messages(one: Any) -> Any:
    (block,) = (await one.post(MESSAGES, message_body()))["content"]
    await goes_on(one, block)
    return block["input"]


async def by_streamed_messages(one: Any) -> Any:
    headers = {"Authorization": f"Bearer {one.rollout['key']}"}
    async with one.http.post(
        one.rollout["base_url"] + MESSAGES, json=message_body(stream=True), headers=headers
    ) as response:
        events = [json.loads(line[6:]) for line in (await response.text()).splitlines() if line.startswith("data: ")]
    (block,) = [event["content_block"] for event in events if event["type"] == "content_block_start"]
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    written = "".join(delta["partial_json"] for delta in deltas)
    await goes_on(one, block | {"input": json.loads(written)})
    return written


@pytest.mark.parametrize("ask", [by_chat, by_responses, by_messages, by_streamed_messages])
@pytest.mark.parametrize("family", ["text", "qwen3", "glm"])
def test_integers_of_any_size_reach_the_agent_and_the_record_as_they_were_written(tmp_path, ask, family):
    make: Any = {"text": lambda _: ScriptedTokenizer(), "qwen3": qwen3_tokenizer, "glm": glm_tokenizer}[family]
    call, wanted = (GLM_CALL, f'{{"a":{NUMBER}}}') if family == "glm" else (CALL, ARGUMENTS)
    given: list[Any] = []

    async def agent(one: Any) -> None:
        given.append(await ask(one))
        await one.reward(1.0)
        await one.end()

    tokenizer = make(tmp_path / "model")
    played = play_outside(tmp_path, agent, script=answers(call, "four"), tokenizer=tokenizer, **LONG)
    played.assert_complete()
    found = given[0] if isinstance(given[0], dict) else json.loads(given[0])
    assert found == json.loads(wanted)
    if family == "text" and isinstance(given[0], str):
        assert given[0] == wanted, "spaces and decimals are kept, too"
    first, second = calls_of(played)
    assert output_of(first) == call
    whole = len(tokens.decode_ids(first.llm.prompt_ids)) + len(tokens.decode_ids(first.llm.completion_ids))
    assert second.llm.prefix.length >= whole - 1, "all of its ids, but maybe the end token"
    assert second.data["input"][1] == {"role": "assistant", "content": call}


@pytest.mark.parametrize("make", [qwen3_tokenizer, glm_tokenizer])
@pytest.mark.parametrize("api", [CHAT, MESSAGES])
def test_a_call_that_the_model_did_not_make_is_rendered_exactly_also_after_a_kill(tmp_path, make, api):
    arguments = {"a": NUMBER}
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": json.dumps(arguments)}}
    result = {"role": "tool", "tool_call_id": "c", "content": "4"}
    chat = [QUESTION, {"role": "assistant", "content": "", "tool_calls": [call]}, result]

    async def ask(one: Any, *more: Any) -> Any:
        if api == CHAT:
            return await one.chat(*chat, *more, tools=[TOOL])
        block = {"type": "tool_use", "id": "c", "name": "add", "input": arguments}
        returned = {"type": "tool_result", "tool_use_id": "c", "content": "4"}
        turns = {"role": "assistant", "content": [block]}, {"role": "user", "content": [returned]}
        return await one.post(MESSAGES, message_body(*turns, *more))

    async def first(one: Any) -> None:
        await ask(one)
        raise Killed

    async def second(one: Any) -> None:
        await ask(one, {"role": "assistant", "content": "four"}, {"role": "user", "content": "and 1?"})
        await one.reward(1.0)
        await one.end()

    tokenizer = make(tmp_path / "model")
    rest: dict[str, Any] = {"script": answers("four"), "tokenizer": tokenizer, **LONG}
    played = play_outside(tmp_path, second, before=play_outside(tmp_path, first, **rest), **rest)
    played.assert_complete()
    before, after = calls_of(played)
    prompt = tokenizer.decode(tokens.decode_ids(before.llm.prompt_ids).tolist())
    assert str(NUMBER) in prompt
    assert '"{' not in prompt, "an object, not a text with one"
    assert json.loads(before.data["input"][1]["tool_calls"][0]["function"]["arguments"]) == arguments
    assert after.llm.prefix is not None


@pytest.mark.parametrize(
    "text",
    [
        "[1e400, 1234567890123456789012]",
        "[NaN, 1234567890123456789012]",
        '["\\ud800", 1234567890123456789012]',
        "[1234567890123456789012",
        "9" * 5000,
        '{"a":' * 2000 + "1234567890123456789012" + "}" * 2000,
    ],
    ids=lambda text: text[:30],
)
def test_invalid_or_too_large_arguments_are_refused(text):
    with pytest.raises(ValueError, match=r"infinity|unexpected|surrogates|delimiter|limit|too deeply"):
        call_arguments.loads(text)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("{}", None),
        ('{"name": "arguments"}', None),
        ('{"arguments":{}}', "{}"),
        (' {\n"x" : "}, {\\"", "arguments" :\t{"b": [1, {"c": "}"}] } , "z":[]}', '{"b": [1, {"c": "}"}] }'),
        ('{"arguments": {"a": 1}, "arguments": {"a": 2}}', '{"a": 2}'),
        ('{"\\u0061rguments": 1.10e5}', "1.10e5"),
    ],
)
def test_the_value_of_a_member_is_found_as_it_is_written(text, found):
    assert call_arguments.member(text, "arguments") == found


def test_arguments_are_objects_in_a_record_only_if_it_can_hold_them():
    def call(arguments: str) -> dict[str, Any]:
        return {"id": "c", "function": {"name": "add", "arguments": arguments}}

    small, large = call('{"a": 1234567890123456789, "b": "12345678901234567890"}'), call(f'{{"a": {NUMBER}}}')
    assert call_arguments.with_object_arguments(small)["function"]["arguments"]["a"] == 1234567890123456789
    assert call_arguments.with_object_arguments(large) == large
    messages = [QUESTION, {"role": "assistant", "tool_calls": [large, "odd"]}]
    (_, exact) = call_arguments.for_template(messages)
    assert exact["tool_calls"] == [{"id": "c", "function": {"name": "add", "arguments": {"a": NUMBER}}}, "odd"]
    assert messages[1]["tool_calls"] == [large, "odd"]


def test_a_body_keeps_long_integers_below_the_key_that_may_have_them():
    body = f'{{"max_tokens": {NUMBER}, "messages": [{NUMBER}]}}'.encode()
    assert json_of(body, "messages") == {"max_tokens": float(NUMBER), "messages": [NUMBER]}
    assert json_of(body) == {"max_tokens": float(NUMBER), "messages": [float(NUMBER)]}
