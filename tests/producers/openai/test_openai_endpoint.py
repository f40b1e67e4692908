"""The OpenAI-compatible endpoint, asked by the real `openai` and `langchain-openai` clients over 127.0.0.1."""

import asyncio
import json
import logging
import socket
from functools import partial
from typing import Any

import aiohttp
import openai
import pytest
import torch
from openai.types import CompletionUsage
from openai.types.chat import (
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionFunctionToolParam,
    ChatCompletionMessageParam,
)
from openai.types.chat.chat_completion import Choice
from transformers import AutoModelForCausalLM

from rollstream.learner.tiny_model import make_tiny_model
from rollstream.producers.engines.scripted import ScriptedEngine, ScriptedTokenizer
from rollstream.producers.engines.transformers import TransformersEngine
from rollstream.producers.openai import anthropic, responses
from rollstream.producers.openai.completions import CompletionRequest
from rollstream.producers.openai.keys import token_of
from rollstream.producers.openai.requests import Refusal, checked_request, parse_request
from rollstream.producers.openai.service import run
from rollstream.schemas.engine_settings import TransformersSettings
from rollstream.schemas.errors import RollstreamError
from tests.producers.openai.endpoint_rig import ASK, GROUP, SECRET, Lab, answering, serving

TOOL: ChatCompletionFunctionToolParam = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {}}},
}


def logprobs_of(choice: Choice) -> dict[str, Any]:
    """Log-probabilities with the fields that OpenAI's own lack: `token_ids`, `version`, ..."""
    assert choice.logprobs is not None
    return choice.logprobs.model_dump()


def usage_of(answer: ChatCompletion | ChatCompletionChunk) -> CompletionUsage:
    assert answer.usage is not None
    return answer.usage


def assert_exact(logprobs, *, prompt, text, version=0):
    decode = ScriptedTokenizer().decode
    assert (decode(logprobs["prompt_token_ids"]), decode(logprobs["token_ids"])) == (prompt, text)
    assert (logprobs["model_group"], logprobs["version"]) == (GROUP, version)
    assert len(logprobs["content"]) == len(logprobs["token_ids"])
    assert logprobs["content"][0]["logprob"] == -0.5


def test_the_openai_client_gets_text_usage_logprobs_and_exact_ids(tmp_path):
    async def scenario():
        async with serving(tmp_path, answering("7")) as lab, lab.client() as client:
            answer = await client.chat.completions.create(model="policy", messages=ASK, logprobs=True, top_logprobs=1)
            choice = answer.choices[0]
            assert (choice.message.content, choice.finish_reason, answer.model) == ("7", "stop", "policy")
            assert (usage_of(answer).prompt_tokens, usage_of(answer).completion_tokens) == (8, 2)
            assert answer.system_fingerprint == f"{GROUP}@0"
            assert_exact(logprobs_of(choice), prompt="<user>3+4=?<end><assistant>", text="7<end>")
            models = await client.models.list()
            assert [(model.id, model.model_dump()["version"]) for model in models.data] == [("policy", 0)]
            assert (await client.models.retrieve(GROUP)).id == GROUP

    asyncio.run(scenario())


def test_langchain_keeps_the_ids_in_the_response_metadata_streamed_or_not(tmp_path):
    async def scenario():
        async with serving(tmp_path, answering("42")) as lab:
            for streaming in (False, True):
                async with lab.langchain(streaming=streaming, max_completion_tokens=8, temperature=0.4) as model:
                    message = await model.ainvoke([("system", "Add."), ("human", [{"type": "text", "text": "4+38"}])])
                assert message.content == "42"
                assert_exact(
                    message.response_metadata["logprobs"],
                    prompt="<system>Add.<end><user>4+38<end><assistant>",
                    text="42<end>",
                )
            asked = [request.sampling for request in lab.engine.requests]
            assert {(sampling.max_new_tokens, sampling.temperature) for sampling in asked} == {(8, 0.4)}

    asyncio.run(scenario())


def test_answers_that_are_trained_on_are_sampled_at_the_temperature_of_the_loss(tmp_path, caplog):
    async def scenario():
        async with serving(tmp_path, answering("7"), temperature=0.4, algorithm="cispo") as lab, lab.client() as client:
            ask = client.chat.completions.create
            for other in (0.0, 0.3, 1.0):
                with pytest.raises(
                    openai.BadRequestError, match=r"0\.4, the temperature that the loss .* remove temp"
                ) as error:
                    await ask(model="policy", messages=ASK, temperature=other)
                assert (error.value.param, error.value.code) == ("temperature", "unsupported_value")
            await ask(model="policy", messages=ASK)
            await ask(model="policy", messages=ASK, temperature=0.4)
            assert [request.sampling.temperature for request in lab.engine.requests] == [0.4, 0.4]
            for _ in range(2):
                await ask(model="policy", messages=ASK, top_p=0.5)
            for wanted in (0.0, 0.3):
                await ask(model=GROUP, messages=ASK, temperature=wanted, top_p=0.5)
            await ask(model=GROUP, messages=ASK)
            assert [request.sampling.temperature for request in lab.engine.requests[4:]] == [0.0, 0.3, 1.0]

    asyncio.run(scenario())
    assert caplog.text.count("requests ask for top_p 0.5, top_k 0: cispo compares") == 1


def test_choices_stop_texts_limits_and_seeds(tmp_path):
    def script(prompt, rng, version):
        return f"{rng.randrange(10**9)};rest", -0.5

    async def scenario():
        async with serving(tmp_path, script) as lab, lab.client() as client:
            ask = client.chat.completions.create
            first = await ask(model="policy", messages=ASK, n=3, seed=5, stop=[";", "#"])
            texts = [choice.message.content or "" for choice in first.choices]
            assert len(set(texts)) == 3
            assert all(text.isdecimal() for text in texts)
            token_ids = logprobs_of(first.choices[0])["token_ids"]
            assert ScriptedTokenizer().decode(token_ids) == texts[0] + ";"
            assert first.choices[0].finish_reason == "stop"
            again = await ask(model="policy", messages=ASK, n=3, seed=5, stop=";")
            assert [choice.message.content for choice in again.choices] == texts
            other = await ask(model="policy", messages=ASK, stop=";")
            assert other.choices[0].message.content not in texts
            short = await ask(model="policy", messages=ASK, max_tokens=2)
            assert (short.choices[0].finish_reason, usage_of(short).completion_tokens) == ("length", 2)

    asyncio.run(scenario())


def test_a_stream_ends_with_its_reason_and_usage(tmp_path):
    async def scenario():
        async with serving(tmp_path, answering("12")) as lab, lab.client() as client:
            stream = await client.chat.completions.create(
                model="policy", messages=ASK, stream=True, stream_options={"include_usage": True}
            )
            pieces = [piece async for piece in stream]
            deltas = [choice for piece in pieces for choice in piece.choices]
            assert "".join(choice.delta.content or "" for choice in deltas) == "12"
            assert [choice.finish_reason for choice in deltas] == [None] * (len(deltas) - 1) + ["stop"]
            assert usage_of(pieces[-1]).completion_tokens == 3

    asyncio.run(scenario())


def test_tool_calls_are_read_only_when_tools_were_offered(tmp_path):
    text = 'Well. <tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'

    async def scenario():
        async with serving(tmp_path, answering(text)) as lab, lab.client() as client:
            ask = client.chat.completions.create
            plain = (await ask(model="policy", messages=ASK)).choices[0]
            assert (plain.message.content, plain.message.tool_calls) == (text, None)
            choice = (await ask(model="policy", messages=ASK, tools=[TOOL])).choices[0]
            assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Well.")
            [call] = choice.message.tool_calls or []
            assert call.type == "function"
            assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 1})
            async with lab.langchain() as model:
                bound = await model.bind_tools([dict(TOOL)]).ainvoke("add")
            assert bound.tool_calls[0]["args"] == {"a": 1}
            dialogue = [*ASK, choice.message, {"role": "tool", "tool_call_id": call.id, "content": "5"}]
            assert (await ask(model="policy", messages=dialogue)).choices[0].finish_reason == "stop"

    asyncio.run(scenario())


def test_a_request_waits_for_the_version_that_it_names(tmp_path):
    async def scenario():
        async with serving(tmp_path, wait_timeout_s=20) as lab, lab.client() as client:
            ask = client.chat.completions.create
            newest = await ask(model="policy", messages=ASK)
            assert logprobs_of(newest.choices[0])["version"] == 0
            waiting = [
                asyncio.create_task(ask(model="policy", messages=ASK, extra_body={"min_version": 1})),
                asyncio.create_task(ask(model="policy", messages=ASK, extra_headers={"X-Min-Version": "1"})),
            ]
            await asyncio.sleep(0.1)
            assert not any(task.done() for task in waiting)
            await lab.publish(1)
            for task in waiting:
                assert logprobs_of((await task).choices[0])["version"] == 1

    asyncio.run(scenario())


def test_a_version_that_does_not_come_is_a_503_and_so_are_missing_weights(tmp_path):
    async def scenario():
        async with serving(tmp_path, versions=(), wait_timeout_s=0.05) as lab, lab.client() as client:
            with pytest.raises(openai.InternalServerError, match="no weights yet") as refused:
                await client.chat.completions.create(model="policy", messages=ASK)
            assert refused.value.status_code == 503
            await lab.publish(0)
            while lab.engine.version(GROUP) < 0:
                await asyncio.sleep(0.01)
            with pytest.raises(openai.InternalServerError, match="has version 0; version 4 was not loaded"):
                await client.chat.completions.create(model="policy", messages=ASK, extra_body={"min_version": 4})

    asyncio.run(scenario())


def test_errors_have_openais_shape(tmp_path):
    async def scenario():
        async with serving(tmp_path) as lab, lab.client() as client:
            ask = client.chat.completions.create
            with pytest.raises(openai.NotFoundError, match="use 'policy' or 'run-1/policy'") as missing:
                await ask(model="no-such", messages=ASK)
            assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
            image: list[ChatCompletionMessageParam] = [
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
            ]
            with pytest.raises(openai.BadRequestError, match=r"messages\.0\.content: part 0 is not text") as wrong:
                await ask(model="policy", messages=image)
            assert wrong.value.type == "invalid_request_error"
            async with aiohttp.ClientSession() as session:
                for method, path, status in (("GET", "/nothing", 404), ("GET", "/chat/completions", 405)):
                    async with session.request(method, lab.url + path) as answer:
                        assert answer.status == status
                        assert (await answer.json())["error"]["type"] == "invalid_request_error"

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"messages": []}, "messages: List should have at least 1 item"),
        ({"temperature": -1}, "temperature: Input should be greater"),
        ({"top_logprobs": 5}, "top_logprobs: 5: .* sampled token alone is known; give 1 or 0, or leave it out$"),
        ({"frequency_penalty": 0.5}, "frequency_penalty: 0.5 is not supported here"),
        ({"response_format": {"type": "json_object"}}, "response_format: "),
        ({"tool_choice": "required"}, "tool_choice: 'required' is not supported here"),
        ({"stop": [""]}, "stop: a stop sequence must not be empty"),
        ({"best_of": 3}, "best_of: unknown parameter"),
    ],
)
def test_unsupported_fields_of_a_request_are_refused_by_name(change, message):
    with pytest.raises(Refusal, match=message) as refused:
        parse_request(json.dumps({"model": "policy", "messages": ASK, **change}).encode()).check_enforced()
    assert (refused.value.status, refused.value.param) == (400, next(iter(change)))


@pytest.mark.parametrize(
    ("parse", "asked", "message"),
    [
        (responses.parse, {"input": "a", "top_logprobs": 2}, "top_logprobs: 2: .*; give 1 or 0, or leave it out$"),
        (anthropic.parse_messages, {"messages": ASK, "max_tokens": 1, "top_logprobs": 2}, "top_logprobs: unknown "),
        (
            partial(checked_request, CompletionRequest),
            {"prompt": "a", "logprobs": 2},
            "logprobs: 2: .*; give 1 or 0, or leave it out$",
        ),
    ],
)
def test_more_log_probabilities_than_the_sampled_ones_are_refused_in_every_form(parse, asked, message):
    with pytest.raises(Refusal, match=f"^{message}") as refused:
        parse({"model": "policy", **asked})
    assert refused.value.status == 400


def test_a_request_of_nothing_but_defaults_and_nulls_is_taken():
    asked = {"model": "policy", "messages": ASK, "stop": None, "seed": None, "frequency_penalty": 0}
    request = parse_request(json.dumps(asked).encode())
    assert (request.stop, request.seed, request.sampling(9).max_new_tokens) == ((), None, 9)
    for body in (b"{", b"[]"):
        with pytest.raises(Refusal):
            parse_request(body)


def test_the_token_is_asked_for_and_never_logged(tmp_path, caplog):
    caplog.set_level(logging.DEBUG)
    (tmp_path / "token").write_text(SECRET + "\n")

    async def scenario():
        token = token_of(Lab(tmp_path, token_file=tmp_path / "token").settings, {})
        async with serving(tmp_path, token=token) as lab:
            async with lab.client() as other_client:
                with pytest.raises(openai.AuthenticationError) as refused:
                    await other_client.chat.completions.create(model="policy", messages=ASK)
                assert refused.value.code == "invalid_api_key"
            async with lab.client(api_key=SECRET) as client:
                await client.chat.completions.create(model="policy", messages=ASK)

    asyncio.run(scenario())
    ours = [record.getMessage() for record in caplog.records if record.name.startswith("rollstream")]
    assert ours
    assert not any(SECRET in line or "3+4" in line for line in ours)


def test_a_port_in_use_is_one_clear_error(tmp_path):
    async def scenario():
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            lab = Lab(tmp_path)
            settings = lab.settings.model_copy(update={"port": taken.getsockname()[1]})
            with pytest.raises(RollstreamError, match=r"endpoint: port \d+ of 127\.0\.0\.1 cannot be used"):
                await run(settings, lab.log, ScriptedEngine())

    asyncio.run(scenario())


def test_log_probabilities_of_a_real_model_match_a_full_forward(tmp_path):
    model_folder = make_tiny_model(tmp_path / "model", seed=0)
    engine = TransformersEngine(TransformersSettings(threads=1))

    async def scenario():
        await engine.start()
        options = {"versions": (), "engine": engine, "allow": (f"model:{model_folder}",)}
        async with serving(tmp_path, **options) as lab, lab.client() as client:
            await lab.publish(0, (model_folder / "model.safetensors").read_bytes(), str(model_folder))
            ask = client.chat.completions.create
            answer = await ask(model="policy", messages=ASK, n=4, temperature=0.7, max_tokens=8)
            with pytest.raises(openai.BadRequestError) as refused:
                await ask(model="policy", messages=[{"role": "user", "content": "x" * 600}])
            assert refused.value.code == "context_length_exceeded"
        await engine.close()
        return answer

    model = AutoModelForCausalLM.from_pretrained(model_folder).eval()
    for choice in asyncio.run(scenario()).choices:
        reported = logprobs_of(choice)
        ids, num_prompt = [*reported["prompt_token_ids"], *reported["token_ids"]], len(reported["prompt_token_ids"])
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([ids])).logits[0, num_prompt - 1 : -1]
        expected = (logits / 0.7).log_softmax(-1).gather(1, torch.tensor(reported["token_ids"])[:, None])[:, 0]
        assert torch.allclose(torch.tensor([entry["logprob"] for entry in reported["content"]]), expected, atol=1e-4)
