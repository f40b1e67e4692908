"""Tool calls of two families, parsed and bridged by the library `renderers`, and the same calls without it."""

import asyncio
import importlib.util
import json
import logging
from typing import Any, cast

import pytest

from rollstream.producers.engines.scripted import ScriptedTokenizer
from rollstream.producers.rollout import rendering
from rollstream.producers.rollout.conversation import Conversation
from rollstream.producers.rollout.gateway_interface import by_template
from rollstream.producers.rollout.registry import register_environment
from rollstream.producers.rollout.session import Session
from rollstream.schemas import tokens
from rollstream.schemas.errors import EnvironmentRunError
from tests.producers.conftest import answers, scripted, task_of
from tests.producers.gateway.gateway_rig import Killed, play_outside
from tests.rigs.families import glm_tokenizer, qwen3_tokenizer

PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "add", "parameters": PARAMETERS}}
QWEN3_CALL = '<think>\nhm\n</think>\n\n<tool_call>\n{"name": "add",  "arguments": {"b": "1", "a": 3}}\n</tool_call>'
GLM_CALL = (
    "\n<think>hm</think>\n<tool_call>add\n<arg_key>b</arg_key>\n<arg_value>1</arg_value>\n"
    "<arg_key>a</arg_key>\n<arg_value>3</arg_value>\n</tool_call>"
)
FAMILIES = {"qwen3": (qwen3_tokenizer, QWEN3_CALL), "glm-4.5": (glm_tokenizer, GLM_CALL)}
SETTINGS: Any = {"sampling": {"max_new_tokens": 400}}


def respaced(message: dict[str, Any]) -> dict[str, Any]:
    """The message as a client writes it that reads the arguments and spaces and orders them in its own way."""
    calls = json.loads(json.dumps(message["tool_calls"]))
    for call in calls:
        found = json.loads(call["function"]["arguments"])
        call["function"]["arguments"] = json.dumps(found, indent=2, sort_keys=True)
    return {"role": "assistant", "content": message["content"], "tool_calls": calls}


def after_tool(message: dict[str, Any], result: str = "4") -> list[Any]:
    called = respaced(message)
    returned = {"role": "tool", "tool_call_id": called["tool_calls"][0]["id"], "content": result}
    return [{"role": "user", "content": "3+1"}, called, returned]


def calls_of(played: Any) -> list[Any]:
    return [step.llm for step in played.steps if step.llm is not None]


def length_of(call: Any, before: int = 0) -> int:
    return before + len(tokens.decode_ids(call.prompt_ids)) + len(tokens.decode_ids(call.completion_ids))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_call_in_the_familys_format_is_parsed_and_the_next_prompt_bridged(tmp_path, family):
    make, call = FAMILIES[family]
    given: list[Any] = []

    async def agent(one):
        first = await one.chat("3+1", tools=[TOOL])
        given.append(first["choices"][0])
        await one.chat(*after_tool(given[0]["message"]), tools=[TOOL])
        await one.reward(1.0)
        await one.end()

    tokenizer = make(tmp_path / "model")
    played = play_outside(tmp_path, agent, script=answers(call, "four"), tokenizer=tokenizer, **SETTINGS)
    played.assert_complete()
    message = given[0]["message"]
    assert given[0]["finish_reason"] == "tool_calls"
    assert message["reasoning_content"].strip() == "hm"
    assert not message["content"]
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"a": 3, "b": "1"}
    first, second = calls_of(played)
    assert second.prefix.length == length_of(first)
    new = tokenizer.decode(tokens.decode_ids(second.prompt_ids).tolist())
    assert new.count("<tool_response>\n4\n</tool_response>") == 1
    assert "<|observation|>" not in new  # of GLM: the answer ended with it


def test_reasoning_that_the_template_drops_forks_the_prompt_of_a_new_question(tmp_path):
    async def agent(one):
        first = await one.chat("a", tools=[TOOL])
        message = {"role": "assistant", "content": first["choices"][0]["message"]["content"]}
        assert message["content"] == "b"
        await one.chat({"role": "user", "content": "a"}, message, {"role": "user", "content": "c"}, tools=[TOOL])
        await one.reward(1.0)
        await one.end()

    tokenizer = qwen3_tokenizer(tmp_path / "model")
    script = answers("<think>\nhm\n</think>\n\nb")
    played = play_outside(tmp_path, agent, script=script, tokenizer=tokenizer, **SETTINGS)
    first, second = calls_of(played)
    assert second.prefix.length <= len(tokens.decode_ids(first.prompt_ids))
    assert "hm" not in tokenizer.decode(tokens.decode_ids(second.prompt_ids).tolist())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_rewritten_history_forks(tmp_path, family):
    make, call = FAMILIES[family]

    async def agent(one):
        first = await one.chat("3+1", tools=[TOOL])
        messages = after_tool(first["choices"][0]["message"])
        messages[1]["tool_calls"][0]["function"]["arguments"] = '{"a": 5, "b": "1"}'
        await one.chat(*messages, tools=[TOOL])
        await one.reward(1.0)
        await one.end()

    tokenizer = make(tmp_path / "model")
    played = play_outside(tmp_path, agent, script=answers(call, "four"), tokenizer=tokenizer, **SETTINGS)
    first, second = calls_of(played)
    assert second.prefix.length <= len(tokens.decode_ids(first.prompt_ids))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_malformed_call_stays_text(tmp_path, family):
    make, call = FAMILIES[family]
    broken = call.removesuffix("</tool_call>")

    async def agent(one):
        (choice,) = (await one.chat("a", tools=[TOOL]))["choices"]
        assert "tool_calls" not in choice["message"]
        assert choice["finish_reason"] == "stop"
        assert choice["message"]["content"].strip() == broken.partition("</think>")[2].strip()
        await one.reward(1.0)
        await one.end()

    tokenizer = make(tmp_path / "model")
    play_outside(tmp_path, agent, script=answers(broken), tokenizer=tokenizer, **SETTINGS).assert_complete()


def test_a_rollout_that_another_process_goes_on_with_has_the_same_ids(tmp_path):
    tokenizer = glm_tokenizer(tmp_path / "model")
    given: list[Any] = []

    async def begin(one):
        given.append((await one.chat("3+1", tools=[TOOL], headers={"Idempotency-Key": "k"}))["choices"][0])
        raise Killed

    async def go_on(one):
        again = await one.chat("3+1", tools=[TOOL], headers={"Idempotency-Key": "k"})
        assert again["choices"][0] == given[0]
        await one.chat(*after_tool(given[0]["message"]), tools=[TOOL])
        await one.reward(1.0)
        await one.end()

    before = play_outside(tmp_path, begin, script=answers(GLM_CALL), tokenizer=tokenizer, **SETTINGS)
    after = play_outside(tmp_path, go_on, script=answers("four"), tokenizer=tokenizer, before=before, **SETTINGS)
    after.assert_complete()
    whole = play_outside(tmp_path, go_on, script=answers(GLM_CALL, "four"), tokenizer=tokenizer, **SETTINGS)
    assert calls_of(after) == calls_of(whole)
    assert calls_of(after)[1].prefix.length == length_of(calls_of(after)[0])


@pytest.mark.parametrize("renderer", ["none", "missing"])
def test_without_a_renderer_calls_are_parsed_as_hermes_and_prompts_go_on_by_text(
    tmp_path, monkeypatch, caplog, renderer
):
    caplog.set_level(logging.INFO, logger=rendering.__name__)
    if renderer == "missing":
        rendering._proven_names.clear()
        rendering._log_missing.cache_clear()
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)

    async def agent(one):
        (choice,) = (await one.chat("3+1", tools=[TOOL]))["choices"]
        assert "hm" in choice["message"]["content"]
        await one.chat(*after_tool(choice["message"]), tools=[TOOL])
        await one.reward(1.0)
        await one.end()

    script, tokenizer = answers(QWEN3_CALL, "four"), qwen3_tokenizer(tmp_path / "model")
    wanted: Any = {"renderer": "auto" if renderer == "missing" else "none"}
    played = play_outside(tmp_path, agent, script=script, tokenizer=tokenizer, **SETTINGS, **wanted)
    rendering._proven_names.clear()
    first, second = calls_of(played)
    assert second.prefix.length == length_of(first)
    assert len(caplog.records) == (1 if renderer == "missing" else 0)


def test_a_model_that_no_renderer_writes_alike_has_none_and_a_named_one_must_fit(tmp_path):
    tokenizer = qwen3_tokenizer(tmp_path / "model")
    assert rendering.renderer_for(ScriptedTokenizer(), "auto") is None
    found = rendering.renderer_for(tokenizer, "auto")
    assert found is not None
    assert found.name == "qwen3"
    with pytest.raises(EnvironmentRunError, match=r"renderer glm-4\.5 cannot be used with this tokenizer"):
        rendering.renderer_for(tokenizer, "glm-4.5")
    other = qwen3_tokenizer(tmp_path / "other")
    other.wrapped.chat_template = other.chat_template.replace("<tool_response>", "<result>")
    assert rendering.renderer_for(other, "auto") is None


@pytest.mark.parametrize("streams", [False, True])
def test_a_named_renderer_that_cannot_be_used_refuses_calls_before_they_are_sampled(tmp_path, streams):
    async def agent(one):
        for _ in range(2):
            refused = await one.chat("a", tools=[TOOL], stream=streams, status=400)
            assert "renderer llama-3" in refused["error"]["message"]
        await one.end()

    played = play_outside(tmp_path, agent, renderer="llama-3")
    assert calls_of(played) == []


@pytest.mark.parametrize("family", FAMILIES)
def test_a_stream_brings_the_content_and_ends_with_reasoning_and_calls(tmp_path, family):
    from rollstream.producers.openai.streaming import ParsedStream

    make, call = FAMILIES[family]
    tokenizer = make(tmp_path / "model")
    renderer = rendering.renderer_for(tokenizer, "auto")
    assert renderer is not None
    text = call.replace("</think>", "</think>Let me see: ")
    ids = tokenizer.encode(text, add_special_tokens=False)
    stream = ParsedStream(lambda some: renderer.parse(some, (), [TOOL]))
    pieces = [stream.add([number]) for number in ids]
    assert "".join(pieces) == "Let me see:" == renderer.parse(ids, (), [TOOL]).content.strip()
    assert sum(map(bool, pieces)) > 2


def test_a_token_that_ends_an_answer_and_opens_the_next_turn_is_written_once(tmp_path):
    tokenizer = glm_tokenizer(tmp_path / "model")
    observation, tokenizer.eos_token_id = tokenizer.eos_token_id, tokenizer.encode("<|endoftext|>")[0]
    conversation, tools = Conversation(tokenizer), [TOOL]
    question = {"role": "user", "content": "3+1"}
    prompt = conversation.prompt(by_template([question], tokenizer, tools=tools))
    ids = tokenizer.encode(GLM_CALL, add_special_tokens=False)
    text = conversation.append_sampled(0, prompt, (*ids, observation))
    assert text == GLM_CALL
    messages = [question, {"role": "assistant", "content": text}, {"role": "tool", "content": "4"}]
    later = conversation.prompt(by_template(messages, tokenizer, tools=tools))
    assert later.token_ids.tolist().count(observation) == 1


@pytest.mark.parametrize("family", FAMILIES)
def test_an_environment_that_gives_tools_has_its_prompts_bridged(tmp_path, play, family):
    make, call = FAMILIES[family]
    question = {"role": "user", "content": "3+1"}

    @register_environment(f"test_tools_{family}")
    async def calls(session):
        reply = await session.chat([question], tools=[TOOL])
        assert reply.text == call
        result = {"role": "tool", "tool_call_id": "c", "name": "add", "content": "4"}
        await session.chat([question, {"role": "assistant", "content": reply.text}, result], tools=[TOOL])
        await session.reward(1.0)

    engine = asyncio.run(scripted(tmp_path, answers(call, "four")))
    engine._tokenizer = make(tmp_path / "model")
    played = play(task_of(f"test_tools_{family}", **SETTINGS), engine=engine)
    played.assert_complete()
    first, second = played.steps
    assert (first.data["tools"], first.metadata) == ([TOOL], None)
    assert second.llm.prefix.length == length_of(first.llm)
    with pytest.raises(EnvironmentRunError, match="tools: not a JSON value"):
        asyncio.run(Session.chat(cast(Any, None), [question], tools=[object()]))
