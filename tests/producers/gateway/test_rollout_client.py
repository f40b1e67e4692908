"""The client of agents in Python, over HTTP against the producers' own gateway."""

import asyncio
import contextlib
import json
import math
import os
import re
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import openai
import pytest
from aiohttp import web

from rollstream.producers import GatewayClient, RemoteRollout
from rollstream.producers.gateway import rollout_client
from rollstream.producers.gateway.rollout_client import Retries, RolloutTask
from rollstream.schemas.errors import ConfigError, GatewayError, PromptTooLongError
from rollstream.schemas.events import RolloutEnded, RolloutFailed
from tests.producers.conftest import Played, answers
from tests.producers.gateway.gateway_rig import play_outside

PAGE = Path(__file__).parents[3] / "docs/gateway.md"
SOON = Retries(for_s=0.3)


def playing(play: Callable[[RemoteRollout], Awaitable[None]]) -> Callable[[Path], Any]:
    """A program that claims one rollout and plays it."""

    async def program(workspace: Path) -> None:
        async with GatewayClient.of_workspace(workspace) as gateway:
            rollout = await gateway.claim(wait_s=10)
            assert rollout is not None
            async with rollout:
                await play(rollout)

    return program


def calls_of(played: Played) -> list[Any]:
    return [step for step in played.steps if step.llm is not None]


def test_a_claimed_rollout_is_played_with_openais_client_rewarded_and_ended(tmp_path: Path) -> None:
    async def play(rollout: RemoteRollout) -> None:
        assert rollout.task.inputs == {"question": "3+4=?"}
        assert rollout.task.agents == ("agent",)
        messages: list[Any] = [{"role": "user", "content": rollout.task.inputs["question"]}]
        async with openai.AsyncOpenAI(base_url=rollout.openai_base_url, api_key=rollout.key) as client:
            message = (await client.chat.completions.create(model="policy", messages=messages)).choices[0].message
        assert message.content == "7"
        messages += [{"role": "assistant", "content": "7"}, {"role": "user", "content": "and 1?"}]
        answer = await rollout.chat(messages, max_tokens=3)
        assert answer["choices"][0]["message"]["content"] == "8"
        await rollout.reward(1.0)
        await rollout.reward(1.0)
        step_index = answer["choices"][0]["logprobs"]["step_index"]
        await rollout.reward(0.5, name="process", step_index=step_index, agent="agent")

    played = play_outside(tmp_path, program=playing(play), script=answers("7", "8"), inputs={"question": "3+4=?"})
    played.assert_complete()
    assert [(one.name, one.value) for one in played.rewards] == [("reward", 1.0), ("process", 0.5)]
    assert len(calls_of(played)) == 2


def test_the_agent_of_the_page_plays_a_rollout(tmp_path: Path) -> None:
    (code,) = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    names: dict[str, Any] = {"__name__": "page"}
    exec(compile(code, PAGE.name, "exec"), names)
    inputs = {"question": "3+4=?", "answer": 7}
    played = play_outside(tmp_path, program=playing(names["play"]), script=answers("7"), inputs=inputs)
    played.assert_complete()
    assert [one.value for one in played.rewards] == [1.0]


def test_an_agents_exception_is_sent_without_its_key_and_the_secrets_of_its_process(
    tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setenv("AGENTS_DB_PASSWORD", "swordfish")

    async def play(rollout: RemoteRollout) -> None:
        raise ValueError(f"{rollout.key} and swordfish")

    async def program(workspace: Path) -> None:
        with contextlib.suppress(ValueError):
            await playing(play)(workspace)

    last = play_outside(tmp_path, program=program).last
    assert isinstance(last, RolloutFailed)
    assert "${OPENAI_API_KEY} and ${AGENTS_DB_PASSWORD}" in last.message


def test_retries_under_a_key_return_the_same_and_a_claim_without_a_rollout_returns_none(tmp_path: Path) -> None:
    async def program(workspace: Path) -> None:
        async with GatewayClient.of_workspace(workspace) as gateway:
            first = await gateway.claim(wait_s=10, idempotency_key="mine")
            again = await gateway.claim(wait_s=0, idempotency_key="mine")
            assert first is not None
            assert again is not None
            assert (again.task, again.key) == (first.task, first.key)
            assert await gateway.claim(wait_s=0) is None
            async with first:
                messages = [{"role": "user", "content": "a"}]
                answer = await first.chat(messages, idempotency_key="one")
                assert await first.chat(messages, idempotency_key="one") == answer
                assert (await first.chat(messages))["id"] != answer["id"]
                await first.reward(1.0)

    played = play_outside(tmp_path, program=program)
    played.assert_complete()
    assert len(calls_of(played)) == 2


def test_a_refused_request_raises_its_code_and_the_rollout_goes_on(tmp_path: Path) -> None:
    async def play(rollout: RemoteRollout) -> None:
        messages = [{"role": "user", "content": "a"}]
        with pytest.raises(GatewayError, match="'no-such' is not served here") as unknown:
            await rollout.chat(messages, model="no-such")
        assert (unknown.value.status, unknown.value.code) == (404, "model_not_found")
        for bad in (math.nan, math.inf):
            with pytest.raises(GatewayError, match="answered 400"):
                await rollout.reward(bad)
        await rollout.reward(1.0)
        with pytest.raises(GatewayError, match="it cannot become 0"):
            await rollout.reward(0.0)
        forged = RemoteRollout(rollout.task, rollout.base_url, rollout.key[:-1] + "x", SOON)
        with pytest.raises(GatewayError, match="the key is not one of producers process") as wrong:
            await forged.end()
        await forged.close()
        assert (wrong.value.status, rollout.key[:-1] in str(wrong.value)) == (401, False)
        await rollout.end()
        with pytest.raises(GatewayError) as late:
            await rollout.chat(messages)
        assert late.value.code == "rollout_ended"

    played = play_outside(tmp_path, program=playing(play))
    assert [one.value for one in played.rewards] == [1.0]
    played.assert_complete()


def test_too_long_a_prompt_and_too_many_turns_are_errors_of_their_own(tmp_path: Path) -> None:
    async def play(rollout: RemoteRollout) -> None:
        with pytest.raises(PromptTooLongError):
            await rollout.chat([{"role": "user", "content": "a" * 200}])
        await rollout.chat([{"role": "user", "content": "a"}])
        await rollout.chat([{"role": "user", "content": "b"}])
        raise AssertionError("more answers than max_turns")

    played = play_outside(tmp_path, program=playing(play), max_turns=1, max_length=100)
    assert isinstance(played.last, RolloutEnded)
    assert played.last.stop_reason == "max_turns"


@pytest.mark.parametrize("others", [(), (LookupError("no such table: apples"),)])
def test_turns_that_run_out_in_a_group_of_tasks_end_the_rollout_unless_another_task_failed(
    tmp_path: Path, others: tuple[Exception, ...]
) -> None:
    async def play(rollout: RemoteRollout) -> None:
        calls = (rollout.chat([{"role": "user", "content": text}]) for text in "ab")
        found = await asyncio.gather(*calls, return_exceptions=True)
        raise ExceptionGroup("tasks", [*(one for one in found if isinstance(one, Exception)), *others])

    async def program(workspace: Path) -> None:
        with pytest.raises(ExceptionGroup) if others else contextlib.nullcontext():
            await playing(play)(workspace)

    last = play_outside(tmp_path, program=program, max_turns=1).last
    assert isinstance(last, RolloutFailed if others else RolloutEnded)
    assert getattr(last, "stop_reason", "") == ("" if others else "max_turns")
    assert getattr(last, "cause", "") == ("environment_error" if others else "")


@pytest.mark.parametrize("kind", [LookupError, SystemExit])
def test_an_exception_in_the_block_fails_the_rollout_and_goes_on(tmp_path: Path, kind: type[BaseException]) -> None:
    async def play(rollout: RemoteRollout) -> None:
        await rollout.chat([{"role": "user", "content": "a"}])
        raise kind("no such table: apples")

    async def program(workspace: Path) -> None:
        with pytest.raises(kind, match="apples"):
            await playing(play)(workspace)

    last = play_outside(tmp_path, program=program).last
    assert isinstance(last, RolloutFailed)
    assert f"the agent reported: {kind.__name__}" in last.message
    assert "no such table: apples" in last.message


@pytest.mark.parametrize("code", [None, 0])
def test_an_exit_without_an_error_ends_the_rollout(tmp_path: Path, code: int | None) -> None:
    async def play(rollout: RemoteRollout) -> None:
        await rollout.chat([{"role": "user", "content": "a"}])
        await rollout.reward(1.0)
        raise SystemExit(code)

    async def program(workspace: Path) -> None:
        with pytest.raises(SystemExit):
            await playing(play)(workspace)

    assert isinstance(play_outside(tmp_path, program=program).last, RolloutEnded)


def test_the_error_of_a_missing_gateway_names_its_address_or_file(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    async def claimed(gateway: GatewayClient) -> None:
        async with gateway:
            await gateway.claim(wait_s=0)

    with pytest.raises(GatewayError, match=r"cannot be reached.*check that the producers run") as down:
        asyncio.run(claimed(GatewayClient.at(f"http://127.0.0.1:{port}", "token", SOON)))
    assert down.value.status is None
    with pytest.raises(GatewayError, match=r"gateway-producers-1\.json cannot be read: no rollout was opened there"):
        asyncio.run(claimed(GatewayClient.of_workspace(tmp_path, retries=SOON)))


def test_an_unanswered_request_is_retried_under_the_same_key_at_a_new_address(tmp_path: Path) -> None:
    seen: list[tuple[int, str]] = []
    task = {"rollout_id": "r", "inputs": {}, "agents": ["a"], "max_turns": 1, "purpose": "train", "seed": 1}
    refusals = [(429, {"error": {"message": "busy", "code": None}}), (500, "broken")]
    refusals += [(503, {"error": {"message": "not yet", "code": "rollout_not_found"}})] * 50

    async def serve(refused: list[tuple[int, Any]]) -> web.AppRunner:
        async def answer(request: web.Request) -> web.StreamResponse:
            seen.append((request.url.port or 0, request.headers["Idempotency-Key"]))
            status, body = refused.pop(0) if refused else (200, task | {"base_url": "http://x", "key": "k"})
            return web.json_response(body, status=status, headers={"Retry-After": "0"})

        app = web.Application()
        app.router.add_post("/rollouts", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        (tmp_path / "gateway-producers-1.json").write_text(json.dumps({"url": url}))
        return runner

    async def scenario() -> None:
        (tmp_path / "gateway-producers-1.token").write_text("token\n")
        first = await serve(refusals)
        async with GatewayClient.of_workspace(tmp_path) as gateway:
            waiting = asyncio.create_task(gateway.claim())
            while len(seen) < 3:
                await asyncio.sleep(0.01)
            await first.cleanup()
            second = await serve([])
            claimed = await waiting
            await second.cleanup()
        assert claimed is not None
        assert claimed.task.rollout_id == "r"

    asyncio.run(scenario())
    assert len({port for port, _ in seen}) == 2
    assert len({key for _, key in seen}) == 1


@contextlib.asynccontextmanager
async def answering(answer: Callable[[web.Request], Awaitable[web.StreamResponse]]):
    """A rollout at a gateway whose chats are answered so."""
    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    task = RolloutTask(rollout_id="r", inputs={}, agents=("a",), max_turns=1, purpose="train", seed=1)
    rollout = RemoteRollout(task, f"http://127.0.0.1:{runner.addresses[0][1]}", "key", SOON)
    try:
        yield rollout
    finally:
        await rollout.close()
        await runner.cleanup()


def test_a_call_that_breaks_off_after_a_long_time_is_made_again(tmp_path: Path) -> None:
    """The time for tries begins where the first one fails, however long that one took."""
    keys: list[str] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        keys.append(request.headers["Idempotency-Key"])
        if len(keys) > 1:
            return web.json_response({"choices": []})
        await asyncio.sleep(2 * SOON.for_s)
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    async def scenario() -> None:
        async with answering(answer) as rollout:
            assert await rollout.chat([{"role": "user", "content": "a"}]) == {"choices": []}

    asyncio.run(scenario())
    assert keys[0] == keys[1]


def test_an_answer_may_have_many_megabytes_and_one_that_is_too_large_is_an_error_of_the_gateway(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = "long" * (3 * 1024 * 1024)

    async def answer(request: web.Request) -> web.StreamResponse:
        return web.json_response({"choices": [{"message": {"content": text}}]})

    async def scenario() -> None:
        async with answering(answer) as rollout:
            messages = [{"role": "user", "content": "a"}]
            assert (await rollout.chat(messages))["choices"][0]["message"]["content"] == text
            monkeypatch.setattr(rollout_client, "MAX_ANSWER_BYTES", 1000)
            with pytest.raises(GatewayError, match="answered more than 1000 bytes; lower max_new_tokens"):
                await rollout.chat(messages)

    asyncio.run(scenario())


def test_no_rollout_is_offered_while_the_learner_is_behind(tmp_path: Path) -> None:
    async def program(workspace: Path) -> None:
        async with GatewayClient.of_workspace(workspace, retries=SOON) as gateway:
            claimed = await gateway.claim(wait_s=10)
            assert claimed is not None
            assert await gateway.claim(wait_s=0) is None
            async with claimed as rollout:
                await rollout.reward(1.0)

    play_outside(tmp_path, program=program, behind_s=lambda: 7, missing_score="unneeded").assert_complete()


def test_an_error_that_names_a_file_which_is_not_unicode_fails_the_rollout(tmp_path: Path) -> None:
    async def play(rollout: RemoteRollout) -> None:
        raise LookupError(f"no table in {os.fsdecode(b'caf' + bytes([0xE9]))}")

    async def program(workspace: Path) -> None:
        with pytest.raises(LookupError):
            await playing(play)(workspace)

    last = play_outside(tmp_path, program=program, rollout_timeout_s=5.0).last
    assert isinstance(last, RolloutFailed)
    assert "the agent reported: LookupError" in last.message
    assert r"no table in caf\udce9" in last.message


def test_a_program_finds_its_rollout_in_its_variables_and_their_lack_is_an_error() -> None:
    task = {"rollout_id": "r", "inputs": {"x": 1}, "agents": ["a"], "max_turns": 3, "purpose": "train", "seed": 1}
    own = {"ROLLSTREAM_ROLLOUT_URL": "http://127.0.0.1:1/rollouts/r", "OPENAI_API_KEY": "k"}
    found = RemoteRollout.of_program({**own, "ROLLSTREAM_TASK": json.dumps(task)})
    assert (found.task.inputs, found.task.max_turns) == ({"x": 1}, 3)
    assert found.openai_base_url == "http://127.0.0.1:1/rollouts/r/v1"
    with pytest.raises(ConfigError, match="OPENAI_API_KEY is not set; run this by environment: command"):
        RemoteRollout.of_program({"ROLLSTREAM_ROLLOUT_URL": "http://127.0.0.1:1/rollouts/r"})
    with pytest.raises(ConfigError, match="task of a rollout: inputs"):
        RemoteRollout.of_program({**own, "ROLLSTREAM_TASK": '{"rollout_id": "r", "agents": []}'})
