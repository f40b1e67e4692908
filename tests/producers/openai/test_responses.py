"""OpenAI's responses, asked by the real client: of the gateway that answers, and of rollouts that are recorded."""

import asyncio
from typing import Any

import aiohttp
import openai
import pytest
from openai.types.responses import ResponseFunctionToolCall

from rollstream.producers.openai import responses
from rollstream.producers.openai.requests import Refusal
from rollstream.schemas import tokens
from tests.producers.conftest import answers
from tests.producers.gateway.gateway_rig import Killed, play_outside
from tests.producers.openai.endpoint_rig import serving

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 3, "b": 4}}\n</tool_call>'
TOOL: Any = {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": False}
LONG: Any = {"sampling": {"max_new_tokens": 200}}


def calls_of(played: Any) -> list[Any]:
    return [step for step in played.steps if step.llm is not None]


def client_of(one: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{one.rollout['base_url']}/v1", api_key=one.rollout["key"], max_retries=0)


def whole_of(step: Any) -> int:
    """Ids of a call that has no prefix."""
    return len(tokens.decode_ids(step.llm.prompt_ids)) + len(tokens.decode_ids(step.llm.completion_ids))


def test_a_response_is_a_recorded_step_and_its_items_given_back_go_on_token_by_token(tmp_path):
    async def agent(one: Any) -> None:
        async with client_of(one) as client:
            items: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": "3+4"}]}]
            first = await client.responses.create(model="policy", input=items, tools=[TOOL], instructions="Add.")
            (call,) = first.output
            assert isinstance(call, ResponseFunctionToolCall)
            assert (call.name, call.arguments, first.status) == ("add", '{"a": 3, "b": 4}', "completed")
            items += [item.model_dump(exclude_none=True) for item in first.output]
            items.append({"type": "function_call_output", "call_id": call.call_id, "output": "7"})
            second = await client.responses.create(model="policy", input=items, tools=[TOOL], instructions="Add.")
            assert (second.output_text, second.previous_response_id) == ("seven", None)
            assert second.usage is not None
            exact: Any = second.model_extra
            assert len(exact["rollstream"]["token_ids"]) == second.usage.output_tokens == len("seven") + 1
        await one.reward(1.0)
        await one.end()

    played = play_outside(tmp_path, agent, script=answers(CALL, "seven"), **LONG)
    played.assert_complete()
    first, second = calls_of(played)
    assert [message["role"] for message in first.data["input"]] == ["system", "user"]
    assert second.llm.prefix.length == whole_of(first)
    assert first.data["tools"] == [
        {"type": "function", "function": {"name": "add", "description": "", "parameters": {"type": "object"}}}
    ]


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_response_goes_on_from_an_earlier_one_by_its_id_also_after_a_kill(tmp_path, is_streamed):
    names: list[str] = []

    async def first(one: Any) -> None:
        async with client_of(one) as client:
            ask: Any = {"model": "policy", "input": "3+4", "instructions": "Add.", "tools": [TOOL]}
            if is_streamed:
                stream = await client.responses.create(**ask, stream=True)
                events: list[Any] = [event async for event in stream]
                names.append(events[-1].response.id)
                assert {event.response.id for event in events if hasattr(event, "response")} == {names[0]}
            else:
                names.append((await client.responses.create(**ask)).id)
        raise Killed

    async def second(one: Any) -> None:
        async with client_of(one) as client:
            output: Any = [{"type": "function_call_output", "call_id": "c", "output": "7"}]
            ask: Any = {"model": "policy", "input": output, "previous_response_id": names[0]}
            header = {"Idempotency-Key": "second"}
            found = await client.responses.create(**ask, instructions="Say it.", extra_headers=header)
            assert found.previous_response_id == names[0]
            assert await client.responses.create(**ask, instructions="Say it.", extra_headers=header) == found
            with pytest.raises(openai.BadRequestError, match="is not a response of this rollout") as refused:
                await client.responses.create(model="policy", input="a", previous_response_id="resp_0")
            assert refused.value.code == "previous_response_not_found"
        await one.reward(1.0)
        await one.end()

    before = play_outside(tmp_path, first, script=answers(f"so {CALL}"), **LONG)
    played = play_outside(tmp_path, second, script=answers("seven"), before=before, **LONG)
    played.assert_complete()
    _, later = calls_of(played)
    assert [message["role"] for message in later.data["input"]] == ["system", "user", "assistant", "tool"]
    assert [message["content"] for message in later.data["input"]] == ["Say it.", "3+4", f"so {CALL}", "7"]


def test_a_stream_of_a_response_brings_its_text_and_its_calls_piece_by_piece(tmp_path):
    async def agent(one: Any) -> None:
        async with client_of(one) as client:
            stream = await client.responses.create(model="policy", input="3+4", tools=[TOOL], stream=True)
            events: list[Any] = [event async for event in stream]
            async with client.responses.stream(model="policy", input="again") as helper:
                async for _ in helper:
                    pass
                assert (await helper.get_final_response()).output_text == f"well then {CALL}"
        kinds = [event.type for event in events]
        assert kinds[:4] == [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
            "response.content_part.added",
        ]
        texts = [event.delta for event in events if event.type == "response.output_text.delta"]
        assert "".join(texts) == "well then"
        assert len(texts) > 3
        assert kinds[-5:] == [
            "response.output_item.added",
            "response.function_call_arguments.delta",
            "response.function_call_arguments.done",
            "response.output_item.done",
            "response.completed",
        ]
        assert [event.sequence_number for event in events] == list(range(len(events)))
        message, call = events[-1].response.output
        assert (message.content[0].text, call.name) == ("well then", "add")
        await one.reward(1.0)
        await one.end()

    play_outside(tmp_path, agent, script=answers(f"well then {CALL}"), **LONG).assert_complete()


def test_the_runs_sampling_is_enforced_and_an_answer_that_is_cut_is_incomplete(tmp_path):
    async def agent(one: Any) -> None:
        body = {"model": "policy", "input": "a", "temperature": 0.25, "max_output_tokens": 2}
        found = await one.post("/v1/responses", body)
        assert (found["status"], found["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
        await one.reward(1.0)
        await one.end()

    played = play_outside(tmp_path, agent, script=answers("abcdef"))
    (step,) = calls_of(played)
    assert step.metadata["gateway"]["asked"] == {"temperature": 0.25}
    assert len(tokens.decode_ids(step.llm.completion_ids)) == 2


@pytest.mark.parametrize(
    ("changed", "param"),
    [
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": None}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0.content.0"),
        ({"input": [{"role": "alien", "content": "a"}]}, "input.0.role"),
        ({"input": [{"type": "function_call", "name": "add"}]}, "input.0"),
        ({"tools": [{"type": "function"}]}, "tools.0"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "always"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "f"}}, "tool_choice"),
        ({"text": {"format": {"type": "json_object"}}}, "response_format"),
        ({"background": True}, "background"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"no_such_option": 1}, "no_such_option"),
    ],
)
def test_unsupported_fields_of_responses_are_refused_by_name(changed, param):
    with pytest.raises(Refusal) as refused:
        responses.parse({"model": "policy", "input": "a"} | changed).chat().check_enforced()
    assert (refused.value.status, refused.value.param) == (400, param)


def test_the_gateway_that_records_nothing_answers_and_knows_no_earlier_response(tmp_path):
    async def scenario() -> None:
        async with serving(tmp_path, answers("7")) as lab, aiohttp.ClientSession() as http, lab.client() as client:
            found = await client.responses.create(model="policy", input="3+4", store=False)
            assert found.output_text == "7"
            body = {"model": "policy", "input": "a", "previous_response_id": found.id}
            async with http.post(f"{lab.url}/responses", json=body) as response:
                error = (await response.json())["error"]
                assert (response.status, error["param"]) == (400, "previous_response_id")

    asyncio.run(scenario())
