"""Streams: pieces come while the answer is sampled, together they are its text, and the end comes after the record."""

import asyncio
import itertools
import json
import logging
import time
from pathlib import Path
from typing import Any, cast

import aiohttp
import openai
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from rollstream.learner.tiny_model import make_tiny_model
from rollstream.producers.engines.base import Generation, GenerationRequest
from rollstream.producers.engines.scripted import ScriptedEngine, ScriptedTokenizer
from rollstream.producers.engines.transformers import TransformersEngine
from rollstream.producers.openai.protocol import REPLACEMENT, answer_of, stop_length
from rollstream.producers.openai.streaming import TextStream
from rollstream.producers.rollout.journal import Journal
from rollstream.schemas import tokens
from rollstream.schemas.engine_settings import TransformersSettings
from rollstream.schemas.events.rollouts import VersionSpan
from tests.producers.conftest import answers
from tests.producers.gateway.gateway_rig import play_outside
from tests.producers.openai.endpoint_rig import ASK, serving
from tests.rigs.runs.llama_tokenizer import llama_tokenizer

CALL = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
PARTS = st.lists(
    st.sampled_from(["a", " ", "é", "€", "𝄞", "stop", "sto", CALL, "<tool_call>", "<tool", "</tool_call>"])
)


@given(parts=PARTS, sizes=st.lists(st.integers(1, 5), min_size=1), stop=st.sampled_from([(), ("stop",), ("a", "€")]))
@pytest.mark.parametrize("has_tools", [False, True])
def test_pieces_are_how_the_text_of_the_answer_begins(parts, sizes, stop, has_tools):
    tokenizer = ScriptedTokenizer()
    ids = (*tokenizer.encode("".join(parts), add_special_tokens=False), tokenizer.eos_token_id)
    span = VersionSpan(model_group="run-1/policy", version=0, length=len(ids))
    generation = Generation(ids, (0.0,) * len(ids), (span,), "stop")
    asked: dict[str, Any] = {"model_group": span.model_group, "prompt_ids": (1,), "stop": stop, "has_tools": has_tools}
    whole = answer_of(generation, tokenizer, salt=0, **asked)
    stream, sent, at = TextStream(tokenizer, stop, has_tools=has_tools), "", 0
    for number in range(len(ids)):
        size = sizes[number % len(sizes)]
        sent += stream.add(ids[at : min(at + size, len(ids) - 1)])
        at = min(at + size, len(ids) - 1)
        assert whole.text.startswith(sent)
    if not stop and not has_tools and REPLACEMENT not in whole.text:
        assert sent == whole.text


@pytest.mark.parametrize("rest", ["<0xF0> <0x9F> <0x98> <0x80>", "<0xF0> <0x9F>", "<0xA0> a a", "a <0xF0> <0x9F>"])
@pytest.mark.parametrize("before", [1, 200])
def test_a_stop_text_of_bytes_is_found_before_bytes_of_an_unfinished_character(rest, before):
    tokenizer = llama_tokenizer()
    names = [*["a"] * before, "<0x0A>", *rest.split()]
    ids = tuple(tokenizer.convert_tokens_to_ids(names))
    span = VersionSpan(model_group="run-1/policy", version=0, length=len(ids))
    generation = Generation(ids, (0.0,) * len(ids), (span,), "length")
    assert stop_length(generation, tokenizer, ("\n",)) == before + 1
    answer = answer_of(generation, tokenizer, model_group="", prompt_ids=(1,), salt=0, stop=("\n",))
    assert (answer.text, len(answer.token_ids), answer.finish_reason) == ("a" * before, before + 1, "stop")


def test_words_after_a_byte_of_no_character_are_decoded_in_windows():
    tokenizer, sizes = llama_tokenizer(), []

    class Counted:
        eos_token_id = -1

        def decode(self, ids: Any, **options: Any) -> str:
            sizes.append(len(ids))
            return tokenizer.decode(ids, **options)

    ids = tokenizer.convert_tokens_to_ids(["<0xF0>", *["▁hi"] * 300])
    generation = Generation(tuple(ids), (0.0,) * 301, (), "length")
    assert stop_length(generation, cast("Any", Counted()), ("zzz",)) is None
    assert sum(sizes) < 100 * len(ids)


async def pieces_of(stream: Any) -> list[Any]:
    return [piece async for piece in stream]


def test_long_stop_texts_cost_a_stream_little_time() -> None:
    text = "abcdefghij" * 200
    stop = ["x" * 1000, "j" + "abcdefghij" * 99 + "x", "a" * 1000, *(f"{number}{'b' * 990}" for number in range(61))]
    stream, tokenizer = TextStream(ScriptedTokenizer(), stop), ScriptedTokenizer()
    began_s = time.process_time()
    found = "".join(stream.add([number]) for number in tokenizer.encode(text))
    assert time.process_time() - began_s < 5, "seconds for 2000 tokens: minutes if each beginning is compared by itself"
    assert text.startswith(found)
    assert len(found) > 1000


def test_a_stream_keeps_only_the_text_that_is_not_sent_and_reads_nothing_after_a_call_begins() -> None:
    num_read = 0

    class CountingTokenizer(ScriptedTokenizer):
        def decode(self, token_ids: Any, *, skip_special_tokens: bool = False) -> str:
            nonlocal num_read
            num_read += len(token_ids)
            return super().decode(token_ids, skip_special_tokens=skip_special_tokens)

    tokenizer = CountingTokenizer()
    stream, sent = TextStream(tokenizer, ("stop",), has_tools=True), ""
    for number in tokenizer.encode("word " * 1000, add_special_tokens=False):
        sent += stream.add([number])
        assert len(stream._unsent) <= len(" <tool_call>")
    assert sent == ("word " * 1000).rstrip()
    for number in tokenizer.encode(CALL, add_special_tokens=False):
        stream.add([number])
    num_read = 0
    for number in tokenizer.encode(CALL * 100, add_special_tokens=False):
        assert stream.add([number]) == ""
    assert num_read == 0


@given(parts=st.lists(st.sampled_from(["a", "é", "€", "𝄞"]).map(str.encode) | st.binary(min_size=1, max_size=30)))
def test_ids_that_are_not_text_are_not_decoded_again_with_each_later_one(parts) -> None:
    most = 0

    class BytesTokenizer(ScriptedTokenizer):
        def decode(self, token_ids: Any, *, skip_special_tokens: bool = False) -> str:
            nonlocal most
            most = max(most, len(token_ids))
            return bytes(token_ids).decode(errors="replace")

    stream, sent, ids = TextStream(BytesTokenizer()), "", b"".join([*parts, b"\xff" * 200])
    for number in ids:
        sent += stream.add([number])
    assert ids.decode(errors="replace").startswith(sent)
    assert len(sent) > 150
    assert most < 64


def test_ids_that_decode_to_nothing_may_stand_between_the_bytes_of_a_character() -> None:
    class PaddedTokenizer(ScriptedTokenizer):
        def decode(self, token_ids: Any, *, skip_special_tokens: bool = False) -> str:
            return bytes(one for one in token_ids if one < 256).decode(errors="replace")

    stream = TextStream(PaddedTokenizer())
    assert "".join(stream.add([number]) for number in [*b"a\xe2\x82", *[300] * 40, 0xAC, *b"b"]) == "a\u20acb"


def test_a_real_model_streams_as_it_samples(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", seed=0)
    engine = TransformersEngine(TransformersSettings(threads=1))

    async def scenario() -> None:
        await engine.start()
        allow = (f"model:{model}",)
        async with serving(tmp_path, versions=(), engine=engine, allow=allow) as lab, lab.client() as client:
            await lab.publish(0, (model / "model.safetensors").read_bytes(), str(model))
            ask = client.chat.completions.create
            sampling: Any = {"model": "policy", "messages": ASK, "seed": 3, "max_tokens": 20, "n": 2}
            whole = await ask(**sampling)
            options: Any = {"include_usage": True}
            pieces = await pieces_of(await ask(**sampling, stream=True, stream_options=options))
            texts = dict.fromkeys(range(2), "")
            counts = dict.fromkeys(range(2), 0)
            for choice in [choice for piece in pieces for choice in piece.choices]:
                texts[choice.index] += choice.delta.content or ""
                counts[choice.index] += bool(choice.delta.content)
            assert list(texts.values()) == [choice.message.content for choice in whole.choices]
            assert sum(counts.values()) > 8
            ends = [choice for piece in pieces for choice in piece.choices if choice.logprobs is not None]
            exact = [choice.logprobs.model_extra["token_ids"] for choice in ends]
            assert exact == [choice.logprobs.model_extra["token_ids"] for choice in whole.choices]
            assert pieces[-1].usage == whole.usage
            assert len({piece.id for piece in pieces}) == 1
            text = await client.completions.create(model="policy", prompt="3+4=", seed=3, max_tokens=20)
            stream = await client.completions.create(model="policy", prompt="3+4=", seed=3, max_tokens=20, stream=True)
            parts = await pieces_of(stream)
            assert len(parts) > 4
            assert "".join(part.choices[0].text for part in parts) == text.choices[0].text
            assert parts[-1].choices[0].finish_reason == text.choices[0].finish_reason
        await engine.close()

    asyncio.run(scenario())


def events_of(text: str) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


def test_anthropics_stream_has_text_pieces_and_then_the_call_of_a_tool(tmp_path: Path) -> None:
    async def scenario() -> list[dict[str, Any]]:
        script = answers(f"well then {CALL}")
        async with serving(tmp_path, script) as lab, aiohttp.ClientSession() as http:
            tool = {"name": "add", "input_schema": {"type": "object"}}
            body = {"model": "policy", "max_tokens": 200, "messages": ASK, "tools": [tool], "stream": True}
            async with http.post(f"{lab.url}/messages", json=body) as response:
                return events_of(await response.text())

    found = asyncio.run(scenario())
    kinds = [event["type"] for event in found]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-2:] == ["message_delta", "message_stop"]
    texts = [event["delta"]["text"] for event in found if event.get("delta", {}).get("type") == "text_delta"]
    assert len(texts) > 3
    assert "".join(texts) == "well then"
    blocks = [event["content_block"]["type"] for event in found if event["type"] == "content_block_start"]
    assert blocks == ["text", "tool_use"]
    assert kinds.count("content_block_stop") == 2
    assert found[0]["message"]["usage"]["input_tokens"] == found[-2]["usage"]["input_tokens"] > 0
    assert found[-2]["delta"]["stop_reason"] == "tool_use"
    assert len(found[-2]["rollstream"]["token_ids"]) == found[-2]["usage"]["output_tokens"]


def test_a_recorded_stream_begins_before_the_step_is_acknowledged_and_ends_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    acknowledged = Journal.acknowledged

    async def slowly(journal: Journal) -> None:
        while "asking" in seen and "piece" not in seen:
            await asyncio.sleep(0.001)
        await acknowledged(journal)
        seen.append("acknowledged")

    monkeypatch.setattr(Journal, "acknowledged", slowly)

    async def agent(one: Any) -> None:
        seen[:] = ["asking"]
        async with openai.AsyncOpenAI(base_url=f"{one.rollout['base_url']}/v1", api_key=one.rollout["key"]) as client:
            stream = await client.chat.completions.create(model="policy", messages=ASK, stream=True)
            async for piece in stream:
                seen.append("end" if piece.choices[0].finish_reason else "piece")
        await one.reward(1.0)
        await one.end()

    played = play_outside(tmp_path, agent, script=answers("a longer answer"), sampling={"max_new_tokens": 64})
    played.assert_complete()
    assert seen.count("piece") > 5
    assert seen.index("acknowledged") < seen.index("end")
    assert seen.index("piece") < seen.index("acknowledged")


def test_a_client_that_hangs_up_in_mid_stream_gets_the_recorded_answer_when_it_asks_again(tmp_path: Path) -> None:
    async def agent(one: Any) -> None:
        body = json.dumps({"model": "policy", "messages": ASK, "stream": True}).encode()
        headers = {
            "Authorization": f"Bearer {one.rollout['key']}",
            "Content-Type": "application/json",
            "Idempotency-Key": "k",
        }
        url = f"{one.rollout['base_url']}/v1/chat/completions"
        async with one.http.post(url, data=body, headers=headers) as response:
            for content in ("", "a"):
                line = await response.content.readuntil(b"\n\n")
                assert json.loads(line.removeprefix(b"data: "))["choices"][0]["delta"]["content"].startswith(content)
            response.close()
        async with one.http.post(url, data=body, headers=headers) as response:
            lines = events_of(await response.text())
        text = "".join(choice["delta"].get("content") or "" for line in lines for choice in line["choices"])
        assert text == "a longer answer"
        await one.reward(1.0)
        await one.end()

    played = play_outside(tmp_path, agent, script=answers("a longer answer"), sampling={"max_new_tokens": 64})
    played.assert_complete()
    (call,) = [step.llm for step in played.steps if step.llm is not None]
    assert len(tokens.decode_ids(call.completion_ids)) == len("a longer answer") + 1


class BrokenError(Exception):
    """Failure of an engine after its first tokens."""


@pytest.mark.parametrize("api", ["messages", "chat", "responses"])
def test_an_engine_that_fails_in_mid_stream_ends_it_with_the_error_as_each_client_knows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, api: str
) -> None:
    async def fails(engine: ScriptedEngine, request: GenerationRequest) -> Any:
        assert request.on_tokens is not None
        request.on_tokens((40, 41))
        await asyncio.sleep(0.01)
        raise BrokenError("a secret of the engine")

    monkeypatch.setattr(ScriptedEngine, "generate", fails)

    async def messages(one: Any) -> None:
        headers = {"Authorization": f"Bearer {one.rollout['key']}"}
        message = {"model": "policy", "max_tokens": 4, "messages": ASK, "stream": True}
        async with one.http.post(f"{one.rollout['base_url']}/v1/messages", json=message, headers=headers) as response:
            last = events_of(await response.text())[-1]
        assert (last["type"], last["error"]["type"]) == ("error", "api_error")

    async def chat(one: Any) -> None:
        async with openai.AsyncOpenAI(base_url=f"{one.rollout['base_url']}/v1", api_key=one.rollout["key"]) as client:
            stream = await client.chat.completions.create(model="policy", messages=ASK, stream=True)
            with pytest.raises(openai.APIError, match="the gateway could not process this request"):
                async for _ in stream:
                    pass

    async def responses(one: Any) -> None:
        async with openai.AsyncOpenAI(base_url=f"{one.rollout['base_url']}/v1", api_key=one.rollout["key"]) as client:
            events = [event async for event in await client.responses.create(model="policy", input="a", stream=True)]
        assert events[-1].type == "error"
        assert events[-1].message == "the gateway could not process this request; see its log"
        assert events[-1].code == "internal_error"

    async def agent(one: Any) -> None:
        await {"messages": messages, "chat": chat, "responses": responses}[api](one)
        await one.end()

    assert play_outside(tmp_path, agent).last.cause == "engine_error"


def test_a_client_that_is_gone_when_a_piece_is_sent_leaves_its_step_and_no_error_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    num_sent = itertools.count()
    write = web.StreamResponse.write

    async def gone(response: web.StreamResponse, data: Any) -> None:
        if next(num_sent) == 2:
            raise aiohttp.ClientConnectionResetError("Cannot write to closing transport")
        await write(response, data)

    async def agent(one: Any) -> None:
        headers = {"Authorization": f"Bearer {one.rollout['key']}", "X-Stainless-Retry-Count": "1"}
        body = {"model": "policy", "messages": ASK, "stream": True}
        url = f"{one.rollout['base_url']}/v1/chat/completions"
        monkeypatch.setattr(web.StreamResponse, "write", gone)
        async with one.http.post(url, json=body, headers=headers) as response:
            assert "a longer answer" not in await response.text()
        async with one.http.post(url, json=body, headers=headers) as response:
            assert "[DONE]" in await response.text()
        await one.reward(1.0)
        await one.end()

    played = play_outside(tmp_path, agent, script=answers("a longer answer"), sampling={"max_new_tokens": 64})
    played.assert_complete()
    assert len([step for step in played.steps if step.llm is not None]) == 1
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_a_request_refused_before_the_first_chunk_has_an_error_status(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, answers("a")) as lab, lab.client() as client:
            with pytest.raises(openai.NotFoundError):
                await client.chat.completions.create(model="other", messages=ASK, stream=True)

    asyncio.run(scenario())


def test_choices_begin_in_their_order_whichever_is_written_first(tmp_path: Path) -> None:
    async def agent(one: Any) -> None:
        async with openai.AsyncOpenAI(base_url=f"{one.rollout['base_url']}/v1", api_key=one.rollout["key"]) as client:
            ask: Any = {"model": "policy", "n": 3, "stop": ["##END"], "messages": ASK}
            async with client.chat.completions.stream(**ask) as stream:
                begun = [event.chunk.choices[0].index async for event in stream if event.type == "chunk"]
                whole = await stream.get_final_completion()
        assert begun[:3] == [0, 1, 2]
        assert [choice.message.content for choice in whole.choices] == ["#First", "second", "third"]
        await one.reward(1.0)
        await one.end()

    script = answers("#First", "second", "third")  # the first may begin with the stop text, and is held back
    play_outside(tmp_path, agent, script=script, sampling={"max_new_tokens": 50}).assert_complete()
