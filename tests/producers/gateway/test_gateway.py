"""Rollouts that an agent outside plays by HTTP: its calls, rewards and end become the events of a complete attempt."""

import asyncio
import json
import logging
from typing import Any

import openai
import pytest

from rollstream.eventlog import codec
from rollstream.producers.gateway.call_keys import RolloutKeys
from rollstream.schemas import tokens
from rollstream.schemas.events import RolloutEnded, RolloutFailed
from tests.producers.conftest import answers
from tests.producers.gateway.gateway_rig import play_outside

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 3, "b": 4}}\n</tool_call>'
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def calls_of(played: Any) -> list[Any]:
    return [step for step in played.steps if step.llm is not None]


def gateway_of(step: Any) -> Any:
    return step.metadata["gateway"]


def test_calls_become_steps_with_the_tokens_and_logprobs_that_the_agent_is_given(tmp_path):
    given: list[Any] = []

    async def agent(one):
        given.append(await one.chat("3+4=?"))
        await one.reward(1.0)
        await one.end()

    played = play_outside(tmp_path, agent, script=answers("7"))
    played.assert_complete()
    (step,) = calls_of(played)
    exact = given[0]["choices"][0]["logprobs"]
    assert tokens.decode_ids(step.llm.prompt_ids).tolist() == exact["prompt_token_ids"]
    assert tokens.decode_ids(step.llm.completion_ids).tolist() == exact["token_ids"]
    assert given[0]["choices"][0]["message"]["content"] == "7"
    assert [(one.name, one.value) for one in played.rewards] == [("reward", 1.0)]


def test_a_claim_returns_the_task_and_each_way_to_name_a_rollout_works(tmp_path):
    async def agent(one):
        assert one.rollout["inputs"] == {"question": "3+4=?"}
        assert one.rollout["agents"] == ["agent"]
        body = {"model": "agent", "messages": [{"role": "user", "content": "a"}]}
        await one.post("/v1/chat/completions", body)
        await one.post(f"{one.url}/v1/chat/completions", body)
        path = f"{one.url}/v1/messages"
        by_name = {"X-Rollout-Id": one.rollout["rollout_id"], "X-Api-Key": one.token}
        await one.post(path, body | {"max_tokens": 4}, key="no-key", **by_name)
        counted = await one.post("/v1/messages/count_tokens", body)
        assert counted["input_tokens"] > 3
        await one.reward(0.5)
        await one.end()

    played = play_outside(tmp_path, agent, inputs={"question": "3+4=?"})
    played.assert_complete()
    assert len(calls_of(played)) == 3


def test_a_claim_is_answered_with_the_address_that_it_was_sent_to(tmp_path):
    async def agent(one):
        own = one.rollout["base_url"]
        assert own.startswith(f"{one.url}/rollouts/")
        refused = await one.post(f"{one.url}/rollouts", {}, key=one.token, status=403, Host="agents.example:8766")
        remedy = "use 127.0.0.1, or add it to gateway.allowed_hosts"
        assert refused["error"]["message"] == f"host 'agents.example' is not allowed; {remedy}"
        headers = {"Host": "localhost:8766", "Idempotency-Key": "claim"}
        again = await one.post(f"{one.url}/rollouts", {}, key=one.token, **headers)
        assert again["base_url"] == own.replace(one.url, "http://localhost:8766")
        behind_tls = await one.post(
            f"{one.url}/rollouts", {}, key=one.token, **headers, **{"X-Forwarded-Proto": "https"}
        )
        assert behind_tls["base_url"] == own.replace(one.url, "https://localhost:8766")
        await one.reward(1.0)
        await one.end()

    play_outside(tmp_path, agent).assert_complete()


def test_the_openai_client_streams_and_a_conversation_keeps_its_tokens_over_tool_calls(tmp_path):
    async def agent(one):
        url = f"{one.rollout['base_url']}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key=one.rollout["key"], max_retries=0) as client:
            messages: list[Any] = [{"role": "user", "content": "3+4"}]
            first = await client.chat.completions.create(model="policy", messages=messages, tools=[TOOL])  # type: ignore[list-item]
            message = first.choices[0].message
            assert message.tool_calls is not None
            messages.append(message.model_dump(exclude_none=True))
            messages.append({"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "7"})
            stream = await client.chat.completions.create(model="policy", messages=messages, stream=True)
            assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == "seven"
        await one.reward(1.0)
        await one.end()

    played = play_outside(tmp_path, agent, script=answers(CALL, "seven"), sampling={"max_new_tokens": 200})
    played.assert_complete()
    first, second = calls_of(played)
    whole = len(tokens.decode_ids(first.llm.prompt_ids)) + len(tokens.decode_ids(first.llm.completion_ids))
    assert second.llm.prefix.length == whole
    assert first.data["tools"] == [TOOL]


def test_the_runs_sampling_is_enforced_and_what_was_asked_for_is_recorded(tmp_path):
    async def agent(one):
        await one.chat("a", temperature=0.25, max_tokens=10_000, seed=3)
        await one.chat("b", max_tokens=2)
        await one.reward(1.0)
        await one.end()

    played = play_outside(tmp_path, agent, script=answers("abcdef"))
    first, second = calls_of(played)
    assert gateway_of(first)["asked"] == {"temperature": 0.25, "max_tokens": 10_000, "seed": 3}
    assert "asked" not in gateway_of(second)
    assert len(tokens.decode_ids(second.llm.completion_ids)) == 2
    assert second.llm.finish_reason == "length"


def test_a_stop_text_ends_what_is_recorded_too(tmp_path):
    async def agent(one):
        answer = await one.chat("a", stop=["cd"])
        assert answer["choices"][0]["message"]["content"] == "ab"
        assert answer["choices"][0]["finish_reason"] == "stop"
        await one.reward(1.0)
        await one.end()

    played = play_outside(tmp_path, agent, script=answers("abcdef"))
    played.assert_complete()
    (step,) = calls_of(played)
    assert len(tokens.decode_ids(step.llm.completion_ids)) == len(tokens.decode_floats(step.llm.logprobs)) == 4


@pytest.mark.parametrize(("stop", "content"), [(">", "ab"), ("nd", "ab"), ("b<", "ab"), ("<end>", "ab"), ("b", "a")])
def test_a_stop_text_within_the_end_token_does_not_reach_the_answer(tmp_path, stop, content):
    async def agent(one):
        answer = await one.chat("a", stop=[stop])
        assert answer["choices"][0]["message"]["content"] == content
        await one.reward(1.0)
        await one.end()

    play_outside(tmp_path, agent, script=answers("ab")).assert_complete()


def test_a_repeated_call_gets_the_recorded_answer_and_equal_calls_without_a_mark_are_two(tmp_path):
    async def agent(one):
        key = {"headers": {"Idempotency-Key": "k1"}}
        first = await one.chat("a", **key)
        assert await one.chat("a", **key) == first
        refused = await one.chat("b", status=422, **key)
        assert "another body" in refused["error"]["message"]
        fresh = await one.chat("c")
        again = await asyncio.gather(*(one.chat("c", headers={"X-Stainless-Retry-Count": "1"}) for _ in range(3)))
        assert again == [fresh] * 3
        assert (await one.chat("c"))["id"] != fresh["id"]
        await one.reward(1.0)
        await one.end()

    played = play_outside(tmp_path, agent)
    played.assert_complete()
    assert len(calls_of(played)) == 3


def test_a_reward_counts_once_and_an_invalid_or_late_one_is_refused(tmp_path):
    async def agent(one):
        answer = await one.chat("a")
        await one.reward(1.0)
        await one.reward(1.0)
        assert "cannot become 0.5" in (await one.reward(0.5, status=409))["error"]["message"]
        for bad in ("1.0", None, True, [1]):
            await one.reward(bad, status=400)
        await one.post("/reward", b'{"value": NaN}', status=400)
        await one.post("/reward", b'{"value": 1e999}', status=400)
        for large in (1.1e15, -1e200):
            assert "1000000000000000" in (await one.reward(large, status=400))["error"]["message"]
        for bad in (7, True, "1", 1.0):
            await one.reward(1.0, step_index=bad, status=400)
        message = (await one.reward(1.0, step_index=0, status=400))["error"]["message"]  # the step of the claim
        assert message.startswith("step_index: step 0 is not a model call of this rollout; give the `step_index`")
        await one.reward(1.0, agent="nobody", status=400)
        await one.reward(0.25, step_index=answer["choices"][0]["logprobs"]["step_index"], name="process")
        await one.end()
        await one.end()
        assert (await one.chat("a", status=409))["error"]["code"] == "rollout_ended"

    played = play_outside(tmp_path, agent)
    played.assert_complete()
    given = [(one.name, one.value, one.step_index) for one in played.rewards]
    assert given == [("reward", 1.0, None), ("process", 0.25, calls_of(played)[0].step_index)]


def test_an_invalid_request_is_an_error_in_openais_shape_and_the_rollout_goes_on(tmp_path):
    async def agent(one):
        async def code(url, body, status, **options):
            return (await one.post(url, body, status=status, **options))["error"]["code"]

        ask: dict[str, Any] = {"model": "policy", "messages": [{"role": "user", "content": "a"}]}
        chat = "/v1/chat/completions"
        other = RolloutKeys(one.token).key_of("run-1/rl/e0/t1/m0/a0")
        assert await code(chat, ask, 401, key="wrong") == "invalid_api_key"
        assert await code(chat, ask, 401, key=one.rollout["key"][:-1] + "x") == "invalid_api_key"
        assert await code(chat, ask, 403, key=other) == "wrong_rollout"
        assert await code(f"{one.url}{chat}", ask, 503, key=other) == "rollout_not_found"
        unknown = {"X-Rollout-Id": "run-1/rl/e0/t9/m0/a0"}
        assert await code(f"{one.url}{chat}", ask, 404, key=one.token, **unknown) == "rollout_not_found"
        assert await code(f"{one.url}/rollouts", {}, 403) == "wrong_key"
        assert await code(chat, ask | {"model": "no-such"}, 404) == "model_not_found"
        assert await code(chat, ask | {"modalities": ["audio"]}, 400) == "unsupported_value"
        assert await code(chat, b"{", 400) is None
        assert await code(chat, {"model": "policy"}, 400) is None
        assert await code(chat, ask, 403, Origin="http://evil.example") == "origin_not_allowed"
        await one.chat("a")
        await one.reward(1.0)
        await one.end()

    played = play_outside(tmp_path, agent)
    played.assert_complete()
    assert len(calls_of(played)) == 1


def test_a_completion_of_token_ids_is_recorded_as_those_ids_and_goes_on_from_earlier_ones(tmp_path):
    sent: list[list[int]] = []

    async def agent(one):
        async def complete(prompt, status=200):
            return await one.post("/v1/completions", {"model": "policy", "prompt": prompt}, status=status)

        first = (await one.chat("3+4"))["choices"][0]["logprobs"]
        sent.append(first["prompt_token_ids"] + first["token_ids"] + [40, 41])
        exact = (await complete(sent[0]))["choices"][0]["logprobs"]
        assert exact["prompt_token_ids"] == sent[0]
        for bad in ([10_000], [-1], [2**40], [], [[5, 6]]):
            assert "prompt" in (await complete(bad, 400))["error"]["message"]
        text = (await complete("plain"))["choices"][0]["text"]
        assert text == "7"
        await one.reward(1.0)
        await one.end()

    played = play_outside(tmp_path, agent, script=answers("7", "7", "7"))
    played.assert_complete()
    first, second, third = calls_of(played)
    kept = tokens.decode_ids(first.llm.prompt_ids) + tokens.decode_ids(first.llm.completion_ids)
    assert second.llm.prefix.step_index == first.step_index
    assert second.llm.prefix.length == len(kept)
    assert (kept + tokens.decode_ids(second.llm.prompt_ids)).tolist() == sent[0]
    assert third.llm.prefix is None


def test_each_agent_has_a_model_of_its_own_name_and_weights(tmp_path):
    async def agent(one):
        async with openai.AsyncOpenAI(base_url=f"{one.rollout['base_url']}/v1", api_key=one.rollout["key"]) as client:
            assert [(model.id, model.model_dump()["model_group"]) async for model in client.models.list()] == [
                ("agent", "run-1/policy"),
                ("other", "run-1/second"),
            ]
            model = await client.models.retrieve("other")
            assert (model.id, model.model_dump()["model_group"]) == ("other", "run-1/second")
        await one.reward(1.0)
        await one.end()

    play_outside(tmp_path, agent, agents={"agent": "run-1/policy", "other": "run-1/second"}).assert_complete()


def test_turns_run_out_with_a_clear_error_and_end_the_rollout_as_max_turns(tmp_path):
    async def agent(one):
        await one.chat("a")
        assert (await one.chat("b", status=400))["error"]["code"] == "max_turns"
        await one.end()

    played = play_outside(tmp_path, agent, max_turns=1)
    assert isinstance(played.last, RolloutEnded)
    assert played.last.stop_reason == "max_turns"


def test_an_agent_that_reports_an_error_fails_its_rollout_however_long_the_error_is(tmp_path):
    async def agent(one):
        await one.chat("a")
        await one.end(error="no tool\nanswers " + "e" * 100_000)

    played = play_outside(tmp_path, agent)
    assert isinstance(played.last, RolloutFailed)
    assert played.last.message.startswith("environment gateway: the agent reported: no tool answers ee")
    (end,) = [step for step in played.steps if step.name == "gateway.end"]
    error = (end.data or {})["error"]
    assert (len(error), error[:17]) == (2000, "no tool answers e")


def test_neither_logs_nor_events_hold_the_secrets_in_what_an_agent_reports_as_its_error(tmp_path, caplog, monkeypatch):
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("MY_SERVICE_TOKEN", "a-token-of-the-service")
    found: list[str] = []

    async def agent(one):
        key, other = one.rollout["key"], RolloutKeys("another process").key_of("run-2/rl/e00000/t00001/m0/a0")
        found.extend([key, key.rpartition(".")[2][:40], other, one.token, "a-token-of-the-service"])
        await one.end(error=f"401: {key}, {key[:-10]}; {other}; Bearer {one.token}; a-token-of-the-service")

    played = play_outside(tmp_path, agent)
    assert isinstance(played.last, RolloutFailed)
    hidden = "401: ${ROLLOUT_KEY}, ${ROLLOUT_KEY}; ${ROLLOUT_KEY}; Bearer ${GATEWAY_TOKEN}; ${MY_SERVICE_TOKEN}"
    assert played.last.message == f"environment gateway: the agent reported: {hidden}"
    assert hidden in caplog.text
    whole = caplog.text + "".join(codec.encode(event).value.decode() for event in played.events)
    assert [secret for secret in found if secret in whole] == []


def test_calls_above_the_concurrency_limit_are_asked_to_retry(tmp_path):
    async def agent(one):
        body = {"model": "policy", "messages": [{"role": "user", "content": "a"}]}

        async def ask(number: int) -> Any:
            headers = {"Authorization": f"Bearer {one.rollout['key']}", "Idempotency-Key": str(number)}
            url = f"{one.rollout['base_url']}/v1/chat/completions"
            async with one.http.post(url, json=body, headers=headers) as response:
                return response.status, response.headers.get("Retry-After"), await response.json()

        found = await asyncio.gather(*map(ask, range(6)))
        refused = [one for one in found if one[0] == 429]
        assert [status for status, *_ in found].count(200) + len(refused) == 6
        assert refused
        assert {retry for _, retry, _ in refused} == {"1"}
        assert refused[0][2]["error"]["type"] == "rate_limit_error"
        assert "gateway.max_concurrent_calls" in refused[0][2]["error"]["message"]
        await one.chat("b")
        await one.reward(1.0)
        await one.end()

    played = play_outside(tmp_path, agent, max_concurrent_calls=2)
    played.assert_complete()


def test_a_claim_while_the_learner_is_behind_gets_a_429_with_retry_after(tmp_path):
    async def agent(one):
        headers = {"Authorization": f"Bearer {one.token}"}
        async with one.http.post(f"{one.url}/rollouts", json={"wait_s": 0.01}, headers=headers) as response:
            assert (response.status, response.headers["Retry-After"]) == (429, "7")
            assert (await response.json())["error"]["code"] == "learner_behind"
        await one.chat("a")
        await one.reward(1.0)
        await one.end()

    play_outside(tmp_path, agent, behind_s=lambda: 7).assert_complete()


def test_a_client_that_hangs_up_leaves_a_recorded_call_which_its_retry_is_answered_with(tmp_path):
    async def agent(one):
        async with asyncio.timeout(5):
            hanging = asyncio.create_task(one.chat("a", stream=True))
            await asyncio.sleep(0.01)
            hanging.cancel()
            await asyncio.wait({hanging})
        await one.chat("a", headers={"X-Stainless-Retry-Count": "1"})
        await one.reward(1.0)
        await one.end()

    played = play_outside(tmp_path, agent)
    played.assert_complete()


def test_calls_that_a_rollouts_end_by_its_time_interrupts_are_refused_as_ended_and_end_their_streams_with_it(tmp_path):
    refusals: list[Any] = []

    async def agent(one):
        asked = asyncio.create_task(one.chat("a", status=409))
        headers = {"Authorization": f"Bearer {one.rollout['key']}"}
        body = {"model": "policy", "max_tokens": 3000, "messages": [{"role": "user", "content": "b"}], "stream": True}
        async with one.http.post(f"{one.rollout['base_url']}/v1/messages", json=body, headers=headers) as response:
            refusals.append((response.status, await response.text()))
        refusals.append((await asked)["error"])

    last = play_outside(tmp_path, agent, rollout_timeout_s=3.0, delay_s=60.0).last
    assert isinstance(last, RolloutFailed)
    assert last.cause == "timeout"
    (status, stream), error = refusals
    assert (status, error["code"]) == (409, "rollout_ended")
    assert "has ended" in json.loads(stream)["error"]["message"]


def test_a_rollout_that_nobody_plays_times_out(tmp_path):
    last = play_outside(tmp_path, rollout_timeout_s=0.2).last
    assert isinstance(last, RolloutFailed)
    assert last.cause == "timeout"


@pytest.mark.parametrize("key", ["", "rs-", "rs-.", "rs-é.00", "rs-YQ.zz", json.dumps({}), "rs-" + "A" * 5000 + ".0"])
def test_keys_that_are_none_of_ours_name_no_rollout(key):
    assert RolloutKeys("secret").rollout_of(key) is None
