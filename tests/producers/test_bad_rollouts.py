"""Faults of users' code: each fails its own attempt with a cause, and none ends its producer."""

import asyncio
import contextlib
import itertools
import os
import re
import sys
import threading
import time
from typing import Any

import pytest

from rollstream.eventlog import codec
from rollstream.eventlog.memory.log import MemoryLog
from rollstream.producers.attempt import record_rollout, run_rollout
from rollstream.producers.clock import EventClock
from rollstream.producers.rollout import rewards
from rollstream.producers.rollout.registry import register_environment, register_reward
from rollstream.producers.steps_writer import MAX_WAITING, Outbox, StepsWriter
from rollstream.schemas.errors import EnvironmentRunError
from rollstream.schemas.events import Tick
from rollstream.schemas.topics import TOPICS
from tests.producers.conftest import answers, scripted, task_of

HELLO = [{"role": "user", "content": "?"}]
TOO_LARGE = "x" * (TOPICS["steps"].max_record_bytes + 1)
UNSPEAKABLE = "half a pair \ud800"
"""A lone surrogate: no UTF-8."""


@pytest.fixture
def play_on_a_log(tmp_path):
    """Play one attempt at a task as the worker does, on a log with its limits; returns its last event."""

    def start(task):
        async def main():
            log, counter = MemoryLog(num_partitions=1), itertools.count(1)
            engine = await scripted(tmp_path)

            async with Outbox(StepsWriter(log, 0, EventClock(0), 0)) as outbox:
                async with asyncio.timeout(20):
                    await record_rollout(
                        task,
                        member=0,
                        attempt=0,
                        is_last=False,
                        engine=engine,
                        emit=outbox.put,
                        clock=lambda: next(counter),
                    )
            return outbox.terminal

        return asyncio.run(main())

    return start


# ---- what no record can hold ----


async def bare(call):
    await call


async def forgiven(call):
    with contextlib.suppress(Exception):
        await call


CALLS = {
    "a large output": (
        lambda s: s.tool("look", "", TOO_LARGE),
        r"step 0 \(TOOL_END look\) cannot be recorded: .*limit",
    ),
    "a large name": (lambda s: s.reward(1.0, TOO_LARGE), "reward xxx"),
    "a name that is not text": (lambda s: s.tool(UNSPEAKABLE, "", ""), r"step 0 .*ud800\) cannot be recorded: .*UTF-8"),
}


@pytest.mark.parametrize("around", [bare, forgiven])
@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_fits_no_record_fails_the_attempt_even_if_it_is_forgiven(play_on_a_log, name, around):
    call, words = CALLS[name]

    @register_environment("test_fits_no_record")
    async def fits_no_record(session):
        await around(call(session))
        await session.reward(1.0)

    failed = play_on_a_log(task_of("test_fits_no_record"))
    assert failed.cause == "environment_error"
    assert re.search(words, failed.message)
    assert len(failed.message) <= 500


def test_a_step_that_nearly_reaches_the_limit_is_played_and_one_above_it_is_refused(play):
    size = TOPICS["steps"].max_record_bytes - 2048
    played = play(task_of("test_speaks", environment_config={"size": size}))
    played.assert_complete()
    assert play(task_of("test_speaks", environment_config={"size": size + 4096})).last.cause == "environment_error"


@register_environment("test_speaks")
async def speaks(session, size):
    await session.tool("say", "", "x" * size)
    await session.reward(1.0)


class Speechless(Exception):
    def __str__(self):
        raise AttributeError("no message")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (RuntimeError(UNSPEAKABLE), r"RuntimeError \(.*\): half a pair \\ud800"),
        (Speechless(), r"Speechless \(.*\): \(its message cannot be read\)"),
    ],
)
def test_any_text_of_an_error_can_be_recorded(play_on_a_log, error, message):
    @register_environment("test_fails_unreadably")
    async def fails_unreadably(session):
        raise error

    failed = play_on_a_log(task_of("test_fails_unreadably"))
    assert failed.cause == "environment_error"
    assert re.fullmatch(f"environment test_fails_unreadably: {message}", failed.message)

    @register_reward("test_fails_unreadably")
    def judge(rollout):
        raise error

    failed = play_on_a_log(task_of(rewards=("test_fails_unreadably",)))
    assert failed.cause == "reward_error"
    assert re.fullmatch(f"reward test_fails_unreadably raised {message}", failed.message)


def test_an_error_derived_from_rollstreams_whose_message_cannot_be_read_fails_its_rollout_alone(play_on_a_log):
    class Unreadable(EnvironmentRunError):
        def __str__(self):
            raise AttributeError("no message")

    class UnreadableReward(rewards.RewardError):
        def __str__(self):
            raise AttributeError("no message")

    @register_environment("test_unreadable_own")
    async def fails(session):
        raise Unreadable

    @register_reward("test_unreadable_own")
    def judge(rollout):
        raise UnreadableReward

    for task in (task_of("test_unreadable_own"), task_of(rewards=("test_unreadable_own",))):
        assert "(its message cannot be read)" in play_on_a_log(task).message


# ---- what never stops ----


async def asks_again(session):
    while True:
        with contextlib.suppress(Exception):
            await session.chat(HELLO)


async def calls_tools(session):
    while True:
        await session.tool("look", "", "nothing")


async def calls_with_invalid_json(session):
    while True:
        with contextlib.suppress(Exception):
            await session.tool("look", "", object())


async def rewards_nobody(session):
    while True:
        with contextlib.suppress(Exception):
            await session.reward(1.0, agent="eve")


@pytest.mark.parametrize("endless", [asks_again, calls_tools, calls_with_invalid_json, rewards_nobody])
def test_an_environment_that_never_stops_keeps_no_other_from_its_turn(play_on_a_log, endless):
    name = f"test_{endless.__name__}"
    register_environment(name)(endless)
    assert play_on_a_log(task_of(name, rollout_timeout_s=0.2)).cause in ("timeout", "reward_error")


def test_an_attempt_that_is_faster_than_the_log_waits_for_it():
    async def main():
        sent, gate = [], asyncio.Event()
        ticks = [Tick(run_id="", time_ms=number, partition=0) for number in range(MAX_WAITING + 1)]
        *events, last = [codec.encode(tick) for tick in ticks]

        class Gated(MemoryLog):
            async def send_all(self, events, *, partition=None):
                await gate.wait()
                sent.extend(events)
                return await super().send_all(events, partition=partition)

        async with Outbox(StepsWriter(Gated(num_partitions=1), 0, EventClock(0), 0)) as outbox:
            async with asyncio.timeout(30):
                for event in events:
                    await outbox.put(event)
                    await asyncio.sleep(0)  # the first one is on its way
            putting = asyncio.create_task(outbox.put(last))
            await asyncio.wait({putting}, timeout=0.05)
            assert not putting.done()
            gate.set()
            await asyncio.wait_for(putting, 30)
        assert sent == [*events, last]

    asyncio.run(main())


# ---- reward functions ----


def test_a_reward_function_that_finds_nothing_is_a_reward_error_and_no_time_out(play):
    @register_reward("test_finds_nothing")
    def finds_nothing(rollout):
        return next(step for step in rollout.steps if step.event_type == "NO_SUCH")

    failed = play(task_of(rewards=("test_finds_nothing",))).last
    assert failed.cause == "reward_error"
    assert re.fullmatch(r"reward test_finds_nothing raised StopIteration \(.*, in finds_nothing\)", failed.message)


@pytest.mark.parametrize("is_async", [False, True])
def test_a_reward_function_that_exits_is_a_reward_error(play, is_async):
    def leave(rollout):
        sys.exit(3)

    async def leave_later(rollout):
        sys.exit(3)

    register_reward(f"test_leaves_{is_async}")(leave_later if is_async else leave)
    failed = play(task_of(rewards=(f"test_leaves_{is_async}",))).last
    assert failed.cause == "reward_error"
    assert re.fullmatch(rf"reward test_leaves_{is_async} raised SystemExit \(.*, in leave\w*\): 3", failed.message)


def test_reward_functions_that_never_return_take_nobody_s_thread_and_keep_no_process_from_its_end():
    gate = threading.Event()
    rescue = threading.Timer(20.0, gate.set)
    rescue.start()
    rollout = rewards.FinishedRollout({}, 1, (), (), {}, "done")

    async def main():
        hanging = [rewards.evaluate("slow", lambda _: gate.wait() or 1.0, rollout) for _ in range(40)]
        late = [asyncio.create_task(asyncio.wait_for(one, 0.2)) for one in hanging]
        assert {type(error) for error in await asyncio.gather(*late, return_exceptions=True)} == {TimeoutError}
        assert await asyncio.to_thread(lambda: 1) == 1

    began = time.monotonic()
    try:
        asyncio.run(main())
        assert time.monotonic() - began < 10
    finally:
        gate.set()
        rescue.cancel()


def test_too_many_reward_functions_that_never_return_end_the_process(monkeypatch):
    monkeypatch.setattr(rewards, "MAX_ABANDONED", 3)
    gate, rollout = threading.Event(), rewards.FinishedRollout({}, 1, (), (), {}, "done")
    unused: Any = None

    async def hang(count):
        hanging = [rewards.evaluate("slow", lambda _: gate.wait(20) or 1.0, rollout) for _ in range(count)]
        await asyncio.gather(*[asyncio.wait_for(one, 0.1) for one in hanging], return_exceptions=True)

    try:
        asyncio.run(hang(3))
        rewards.check_threads()
        asyncio.run(hang(1))
        with pytest.raises(EnvironmentRunError, match=r"4 reward functions still run .*; give what they wait for"):
            asyncio.run(run_rollout(task_of(), member=0, attempt=0, engine=unused, emit=unused, clock=lambda: 0))
    finally:
        gate.set()
    deadline = time.monotonic() + 20
    while any(thread.name == "reward" for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    rewards.check_threads()


def test_changes_by_a_reward_function_are_not_in_the_record(play):
    @register_reward("test_tidies")
    def tidies(rollout):
        rollout.messages["agent"][0]["content"] = "tidy"
        rollout.steps[0].data["output"] = "tidy"
        rollout.steps[0].data["input"][0]["content"] = "tidy"
        return 1.0

    @register_reward("test_looks")
    def looks(rollout):
        return float(rollout.steps[0].data["output"] == "tidy")

    played = play(task_of(inputs={"secret": 7}, rewards=("test_tidies", "test_looks")), answers("5", "7"))
    played.assert_complete()
    assert [reward.value for reward in played.rewards] == [0.85, 1.0, 0.0]


def test_changes_of_an_example_by_an_environment_do_not_reach_the_next_member(play):
    @register_environment("test_marks_its_board")
    async def marks_its_board(session):
        await session.tool("look", "", session.inputs["cells"])
        session.inputs["cells"].append("X")
        await session.reward(1.0)

    task = task_of("test_marks_its_board", inputs={"cells": []})
    for member in range(2):
        assert play(task, member=member).steps[0].data["output"] == []


# ---- what users' code tells of its process's variables ----


@register_environment("test_raises_a_secret")
async def raises_a_secret(session):
    raise KeyError(os.environ["MY_SECRET"])


@register_reward("test_scores_a_secret")
def scores_a_secret(rollout):
    raise rewards.NoScoreError(f"refused {os.environ['MY_SECRET']}")


@pytest.mark.parametrize(
    "task",
    [
        task_of("test_raises_a_secret"),
        task_of("test_speaks", environment_config={"size": 1}, rewards=("test_scores_a_secret",)),
        task_of(
            "test_speaks",
            environment_config={"size": 1},
            rewards=("test_scores_a_secret",),
            missing_score="reject",
        ),
    ],
    ids=["environment", "reward", "missing score"],
)
def test_a_secret_that_no_configuration_names_enters_no_record(play_on_a_log, task, monkeypatch):
    monkeypatch.setenv("MY_SECRET", "s3cr3t-value")
    ended = play_on_a_log(task).model_dump_json()
    assert "s3cr3t" not in ended
    assert "${MY_SECRET}" in ended
