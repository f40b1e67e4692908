"""Requests that cannot be answered: an error in the shape of the API that was asked, and a rollout that goes on."""

import asyncio
import json
from typing import Any

import pytest

from rollstream.producers.engines.scripted import ScriptedTokenizer
from rollstream.producers.gateway.call_keys import RolloutKeys
from rollstream.producers.openai.requests import MAX_NESTING
from rollstream.producers.openai.routes import MAX_BODY_BYTES
from rollstream.schemas import tokens
from rollstream.schemas.events import RolloutEnded, RolloutFailed
from tests.producers.conftest import answers
from tests.producers.gateway.gateway_rig import Killed, play_outside

CHAT, COMPLETE, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"
RESPOND, COUNT = "/v1/responses", f"{MESSAGES}/count_tokens"
APIS = [CHAT, COMPLETE, RESPOND, MESSAGES, COUNT]
ANTHROPICS = (MESSAGES, COUNT)
ASKED: dict[str, dict[str, Any]] = {
    CHAT: {"model": "policy", "messages": [{"role": "user", "content": "a"}]},
    COMPLETE: {"model": "policy", "prompt": "a"},
    MESSAGES: {"model": "policy", "max_tokens": 4, "messages": [{"role": "user", "content": "a"}]},
    RESPOND: {"model": "policy", "input": "a"},
    COUNT: {"model": "policy", "messages": [{"role": "user", "content": "a"}]},
}
LONG = "a" * 300
DEEP: list[Any] = []
for _ in range(MAX_NESTING):
    DEEP = [DEEP]


def calls_of(played: Any) -> list[Any]:
    return [step for step in played.steps if step.llm is not None]


def refused(tmp_path: Any, url: str, body: Any, status: int, **headers: str) -> tuple[Any, Any]:
    """The error of one request among others that are answered; and the attempt, which is complete."""
    found: list[Any] = []

    async def agent(one: Any) -> None:
        await one.chat("before")
        found.append(await one.post(url, body, status=status, **headers))
        await one.chat("after")
        await one.reward(1.0)
        await one.end()

    played = play_outside(tmp_path, agent, max_length=100, sampling={"max_new_tokens": 8})
    played.assert_complete()
    assert len(calls_of(played)) == 2
    (body,) = found
    if url in ANTHROPICS:
        assert body["type"] == "error"
    else:
        assert set(body["error"]) == {"message", "type", "param", "code"}
    return body["error"], played


def with_(url: str, **changed: Any) -> dict[str, Any]:
    return ASKED[url] | changed


@pytest.mark.parametrize("url", APIS)
@pytest.mark.parametrize(
    "body", [b"", b"{", b"\xff", b"[]", b"null", b'{"model": NaN}', b'{"model": "\\ud800"}', b"[" * 5000], ids=repr
)
def test_a_body_that_is_not_a_json_object_is_a_400(tmp_path, url, body):
    error, _ = refused(tmp_path, url, body, 400)
    assert error["type"] == "invalid_request_error"
    assert error["message"].startswith("the body")


@pytest.mark.parametrize(
    ("url", "changed", "param"),
    [
        (CHAT, {"messages": None}, "messages"),
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": "a"}, "messages"),
        (CHAT, {"messages": [{"role": "alien", "content": "a"}]}, "messages.0.role"),
        (CHAT, {"messages": [{"role": "assistant", "tool_calls": [1]}]}, "messages.0.tool_calls.0"),
        (CHAT, {"messages": [{"role": "assistant", "function_call": {"name": "add"}}]}, "messages.0"),
        (CHAT, {"messages": [{"role": "function", "name": "add", "content": "4"}]}, "messages.0"),
        (CHAT, {"model": None}, "model"),
        (CHAT, {"model": 3}, "model"),
        (CHAT, {"temperature": "hot"}, "temperature"),
        (CHAT, {"temperature": -1}, "temperature"),
        (CHAT, {"max_tokens": 0}, "max_tokens"),
        (CHAT, {"max_tokens": 10**30}, "max_tokens"),
        (CHAT, {"seed": 2**64}, "seed"),
        (CHAT, {"n": 0}, "n"),
        (CHAT, {"n": 10**6}, "n"),
        (CHAT, {"stop": [""]}, "stop"),
        (CHAT, {"stop": "x" * 1001}, "stop"),
        (MESSAGES, {"stop_sequences": ["x" * 1001]}, "stop"),
        (CHAT, {"no_such_option": 1}, "no_such_option"),
        (COMPLETE, {"prompt": None}, "prompt"),
        (COMPLETE, {"prompt": ""}, "prompt"),
        (COMPLETE, {"prompt": [""]}, "prompt"),
        (COMPLETE, {"prompt": []}, "prompt"),
        (COMPLETE, {"prompt": ["a", "b"]}, "prompt"),
        (COMPLETE, {"echo": True}, "echo"),
        (MESSAGES, {"max_tokens": None}, "max_tokens"),
        (MESSAGES, {"max_tokens": 0}, "max_tokens"),
        (MESSAGES, {"messages": []}, "messages"),
        (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages.0.content.0"),
        (COUNT, {"messages": None}, "messages"),
        (COUNT, {"messages": []}, "messages"),
        (COUNT, {"system": 3}, "system"),
        (COUNT, {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages.0.content.0"),
        (RESPOND, {"input": None}, "input"),
        (RESPOND, {"input": ""}, "input"),
        (RESPOND, {"input": []}, "input"),
        (RESPOND, {"input": 3}, "input"),
        (RESPOND, {"input": [{"type": "reasoning"}]}, "input"),
        (RESPOND, {"input": [{"type": "message", "content": "a"}]}, "input.0.role"),
        (RESPOND, {"input": [{"role": ["user"], "content": "a"}]}, "input.0.role"),
        (RESPOND, {"input": [{"type": "input_image"}]}, "input.0"),
        (RESPOND, {"input": [{"type": "additional_tools", "tools": [{"name": "f"}]}]}, "input.0.tools.0"),
        (RESPOND, {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0.content.0"),
        (RESPOND, {"model": 3}, "model"),
        (RESPOND, {"max_output_tokens": 0}, "max_output_tokens"),
        (RESPOND, {"temperature": "hot"}, "temperature"),
        (RESPOND, {"no_such_option": 1}, "no_such_option"),
        (RESPOND, {"previous_response_id": "resp_9"}, "previous_response_id"),
        (RESPOND, {"background": True}, "background"),
    ],
)
def test_a_field_that_is_missing_or_wrong_is_a_400_that_names_it(tmp_path, url, changed, param):
    body = {key: value for key, value in with_(url, **changed).items() if value is not None}
    error, _ = refused(tmp_path, url, body, 400)
    assert param in error["message"]
    if url not in ANTHROPICS:
        assert error["param"].startswith(param)


@pytest.mark.parametrize("url", APIS)
def test_an_unknown_model_is_a_404(tmp_path, url):
    error, _ = refused(tmp_path, url, with_(url, model="no-such"), 404)
    assert error["message"] == "model 'no-such' is not served here; use one of: agent, policy, run-1/policy"


@pytest.mark.parametrize(
    ("url", "changed", "param"),
    [
        (CHAT, {"messages": [{"role": "user", "content": LONG}]}, "messages"),
        (COMPLETE, {"prompt": LONG}, "prompt"),
        (COMPLETE, {"prompt": [7] * 300}, "prompt"),
        (MESSAGES, {"messages": [{"role": "user", "content": LONG}]}, None),
        (RESPOND, {"input": LONG}, "input"),
    ],
)
def test_a_prompt_that_is_too_long_is_a_400_and_recorded_as_refused(tmp_path, url, changed, param):
    error, played = refused(tmp_path, url, with_(url, **changed), 400)
    assert "leaves no room in the scripted model, which takes 100" in error["message"]
    if param is not None:
        assert (error["param"], error["code"]) == (param, "context_length_exceeded")
    assert [step.name for step in played.steps if step.llm is None and step.name == "refused_call"] == ["refused_call"]


@pytest.mark.parametrize("url", [*APIS, "/reward", "/end"])
def test_a_body_over_the_limit_is_a_413(tmp_path, url):
    error, _ = refused(tmp_path, url, b" " * (MAX_BODY_BYTES + 1), 413)
    assert error["message"] == f"the body has more than {MAX_BODY_BYTES} bytes; send less"
    assert error["type"] == ("request_too_large" if url in ANTHROPICS else "invalid_request_error")


def test_tokens_of_too_long_a_prompt_can_be_counted(tmp_path):
    async def agent(one: Any) -> None:
        counted = await one.post(COUNT, with_(COUNT, messages=[{"role": "user", "content": LONG}]))
        assert counted["input_tokens"] > len(LONG)
        await one.reward(1.0)
        await one.end()

    play_outside(tmp_path, agent, max_length=100).assert_complete()


class BrokenError(Exception):
    """An unforeseen error of a part of an engine."""


def broken(prompt: str, rng: Any, version: int) -> tuple[str, float]:
    """A script that cannot answer."""
    raise BrokenError("a secret of the engine")


@pytest.mark.parametrize("url", [CHAT, COMPLETE, RESPOND, MESSAGES])
@pytest.mark.parametrize("stream", [False, True])
def test_an_exception_in_an_engine_is_a_500_in_the_apis_shape_and_shown_only_in_the_log(tmp_path, url, stream, caplog):
    async def agent(one: Any) -> None:
        body = await one.post(url, with_(url, stream=stream), status=500)
        error = body["error"]
        assert error["message"] == "the gateway could not process this request; see its log"
        assert error["type"] == ("api_error" if url == MESSAGES else "server_error")
        await one.end()

    last = play_outside(tmp_path, agent, script=broken).last
    assert isinstance(last, RolloutFailed)
    assert last.cause == "engine_error"
    (logged,) = [record for record in caplog.records if record.name.endswith("openai.routes")]
    assert "BrokenError" in logged.getMessage()
    assert logged.exc_info is not None


def test_values_within_values_that_no_record_could_hold_are_a_400(tmp_path):
    error, _ = refused(tmp_path, CHAT, with_(CHAT, tools=[{"a": DEEP}]), 400)
    assert error["message"] == "the body nests values more than 64 deep; make it flatter"


@pytest.mark.parametrize("url", [*APIS, "/reward", "/end"])
def test_a_wrong_key_is_a_401_and_that_of_another_rollout_a_403(tmp_path, url):
    error, _ = refused(tmp_path, url, ASKED.get(url, {}), 401, Authorization="Bearer rs-wrong")
    assert error["message"] == (
        "the key is not one of producers process producers-1 in this workspace; use it at the gateway that gave it, "
        "whose keys outlast restarts under the same name"
    )
    error, _ = refused(tmp_path, url, ASKED.get(url, {}), 401, Authorization="Bearer sk-wrong")
    assert error["message"] == "the API key is missing or wrong; send a valid key"
    assert error["type"] == ("authentication_error" if url in ANTHROPICS else "invalid_request_error")


def test_an_unknown_rollout_is_a_404_by_its_own_key_a_503_and_anothers_key_a_403(tmp_path):
    async def agent(one: Any) -> None:
        other = RolloutKeys(one.token).key_of("run-1/rl/e00000/t00009/m0/a0")
        for url in (*APIS, "/reward", "/end"):
            await one.post(url, ASKED.get(url, {"value": 1.0}), status=403, key=other)
            unknown = f"{one.url}/rollouts/run-1/rl/e00000/t00009/m0/a0{url}"
            body = ASKED.get(url, {"value": 1.0} if url == "/reward" else {})
            for key, status, kind in ((other, 503, "api_error"), (one.token, 404, "not_found_error")):
                found = await one.post(unknown, body, status=status, key=key)
                assert "is not open here" in found["error"]["message"]
                assert url not in ANTHROPICS or found["error"]["type"] == kind
        await one.chat("a")
        await one.reward(1.0)
        await one.end()

    play_outside(tmp_path, agent).assert_complete()


def test_the_gateways_token_names_a_rollout_of_a_process_that_was_killed_where_the_log_knows_it(tmp_path):
    over, coming, unknown = (f"run-1/rl/e00000/t0000{number}/m0/a0" for number in (7, 8, 9))

    async def agent(one: Any) -> None:
        async def refusal(name: str, url: str, status: int) -> dict[str, Any]:
            asked: Any = {"key": one.token, "status": status, "X-Rollout-Id": name}
            return (await one.post(f"{one.url}{url}", ASKED.get(url, {}), **asked))["error"]

        assert (await refusal(over, CHAT, 409))["code"] == "rollout_ended"
        assert (await one.post(f"{one.url}/rollouts/{over}/end", {}, key=one.token))["status"] == "ended"
        for url in (CHAT, f"/rollouts/{coming}/end"):
            assert "is not open here; try again in 1 s" in (await refusal(coming, url, 503))["message"]
        for url in (CHAT, f"/rollouts/{unknown}/end"):
            assert "bear the key of its claim in place of" in (await refusal(unknown, url, 404))["message"]
        await one.chat("a")
        await one.reward(1.0)
        await one.end()

    of_log: dict[str, Any] = {"is_over": lambda name: name != coming, "may_have_begun": lambda name: name != unknown}
    play_outside(tmp_path, agent, **of_log).assert_complete()


@pytest.mark.parametrize("url", [CHAT, COMPLETE, RESPOND, MESSAGES])
def test_a_client_that_hangs_up_in_mid_stream_leaves_one_whole_step_and_can_have_it(tmp_path, url, caplog):
    answer = "abcdefghij" * 200

    async def agent(one: Any) -> None:
        headers = {"Authorization": f"Bearer {one.rollout['key']}", "Idempotency-Key": "k"}
        body = with_(url, stream=True) | ({"max_tokens": 3000} if url == MESSAGES else {})
        async with one.http.post(one.rollout["base_url"] + url, json=body, headers=headers) as response:
            assert b"data" in await response.content.readline() + await response.content.readline()
            response.close()
        async with one.http.post(one.rollout["base_url"] + url, json=body, headers=headers) as response:
            whole = (await response.text()).split("data: ")
        pieces = [json.loads(text) for line in whole if (text := line.partition("\n")[0]).startswith("{")]
        assert answer in "".join(_text(piece) for piece in pieces)
        await one.chat("after")
        await one.reward(1.0)
        await one.end()

    played = play_outside(tmp_path, agent, script=answers(answer), sampling={"max_new_tokens": 3000})
    played.assert_complete()
    first, _ = calls_of(played)
    assert len(tokens.decode_ids(first.llm.completion_ids)) == len(answer) + 1
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == []


def _text(piece: dict[str, Any]) -> str:
    if "choices" not in piece:
        delta = piece.get("delta", "")
        return delta if isinstance(delta, str) else delta.get("text", "")
    return "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in piece["choices"])


def test_rewards_claim_and_end_are_the_same_again_in_the_process_after_one_that_was_killed(tmp_path):
    async def first(one: Any) -> None:
        await one.chat("a", headers={"Idempotency-Key": "k"})
        await one.reward(0.5, name="part")
        await one.reward(1.0)
        raise Killed

    async def second(one: Any) -> None:
        await one.chat("a", headers={"Idempotency-Key": "k"})
        await asyncio.gather(one.reward(1.0), one.reward(1.0), one.reward(0.5, name="part"))
        refusal = await one.reward(0.25, status=409)
        assert refusal["error"]["message"] == "reward reward was given as 1; it cannot become 0.25"
        await one.end()
        await one.end()

    played = play_outside(tmp_path, first, max_turns=1)
    assert not isinstance(played.last, RolloutEnded)
    whole = play_outside(tmp_path, second, before=played, max_turns=1)
    whole.assert_complete()
    assert [(one.name, one.value) for one in whole.rewards] == [("part", 0.5), ("reward", 1.0)]
    assert len(calls_of(whole)) == 1


@pytest.mark.parametrize("num", [1, 2])
def test_a_prompt_that_is_too_long_takes_a_turn_and_one_that_cannot_be_rendered_none_with_and_without_a_kill(
    tmp_path, monkeypatch, num
):
    render = ScriptedTokenizer.apply_chat_template

    def picky(self: Any, conversation: list[dict[str, Any]], **options: Any) -> str:
        if conversation[-1]["content"] == "odd":
            raise ValueError("only even messages")
        return render(self, conversation, **options)

    async def first(one: Any) -> None:
        refused = await one.chat(LONG, status=400, n=num)
        assert refused["error"]["code"] == "context_length_exceeded"
        assert "chat template" in (await one.chat("odd", status=400))["error"]["message"]
        await one.chat("a")

    async def killed(one: Any) -> None:
        await first(one)
        raise Killed

    async def rest(one: Any) -> None:
        await one.chat("b")
        assert (await one.chat("c", status=400))["error"]["code"] == "max_turns"
        await one.reward(1.0)
        await one.end()

    async def both(one: Any) -> None:
        await first(one)
        await rest(one)

    monkeypatch.setattr(ScriptedTokenizer, "apply_chat_template", picky)
    limits: dict[str, Any] = {"max_length": 100, "sampling": {"max_new_tokens": 8}, "max_turns": 3}
    (tmp_path / "whole").mkdir()
    (tmp_path / "taken up").mkdir()
    whole = play_outside(tmp_path / "whole", both, **limits)
    taken_up = play_outside(
        tmp_path / "taken up", rest, before=play_outside(tmp_path / "taken up", killed, **limits), **limits
    )
    for played in (whole, taken_up):
        played.assert_complete()
    assert whole.texts() == taken_up.texts()
    assert len(calls_of(whole)) == 2
