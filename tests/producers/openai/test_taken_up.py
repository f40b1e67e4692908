"""Rollouts that another process takes up: what it gives new calls, and how the rollout ends."""

import asyncio
import itertools
import json
from dataclasses import replace
from typing import Any

import pytest

from rollstream.processors.assemble.sequences import join_calls
from rollstream.producers.engines.scripted import ScriptedEngine
from rollstream.producers.rollout.registry import register_reward
from rollstream.schemas.errors import ModelError
from rollstream.schemas.events import RolloutEnded, RolloutFailed
from tests.producers.conftest import GROUP, Played, answers
from tests.producers.gateway.gateway_rig import Killed, assembled_calls, play_outside


def keyed(key: str) -> dict[str, str]:
    return {"Idempotency-Key": key}


@pytest.fixture
def engine(monkeypatch):
    """Sampled requests, and the prompts that are answered only after the process is gone."""
    seeds: list[int] = []
    held: set[str] = set()
    generate = ScriptedEngine.generate

    async def slow(self: ScriptedEngine, request: Any) -> Any:
        text = self._tokenizer.decode(request.prompt_ids)
        for one in [one for one in held if one in text]:
            held.remove(one)
            await asyncio.sleep(3600)
        seeds.append(request.seed)
        return await generate(self, request)

    monkeypatch.setattr(ScriptedEngine, "generate", slow)
    return seeds, held


async def lost_first(one: Any, first: str, second: str) -> None:
    """Two calls side by side: the second one is answered, then the process is killed."""
    lost = asyncio.create_task(one.chat(first, headers=keyed("first")))
    await asyncio.sleep(0.05)
    await one.chat(second, headers=keyed("second"))
    lost.cancel()
    raise Killed


async def finish(one: Any) -> None:
    await one.reward(1.0)
    await one.end()


def lost_and_repeated(folder: Any) -> Any:
    """A rollout with two equal calls, of which the first one is lost and repeated in the next process."""

    async def killed(one):
        await lost_first(one, "same", "same")

    async def second(one):
        await one.chat("same", headers=keyed("first"))
        await finish(one)

    return play_outside(folder, second, before=play_outside(folder, killed, max_turns=9), max_turns=9)


def test_a_repeated_call_comes_after_the_calls_that_it_goes_on_from(tmp_path, engine):
    _, held = engine
    held.add("same")
    played = lost_and_repeated(tmp_path)
    played.assert_complete()
    answered, repeated = assembled_calls(played)
    assert repeated.llm.prefix.step_index == answered.step_index < repeated.step_index
    assert len(join_calls([answered, repeated])) == 2
    assert [step.name for step in played.steps if step.step_index == answered.step_index - 1] == ["lost_call"]


def test_a_branch_that_went_on_before_the_lost_call_is_repeated_is_kept(tmp_path, engine):
    _, held = engine
    held.add("task a")

    async def killed(one):
        await lost_first(one, "task a", "task b")

    async def second(one):
        answer = await one.chat("task b", headers=keyed("second"))
        await one.chat("task b", answer["choices"][0]["message"], "go on", headers=keyed("third"))
        await one.chat("task a", headers=keyed("first"))
        await finish(one)

    played = play_outside(tmp_path, second, before=play_outside(tmp_path, killed, max_turns=9), max_turns=9)
    played.assert_complete()
    assert len(join_calls(assembled_calls(played))) == 2


def test_a_repeated_call_is_not_sampled_with_the_seed_of_an_equal_one_that_was_recorded(tmp_path, engine):
    seeds, held = engine
    held.add("same")
    lost_and_repeated(tmp_path)
    assert len(set(seeds)) == len(seeds) == 2


def test_a_rollout_without_a_turn_left_ends_as_max_turns_after_a_kill_too(tmp_path):
    async def killed(one):
        await one.chat("a")
        await one.chat("b", status=400)
        raise Killed

    async def second(one):
        assert (await one.chat("b", status=400))["error"]["code"] == "max_turns"
        await one.end()

    played = play_outside(tmp_path, second, before=play_outside(tmp_path, killed, max_turns=1), max_turns=1)
    assert isinstance(played.last, RolloutEnded)
    assert played.last.stop_reason == "max_turns"
    assert [step.name for step in played.steps].count("gateway.max_turns") == 1


def test_answers_of_a_call_that_was_lost_in_part_are_not_given_with_those_of_its_repetition(tmp_path):
    given: list[Any] = []

    async def ask(one):
        answer = await one.chat("a", n=2, headers=keyed("first"))
        given.append([choice["message"]["content"] for choice in answer["choices"]])

    async def killed(one):
        await ask(one)
        raise Killed

    async def second(one):
        await ask(one)
        await finish(one)

    texts = (f"{number}" for number in itertools.count())
    options: dict[str, Any] = {"script": lambda *asked: (next(texts), -0.5), "max_turns": 9}
    first = play_outside(tmp_path, killed, **options)
    in_part = Played([event for event in first.events if event is not first.steps[-1]])
    repeated = play_outside(tmp_path, killed, before=in_part, **options)
    play_outside(tmp_path, second, before=repeated, **options).assert_complete()
    assert given == [["0", "1"], ["2", "3"], ["2", "3"]]


def test_the_last_turn_is_there_for_the_repetition_of_a_call_that_was_lost_in_part(tmp_path):
    async def ask(one):
        return await one.chat("a", n=2, headers=keyed("first"))

    async def killed(one):
        await ask(one)
        raise Killed

    async def second(one):
        assert len((await ask(one))["choices"]) == 2
        await finish(one)

    first = play_outside(tmp_path, killed, max_turns=1)
    in_part = Played([event for event in first.events if event is not first.steps[-1]])
    play_outside(tmp_path, second, before=in_part, max_turns=1).assert_complete()


@pytest.mark.parametrize(
    ("error", "reason"),
    [(ModelError("the GPU is gone"), "the GPU is gone"), (ValueError("a secret"), "see the log of the producers")],
)
def test_a_rollout_whose_engine_failed_has_failed_after_a_kill_too(tmp_path, monkeypatch, error, reason):
    generate = ScriptedEngine.generate

    async def failing(self: ScriptedEngine, request: Any) -> Any:
        if "<user>b" in self._tokenizer.decode(request.prompt_ids):
            raise error
        return await generate(self, request)

    monkeypatch.setattr(ScriptedEngine, "generate", failing)

    async def killed(one):
        await one.chat("a")
        await asyncio.gather(*(one.chat("b", status=500) for _ in range(2)))
        await one.chat("c", status=500)
        raise Killed

    async def second(one):
        refused = (await one.chat("c", status=500))["error"]
        assert (refused["code"], reason in refused["message"]) == ("engine_error", True)
        await one.reward(0.0)
        await one.end()

    played = play_outside(tmp_path, second, before=play_outside(tmp_path, killed))
    assert isinstance(played.last, RolloutFailed)
    assert (played.last.cause, reason in played.last.message) == ("engine_error", True)
    assert [step.name for step in played.steps].count("gateway.engine_error") == 1
    assert not any("a secret" in str(step.data) for step in played.steps)


def num_seen(rollout: Any) -> float:
    """A reward function: the number of rewards that it is shown."""
    return float(len(rollout.rewards))


register_reward("test_first_seen")(num_seen)
register_reward("test_last_seen")(lambda rollout: {"agent": num_seen(rollout)})


@pytest.mark.parametrize("num_recorded", [1, 2, 3])
def test_a_reward_that_a_function_gave_before_a_kill_counts_once(tmp_path, num_recorded):
    names = ("test_first_seen", "test_last_seen")

    async def agent(one):
        await one.chat("a")
        await one.reward(0.5, name="own")
        await one.end()

    whole = play_outside(tmp_path, agent, rewards=names)
    whole.assert_complete()
    rest = [*whole.rewards, whole.last][num_recorded]
    cut = Played(whole.events[: whole.events.index(rest)])
    again = play_outside(tmp_path, None, rewards=names, before=cut)
    again.assert_complete()
    given = [(one.name, one.agent, one.value) for one in again.rewards]
    assert given == [("own", None, 0.5), (names[0], None, 1.0), (names[1], "agent", 2.0)]


ASK = [{"role": "user", "content": "3+4="}]


@pytest.mark.parametrize("is_killed", [False, True])
def test_the_final_answer_is_without_its_stop_text_after_a_kill_too(tmp_path, is_killed):
    async def agent(one):
        await one.chat("a", stop=["cd"])
        if is_killed:
            raise Killed
        await one.end()

    async def end(one):
        await one.end()

    evaluators = {"right": {"_type": "exact_match"}}
    scored: dict[str, Any] = {"rewards": ("right",), "evaluators": evaluators, "inputs": {"answer": "ab"}}
    played = play_outside(tmp_path, agent, script=answers("abcdef"), **scored)
    if is_killed:
        played = play_outside(tmp_path, end, before=played, **scored)
    recorded = [step.data and step.data["output"] for step in played.steps if step.llm is not None]
    assert (recorded, [reward.value for reward in played.rewards]) == (["abcd"], [1.0])


APIS: dict[str, dict[str, Any]] = {
    "chat/completions": {"messages": ASK, "tools": [{"type": "function", "function": {"name": "add"}}], "n": 2},
    "completions": {"prompt": "3+4=", "logprobs": 1, "stop": ["!"]},
    "responses": {"input": "3+4="},
    "messages": {"messages": ASK, "max_tokens": 8},
}
NO_LOGPROBS = {"content": None, "refusal": None, "model_group": GROUP, "version": 0}


def test_an_answer_without_logprobs_and_versions_is_given_by_every_api_and_again_after_a_kill(tmp_path, monkeypatch):
    generate = ScriptedEngine.generate

    async def frozen(self: ScriptedEngine, request: Any) -> Any:
        return replace(await generate(self, request), logprobs=(), spans=())

    monkeypatch.setattr(ScriptedEngine, "generate", frozen)
    given: list[list[str]] = []

    async def ask(one: Any, path: str, *, stream: bool) -> str:
        body = {"model": "policy", "stream": stream} | APIS[path]
        headers = {"Authorization": f"Bearer {one.rollout['key']}", **keyed(f"{path} {stream}")}
        async with one.http.post(f"{one.rollout['base_url']}/v1/{path}", json=body, headers=headers) as response:
            assert response.status == 200, await response.text()
            return await response.text()

    async def agent(one):
        given.append([await ask(one, path, stream=stream) for path in APIS for stream in (False, True)])
        if len(given) == 1:
            raise Killed
        await finish(one)

    options: dict[str, Any] = {"script": answers("7!"), "max_turns": 9}
    played = play_outside(tmp_path, agent, before=play_outside(tmp_path, agent, **options), **options)
    played.assert_complete()
    assert len(assembled_calls(played)) == 10
    first, again = given
    assert again[::2] == first[::2]
    assert all("7" in text and '"error":{' not in text for text in first + again)
    chat, completion, response, message = map(json.loads, first[::2])
    assert [choice["logprobs"]["step_index"] for choice in chat["choices"]] == [1, 2]
    for choice in chat["choices"]:
        assert {key: choice["logprobs"][key] for key in NO_LOGPROBS} == NO_LOGPROBS
    assert completion["choices"][0]["logprobs"]["token_logprobs"] is None
    assert completion["choices"][0]["logprobs"]["step_index"] == 5
    for found, step_index in ((response, 7), (message, 9)):
        assert (found["rollstream"]["logprobs"], found["rollstream"]["step_index"]) == ([], step_index)
        assert (found["rollstream"]["model_group"], found["rollstream"]["version"]) == (GROUP, 0)
