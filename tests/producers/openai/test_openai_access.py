"""Access to the endpoint: with its token, and not from a web page. Requested over 127.0.0.1."""

import asyncio
import io
import json
import stat

import aiohttp
import pytest

from rollstream.producers.openai.access import MAX_KEYS, KeyLimits
from rollstream.producers.openai.keys import token_file, token_of
from rollstream.producers.openai.requests import Refusal
from rollstream.producers.openai.routes import MAX_BODY_BYTES
from rollstream.schemas.errors import ConfigError
from rollstream.schemas.services import EndpointSettings
from tests.producers.openai.endpoint_rig import ASK, GROUP, SECRET, serving


def settings_of(folder, **settings):
    return EndpointSettings(
        artifact_uri="none",
        workspace=folder,
        name="endpoint-1",
        model_group=GROUP,
        bootstrap_servers="memory",
        **settings,
    )


def test_a_random_token_of_mode_0600_is_needed_unless_it_is_set_or_left_out(tmp_path):
    settings = settings_of(tmp_path, host="0.0.0.0")
    token = token_of(settings, {})
    path = token_file(tmp_path, "endpoint-1")
    assert token is not None
    assert (token, stat.S_IMODE(path.stat().st_mode)) == (path.read_text(), 0o600)
    assert len(token) >= 32
    assert token_of(settings, {}) == token
    assert token_of(settings, {"ROLLSTREAM_ENDPOINT_TOKEN": SECRET}) == SECRET
    own = settings_of(tmp_path, token="${MY_KEY}")
    assert token_of(own, {"MY_KEY": SECRET}) == SECRET
    with pytest.raises(ConfigError, match="environment variable MY_KEY is not set"):
        token_of(own, {})
    with pytest.raises(ConfigError, match="cannot be read"):
        token_of(settings_of(tmp_path, token_file=tmp_path / "none"), {})
    assert token_of(settings_of(tmp_path, requires_token=False), {}) is None
    with pytest.raises(ConfigError, match="is reachable from other machines"):
        token_of(settings_of(tmp_path, host="0.0.0.0", requires_token=False), {})


JSON = {"Content-Type": "application/json", "Authorization": f"Bearer {SECRET}"}


@pytest.mark.parametrize(
    ("headers", "status", "code"),
    [
        ({**JSON, "Host": "attacker.example:{port}"}, 403, "host_not_allowed"),
        ({**JSON, "Host": "127.0.0.1.attacker.example"}, 403, "host_not_allowed"),
        ({**JSON, "Host": ""}, 403, "host_not_allowed"),
        ({**JSON, "Origin": "https://attacker.example"}, 403, "origin_not_allowed"),
        ({**JSON, "Origin": "null"}, 403, "origin_not_allowed"),
        ({**JSON, "Sec-Fetch-Site": "cross-site"}, 403, "origin_not_allowed"),
        ({"Content-Type": "application/json"}, 401, "invalid_api_key"),
        ({**JSON, "Authorization": f"Bearer {SECRET}x"}, 401, "invalid_api_key"),
        ({**JSON, "Authorization": f"Basic {SECRET}"}, 401, "invalid_api_key"),
        ({**JSON, "Content-Type": "text/plain"}, 415, "unsupported_content_type"),
        ({**JSON, "Content-Type": "application/x-www-form-urlencoded"}, 415, "unsupported_content_type"),
        ({**JSON, "Content-Type": "text/plain; application/json"}, 415, "unsupported_content_type"),
        ({**JSON, "Content-Type": "application/json; charset=utf-8", "Host": "localhost:{port}"}, 200, None),
        ({**JSON, "Host": "[::1]:{port}"}, 200, None),
    ],
)
def test_no_web_page_and_nobody_without_the_token_is_answered(headers, status, code, tmp_path):
    async def scenario():
        async with serving(tmp_path, token=SECRET) as lab, aiohttp.ClientSession() as session:
            port = lab.url.split(":")[2].split("/")[0]
            given = {key: value.replace("{port}", port) for key, value in headers.items()}
            body = json.dumps({"model": "policy", "messages": ASK})
            async with session.post(f"{lab.url}/chat/completions", data=body, headers=given) as answer:
                assert answer.status == status
                found = await answer.json()
                assert "Access-Control-Allow-Origin" not in answer.headers
                if status != 200:
                    assert (found["error"]["type"], found["error"]["code"]) == ("invalid_request_error", code)
                assert (status == 401) == ("WWW-Authenticate" in answer.headers)
            async with session.options(f"{lab.url}/chat/completions", headers=given) as preflight:
                assert preflight.status >= 400

    asyncio.run(scenario())


def test_a_name_that_is_set_is_answered_and_a_large_body_is_not(tmp_path):
    async def scenario():
        async with serving(tmp_path, allowed_hosts=("models.lan",)) as lab, aiohttp.ClientSession() as session:
            async with session.get(f"{lab.url}/models", headers={"Host": "Models.LAN:80"}) as answer:
                assert answer.status == 200
            async with session.post(
                f"{lab.url}/chat/completions", data=io.BytesIO(b" " * (MAX_BODY_BYTES + 1)), headers=JSON
            ) as answer:
                assert answer.status == 413
                assert (await answer.json())["error"]["type"] == "invalid_request_error"

    asyncio.run(scenario())


def bearing(key):
    return {"Authorization": f"Bearer {key}"}


def test_requests_of_a_key_are_limited_per_minute_with_the_time_to_retry():
    now = [0.0]
    limits = KeyLimits(6, None, lambda: now[0])

    def refused(key):
        try:
            with limits.call(key):
                return None
        except Refusal as error:
            return error.status, error.code, error.retry_after_s

    assert [refused("a") for _ in range(7)] == [None] * 6 + [(429, "rate_limit_exceeded", 10)]
    assert refused("b") is None
    now[0] = 5.0
    assert refused("a") == (429, "rate_limit_exceeded", 5)
    now[0] = 10.0
    assert [refused("a"), refused("a")] == [None, (429, "rate_limit_exceeded", 10)]
    now[0] = 1e6
    assert [refused("a") for _ in range(7)].count(None) == 6


def test_a_key_has_so_many_calls_at_once_and_keys_that_ask_no_more_are_forgotten():
    limits = KeyLimits(None, 2, lambda: 0.0)
    with limits.call("a"), limits.call("a"):
        with (
            pytest.raises(Refusal, match="2 calls in progress, as many as calls_per_key allows"),
            limits.call("a"),
        ):
            pass
        for number in range(MAX_KEYS + 10):
            with limits.call(str(number)):
                pass
        assert len(limits._uses) == MAX_KEYS  # pyright: ignore[reportPrivateUsage]
        with pytest.raises(Refusal), limits.call("a"):
            pass
    with limits.call("a"):
        pass


def test_a_request_for_n_answers_counts_as_n_and_costs_nothing_where_it_is_refused():
    now = [0.0]

    def refused(limits, num):
        try:
            with limits.call("a") as counted:
                counted.raise_to(num)
                return None
        except Refusal as error:
            return error.status, error.retry_after_s, str(error)

    limits = KeyLimits(6, None, lambda: now[0])
    assert refused(limits, 7) == (
        400, None, "n: 7 answers are more than requests_per_minute (6) allows; ask for fewer"
    )  # fmt: skip
    assert refused(limits, 4) is None
    assert refused(limits, 3) == (
        429, 10, "n: 3 answers are more than the 2 requests that requests_per_minute leaves; try again in 10 s"
    )  # fmt: skip
    assert refused(limits, 2) is None
    now[0] = 40.0
    assert refused(limits, 4) is None

    limits = KeyLimits(None, 3, lambda: 0.0)
    with limits.call("a") as counted:
        counted.raise_to(2)
        assert refused(limits, 2) == (
            429, 1, "n: 2 answers beside 2 calls in progress are more than calls_per_key allows; try again in 1 s"
        )  # fmt: skip
        assert refused(limits, 4) == (400, None, "n: 4 answers are more than calls_per_key (3) allows; ask for fewer")
        assert refused(limits, 1) is None
    assert refused(limits, 3) is None


@pytest.mark.parametrize(
    ("route", "asked"), [("chat/completions", {"messages": ASK}), ("completions", {"prompt": "a"})]
)
@pytest.mark.parametrize("stream", [False, True])
def test_n_answers_count_as_n_requests_over_http(tmp_path, route, asked, stream):
    async def scenario():
        async with serving(tmp_path, token=SECRET, requests_per_minute=5) as lab, aiohttp.ClientSession() as http:
            found = []
            for n in (3, 6, 3, 2, 1):
                body = {"model": "policy", "n": n, "stream": stream, "max_tokens": 2, **asked}
                async with http.post(f"{lab.url}/{route}", json=body, headers=JSON) as answer:
                    found.append((answer.status, "Retry-After" in answer.headers))
                    await answer.read()
            assert found == [(200, False), (400, False), (429, True), (200, False), (429, True)]

    asyncio.run(scenario())


def test_limits_are_kept_over_http_in_the_words_of_each_api_and_leave_other_routes_alone(tmp_path):
    async def scenario():
        async with serving(tmp_path, token=SECRET, requests_per_minute=2) as lab, aiohttp.ClientSession() as http:
            chat = {"model": "policy", "messages": ASK}
            statuses: list[int] = []
            for _ in range(4):
                async with http.post(f"{lab.url}/chat/completions", json=chat, headers=JSON) as answer:
                    statuses.append(answer.status)
                    found, retry = await answer.json(), answer.headers.get("Retry-After", "0")
                if answer.status == 429:
                    assert 1 <= int(retry) <= 30
                    assert (found["error"]["type"], found["error"]["code"]) == (
                        "rate_limit_error",
                        "rate_limit_exceeded",
                    )
            assert statuses == [200, 200, 429, 429]
            for other in ("another", "key"):
                headers = {**JSON, "X-Api-Key": other}
                async with http.post(f"{lab.url}/chat/completions", json=chat, headers=headers) as answer:
                    assert answer.status == 429, "a further key is not another caller"
            body = chat | {"max_tokens": 4}
            async with http.post(f"{lab.url}/messages", json=body, headers=JSON) as answer:
                assert (answer.status, (await answer.json())["error"]["type"]) == (429, "rate_limit_error")
            async with http.get(f"{lab.url}/models", headers=JSON) as answer:
                assert answer.status == 200

    asyncio.run(scenario())


def test_an_endpoint_on_any_free_port_keeps_it_over_restarts_while_it_is_free(tmp_path):
    async def scenario():
        urls = []
        for _ in range(2):
            async with serving(tmp_path) as lab:
                urls.append(lab.url)
        port = int(urls[0].split(":")[2].removesuffix("/v1"))
        other = await asyncio.start_server(lambda *_: None, "127.0.0.1", port)
        async with other, serving(tmp_path) as lab:
            urls.append(lab.url)
        return urls

    first, again, elsewhere = asyncio.run(scenario())
    assert first == again != elsewhere
