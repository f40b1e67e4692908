"""Tasks of user code that exit, in an environment or below it: the attempt fails, and the process continues."""

import asyncio
import inspect
import sys
from typing import Any

import pytest

from rollstream.producers.rollout.registry import register_environment, register_reward
from rollstream.producers.user_tasks import create_task
from rollstream.schemas.errors import EnvironmentRunError
from tests.producers.conftest import task_of

HELLO = [{"role": "user", "content": "?"}]


async def leave(session=None):
    if session is not None:
        await session.chat(HELLO)
    sys.exit(3)


async def interrupt(session):
    await session.chat(HELLO)
    raise KeyboardInterrupt


@register_environment("test_gathers")
async def gathers(session):
    await asyncio.gather(leave(session), leave(session))


@register_environment("test_groups")
async def groups(session):
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(leave(session))
        tasks.create_task(interrupt(session))


@register_environment("test_starts")
async def starts(session):
    await asyncio.create_task(gathers(session), name="below")


@register_environment("test_interrupted_below")
async def interrupted_below(session):
    await asyncio.gather(interrupt(session))


@register_environment("test_leaves_in_vain")
async def leaves_in_vain(session):
    await asyncio.wait({asyncio.create_task(leave())})
    await session.chat(HELLO)
    await session.reward(1.0)


class Unreadable(BaseException):
    def __str__(self):
        sys.exit(5)


@register_environment("test_unreadable")
async def unreadable(session):
    raise Unreadable


@register_environment("test_answers_once")
async def answers_once(session):
    await session.chat(HELLO)


@register_reward("test_gathers_exits")
async def gathers_exits(rollout):
    await asyncio.gather(leave())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("test_gathers", "called sys.exit(3)"),
        ("test_groups", "called sys.exit(3)"),
        ("test_starts", "called sys.exit(3)"),
        ("test_interrupted_below", "raised KeyboardInterrupt"),
        ("test_unreadable", "(its message cannot be read)"),
    ],
)
def test_an_exit_in_a_task_of_an_environment_fails_its_attempt(play, name, message):
    failed = play(task_of(name)).last
    assert failed.cause == "environment_error"
    assert message in failed.message


def test_a_reward_function_whose_task_exits_fails_its_attempt(play):
    failed = play(task_of("test_answers_once", rewards=("test_gathers_exits",))).last
    assert failed.cause == "reward_error"
    assert "called sys.exit(3)" in failed.message


def test_an_environment_may_continue_after_a_task_that_exits(play):
    assert [reward.value for reward in play(task_of("test_leaves_in_vain")).rewards] == [1.0]


def test_other_tasks_are_made_as_before_and_those_of_users_can_be_inspected():
    async def scenario():
        made = []

        def factory(loop, coroutine, **options):
            made.append(inspect.iscoroutine(coroutine))
            return asyncio.Task(coroutine, loop=loop, **options)

        asyncio.get_running_loop().set_task_factory(factory)
        tasks = [create_task(asyncio.sleep(0, "users")), asyncio.create_task(asyncio.sleep(0, "ours"))]
        assert made == [False, True]
        coroutine: Any = tasks[0].get_coro()
        assert inspect.getcoroutinestate(coroutine) == inspect.CORO_CREATED
        assert "sleep" in repr(tasks[0])
        assert [await one for one in tasks] == ["users", "ours"]
        early = create_task(leave())
        early.cancel()
        assert isinstance((await asyncio.gather(early, return_exceptions=True))[0], asyncio.CancelledError)
        with pytest.raises(EnvironmentRunError, match=r"called sys\.exit\(3\)") as raised:
            await create_task(leave())
        assert isinstance(raised.value.__cause__, SystemExit)

    asyncio.run(scenario())
