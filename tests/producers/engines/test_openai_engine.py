"""The frozen engine against servers that are down, refuse, answer nonsense or ask for a pause: one clear error each."""

import asyncio
import base64
import io
import json
import logging
import traceback
from contextlib import asynccontextmanager
from itertools import cycle

import pytest
from aiohttp import web

from rollstream.eventlog.http import http_json
from rollstream.producers.engines.base import GenerationRequest
from rollstream.producers.engines.openai import OpenAIEngine, TextTokenizer
from rollstream.producers.engines.routed import RoutedEngine
from rollstream.producers.engines.scripted import ScriptedEngine
from rollstream.producers.rollout.conversation import Conversation
from rollstream.schemas.engine_settings import OpenAISettings
from rollstream.schemas.errors import ModelError, PromptTooLongError
from rollstream.schemas.settings import Sampling

GROUP, KEY = "run-1/judge", "sk-very-secret"
TALK = [{"role": "system", "content": "Ünïcode\nand lines"}, {"role": "user", "content": 'say "yes"'}]


def completion(text, reason="stop"):
    return {"choices": [{"message": {"role": "assistant", "content": text}, "text": text, "finish_reason": reason}]}


class Server:
    """Answers with (status, headers, body) in turn, again and again; keeps what it was sent."""

    def __init__(self, *answers):
        self.requests = []
        self._answers = cycle(answers)

    async def answer(self, request) -> web.StreamResponse:
        body = await request.read()
        self.requests.append((request.path, dict(request.headers), json.loads(body) if body else None))
        status, headers, content = next(self._answers)
        text = content if isinstance(content, str | bytes) else json.dumps(content)
        raw = text.encode() if isinstance(text, str) else text
        return web.Response(status=status, headers=headers, body=io.BytesIO(raw), content_type="application/json")

    @asynccontextmanager
    async def listening(self):
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self.answer)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        finally:
            await runner.cleanup()


def request(messages=TALK, **sampling):
    tokenizer = TextTokenizer()
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return GenerationRequest(GROUP, tokenizer.encode(text), Sampling(**sampling), 2**63 + 5)


def ask(server, *requests, **settings):
    """The answers of an engine that asks the server, in turn."""
    chosen = {"model": "m", "api_key_variable": "JUDGE_KEY", "retry_wait_s": 0.001, "retries": 2} | settings

    async def main():
        async with server.listening() as url:
            engine = OpenAIEngine(OpenAISettings(base_url=url, **chosen), {"JUDGE_KEY": KEY})
            try:
                return [await engine.generate(one) for one in requests or [request()]]
            finally:
                await engine.close()

    return asyncio.run(asyncio.wait_for(main(), 60))


def text_of(generation):
    return TextTokenizer().decode(generation.token_ids, skip_special_tokens=True)


class Dying(Server):
    """Breaks off within its first answer, as a server that is killed does."""

    async def answer(self, request):
        if self.requests:
            return await super().answer(request)
        self.requests.append((request.path, {}, await request.json()))
        response = web.StreamResponse(headers={"Content-Type": "application/json", "Content-Length": "1000"})
        await response.prepare(request)
        await response.write(b'{"choices": [{"message": {"content": "ye')
        request.transport.abort()
        return response


def test_a_server_that_is_killed_within_an_answer_is_asked_again_with_the_same_seed():
    server = Dying((200, {}, completion("yes")))
    (found,) = ask(server, request(), retry_wait_s=0.01)
    assert text_of(found) == "yes"
    first, second = (body for _, _, body in server.requests)
    assert first == second
    assert "seed" in first


def test_the_server_gets_messages_sampling_and_key_and_its_text_comes_back():
    server = Server((200, {}, completion("jä")))
    (answer,) = ask(server, request(temperature=0.5, top_p=0.9, top_k=3, max_new_tokens=7))
    assert (text_of(answer), answer.finish_reason, answer.logprobs, answer.spans) == ("jä", "stop", (), ())
    ((path, headers, body),) = server.requests
    assert (path, headers["Authorization"]) == ("/v1/chat/completions", f"Bearer {KEY}")
    assert body == {
        "model": "m",
        "messages": TALK,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 3,
        "max_tokens": 7,
        "seed": 5,
    }


def test_messages_with_unicodes_own_line_ends_stay_messages():
    talk = [TALK[0], {"role": "user", "content": "a\u2028b\u2029c\x85d\x0be\x1cf\r\ng"}]
    server = Server((200, {}, completion("x")))
    ask(server, request(talk))
    assert server.requests[0][2]["messages"] == talk


def test_a_conversation_keeps_every_message_over_turns():
    tokenizer = TextTokenizer()
    conversation, messages = Conversation(tokenizer), list(TALK)
    server = Server((200, {}, completion("first\nanswer", "length")), (200, {}, completion("zweite ✓")))
    for step in range(2):
        prompt = conversation.prompt(tokenizer.apply_chat_template(messages))
        (answer,) = ask(server, GenerationRequest(GROUP, prompt.token_ids, Sampling(), 1))
        text = conversation.append_sampled(step, prompt, answer.token_ids)
        assert server.requests[-1][2]["messages"] == messages
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "go on"}]
        server = Server((200, {}, completion("zweite ✓")))
    assert [one["content"] for one in messages if one["role"] == "assistant"] == ["first\nanswer", "zweite ✓"]


def test_arguments_of_calls_are_sent_as_text_though_templates_take_objects():
    def history(arguments):
        call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}
        return [TALK[0], {"role": "assistant", "content": None, "tool_calls": [call]}]

    server = Server((200, {}, completion("x")))
    ask(server, request(history({"a": 2**70, "b": "ü"})))
    assert server.requests[0][2]["messages"] == history(f'{{"a": {2**70}, "b": "ü"}}')


def test_a_base_model_gets_the_contents_alone_and_the_only_model_of_a_server_is_found():
    server = Server((200, {}, {"data": [{"id": "base"}]}), (200, {}, completion("x", "length")))
    (answer,) = ask(server, model=None, api="completions", api_key_variable=None)
    assert (text_of(answer), answer.finish_reason) == ("x", "length")
    (listed, _, _), (path, headers, body) = server.requests
    assert (listed, path, body["model"]) == ("/v1/models", "/v1/completions", "base")
    assert body["prompt"] == 'Ünïcode\nand lines\nsay "yes"'
    assert "Authorization" not in headers


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((401, {}, {"error": f"bad key {KEY}"}), r"answered 401 .*set the variable JUDGE_KEY to a valid key"),
        (
            (404, {}, {"error": {"message": "The model `m` does not exist"}}),
            r"\(model m\) answered 404 .*check base_url",
        ),
        ((302, {"Location": "http://127.0.0.1:9/"}, ""), r"answered 302"),
        ((200, {}, "<html>"), r"answered with invalid JSON: '<html>'; check base_url"),
        ((200, {}, b"\xff\xfe"), r"answered with invalid JSON"),
        ((200, {}, [1]), r"an answer without choices"),
        ((200, {}, {"choices": []}), r"an answer without choices"),
        ((200, {}, completion(None, "length")), r"answered no text; raise max_new_tokens"),
        ((200, {}, completion(5)), r"not text"),
        ((200, {}, completion("x", "tool_calls")), r"not text"),
        ((200, {}, completion("", "length")), r"no text; raise max_new_tokens"),
        ((500, {}, f"broken {KEY}"), r"answered 500 'broken \$\{JUDGE_KEY\}' \(3 tries\); check that it serves"),
    ],
)
def test_a_server_that_refuses_or_answers_nonsense_is_one_error_without_the_key(answer, message, caplog):
    caplog.set_level(logging.DEBUG)
    with pytest.raises(ModelError, match=message) as raised:
        ask(Server(answer))
    assert not isinstance(raised.value, PromptTooLongError)
    assert "\n" not in str(raised.value)
    assert KEY not in str(raised.value) + caplog.text


def unsupported(name, more=""):
    message = f"Unsupported parameter: '{name}' is not supported with this model.{more}"
    error = {"message": message, "type": "invalid_request_error", "param": name, "code": "unsupported_parameter"}
    return (400, {}, {"error": error})


class Particular(Server):
    """Refuses what models that think refuse, as OpenAI's API does, one parameter at a time."""

    async def answer(self, request):
        body = await request.json()
        found = next((name for name in ("max_tokens", "top_p", "temperature", "seed") if name in body), None)
        self._answers = cycle([(200, {}, completion("yes")) if found is None else unsupported(found)])
        return await super().answer(request)


def test_a_model_that_does_not_take_all_settings_is_asked_without_those_that_change_nothing():
    server = Particular()
    answers = ask(server, request(max_new_tokens=9), request(max_new_tokens=8))
    assert [text_of(answer) for answer in answers] == ["yes", "yes"]
    *refused, first, second = (body for _, _, body in server.requests)
    assert len(refused) == 4
    assert first == {"model": "m", "messages": TALK, "max_completion_tokens": 9}
    assert second == {**first, "max_completion_tokens": 8}


@pytest.mark.parametrize("sampling", [{"top_p": 0.9}, {"temperature": 0.0}], ids=str)
def test_a_model_that_cannot_sample_as_the_run_asks_is_an_error(sampling):
    (name,) = sampling
    with pytest.raises(ModelError, match=rf"answered 400 .*{name}\W+is not supported.*; check base_url, model and api"):
        ask(Particular(), request(), request(**sampling))


def test_a_parameter_refused_although_it_was_left_out_is_an_error():
    with pytest.raises(ModelError, match=r"top_p\W+is not supported"):
        ask(Server(unsupported("top_p")))


def test_the_proxy_of_the_environment_is_used_but_for_this_machine_and_what_it_excepts():
    server = Server((200, {}, completion("yes")))

    async def main():
        async with server.listening() as url:
            proxy = url.removesuffix("/v1")
            settings = OpenAISettings(base_url="http://llm.example/v1", model="m", retries=0)
            engine = OpenAIEngine(settings, {"http_proxy": proxy})
            try:
                return text_of(await engine.generate(request()))
            finally:
                await engine.close()

    assert asyncio.run(main()) == "yes"
    ((path, headers, _),) = server.requests
    assert (path, headers["Host"]) == ("/v1/chat/completions", "llm.example")


@pytest.mark.parametrize(
    ("url", "env", "proxy"),
    [
        ("https://llm.example/v1", {}, None),
        ("https://llm.example/v1", {"http_proxy": "http://p:1"}, None),
        ("https://llm.example/v1", {"HTTPS_PROXY": "http://p:1"}, "http://p:1"),
        ("https://llm.example/v1", {"https_proxy": "p:1", "HTTPS_PROXY": "http://q:1"}, "http://p:1"),
        ("https://llm.example/v1", {"https_proxy": "http://p:1", "no_proxy": "other, .example"}, None),
        ("https://llm.example:8443/v1", {"https_proxy": "http://p:1", "NO_PROXY": "*"}, None),
        ("https://llm.example/v1", {"https_proxy": "http://p:1", "NO_PROXY": "m.example"}, "http://p:1"),
        ("http://127.0.0.1:8000/v1", {"http_proxy": "http://p:1"}, None),
        ("http://[::1]:8000/v1", {"http_proxy": "http://p:1"}, None),
    ],
)
def test_a_proxy_is_found_as_other_programs_find_it(url, env, proxy):
    assert http_json.proxy_of(url, env) == (proxy and http_json.Proxy(proxy))


@pytest.mark.parametrize("scheme", ["http", "https"])
@pytest.mark.parametrize("host", ["127.0.0.1:{port}", "127.0.0.1:1", "127.0.0.1:x1"], ids=["refusing", "down", "wrong"])
def test_no_error_shows_the_password_of_a_proxy_and_the_proxy_gets_it(scheme, host):
    asked = []

    async def proxy(reader, writer):
        asked.append((await reader.readuntil(b"\r\n\r\n")).decode())
        writer.write(b"HTTP/1.1 407 Proxy Authentication Required\r\nContent-Length: 0\r\n\r\n")
        writer.close()

    async def main():
        server = await asyncio.start_server(proxy, "127.0.0.1", 0)
        address = host.format(port=server.sockets[0].getsockname()[1])
        settings = OpenAISettings(base_url=f"{scheme}://llm.example/v1", model="m", retries=0)
        engine = OpenAIEngine(settings, {f"{scheme}_proxy": f"http://svc:Sesame%201234@{address}"})
        try:
            await engine.generate(request())
        finally:
            await engine.close()
            server.close()

    with pytest.raises(ModelError) as raised:
        asyncio.run(main())
    assert "Sesame" not in "".join(traceback.format_exception(raised.value))
    sent = base64.b64encode(b"svc:Sesame 1234").decode()
    assert all(f"\r\nProxy-Authorization: Basic {sent}\r\n" in one for one in asked)
    assert bool(asked) == ("port" in host)


def test_too_long_a_prompt_has_its_own_error():
    refused = {"error": {"message": "too many tokens", "code": "context_length_exceeded"}}
    with pytest.raises(PromptTooLongError, match=r"answered 400 .*make the conversation shorter"):
        ask(Server((400, {}, refused)))


def test_more_than_the_limit_is_not_read():
    limit = http_json.MAX_ANSWER_BYTES
    with pytest.raises(ModelError, match=f"answered more than {limit} bytes"):
        ask(Server((200, {}, completion("x" * limit))))


def test_a_server_that_is_down_is_one_error_after_all_tries():
    async def main():
        async with Server((200, {}, "")).listening() as url:
            pass
        engine = OpenAIEngine(OpenAISettings(base_url=url, model="m", retries=2, retry_wait_s=0.001), {})
        try:
            with pytest.raises(ModelError, match=r"cannot be reached: .*\(3 tries\); check that it serves"):
                await engine.generate(request())
        finally:
            await engine.close()

    asyncio.run(main())


def test_a_temporary_failure_is_retried():
    server = Server((429, {"Retry-After": "0.002"}, ""), (503, {}, ""), (200, {}, completion("yes")))
    (answer,) = ask(server)
    assert (text_of(answer), len(server.requests)) == ("yes", 3)


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({}, 0),
        ({"Retry-After": "7"}, 7),
        ({"Retry-After": "-1"}, 0),
        ({"Retry-After": "nan"}, 0),
        ({"Retry-After": "inf"}, http_json.MAX_RETRY_AFTER_S),
        ({"Retry-After": "86400"}, http_json.MAX_RETRY_AFTER_S),
        ({"Retry-After": "soon"}, 0),
        ({"Retry-After": "Mon, 23 Nov 2026 10:00:09 GMT", "Date": "Mon, 23 Nov 2026 10:00:00 GMT"}, 9),
        ({"Retry-After": "Mon, 23 Nov 2026 10:00:09 GMT"}, 0),
    ],
)
def test_the_pause_that_a_server_asks_for_is_bounded(headers, seconds):
    assert http_json.retry_after(headers) == seconds


@pytest.mark.parametrize(
    ("listed", "message"),
    [({"data": [{"id": "a"}, {"id": "b"}]}, r"serves 2 models \(a, b\); set endpoint\.model"), ({}, "lists no models")],
)
def test_a_server_with_several_models_needs_a_name(listed, message):
    with pytest.raises(ModelError, match=message):
        ask(Server((200, {}, listed)), model=None)


@pytest.mark.parametrize("env", [{}, {"JUDGE_KEY": " "}, {"JUDGE_KEY": "a\nb"}])
def test_a_key_that_is_not_there_is_named_before_anything_is_asked(env):
    settings = OpenAISettings(base_url="http://127.0.0.1:9/v1", api_key_variable="JUDGE_KEY")
    with pytest.raises(ModelError, match="the variable JUDGE_KEY holds no key; export it"):
        OpenAIEngine(settings, env)


@pytest.mark.parametrize("url", ["host:80", "ftp://h/v1", "http://user:pw@h/v1", "http://h/v1?key=x", "http://h /v1"])
def test_a_url_that_is_none_or_holds_a_secret_is_refused(url):
    with pytest.raises(ValueError, match="is not a URL like"):
        OpenAISettings(base_url=url)


def test_a_model_group_that_others_serve_stands_beside_the_engine(tmp_path):
    async def main():
        async with Server((200, {}, completion("no"))).listening() as url:
            served = OpenAIEngine(OpenAISettings(base_url=url, model="m"), {})
            engine = RoutedEngine(ScriptedEngine(), {"judge": served})
            await engine.start()
            try:
                assert (engine.version(GROUP), engine.version("run-1/policy")) == (0, -1)
                assert not engine.capabilities.is_frozen
                await engine.unload(GROUP)
                return text_of(await engine.generate(request()))
            finally:
                await engine.close()

    assert asyncio.run(main()) == "no"
