"""Tool calls of a session's own chat: parsed as the gateway's are, and given back token for token."""

import asyncio
import contextlib
import json
from typing import Any

import pytest

from rollstream.producers.engines.scripted import ScriptedTokenizer
from rollstream.producers.rollout.registry import register_environment
from rollstream.schemas import tokens
from rollstream.schemas.errors import PromptTooLongError
from tests.producers.conftest import GROUP, answers, scripted, task_of
from tests.producers.gateway.gateway_rig import play_outside
from tests.rigs.families import glm_tokenizer, qwen3_tokenizer

PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "add", "parameters": PARAMETERS}}
CALL = 'So: <tool_call>\n{"name": "add",  "arguments": {"b": "1", "a": 3}}\n</tool_call>'
QWEN3_CALL = f"<think>\nhm\n</think>\n\n{CALL}"
GLM_CALL = (
    "\n<think>hm</think>\nSo:<tool_call>add\n<arg_key>b</arg_key>\n<arg_value>1</arg_value>\n"
    "<arg_key>a</arg_key>\n<arg_value>3</arg_value>\n</tool_call>"
)
FAMILIES: dict[str, tuple[Any, str]] = {
    "text": (lambda _: ScriptedTokenizer(), CALL),
    "qwen3": (qwen3_tokenizer, QWEN3_CALL),
    "glm-4.5": (glm_tokenizer, GLM_CALL),
}
LONG: Any = {"sampling": {"max_new_tokens": 400}}
QUESTION = {"role": "user", "content": "3+1"}


def ids_of(played: Any) -> list[tuple[Any, list[int], list[int]]]:
    """For each call: the prefix that its prompt extends, the ids that are new in it, and those of its answer."""
    calls = [step.llm for step in played.steps if step.llm is not None]
    return [
        (
            call.prefix and (call.prefix.length, call.prefix.sha256),
            tokens.decode_ids(call.prompt_ids).tolist(),
            tokens.decode_ids(call.completion_ids).tolist(),
        )
        for call in calls
    ]


def result_of(call: dict[str, Any]) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call["id"], "content": "4"}


@pytest.mark.parametrize("given_back", ["message", "text and calls", "text", "respaced"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_reply_has_the_calls_that_the_gateway_gives_and_goes_back_token_for_token(play, tmp_path, family, given_back):
    make, call_text = FAMILIES[family]
    tokenizer, found = make(tmp_path / "model"), {}

    @register_environment("test_calls")
    async def calls(session):
        reply = await session.chat([QUESTION], tools=[TOOL])
        (found["call"],) = reply.tool_calls
        found["message"] = reply.message
        back = {
            "message": reply.message,
            "text and calls": {"role": "assistant", "content": reply.text, "tool_calls": [*reply.tool_calls]},
            "text": {"role": "assistant", "content": reply.text},
            "respaced": respaced(reply.message),
        }[given_back]
        last = await session.chat([QUESTION, back, result_of(found["call"])], tools=[TOOL])
        assert (last.tool_calls, last.text) == ((), "four")
        await session.reward(1.0)

    async def agent(one):
        message = (await one.chat(QUESTION, tools=[TOOL]))["choices"][0]["message"]
        found["outside"] = message
        await one.chat(QUESTION, message, result_of(message["tool_calls"][0]), tools=[TOOL])
        await one.reward(1.0)
        await one.end()

    engine = asyncio.run(scripted(tmp_path, answers(call_text, "four")))
    engine._tokenizer = tokenizer
    inside = play(task_of("test_calls", **LONG), engine=engine)
    outside = play_outside(tmp_path, agent, script=answers(call_text, "four"), tokenizer=tokenizer, **LONG)
    inside.assert_complete()
    (called,) = found["outside"]["tool_calls"]
    assert called | {"id": found["call"]["id"]} == found["call"]
    assert found["message"]["tool_calls"] == [found["call"]]
    assert found["message"]["content"] == (found["outside"]["content"] or "")
    assert json.loads(found["call"]["function"]["arguments"]) == {"a": 3, "b": "1"}
    assert ids_of(inside) == ids_of(outside)
    (_, prompt, answer), (prefix, _, _) = ids_of(inside)
    assert prefix[0] == len(prompt) + len(answer)


def respaced(message: dict[str, Any]) -> dict[str, Any]:
    """The message from a client that parses the arguments and orders and spaces them in its own way."""
    (call,) = json.loads(json.dumps(message["tool_calls"]))
    call["function"]["arguments"] = json.dumps(json.loads(call["function"]["arguments"]), indent=2)
    return {**message, "tool_calls": [call]}


def test_a_call_that_cannot_be_read_stays_text_and_without_tools_none_is_looked_for(play):
    replies = []

    @register_environment("test_no_calls")
    async def no_calls(session):
        replies.append(await session.chat([QUESTION], tools=[TOOL]))
        replies.append(await session.chat([QUESTION]))
        await session.reward(1.0)

    play(task_of("test_no_calls", **LONG), answers("<tool_call>{not json}</tool_call>", CALL))
    assert [reply.tool_calls for reply in replies] == [(), ()]
    assert [reply.message["content"] for reply in replies] == ["<tool_call>{not json}</tool_call>", CALL]


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "content": 3, "tool_calls": []},
        {"role": "assistant", "content": "", "tool_calls": "add"},
        {"role": "assistant", "content": "", "tool_calls": ["add"]},
        {"role": "assistant", "content": "", "tool_calls": [{"function": "add"}]},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": "{"}}]},
    ],
)
def test_a_message_of_another_shape_is_up_to_the_chat_template(play, monkeypatch, message):
    rendered = []
    monkeypatch.setattr(
        ScriptedTokenizer, "apply_chat_template", lambda _, messages, **options: rendered.append(messages) or "a"
    )

    @register_environment("test_shapes")
    async def shapes(session):
        await session.chat([QUESTION], tools=[TOOL])
        await session.chat([QUESTION, message], tools=[TOOL])
        await session.reward(1.0)

    play(task_of("test_shapes", **LONG), answers(CALL)).assert_complete()
    assert rendered[-1][-1] == message


def test_calls_of_an_example_that_the_model_did_not_write_are_rendered_as_objects(play, monkeypatch):
    rendered = []
    render = ScriptedTokenizer.apply_chat_template

    def seen(self, conversation, **options):
        rendered.append(conversation)
        return render(self, conversation, **options)

    monkeypatch.setattr(ScriptedTokenizer, "apply_chat_template", seen)

    @register_environment("test_example")
    async def example(session):
        call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 3}'}}
        shown = {"role": "assistant", "content": None, "tool_calls": [call]}
        await session.chat([QUESTION, shown, result_of(call), QUESTION], tools=[TOOL])
        await session.reward(1.0)

    play(task_of("test_example", **LONG), answers("4")).assert_complete()
    (message,) = (one for one in rendered[-1] if one["role"] == "assistant")
    assert message["content"] == ""
    assert message["tool_calls"][0]["function"]["arguments"] == {"a": 3}


@pytest.mark.parametrize("tools", [(), (TOOL,)])
@pytest.mark.parametrize("is_caught", [True, False])
def test_a_prompt_that_is_too_long_fails_the_attempt_unless_it_is_caught(play, tmp_path, tools, is_caught):
    @register_environment("test_asks_too_much")
    async def asks(session):
        with contextlib.suppress(*([PromptTooLongError] if is_caught else [])):
            await session.chat([{"role": "user", "content": "x" * 500}], tools=tools)
        await session.chat([QUESTION], tools=tools)
        await session.reward(1.0)

    engine = asyncio.run(scripted(tmp_path, max_length=100))
    played = play(task_of("test_asks_too_much", sampling={"max_new_tokens": 5}), engine=engine)
    if is_caught:
        played.assert_complete()
        assert [step.name for step in played.steps] == ["refused_call", GROUP]
    else:
        assert played.last.cause == "engine_error"


def test_a_prompt_that_is_too_long_in_a_group_of_tasks_is_an_engine_error(play, tmp_path):
    @register_environment("test_asks_too_much_in_tasks")
    async def asks(session):
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(session.chat([{"role": "user", "content": "x" * 500}]))

    engine = asyncio.run(scripted(tmp_path, max_length=100))
    task = task_of("test_asks_too_much_in_tasks", sampling={"max_new_tokens": 5})
    assert play(task, engine=engine).last.cause == "engine_error"
