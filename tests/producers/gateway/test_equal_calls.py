"""Equal calls of one agent, sent side by side as samples are, and their retries: whose answer each of them gets."""

import asyncio
import itertools
from typing import Any

import pytest

from rollstream.producers.engines.base import Generation, GenerationRequest
from rollstream.producers.engines.scripted import ScriptedEngine
from rollstream.producers.gateway.call_keys import MAX_REFUSED, CallIdentity, RememberedCalls
from tests.producers.gateway.gateway_rig import Killed, play_outside


def numbered() -> Any:
    """A script that never gives an answer twice."""
    numbers = itertools.count()
    return lambda prompt, rng, version: (f"answer {next(numbers)}", -0.5)


def texts_of(answers: Any) -> list[str]:
    return [one["choices"][0]["message"]["content"] for one in answers]


async def retried(one: Any, *headers: dict[str, str]) -> list[str]:
    """The texts of equal calls, sent at once."""
    return texts_of(await asyncio.gather(*(one.chat("a", headers=given) for given in headers)))


def retry(count: int, key: str | None = None) -> dict[str, str]:
    return {"X-Stainless-Retry-Count": str(count)} | ({} if key is None else {"Idempotency-Key": key})


@pytest.fixture
def arrived(monkeypatch) -> list[GenerationRequest]:
    """Requests that have arrived at the engine so far."""
    found: list[GenerationRequest] = []
    generate = ScriptedEngine.generate

    async def counting(engine: ScriptedEngine, request: GenerationRequest) -> Generation:
        found.append(request)
        return await generate(engine, request)

    monkeypatch.setattr(ScriptedEngine, "generate", counting)
    return found


async def hang_up(one: Any, num: int, arrived: list[GenerationRequest]) -> None:
    """Send equal calls, the first ones of all, whose client goes away before they are answered."""
    asked = [asyncio.create_task(one.chat("a")) for _ in range(num)]
    while len(arrived) < num:
        await asyncio.sleep(0.005)
    for call in asked:
        call.cancel()
    await asyncio.wait(asked)


async def repeated(one: Any) -> Any:
    """A chat that is repeated, as OpenAI's client does it, while it is refused because of a limit."""
    url, bears = f"{one.rollout['base_url']}/v1/chat/completions", {"Authorization": f"Bearer {one.rollout['key']}"}
    body = {"model": "policy", "messages": [{"role": "user", "content": "a"}]}
    for count in itertools.count():
        async with one.http.post(url, json=body, headers=bears | retry(count)) as response:
            if response.status == 200:
                return await response.json()
            assert response.status == 429
        await asyncio.sleep(0.05)


async def finish(one: Any) -> None:
    await one.reward(1.0)
    await one.end()


def assert_complete(played: Any, num_calls: int) -> None:
    """The rollout ended whole, with so many calls recorded."""
    played.assert_complete()
    assert sum(step.llm is not None for step in played.steps) == num_calls


@pytest.mark.parametrize("is_open", [True, False])
def test_the_retries_of_two_equal_calls_get_both_answers(tmp_path, arrived, is_open):
    async def agent(one: Any) -> None:
        await hang_up(one, 2, arrived)
        await asyncio.sleep(0.0 if is_open else 1.5)
        first = await retried(one, retry(1), retry(1))
        assert sorted(first) == ["answer 0", "answer 1"]
        again = await retried(one, retry(1), retry(2))
        assert again[0] == again[1], "both are answered: any further retry gets the newest"
        await finish(one)

    played = play_outside(tmp_path, agent, script=numbered(), delay_s=1.0)
    assert_complete(played, 2)


def test_a_retry_gets_the_call_that_nobody_has_an_answer_of_and_not_the_newest(tmp_path, arrived):
    async def agent(one: Any) -> None:
        await hang_up(one, 1, arrived)
        assert await retried(one, {}) == ["answer 1"]
        assert await retried(one, retry(1)) == ["answer 0"]
        await finish(one)

    played = play_outside(tmp_path, agent, script=numbered(), delay_s=1.0)
    assert_complete(played, 2)


def test_the_retries_of_two_equal_calls_get_both_answers_from_the_process_after_the_one_that_was_killed(tmp_path):
    async def first(one: Any) -> None:
        await retried(one, {}, {})
        raise Killed

    async def second(one: Any) -> None:
        assert sorted(await retried(one, retry(1), retry(1))) == ["answer 0", "answer 1"]
        await finish(one)

    whole = play_outside(tmp_path, second, before=play_outside(tmp_path, first, script=numbered()))
    assert_complete(whole, 2)


def test_equal_retries_of_calls_that_never_arrived_are_one_call_and_under_keys_of_their_own_several(tmp_path):
    async def agent(one: Any) -> None:
        assert await retried(one, retry(1), retry(1), retry(2)) == ["answer 0"] * 3
        keyed = await retried(one, retry(1, "a"), retry(1, "b"), retry(2, "a"))
        assert keyed == [keyed[0], keyed[1], keyed[0]]
        assert {*keyed} == {"answer 1", "answer 2"}
        await finish(one)

    played = play_outside(tmp_path, agent, script=numbered(), delay_s=0.1)
    assert_complete(played, 3)


@pytest.mark.parametrize("limit", ["max_concurrent_calls", "calls_per_key"])
def test_equal_calls_of_which_some_are_refused_because_of_a_limit_get_an_answer_each(tmp_path, limit):
    async def agent(one: Any) -> None:
        found = texts_of(await asyncio.gather(*(repeated(one) for _ in range(5))))
        assert sorted(found) == [f"answer {number}" for number in range(5)]
        await finish(one)

    limits: dict[str, Any] = {limit: 2}
    played = play_outside(tmp_path, agent, script=numbered(), delay_s=0.3, **limits)
    assert_complete(played, 5)


def test_refused_calls_that_never_come_again_are_remembered_up_to_a_bound():
    calls = RememberedCalls()
    for number in range(MAX_REFUSED + 5):
        calls.refuse(CallIdentity(f"body {number}", None))
    assert len(calls._refused) == MAX_REFUSED
    calls.refuse(CallIdentity("keyed", "key"))
    calls.refuse(CallIdentity("again", None, retry_count=1))
    assert not {"keyed", "again"} & calls._refused.keys()
