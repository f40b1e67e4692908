"""A gateway's memory of rollouts and calls is bounded, and a claim key gets one rollout."""

import asyncio
import contextlib
import itertools
import time
from pathlib import Path
from typing import Any

from rollstream.eventlog import codec
from rollstream.eventlog.log import Encoded
from rollstream.producers.attempt import record_rollout
from rollstream.producers.engines.base import Engine
from rollstream.producers.gateway import played
from rollstream.producers.gateway.call_keys import CallIdentity, RememberedCalls, RolloutKeys
from rollstream.producers.gateway.listener import RolloutGateway
from rollstream.producers.gateway.played import CLAIM
from rollstream.producers.openai.requests import SHOULD_RETRY, Refusal
from rollstream.schemas.services import GatewaySection
from tests.producers.conftest import Played, scripted, task_of
from tests.producers.gateway.gateway_rig import NAME, Outside, outside, play_outside, recorded_of


@contextlib.asynccontextmanager
async def gateway_of(folder: Path, **options: Any):
    engine = await scripted(folder)
    async with RolloutGateway(GatewaySection(), engine, workspace=folder / "w", name=NAME, **options) as gateway:
        yield gateway, engine


def taken_up(folder: Path):
    """The gateway of the next process, which agents can ask before a rollout is open again."""
    return gateway_of(folder, is_listening_at_once=True)


def opened(
    gateway: RolloutGateway,
    engine: Engine,
    index: int,
    *,
    before_claim: Any = None,
    events: list[Any] | None = None,
    **settings: Any,
) -> "asyncio.Task[None]":
    """A rollout that is played outside. `before_claim`: awaited before the log has the claim. `events`: the log's; it
    goes on from those that are there.
    """
    log = [] if events is None else events
    before = recorded_of(Played(log)) if log else None
    counter = itertools.count(1000 + 100 * len(log))

    async def emit(encoded: Encoded) -> None:
        log.append(codec.parse(encoded.topic, encoded.value)[0])
        if before_claim is not None and CLAIM.encode() in encoded.value:
            await before_claim()

    task = task_of("gateway", index=index, **settings)
    asked: dict[str, Any] = {"member": 0, "attempt": 0, "is_last": False, "emit": emit, "gateway": gateway}
    asked["before"] = before
    return asyncio.create_task(record_rollout(task, engine=engine, clock=lambda: next(counter), **asked))


async def refused(status: int) -> None:
    raise Refusal(status, "refused")


def test_calls_that_fail_are_forgotten():
    async def scenario() -> None:
        calls = RememberedCalls()
        for number in range(200):
            answer = asyncio.ensure_future(refused(400))
            identity = CallIdentity(f"body {number}", f"key {number}")
            calls.add(identity, answer)
            assert calls.repeated(identity) is answer
            await asyncio.wait({answer})
            assert answer.exception() is not None
            await asyncio.sleep(0)
            assert calls.repeated(identity) is None
        assert len(calls) == 0

    asyncio.run(scenario())


def test_a_call_that_failed_and_is_made_again_is_remembered():
    async def scenario() -> None:
        calls, identity = RememberedCalls(), CallIdentity("body", "key")
        failed = asyncio.ensure_future(refused(500))
        calls.add(identity, failed)
        await asyncio.wait({failed})
        assert failed.exception() is not None
        again: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        calls.add(identity, again)  # before the loop has told of the failure
        await asyncio.sleep(0)
        assert calls.repeated(identity) is again

    asyncio.run(scenario())


def test_secrets_are_concealed_in_time_that_grows_with_the_text_however_it_is_made():
    keys = RolloutKeys("a-token-of-a-gateway")
    key = keys.key_of("run-1/rl/e00000/t00001/m0/a0")
    assert keys.conceal(f"it\\n{key}; {key[:-50]}, rs-a.b, a.0123456789") == (
        "it\\n${ROLLOUT_KEY}; ${ROLLOUT_KEY}, rs-a.b, a.0123456789"
    )
    for text in ("rs-" * 300_000, "rs-a." * 200_000, "a" * 1_000_000, "rs-a.0123456" * 100_000):
        began_s = time.process_time()
        assert keys.conceal(text)
        assert time.process_time() - began_s < 5, "seconds: from each beginning to the end it takes hours"


def test_rollouts_that_nobody_claims_leave_nothing_behind(tmp_path):
    async def scenario() -> None:
        async with gateway_of(tmp_path) as (gateway, engine):
            await asyncio.gather(*(opened(gateway, engine, number, rollout_timeout_s=0.1) for number in range(5)))
            async with outside(tmp_path / "w") as one:
                await one.assert_none_is_claimable()

    asyncio.run(scenario())


def test_a_rollout_that_is_cancelled_before_it_can_be_claimed_is_not_open_any_more(tmp_path):
    async def scenario() -> None:
        async with gateway_of(tmp_path) as (gateway, engine):
            async with gateway._claiming:  # which others hold for a moment
                task = opened(gateway, engine, 0)
                while not gateway._rollouts:
                    await asyncio.sleep(0.001)
                task.cancel()
                await asyncio.wait({task})
            assert not gateway._rollouts

    asyncio.run(asyncio.wait_for(scenario(), 20))


def test_a_claim_at_a_rollouts_timeout_is_refused_and_the_next_gets_the_next_rollout(tmp_path):
    async def scenario() -> None:
        async with gateway_of(tmp_path) as (gateway, engine):
            late = opened(gateway, engine, 0, rollout_timeout_s=2.0, before_claim=asyncio.Event().wait)
            async with outside(tmp_path / "w") as one:
                body, header = {"wait_s": 5.0}, {"Idempotency-Key": "claim"}
                refused = await one.post(f"{one.url}/rollouts", body, key=one.token, status=409, **header)
                assert refused["error"]["code"] == "rollout_ended"
                assert SHOULD_RETRY not in one.headers, "the next claim may get a rollout"
                assert refused["error"]["message"].endswith(
                    "has ended by its timeout while it was claimed; claim again"
                )
                await late
                following = opened(gateway, engine, 1)
                claimed = await one.claim()
                assert claimed["rollout_id"].startswith("run-1/rl/e00000/t00001")
                await one.reward(1.0)
                await one.end()
            await following

    asyncio.run(asyncio.wait_for(scenario(), 20))


def test_claims_that_wait_under_one_key_get_one_rollout(tmp_path):
    async def scenario() -> None:
        async with gateway_of(tmp_path) as (gateway, engine):
            tasks = [opened(gateway, engine, 0)]
            async with outside(tmp_path / "w") as one:
                await one.claim(key="first")
                waiting = [Outside(one.http, one.url, one.token) for _ in range(3)]
                keys = ("again", "again", "another")
                claims = [asyncio.create_task(who.claim(key=key)) for who, key in zip(waiting, keys, strict=True)]
                await asyncio.sleep(0.1)
                tasks += [opened(gateway, engine, number) for number in (1, 2)]
                given = [(await claim)["rollout_id"] for claim in claims]
                assert given[0] == given[1] != given[2]
                for who in (one, waiting[0], waiting[2]):
                    await who.reward(1.0)
                    await who.end()
            await asyncio.gather(*tasks)

    asyncio.run(asyncio.wait_for(scenario(), 20))


async def stopped(*tasks: "asyncio.Task[None]") -> None:
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


def test_a_claim_that_is_repeated_after_a_kill_gets_its_rollout_once_that_is_open_again(tmp_path):
    async def scenario() -> None:
        log: list[Any] = []
        async with gateway_of(tmp_path) as (gateway, engine):
            task = opened(gateway, engine, 0, events=log)
            async with outside(tmp_path / "w") as one:
                first = await one.claim(key="mine")
            await stopped(task)
        async with taken_up(tmp_path) as (gateway, engine), outside(tmp_path / "w") as one:
            again = asyncio.create_task(one.claim(5.0, key="mine"))
            await asyncio.sleep(0.2)
            task = opened(gateway, engine, 0, events=log)
            assert (await again)["rollout_id"] == first["rollout_id"]
            await one.reward(1.0)
            await one.end()
            await task

    asyncio.run(asyncio.wait_for(scenario(), 20))


def test_a_rollout_whose_claim_got_another_one_after_a_kill_can_be_claimed_again(tmp_path):
    async def scenario() -> None:
        logs: list[list[Any]] = [[], []]
        async with gateway_of(tmp_path) as (gateway, engine):
            task = opened(gateway, engine, 0, events=logs[0])
            async with outside(tmp_path / "w") as one:
                first = await one.claim(key="mine")
            await stopped(task)
        async with taken_up(tmp_path) as (gateway, engine), outside(tmp_path / "w") as one:
            again = asyncio.create_task(one.claim(5.0, key="mine"))
            await asyncio.sleep(0.2)
            tasks = [opened(gateway, engine, 1, events=logs[1])]
            other = await again
            assert other["rollout_id"] != first["rollout_id"]
            tasks.append(opened(gateway, engine, 0, events=logs[0]))
            await one.chat("a")
            await stopped(*tasks)
        for order in ((0, 1), (1, 0)):  # the log has two claims under one key, and the calls of one rollout
            async with taken_up(tmp_path) as (gateway, engine), outside(tmp_path / "w") as one:
                tasks = [opened(gateway, engine, index, events=[*logs[index]]) for index in order]
                assert (await one.claim(key="another"))["rollout_id"] == first["rollout_id"]
                assert (await one.claim(key="mine"))["rollout_id"] == other["rollout_id"]
                await one.assert_none_is_claimable()
                await stopped(*tasks)
        async with taken_up(tmp_path) as (gateway, engine), outside(tmp_path / "w") as one:
            tasks = [opened(gateway, engine, index, events=logs[index]) for index in (1, 0)]
            assert (await one.claim(key="another"))["rollout_id"] == first["rollout_id"]
            await one.reward(1.0)
            await one.end()
            await tasks[1]
            await stopped(tasks[0])
        Played(logs[0]).assert_complete()

    asyncio.run(asyncio.wait_for(scenario(), 20))


def test_a_rollout_has_only_so_many_rewards(tmp_path, monkeypatch):
    monkeypatch.setattr(played, "MAX_REWARDS", 3)

    async def agent(one: Any) -> None:
        await one.chat("a")
        for number in range(3):
            await one.reward(1.0, name=f"part {number}")
        assert "has 3 rewards already" in (await one.reward(1.0, status=400))["error"]["message"]
        await one.reward(1.0, name="part 0")
        await one.end()

    play_outside(tmp_path, agent).assert_complete()
