"""Anthropic's messages and OpenAI's completions over the same gateway, asked over 127.0.0.1 as their clients ask."""

import asyncio
import itertools
import json
from typing import Any

import aiohttp
import pytest

from rollstream.producers.engines.scripted import ScriptedTokenizer
from rollstream.producers.openai.anthropic import parse_count, parse_messages
from rollstream.producers.openai.requests import Refusal
from tests.producers.openai.endpoint_rig import GROUP, SECRET, answering, serving

ASK = {"model": "policy", "max_tokens": 128, "messages": [{"role": "user", "content": "3+4=?"}]}
TOOL = {"name": "add", "description": "Adds.", "input_schema": {"type": "object", "properties": {}}}


async def post(lab, path, body: Any, *, headers=None, status=200):
    async with (
        aiohttp.ClientSession() as session,
        session.post(lab.url + path, json=body, headers=headers) as answer,
    ):
        assert answer.status == status, await answer.text()
        return await answer.json()


async def events_of(lab, path, body):
    async with aiohttp.ClientSession() as session, session.post(lab.url + path, json=body) as answer:
        assert (answer.status, answer.content_type) == (200, "text/event-stream")
        blocks = (await answer.text()).strip().split("\n\n")
    return [dict(line.split(": ", 1) for line in block.splitlines()) for block in blocks]


def test_a_message_has_its_text_usage_and_exact_ids(tmp_path):
    async def scenario():
        async with serving(tmp_path, answering("7")) as lab:
            answer = await post(lab, "/messages", ASK | {"system": "Add."})
            assert (answer["type"], answer["role"], answer["model"]) == ("message", "assistant", "policy")
            assert answer["content"] == [{"type": "text", "text": "7"}]
            assert (answer["stop_reason"], answer["stop_sequence"]) == ("end_turn", None)
            exact, tokenizer = answer["rollstream"], ScriptedTokenizer()
            prompt = "<system>Add.<end><user>3+4=?<end><assistant>"
            assert tokenizer.decode(exact["prompt_token_ids"]) == prompt
            assert tokenizer.decode(exact["token_ids"]) == "7<end>"
            assert (exact["model_group"], exact["version"], exact["logprobs"]) == (GROUP, 0, [-0.5, 0])
            assert answer["usage"] == {"input_tokens": len(exact["prompt_token_ids"]), "output_tokens": 2}
            counted = {"model": "policy", "messages": ASK["messages"], "system": "Add."}
            for body in (counted, ASK | {"system": "Add."}):
                count = await post(lab, "/messages/count_tokens", body)
                assert count == {"input_tokens": answer["usage"]["input_tokens"]}

    asyncio.run(scenario())


def test_token_limits_and_stop_sequences_have_different_stop_reasons(tmp_path):
    async def scenario():
        async with serving(tmp_path, answering("12;rest")) as lab:
            stopped = await post(lab, "/messages", ASK | {"stop_sequences": ["#", ";"]})
            assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", ";")
            assert stopped["content"] == [{"type": "text", "text": "12"}]
            cut = await post(lab, "/messages", ASK | {"max_tokens": 1})
            assert (cut["stop_reason"], cut["stop_sequence"]) == ("max_tokens", None)

    asyncio.run(scenario())


def test_tools_are_called_and_their_results_come_back(tmp_path):
    sampled = 'Well. <tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'

    async def scenario():
        async with serving(tmp_path, answering(sampled)) as lab:
            answer = await post(lab, "/messages", ASK | {"tools": [TOOL], "tool_choice": {"type": "auto"}})
            text, call = answer["content"]
            assert (answer["stop_reason"], text["text"], call["name"]) == ("tool_use", "Well.", "add")
            assert call["input"] == {"a": 1}
            result = {"type": "tool_result", "tool_use_id": call["id"], "content": [{"type": "text", "text": "5"}]}
            back = [
                {"role": "assistant", "content": answer["content"]},
                {"role": "user", "content": [result, {"type": "text", "text": "Go on."}]},
            ]
            whole = ASK | {"messages": [*ASK["messages"], *back], "tool_choice": {"type": "none"}, "tools": [TOOL]}
            answer = await post(lab, "/messages", whole)
            assert answer["stop_reason"] == "end_turn"
            prompt = ScriptedTokenizer().decode(answer["rollstream"]["prompt_token_ids"])
            assert prompt.endswith("<tool>5<end><user>Go on.<end><assistant>")

    asyncio.run(scenario())


def test_a_stream_of_a_message_is_named_events_that_make_up_the_message(tmp_path):
    sampled = 'Well. <tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'

    async def scenario():
        async with serving(tmp_path, answering(sampled)) as lab:
            events = await events_of(lab, "/messages", ASK | {"tools": [TOOL], "stream": True})
            found = [json.loads(event["data"]) for event in events]
            assert [event["event"] for event in events] == [event["type"] for event in found]
            block = ["content_block_start", "content_block_delta", "content_block_stop"]
            kinds = [kind for kind, _ in itertools.groupby(event["type"] for event in found)]
            assert kinds == ["message_start", *block, *block, "message_delta", "message_stop"]
            *texts, call = [event["delta"] for event in found if event["type"] == "content_block_delta"]
            assert "".join(text["text"] for text in texts) == "Well."
            assert json.loads(call["partial_json"]) == {"a": 1}
            assert found[-2]["delta"]["stop_reason"] == "tool_use"

    asyncio.run(scenario())


def test_a_completion_goes_on_from_text_or_from_ids_as_they_are(tmp_path):
    async def scenario():
        async with serving(tmp_path, answering("7")) as lab:
            by_text = await post(lab, "/completions", {"model": "policy", "prompt": "3+4="})
            choice = by_text["choices"][0]
            assert (by_text["object"], choice["text"], choice["finish_reason"]) == ("text_completion", "7", "stop")
            assert choice["logprobs"]["token_logprobs"] == [-0.5, 0]
            prompt_ids = choice["logprobs"]["prompt_token_ids"]
            by_ids = await post(lab, "/completions", {"model": "policy", "prompt": prompt_ids, "logprobs": 1})
            assert by_ids["choices"][0]["logprobs"]["prompt_token_ids"] == prompt_ids
            events = await events_of(lab, "/completions", {"model": "policy", "prompt": ["3+4="], "stream": True})
            assert json.loads(events[0]["data"])["choices"][0]["text"] == "7"
            assert events[-1]["data"] == "[DONE]"
            for wrong in ([], ["a", "b"], {"a": 1}):
                refused = await post(lab, "/completions", {"model": "policy", "prompt": wrong}, status=400)
                assert refused["error"]["type"] == "invalid_request_error"

    asyncio.run(scenario())


def test_either_clients_key_is_taken_and_errors_have_the_routes_shape(tmp_path):
    async def scenario():
        async with serving(tmp_path, answering("7"), token=SECRET) as lab:
            for headers in ({"X-Api-Key": SECRET}, {"Authorization": f"Bearer {SECRET}"}):
                await post(lab, "/messages", ASK, headers=headers)
            for headers in ({}, {"X-Api-Key": "wrong"}, {"Authorization": SECRET}, {"X-Api-Key": f"Bearer {SECRET}"}):
                wrong = await post(lab, "/messages", ASK, headers=headers, status=401)
                assert (wrong["type"], wrong["error"]["type"]) == ("error", "authentication_error")
            key = {"X-Api-Key": SECRET}
            unknown = await post(lab, "/messages", ASK | {"model": "no-such"}, headers=key, status=404)
            assert unknown["error"]["type"] == "not_found_error"
            page = await post(lab, "/messages/count_tokens", ASK, headers=key | {"Origin": "http://x"}, status=403)
            assert page["error"]["type"] == "permission_error"

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"messages": []}, "messages: List should have at least 1 item"),
        ({"max_tokens": 0}, "max_tokens: Input should be greater"),
        ({"tool_choice": {"type": "all"}}, "tool_choice.type: Input should be 'auto', 'none', 'any' or 'tool'"),
        ({"tool_choice": {"type": "tool", "name": "add"}}, "tool_choice: tool 'add' is not one of tools"),
        ({"tools": [{"name": "add"}]}, "tools.0: input_schema is missing; describe the tool's input"),
        ({"mcp_servers": []}, "mcp_servers"),
        ({"system": [{"type": "image"}]}, "system.0: only blocks of type text"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "block of type 'image' in a turn of user"),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "tool_use"}]}, *ASK["messages"]]},
            "has a name and an object",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result", "content": 3}]}]}, "neither a text nor"),
        ({"messages": [*ASK["messages"], {"role": "assistant", "content": "{"}]}, "prefill is not supported"),
        ({"messages": [{"role": "assistant", "content": [{"type": "image"}]}, *ASK["messages"]]}, "in a turn of assi"),
        ({"stop_sequences": [""]}, "stop: a stop sequence must not be empty"),
    ],
)
def test_unsupported_fields_of_a_message_are_refused_by_name(change, message):
    with pytest.raises(Refusal, match=message) as refused:
        parse_messages(ASK | change).chat()
    assert refused.value.status == 400


@pytest.mark.parametrize(
    "extra", [{"speed": "fast"}, {"metadata": {"user_id": "u"}}, {"max_tokens": 5, "stream": True}]
)
def test_a_count_passes_over_what_only_a_message_needs(extra):
    question = {key: value for key, value in ASK.items() if key != "max_tokens"}
    assert parse_count(question | extra).chat() == parse_count(question).chat()


def test_null_means_the_default():
    unset = dict.fromkeys(["tools", "tool_choice", "stop_sequences", "system", "metadata", "thinking", "top_p"])
    assert parse_messages(ASK | unset).chat() == parse_messages(ASK).chat()
    tool = {"name": "f", "input_schema": {"type": "object"}}
    asked = parse_messages(ASK | {"tools": [tool | {"type": None, "description": None, "cache_control": None}]})
    assert asked.chat() == parse_messages(ASK | {"tools": [tool]}).chat()
