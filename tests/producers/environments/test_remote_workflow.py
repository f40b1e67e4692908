"""Rollouts at a workflow behind HTTP: a real server on this machine streams NAT's lines, or fails in every way."""

import asyncio
import json
import math
from collections.abc import AsyncGenerator
from datetime import date
from typing import Any

import pytest
from aiohttp import web
from pydantic import BaseModel

from rollstream.producers.environments.remote_workflow import base_url
from rollstream.producers.traces.stream import MAX_LINE_BYTES, MAX_STREAM_BYTES, Lines, RemoteStream
from rollstream.schemas.errors import EnvironmentRunError
from rollstream.schemas.events import RolloutFailed
from tests.producers.conftest import task_of
from tests.producers.environments.workflow_rig import lines_of, serving, streaming
from tests.rigs import nat_samples as nat

ASKED = [nat.messages("1+1="), [*nat.messages("1+1=", "add"), {"role": "tool", "content": "2"}]]


def agents_lines(*values, question="1+1="):
    """An agent that calls a model, a tool and the model again inside a function of its own."""
    inner: dict[str, Any] = {"parent": "w-g"}
    calls = nat.langchain("a", ASKED[0], "add", **inner), nat.tool("t", "2", **inner)
    started = nat.step("FUNCTION_START", "w-g", name="solver", parent="w-f")
    steps = nat.workflow([started], *calls, nat.langchain("b", ASKED[1], "2", **inner), question=question, answer="2")
    return lines_of(steps, *values)


def ask(play, answer, *, path="/v1/workflow/full", inputs=None, **config):
    with serving(answer, path) as (url, bodies):
        task = task_of(
            "remote_workflow", inputs=inputs or {"question": "1+1="}, environment_config={"endpoint": url, **config}
        )
        settings = task.settings.model_copy(
            update={"rewards": ("python:tests.producers.environments.test_remote_workflow.right",)}
        )
        played = play(task.model_copy(update={"settings": settings}))
    return played, bodies


def right(rollout):
    """Whether the workflow's answer is 2."""
    answers = [step.data["output"] for step in rollout.steps if step.event_type == "WORKFLOW_END"]
    return float(answers == ["2"])


def test_a_remote_workflow_is_recorded_as_it_streams_and_its_calls_are_samples(play):
    played, bodies = ask(play, streaming(agents_lines("2")))
    played.assert_complete()
    assert bodies == [{"input_message": "1+1="}]
    kinds = [step.event_type for step in played.steps]
    assert kinds == ["LLM_END", "TOOL_END", "LLM_END", "FUNCTION_END", "FUNCTION_START", "WORKFLOW_END"]
    first, later = (step for step in played.steps if step.llm is not None)
    assert later.llm.prefix.step_index == first.step_index
    assert first.function_ancestry.function_name == "solver"
    assert first.function_ancestry.parent_name == "<workflow>"
    assert first.uuid == "a"
    assert [reward.value for reward in played.rewards] == [1.0]


@pytest.mark.parametrize(("target", "num"), [("<workflow>", 2), ("solver", 2), ("nobody", 0)])
def test_target_functions_may_name_functions_that_the_stream_shows(play, target, num):
    played, _ = ask(play, streaming(agents_lines("2")), target_functions=[target])
    assert sum(step.llm is not None for step in played.steps) == num


def test_the_older_path_is_the_fallback_and_pieces_of_its_answer_are_joined(play):
    lines = lines_of(nat.langchain("a", ASKED[0], "2", parent="root"), '{"sum": ', '["2"]}')
    played, _ = ask(play, streaming(lines, cut=11), path="/generate/full", result_json_path="$.sum[0]")
    played.assert_complete()
    assert played.steps[0].function_ancestry.function_name == "<workflow>"
    assert played.steps[-1].data == {"input": "1+1=", "output": "2"}


def scored_by(play, path, *, missing_score, answer):
    with serving(streaming(lines_of(nat.langchain("a", ASKED[0], "2", parent="root"), answer))) as (url, _):
        config = {"endpoint": url, "result_json_path": path}
        task = task_of("remote_workflow", inputs={"question": "1+1=", "answer": "2"}, environment_config=config)
        evaluators = {"right": {"_type": "exact_match"}}
        fields = {"rewards": ("right",), "evaluators": evaluators, "missing_score": missing_score}
        return play(task.model_copy(update={"settings": task.settings.model_copy(update=fields)}))


def test_a_null_result_is_a_missing_score_and_not_the_text_that_the_model_wrote_last(play):
    played = scored_by(play, "$.sum", missing_score="reject", answer='{"sum": null}')
    assert played.steps[-1].data == {"input": "1+1=", "output": None}
    assert played.rewards == []
    assert "the workflow's result is null" in played.last.missing_scores["right"]
    failed = scored_by(play, "$.sum", missing_score="error", answer='{"sum": null}').last
    assert (failed.cause, "the workflow's result is null" in failed.message) == ("reward_error", True)


@pytest.mark.parametrize("answer", ['{"total": "2"}', "2 (which is not JSON)"])
def test_an_answer_without_a_result_at_the_path_fails_the_attempt_and_the_path_is_named(play, answer):
    failed = scored_by(play, "$.sum[0]", missing_score="reject", answer=answer).last
    assert failed.cause == "environment_error"
    assert "its answer has nothing at result_json_path $.sum[0]; correct that path" in failed.message
    assert answer in failed.message


PIECES = [f"word{n} " for n in range(60)]


class Sum(BaseModel):
    sum: str
    when: date = date(2026, 12, 1)


class Valued(BaseModel):
    value: str
    other: int = 1


RETURNED: dict[str, Any] = {
    "a text": "2",
    "a text in Python's notation": "{'sum': '2'}",
    "no text": "",
    "an integer": 2,
    "a truth value": True,
    "null": None,
    "NaN": math.nan,
    "a dict": {"sum": "2", "of": [1, None, "ü"]},
    "a dict of models": {"sums": [Sum(sum="2")]},
    "a list": ["a", 1],
    "a model": Sum(sum="2"),
    "a model of a value": Valued(value="two"),
}


def returning(value: Any) -> Any:
    async def answer(question: str) -> Any:
        return value

    answer.__annotations__["return"] = type(value) if value is not None else dict[str, Any] | None
    return answer


async def answer_as_nat(request):
    """NAT's own stream of a workflow that answers in pieces, or of one that returns JSON or another value."""
    from nat.builder.function_info import FunctionInfo
    from nat.builder.workflow_builder import WorkflowBuilder
    from nat.cli.register_workflow import register_function
    from nat.cli.type_registry import GlobalTypeRegistry
    from nat.data_models.config import Config
    from nat.data_models.function import FunctionBaseConfig
    from nat.front_ends.fastapi.response_helpers import generate_streaming_response_full_as_str
    from nat.runtime.session import SessionManager

    class AnswerConfig(FunctionBaseConfig, name="remote_test_answer"):
        pass

    question = (await request.json())["input_message"]

    async def function(config, builder):
        async def stream(question: str) -> AsyncGenerator[str]:
            for piece in [*PIECES, "2"] if question == "in pieces" else ['{"sum": "2"}']:
                yield piece

        if question in RETURNED:
            yield FunctionInfo.from_fn(returning(RETURNED[question]), description="answers")
        else:
            yield FunctionInfo.create(stream_fn=stream, description="answers")

    response = web.StreamResponse()
    await response.prepare(request)
    with GlobalTypeRegistry.push():
        register_function(config_type=AnswerConfig)(function)
        config = Config.model_validate({"workflow": {"_type": "remote_test_answer"}})
        async with WorkflowBuilder.from_config(config) as builder:
            sessions = await SessionManager.create(config=config, shared_builder=builder)
            async with sessions.session(user_id="u") as session:
                stated = {"streaming": True, "result_type": None, "output_type": None}  # as NAT's server has it
                async for text in generate_streaming_response_full_as_str(question, session=session, **stated):
                    await response.write(text.encode())
            await sessions.shutdown()
    return response


@pytest.mark.parametrize(
    ("question", "path", "result"), [("in pieces", "$", "".join(PIECES) + "2"), ("as JSON", "$.sum", "2")]
)
def test_the_result_is_in_the_streamed_answer_and_not_nats_preview_of_it(play, question, path, result):
    pytest.importorskip("nat")
    played, _ = ask(play, answer_as_nat, inputs={"question": question}, result_json_path=path)
    played.assert_complete()
    assert [step.event_type for step in played.steps] == ["FUNCTION_END", "WORKFLOW_END"]
    assert played.steps[-1].data == {"input": question, "output": result}
    assert played.steps[-1].name == "remote_test_answer"


@pytest.mark.parametrize(
    ("question", "result"),
    [
        ("a text", "2"),
        ("a text in Python's notation", "{'sum': '2'}"),
        ("no text", ""),
        ("an integer", "2"),
        ("a truth value", "true"),
        ("null", None),
        ("NaN", "nan"),
        ("a dict", '{"sum": "2", "of": [1, null, "ü"]}'),
        ("a dict of models", '{"sums": [{"sum": "2", "when": "2026-12-01"}]}'),
        ("a list", '["a", 1]'),
        ("a model", '{"sum":"2","when":"2026-12-01"}'),
        ("a model of a value", "two"),
    ],
)
def test_a_result_that_is_neither_text_nor_a_model_is_json_and_not_pythons_notation_of_it(play, question, result):
    pytest.importorskip("nat")
    played, _ = ask(play, answer_as_nat, inputs={"question": question})
    assert played.steps[-1].data == {"input": question, "output": result}


def test_a_path_leads_into_a_dict(play):
    pytest.importorskip("nat")
    played, _ = ask(play, answer_as_nat, inputs={"question": "a dict"}, result_json_path="$.of[2]")
    assert played.steps[-1].data["output"] == "ü"


@pytest.mark.parametrize("in_chunks", [True, False])
def test_the_text_of_a_chats_response_is_the_result_and_not_the_whole_response(play, in_chunks):
    server = pytest.importorskip("nat.data_models.api_server")
    if in_chunks:
        RETURNED["a chat"] = server.ChatResponseChunk.create_streaming_chunk("two")
    else:
        RETURNED["a chat"] = server.ChatResponse.from_string("two", usage=server.Usage())
    played, _ = ask(play, answer_as_nat, inputs={"question": "a chat"})
    assert played.steps[-1].data["output"] == "two"


def test_the_ends_of_workflows_inside_the_workflow_stay_as_they_are(play):
    inner = nat.workflow(uuid="inner", answer="inner")
    inner[0]["parent_id"] = inner[-1]["parent_id"] = "w-f"
    played, _ = ask(play, streaming(lines_of(nat.workflow(inner, answer="a preview"), "2")))
    ends = [step.data["output"] for step in played.steps if step.event_type == "WORKFLOW_END"]
    assert ends == ["inner", "2"]


def test_a_line_far_longer_than_a_network_buffer_is_one_step(play):
    prompt = nat.messages("x" * 300_000)
    played, _ = ask(play, streaming(lines_of(nat.langchain("a", prompt, "2"), "2")))
    played.assert_complete()
    assert played.steps[0].usage_info is None
    assert len(played.steps[0].llm.prompt_ids) > 1_000_000


async def refuse(request):
    return web.Response(status=500, text="no model\nis loaded")


async def hang(request):
    response = web.StreamResponse()
    await response.prepare(request)
    await response.write(agents_lines()[1].encode() + b"\n\n")
    await asyncio.sleep(30)


async def hang_up(request):
    response = web.StreamResponse(headers={"Content-Length": "100000"})
    await response.prepare(request)
    await response.write(agents_lines()[1].encode() + b"\n\n")
    request.transport.close()
    return response


async def redirect(request):
    """Redirect to where the question would be posted again; nobody must follow."""
    return web.Response(status=307, headers={"Location": str(request.url)})


async def endless_error(request):
    response = web.StreamResponse(status=500)
    await response.prepare(request)
    while True:  # until the client, which reads only the beginning, hangs up
        await response.write(b"no end " * 10_000)


FAILED = json.dumps({"code": "workflow_error", "message": "the agent raised KeyError", "details": "KeyError"})
START = agents_lines()[1]
BROKEN = {
    "an HTTP error": (refuse, "/v1/workflow/full: HTTP 500: no model is loaded"),
    "a redirect": (redirect, "/v1/workflow/full: HTTP 307: redirects are not followed"),
    "an endless error": (endless_error, "/v1/workflow/full: HTTP 500: no end no end"),
    "no such path": (streaming([]), "/generate/full: HTTP 404"),
    "too slow": (hang, "timed out after 0.5 s (endpoint_timeout)"),
    "a cut stream": (hang_up, "ClientPayloadError"),
    "the workflow failed": (streaming([START, FAILED]), "it failed: the agent raised KeyError"),
    "no answer": (streaming([START]), "its stream ended after 3 lines without an answer"),
    "no JSON": (streaming([START, "data: {value"]), "line 3 of its stream is not JSON: '{value'"),
    "no object": (streaming(["data: [1]"]), "line 1 of its stream is not a JSON object"),
    "no step": (
        streaming(['intermediate_data: {"payload": "{}"}']),
        "does not contain a step: payload.event_type: Field required",
    ),
    "no payload": (streaming(['intermediate_data: {"id": "x"}']), "line 1 of its stream does not contain a step"),
    "another type": (
        streaming([START.replace("WORKFLOW_START", "WORKFLOW_BEGIN")]),
        "does not contain a step: payload.event_type",
    ),
}


@pytest.mark.parametrize("way", BROKEN)
def test_any_failure_of_the_server_is_a_failed_attempt_with_its_cause(play, way):
    answer, message = BROKEN[way]
    path = "/elsewhere" if way == "no such path" else "/v1/workflow/full"
    played, _ = ask(play, answer, path=path, endpoint_timeout=0.5 if way == "too slow" else 20.0)
    assert isinstance(played.last, RolloutFailed)
    assert played.last.cause == "environment_error"
    assert message in played.last.message
    assert "endpoint http://127.0.0.1:" in played.last.message


@pytest.mark.parametrize("route", ["", "/", "/generate", "/generate/full", "/generate/", "/v1/workflow/full"])
def test_the_address_may_be_one_of_the_servers_routes_as_nats_help_writes_it(route):
    assert base_url(f"http://host:8000/agents{route}") == "http://host:8000/agents"


def test_nobody_listening_is_a_failed_attempt(play):
    task = task_of("remote_workflow", inputs={"question": "?"}, environment_config={"endpoint": "http://127.0.0.1:9"})
    assert "endpoint http://127.0.0.1:9: ClientConnectorError" in play(task).last.message


def test_an_example_without_a_question_or_an_invalid_configuration_fails_with_the_reason(play):
    task = task_of("remote_workflow", inputs={"query": "?"}, environment_config={"endpoint": "http://127.0.0.1:9"})
    assert "the example has no key 'question'; its inputs are: query" in play(task).last.message
    for config, message in (
        ({"endpoint": "localhost:80"}, "must be a URL"),
        ({"endpoint": "http://x", "endpoint_timeout": 0}, "endpoint_timeout is 0"),
        ({"endpoint": "http://x", "result_json_path": "answer"}, "result_json_path is 'answer'"),
    ):
        assert message in play(task_of("remote_workflow", environment_config=config)).last.message


def test_lines_are_whole_however_they_come_and_never_endless():
    lines = Lines()
    assert [list(lines.feed(part)) for part in (b"a", b"b\nc\n\nd", b"")] == [[], [b"ab", b"c", b""], []]
    assert lines.rest == b"d"
    with pytest.raises(EnvironmentRunError, match="longer than"):
        list(Lines().feed(b"x" * (MAX_LINE_BYTES + 1)))
    with pytest.raises(EnvironmentRunError, match="a line of its stream is longer than"):
        list(Lines().feed(b"x" * (MAX_LINE_BYTES + 1) + b"\n"))
    endless = Lines()
    for _ in range(MAX_STREAM_BYTES // MAX_LINE_BYTES - 1):
        list(endless.feed(b"x" * (MAX_LINE_BYTES - 1) + b"\n"))
    with pytest.raises(EnvironmentRunError, match="its stream is longer than"):
        list(endless.feed(b"x" * (MAX_LINE_BYTES - 1) + b"\n" + b"x" * MAX_LINE_BYTES))
    with pytest.raises(EnvironmentRunError, match=r"it failed: x{497}[.]{3}; see the workflow server's log$"):
        RemoteStream().read(json.dumps({"message": "x" * 100_000}).encode())
    with pytest.raises(EnvironmentRunError, match="is not UTF-8"):
        RemoteStream().read(b"data: \xff")


def test_a_stream_passes_over_what_is_not_for_it():
    stream = RemoteStream()
    for line in (b"", b": keep-alive", b"event: x", b"data: [DONE]", b'data: {"value": 4}', b'data: {"value": null}'):
        assert stream.read(line) is None
    assert stream.answer == "4"
