"""The LLM judge against a real server on 127.0.0.1: what is asked, what is recorded, and every way to get no score."""

import asyncio
import json
import logging
import threading
import time

import pytest

from rollstream.eventlog import codec
from rollstream.eventlog.http.http_json import MAX_ANSWER_BYTES
from rollstream.eventlog.log import Position, Received
from rollstream.processors.assemble import fold as assembly
from rollstream.processors.assemble.trajectories import agents_of
from rollstream.producers.rollout.registry import register_environment
from rollstream.schemas.events import GroupStarted, RolloutEnded, RolloutFailed
from tests.producers.conftest import GROUP, answers, task_of
from tests.rigs.services.judge_server import JudgeServer, chat_completion

SECRET = "sk-very-secret-4711"
PROMPT = "Question: {question}\nExpected: {answer}\nResponse: {response}\nHow good is it, from 0 to 10?"


@register_environment("test_asks_once")
async def asks_once(session):
    await session.chat([{"role": "user", "content": str(session.inputs["question"])}])


@pytest.fixture(autouse=True)
def _environment(monkeypatch):
    monkeypatch.setenv("TEST_JUDGE_KEY", SECRET)


def judge(base_url, **changes):
    block = {"_type": "llm_judge", "base_url": base_url, "model": "big", "api_key": "${TEST_JUDGE_KEY}"}
    return block | {"prompt": PROMPT, "max": 10, "timeout_s": 5, "retries": 0, "retry_wait_s": 0.01} | changes


def judged(
    play,
    *replies,
    response="Paris",
    inputs=None,
    missing_score="error",
    error_headers=None,
    rollout_timeout_s=120,
    **changes,
):
    """Events of an attempt that a server judged, and the server."""
    server = JudgeServer(*replies, error_headers=error_headers)
    inputs = {"question": "Capital of France?", "answer": "Paris"} if inputs is None else inputs

    # The attempt runs in a loop of its own, so the server has a thread.
    ready, loop = threading.Event(), asyncio.new_event_loop()
    done = asyncio.Event()

    async def serve():
        async with server:
            ready.set()
            await done.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    try:
        assert ready.wait(5)
        block = judge(changes.pop("base_url", server.base_url), **changes)
        task = task_of(
            "test_asks_once",
            inputs=inputs,
            rewards=("helpful",),
            evaluators={"helpful": block},
            missing_score=missing_score,
            rollout_timeout_s=rollout_timeout_s,
            sampling={"max_new_tokens": 200},
        )
        return play(task, answers(response)), server
    finally:
        loop.call_soon_threadsafe(done.set)
        thread.join()
        loop.close()


def test_a_judge_is_asked_once_and_its_answer_recorded_before_the_reward(play):
    played, server = judged(play, "It is right, so 9 points of 10: 9.5")
    played.assert_complete()
    assert [(reward.name, reward.value) for reward in played.rewards] == [("helpful", 9.5)]
    ((headers, request),) = server.requests
    assert headers["Authorization"] == f"Bearer {SECRET}"
    question = "Question: Capital of France?\nExpected: Paris\nResponse: Paris\nHow good is it, from 0 to 10?"
    assert request == {"model": "big", "messages": [{"role": "user", "content": question}], "temperature": 0.0}
    asked = played.steps[-1]
    assert (asked.agent, asked.event_type, asked.name, asked.llm) == ("judge:helpful", "LLM_END", "big", None)
    assert asked.data == {"input": request["messages"], "output": "It is right, so 9 points of 10: 9.5"}
    assert asked.metadata == {"evaluator": "helpful", "temperature": 0.0, "num_tries": 1}
    assert asked.usage_info["token_usage"] == {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}
    kinds = [event.kind for event in played.events]
    assert kinds.index("reward_recorded") > kinds.index("step_recorded", kinds.index("step_recorded") + 1)


def test_no_trajectory_is_made_of_a_judge(play):
    played, _ = judged(play, "7")
    task = task_of("test_asks_once")
    started = GroupStarted(
        run_id=task.run_id, time_ms=1, group_id=task.group_id, example_id="x0", job_id=task.job_id, epoch=0, index=0,
        size=1, minimum=1, timeout_ms=9000, seed=1, agents={"agent": GROUP},
    )  # fmt: skip
    assert agents_of(started, {step.agent for step in played.steps}) == ["agent"]
    state = assembly.initial()
    closings = [
        closing
        for offset, event in enumerate([started, *played.events])
        for closing in assembly.evolve(
            state, Received(event, codec.content_digest(event), Position("steps", 0, offset), 0)
        )
    ]
    ((trajectory,),) = [closing.trajectories for closing in closings]
    assert (trajectory.agent, trajectory.reward) == ("agent", 7.0)
    assert len(trajectory.sequences) == 1


def test_braces_in_a_response_or_prompt_are_not_expanded(play):
    played, server = judged(play, "3", response="{answer} {x}", prompt='Give {"score": n} for {response}')
    played.assert_complete()
    assert server.requests[0][1]["messages"][0]["content"] == 'Give {"score": n} for {answer} {x}'


def test_a_prompt_that_needs_no_answer_needs_none_in_the_inputs(play):
    played, _ = judged(play, "3", inputs={"question": "?"}, prompt="{question} {response}")
    played.assert_complete()


def test_a_pattern_with_a_group_picks_the_score(play):
    played, _ = judged(play, "Score: <3>, surely not <4>... final <2> of 9", pattern=r"<(\d)>")
    assert played.rewards[0].value == 2


def test_a_pattern_that_takes_too_long_fails_the_attempt_and_is_named(play):
    played, _ = judged(play, "a" * 40 + "b", pattern="(a+)+$")
    assert played.last.cause == "reward_error"
    assert "eval.evaluators.helpful.pattern" in played.last.message
    assert "takes more than 1 s of CPU time" in played.last.message
    played, _ = judged(play, "7", pattern="(" * 5000 + ")" * 5000)
    assert "is not a valid regular expression" in played.last.message


def test_a_server_that_stumbles_is_asked_again(play):
    overloaded = (503, {"error": "later"})
    played, server = judged(play, overloaded, (429, "slow down"), 30.0, "8", retries=3, timeout_s=1.0)
    played.assert_complete()
    assert len(server.requests) == 4
    assert played.steps[-1].metadata["num_tries"] == 4
    assert len(played.steps) == 2, "what is recorded is the answer, not the tries"


def test_a_server_that_asks_for_a_pause_is_asked_after_it(play):
    begun = time.monotonic()
    played, server = judged(play, (429, "slow down"), "8", retries=1, error_headers={"Retry-After": "0.6"})
    played.assert_complete()
    assert len(server.requests) == 2
    assert time.monotonic() - begun >= 0.6


def test_a_pause_beyond_the_time_of_the_rollout_is_not_waited_for(play):
    answered = (429, "slow down")
    played, server = judged(play, answered, retries=1, error_headers={"Retry-After": "50"}, rollout_timeout_s=40)
    assert played.last.cause == "reward_error"
    assert "the next in 50 s would be after the rollout's time" in played.last.message
    assert len(server.requests) == 1


def test_an_answer_that_no_record_could_hold_is_made_to_fit(play):
    whole = chat_completion("half a pair \ud83d, 8") | {"usage": {"total_tokens": 2**70, "prompt_tokens": 3}}
    played, _ = judged(play, (200, json.dumps(whole)))
    played.assert_complete()
    assert played.steps[-1].data["output"] == "half a pair \\ud83d, 8"
    assert played.steps[-1].usage_info["token_usage"] == {"prompt_tokens": 3}


def test_a_judge_is_asked_by_the_proxy_of_the_environment(play, monkeypatch):
    class Proxy(JudgeServer):
        async def __aenter__(self):
            await super().__aenter__()
            monkeypatch.setenv("http_proxy", self.base_url.removesuffix("/v1"))
            return self

    monkeypatch.setattr("tests.producers.evaluators.test_llm_judge.JudgeServer", Proxy)
    played, server = judged(play, "8", base_url="http://judge.example/v1")
    played.assert_complete()
    assert server.requests[0][0]["Host"] == "judge.example"


NO_SCORES = {
    "500": ([(500, {"error": f"key {SECRET} exploded"})], {"retries": 1}, ["answered 500", "2 tries"]),
    "401": ([(401, {"error": f"Incorrect API key provided: {SECRET}"})], {}, ["answered 401", "check base_url"]),
    "redirect": ([(302, "")], {}, ["answered 302"]),
    "timeout": ([2.0], {"timeout_s": 0.1}, ["no answer within 0.1 s", "timeout_s"]),
    "not JSON": ([(200, "<html>")], {}, ["choices[0].message.content", "OpenAI-compatible"]),
    "no choices": ([(200, {"choices": []})], {}, ["choices[0].message.content"]),
    "no text": ([(200, chat_completion(None))], {}, ["is not text"]),
    "too large": ([(200, "a" * (MAX_ANSWER_BYTES + 1))], {}, ["answered more than", "max_tokens"]),
    "no number": ([f"{SECRET} is a fine answer"], {}, ["says no score", "change pattern, min or max"]),
    "out of range": (["I give 11 points"], {}, ["says '11'", "between 0 and 10"]),
    "too long a number": (["9" * 400], {}, ["says '999"]),
    "unreachable": ([""], {"base_url": "http://127.0.0.1:9/v1", "retries": 1}, ["cannot be reached", "2 tries"]),
    "a long secret": ([(400, "x" * 190 + SECRET)], {}, ["answered 400"]),
}


@pytest.mark.parametrize("name", NO_SCORES)
@pytest.mark.parametrize("missing_score", ["error", "reject"])
def test_a_judge_without_a_score_fails_the_attempt_or_has_it_rejected(play, caplog, name, missing_score):
    caplog.set_level(logging.DEBUG)
    replies, changes, words = NO_SCORES[name]
    played, _ = judged(play, *replies, missing_score=missing_score, **changes)
    if missing_score == "error":
        assert isinstance(played.last, RolloutFailed)
        assert played.last.cause == "reward_error"
        message = played.last.message
    else:
        assert isinstance(played.last, RolloutEnded)
        played.assert_complete()
        message = played.last.missing_scores["helpful"]
    is_caused = name in ("timeout", "not JSON", "no choices", "unreachable")
    assert ("Traceback (most recent call last)" in caplog.text) is is_caused, "what another library raised"
    assert message.startswith("eval.evaluators.helpful: http://127.0.0.1:")
    for word in words:
        assert word in message
    assert played.rewards == []
    everything = (
        json.dumps([event.model_dump(mode="json") for event in played.events]) + caplog.text + repr(played.events)
    )
    assert SECRET[:9] not in everything, "neither events nor logs hold a part of the secret"
    assert "${TEST_JUDGE_KEY}" in message if SECRET in str(replies[0]) and "long" not in name else True


def test_an_unusable_answer_is_recorded_too(play):
    played, _ = judged(play, "no idea")
    assert played.steps[-1].data["output"] == "no idea"


def test_secrets_in_the_prompt_are_sent_and_not_recorded(play):
    played, server = judged(play, f"You said {SECRET}: 4", prompt="Token ${TEST_JUDGE_KEY}. {response}")
    assert server.requests[0][1]["messages"][0]["content"] == f"Token {SECRET}. Paris"
    assert played.steps[-1].data == {
        "input": [{"role": "user", "content": "Token ${TEST_JUDGE_KEY}. Paris"}],
        "output": "You said ${TEST_JUDGE_KEY}: 4",
    }
    assert played.rewards[0].value == 4


def test_a_variable_that_is_not_set_is_named_with_its_path(play, monkeypatch):
    monkeypatch.delenv("TEST_JUDGE_KEY")
    played, server = judged(play, "7")
    assert "eval.evaluators.helpful.api_key: environment variable TEST_JUDGE_KEY is not set" in played.last.message
    assert server.requests == []


def test_a_missing_question_is_named_with_its_path(play):
    played, _ = judged(play, "7", inputs={"question": "?"})
    assert played.last.cause == "reward_error"
    assert "eval.evaluators.helpful.answer_key: the example's inputs have no key 'answer'" in played.last.message
