"""Requests in the shapes that agents as shipped send: answered as the run samples, and what differs is recorded.

The shapes are those of Claude Code 2.1.197, Codex 0.169.0 and mini-swe-agent 2.4.6 (docs/gateway.md).
"""

import asyncio
import json
from typing import Any

import aiohttp
import pytest

from rollstream.producers.engines.scripted import ScriptedTokenizer
from rollstream.schemas import tokens
from tests.producers.conftest import answers
from tests.producers.gateway.gateway_rig import play_outside
from tests.producers.openai.endpoint_rig import serving

LONG: Any = {"sampling": {"max_new_tokens": 200}}
CALL = '<tool_call>\n{"name": "run", "arguments": {"command": "ls"}}\n</tool_call>'
SCHEMA = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
CACHED = {"cache_control": {"type": "ephemeral"}}
MESSAGES: dict[str, Any] = {
    "model": "claude-opus-4-8",
    "max_tokens": 64_000,
    "stream": True,
    "system": [{"type": "text", "text": "Be brief."}, {"type": "text", "text": "Folder: /w", **CACHED}],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "note"}, {"type": "text", "text": "List.", **CACHED}]},
        {"role": "system", "content": "Tools may fail."},
    ],
    "tools": [
        {"name": "run", "description": "Runs.", "input_schema": SCHEMA, **CACHED},
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 5},
    ],
    "metadata": {"user_id": "u"},
    "thinking": {"type": "adaptive"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "high"},
}
BETAS = {"anthropic-beta": "interleaved-thinking-2025-05-14,effort-2025-11-24", "anthropic-version": "2023-06-01"}
RESPONSES: dict[str, Any] = {
    "model": "gpt-5-codex",
    "stream": True,
    "input": [
        {
            "type": "message",
            "id": "msg_1",
            "role": "developer",
            "content": [{"type": "input_text", "text": "Be brief."}],
        },
        {"type": "message", "id": "msg_2", "role": "developer", "content": [{"type": "input_text", "text": "No net."}]},
        {"type": "message", "id": "msg_3", "role": "user", "content": [{"type": "input_text", "text": "List."}]},
    ],
    "tools": [
        {"type": "function", "name": "run", "description": "Runs.", "strict": False, "parameters": SCHEMA},
        {"type": "namespace", "name": "agents", "description": "d", "tools": [{"type": "function", "name": "spawn"}]},
        {"type": "web_search", "external_web_access": False},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "text": {"verbosity": "low"},
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "k",
    "client_metadata": {"session_id": "s"},
}


def calls_of(played: Any) -> list[Any]:
    return [step for step in played.steps if step.llm is not None]


def asked_of(step: Any) -> Any:
    return step.metadata["gateway"].get("asked")


def events_of(stream: str) -> list[Any]:
    return [json.loads(line.removeprefix("data: ")) for line in stream.splitlines() if line.startswith("data: ")]


async def streamed(one: Any, url: str, body: Any, **headers: str) -> list[Any]:
    sent = {"Authorization": f"Bearer {one.rollout['key']}", **headers}
    async with one.http.post(one.rollout["base_url"] + url, json=body, headers=sent) as response:
        text = await response.text()
        assert response.status == 200, text
    return events_of(text)


def test_a_claude_cli_calls_its_tool_and_goes_on_token_by_token(tmp_path):
    async def agent(one: Any) -> None:
        events = await streamed(one, "/v1/messages?beta=true", MESSAGES, **BETAS)
        (block,) = [event["content_block"] for event in events if event["type"] == "content_block_start"]
        assert (block["type"], block["name"]) == ("tool_use", "run")
        called = {"type": "tool_use", "id": block["id"], "name": "run", "input": {"command": "ls"}}
        thought = {"type": "thinking", "thinking": "hm", "signature": "s"}
        result = {"type": "tool_result", "tool_use_id": block["id"], "content": "a.txt", "is_error": False, **CACHED}
        later = [{"role": "assistant", "content": [thought, called]}, {"role": "user", "content": [result]}]
        body = MESSAGES | {"messages": [*MESSAGES["messages"], *later]}
        events = await streamed(one, "/v1/messages?beta=true", body, **BETAS)
        assert "".join(one["delta"]["text"] for one in events if one["type"] == "content_block_delta") == "One file."
        await one.reward(1.0)
        await one.end()

    played = play_outside(tmp_path, agent, script=answers(CALL, "One file."), **LONG)
    played.assert_complete()
    first, second = calls_of(played)
    roles = [message["role"] for message in first.data["input"]]
    assert roles == ["system", "user", "system"]
    assert first.data["input"][0]["content"] == "Be brief.\nFolder: /w"
    assert [tool["function"]["name"] for tool in first.data["tools"]] == ["run"]
    assert second.llm.prefix.length == sum(
        len(tokens.decode_ids(ids)) for ids in (first.llm.prompt_ids, first.llm.completion_ids)
    )
    assert asked_of(first) == {
        "model": "claude-opus-4-8",
        "max_tokens": 64_000,
        "thinking": {"type": "adaptive"},
        "context_management": MESSAGES["context_management"],
        "output_config": {"effort": "high"},
        "tools": ["web_search_20250305 web_search"],
    }


def test_a_codex_cli_calls_its_tool_and_goes_on_token_by_token(tmp_path):
    async def agent(one: Any) -> None:
        whole = (await streamed(one, "/v1/responses", RESPONSES))[-1]["response"]
        (call,) = whole["output"]
        assert (call["type"], call["name"], json.loads(call["arguments"])) == (
            "function_call",
            "run",
            {"command": "ls"},
        )
        assert [tool["name"] for tool in whole["tools"]] == ["run"]
        reasoned = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x"}
        output = {"type": "function_call_output", "call_id": call["call_id"], "output": "a.txt"}
        body = RESPONSES | {"input": [*RESPONSES["input"], reasoned, call, output]}
        whole = (await streamed(one, "/v1/responses", body))[-1]["response"]
        assert whole["output"][0]["content"][0]["text"] == "One file."
        await one.reward(1.0)
        await one.end()

    played = play_outside(tmp_path, agent, script=answers(CALL, "One file."), **LONG)
    played.assert_complete()
    second = calls_of(played)[1]
    assert second.llm.prefix is not None
    assert asked_of(second) == {
        "model": "gpt-5-codex",
        "reasoning": {"effort": "medium", "summary": "auto"},
        "verbosity": "low",
        "tools": ["web_search"],
    }
    assert [tool["function"]["name"] for tool in second.data["tools"]] == ["run", "agents.spawn"]


def test_tools_of_an_item_are_offered_like_those_of_the_request(tmp_path):
    offered, namespace, _ = RESPONSES["tools"]
    searches = {**namespace, "tools": [*namespace["tools"], {"type": "web_search", "name": "search"}]}
    code = {"type": "custom", "name": "exec", "format": {"type": "text"}}
    added = {"type": "additional_tools", "role": "developer", "id": "at_1", "tools": [offered, searches, code]}

    async def agent(one: Any) -> None:
        older = {**offered, "description": "Replaced."}
        body = RESPONSES | {"tools": [older], "input": [added, *RESPONSES["input"]]}
        whole = (await streamed(one, "/v1/responses", body))[-1]["response"]
        (call,) = whole["output"]
        assert (call["type"], call["name"]) == ("function_call", "run")
        output = {"type": "function_call_output", "call_id": call["call_id"], "output": "a.txt"}
        await streamed(one, "/v1/responses", body | {"input": [*body["input"], call, output]})
        for wrong, at in (({"tools": [{"type": "function"}]}, "input.0.tools.0"), ({}, "input.0.tools")):
            refused = await one.post("/v1/responses", body | {"input": [added | {"tools": 1} | wrong]}, status=400)
            assert refused["error"]["param"] == at
        await one.reward(1.0)
        await one.end()

    played = play_outside(tmp_path, agent, script=answers(CALL, "One file."), **LONG)
    played.assert_complete()
    first, second = calls_of(played)
    offers = [tool["function"] for tool in first.data["tools"]]
    assert [(tool["name"], tool["description"]) for tool in offers] == [
        ("run", "Runs."),
        ("agents.spawn", ""),
        ("exec", ""),
    ]
    assert [message["role"] for message in first.data["input"]] == ["system", "system", "user"]
    assert second.llm.prefix is not None
    assert asked_of(first)["tools"] == ["web_search agents.search"]


SCRIPT = 'text("hi")'
SCRIPTED_CALL = '<tool_call>\n{"name": "functions.exec", "arguments": {"input": "text(\\"hi\\")"}}\n</tool_call>'
SLEPT = '<tool_call>\n{"name": "clock.sleep", "arguments": {"seconds": 1}}\n</tool_call>'
GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"}
NAMESPACES: list[Any] = [
    {
        "type": "namespace",
        "name": "functions",
        "description": "",
        "tools": [{"type": "custom", "name": "exec", "description": "Runs a script.", "format": GRAMMAR}],
    },
    {"type": "namespace", "name": "clock", "description": "d", "tools": [{"type": "function", "name": "sleep"}]},
]


def test_codex_gets_calls_of_tools_in_namespaces_as_it_knows_them_and_goes_on_token_by_token(tmp_path):
    added = {"type": "additional_tools", "role": "developer", "id": "at_1", "tools": NAMESPACES}
    body = {key: value for key, value in RESPONSES.items() if key != "tools"} | {"model": "gpt-6.1-sol"}
    items = [added, *RESPONSES["input"]]

    async def agent(one: Any) -> None:
        events = await streamed(one, "/v1/responses", body | {"input": items})
        (call,) = events[-1]["response"]["output"]
        assert (call["type"], call["name"], call["namespace"]) == ("custom_tool_call", "exec", "functions")
        assert call["input"] == SCRIPT
        deltas = [event["delta"] for event in events if event["type"] == "response.custom_tool_call_input.delta"]
        assert deltas == [SCRIPT]
        parts = [{"type": "input_text", "text": "Script completed"}, {"type": "input_text", "text": "hi"}]
        output = {"type": "custom_tool_call_output", "call_id": call["call_id"], "output": parts}
        later = [*items, call, output]
        (slept,) = (await streamed(one, "/v1/responses", body | {"input": later}))[-1]["response"]["output"]
        assert (slept["type"], slept["name"], slept["namespace"]) == ("function_call", "sleep", "clock")
        assert slept["arguments"] == '{"seconds": 1}'
        output = {"type": "function_call_output", "call_id": slept["call_id"], "output": "slept"}
        choice = {"type": "function", "namespace": "clock", "name": "sleep"}
        await streamed(one, "/v1/responses", body | {"input": [*later, slept, output], "tool_choice": choice})
        await one.reward(1.0)
        await one.end()

    played = play_outside(tmp_path, agent, script=answers(SCRIPTED_CALL, SLEPT, "Done."), **LONG)
    played.assert_complete()
    calls = calls_of(played)
    assert all(call.llm.prefix is not None for call in calls[1:])
    execute, sleep = (tool["function"] for tool in calls[0].data["tools"])
    assert (execute["name"], sleep["name"]) == ("functions.exec", "clock.sleep")
    assert execute["description"] == "Runs a script.\n\nGrammar of input:\nstart: /.+/"
    assert execute["parameters"]["required"] == ["input"]
    assert "tools" not in asked_of(calls[0])


@pytest.mark.parametrize(
    ("url", "changed", "recorded"),
    [
        ("chat/completions", {"reasoning_effort": "high", "verbosity": "low"}, None),
        ("chat/completions", {"min_p": 0.1, "presence_penalty": 0.5, "frequency_penalty": 0.5}, None),
        ("chat/completions", {"logit_bias": {"5": 1}, "repetition_penalty": 1.1}, None),
        ("chat/completions", {"response_format": {"type": "json_object"}, "tool_choice": "required"}, None),
        ("chat/completions", {"parallel_tool_calls": False}, None),
        ("chat/completions", {"tools": [{"type": "custom", "custom": {"name": "p"}}]}, {"tools": ["custom p"]}),
        ("chat/completions", {"min_p": 0, "response_format": {"type": "text"}, "service_tier": "auto"}, {}),
        ("responses", {"text": {"format": {"type": "json_object"}}}, {"response_format": {"type": "json_object"}}),
        ("responses", {"tool_choice": "required", "truncation": "auto"}, None),
        ("messages", {"tool_choice": {"type": "any"}}, {"tool_choice": "required"}),
        (
            "messages",
            {"output_config": {"format": {"type": "json_schema"}}},
            {"response_format": {"type": "json_schema"}},
        ),
        ("messages", {"thinking": {"type": "disabled"}, "speed": "fast", "cache_control": {"type": "ephemeral"}}, {}),
        ("messages", {"thinking": {"type": "enabled", "budget_tokens": 1024}}, None),
    ],
)
def test_an_option_that_the_runs_sampling_does_not_allow_is_recorded_and_the_call_answered(
    tmp_path, url, changed, recorded
):
    asked: dict[str, Any] = {"model": "policy"}
    asked |= {"input": "a"} if url == "responses" else {"messages": [{"role": "user", "content": "a"}]}
    asked |= {"max_tokens": 4} if url == "messages" else {}

    async def agent(one: Any) -> None:
        await one.post(f"/v1/{url}", asked | changed)
        await one.reward(1.0)
        await one.end()

    (step,) = calls_of(play_outside(tmp_path, agent))
    assert (asked_of(step) or {}) == (changed if recorded is None else recorded)
    assert "tools" not in step.data


def test_the_gateway_that_records_nothing_takes_other_providers_names_and_refuses_what_it_cannot_enforce(tmp_path):
    async def scenario() -> None:
        async with serving(tmp_path, answers("7")) as lab, aiohttp.ClientSession() as http:

            async def post(path: str, body: Any, status: int) -> Any:
                async with http.post(lab.url + path, json=body) as response:
                    assert response.status == status, await response.text()
                    return await response.text()

            stream = await post("/messages?beta=true", MESSAGES | {"max_tokens": 200}, 200)
            assert events_of(stream)[-1] == {"type": "message_stop"}
            assert events_of(await post("/responses", RESPONSES, 200))[-1]["type"] == "response.completed"
            ask = {"model": "gpt-5", "messages": [{"role": "user", "content": "a"}]}
            await post("/chat/completions", ask | {"reasoning_effort": "low", "temperature": 0.3}, 200)
            error = json.loads(await post("/chat/completions", ask | {"tool_choice": "required"}, 400))["error"]
            assert error["param"] == "tool_choice"
            assert error["message"].endswith("sampling is not constrained; remove it")
            await post("/chat/completions", ask | {"model": "some-model"}, 404)

    asyncio.run(scenario())


def test_a_template_that_takes_one_system_message_first_gets_the_others_where_it_takes_them(tmp_path, monkeypatch):
    render = ScriptedTokenizer.apply_chat_template

    def strict(self: Any, conversation: list[dict[str, Any]], **options: Any) -> str:
        if any(message["role"] == "system" for message in conversation[1:]):
            raise ValueError("the system message must come first")
        return render(self, conversation, **options)

    async def agent(one: Any) -> None:
        await streamed(one, "/v1/responses", RESPONSES)
        await streamed(one, "/v1/messages", MESSAGES)
        counted = await one.post("/v1/messages/count_tokens", MESSAGES)
        assert counted["input_tokens"] > 0
        await one.reward(1.0)
        await one.end()

    monkeypatch.setattr(ScriptedTokenizer, "apply_chat_template", strict)
    played = play_outside(tmp_path, agent, script=answers("a"), **LONG)
    played.assert_complete()
    codex, claude = (
        ScriptedTokenizer().decode(tokens.decode_ids(step.llm.prompt_ids).tolist()) for step in calls_of(played)
    )
    assert codex.startswith("<system>Be brief.\n\nNo net.<end><user>List.<end>")
    assert "<user>note\nList.<end><user>Tools may fail.<end><assistant>" in claude
