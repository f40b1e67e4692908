"""Reward functions: what they see, what they may return, and what becomes of those that fail."""

import asyncio
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch

from rollstream.producers.rollout import rewards
from rollstream.producers.rollout.registry import register_environment, register_reward
from tests.producers.conftest import answers, task_of


def rollout_of(**fields):
    kept = {"inputs": {}, "seed": 1, "steps": (), "rewards": (), "messages": {}, "stop_reason": "done"}
    return rewards.FinishedRollout(**(kept | fields))


def evaluate(function):
    return asyncio.run(rewards.evaluate("judge", function, rollout_of()))


def test_a_function_sees_the_finished_rollout_and_is_recorded_before_the_end(play):
    seen = []

    @register_reward("test_brevity")
    def brevity(rollout):
        seen.append(rollout)
        return 1 / len(rollout.steps)

    played = play(task_of(inputs={"secret": 7}, rewards=("test_brevity",)), answers("5", "7"))
    played.assert_complete()
    assert [(reward.name, reward.value) for reward in played.rewards] == [("reward", 0.85), ("test_brevity", 0.25)]
    (rollout,) = seen
    assert rollout.inputs == {"secret": 7}
    assert rollout.rewards[0].value == 0.85
    assert [message["content"] for message in rollout.messages["agent"]] == ["?", "5", "H", "7"]
    assert rollout.stop_reason == "done"


def test_async_functions_and_awaitables_are_awaited():
    async def judge(rollout):
        return 0.5

    assert evaluate(judge) == {None: 0.5}
    assert evaluate(lambda rollout: judge(rollout)) == {None: 0.5}


@pytest.mark.parametrize(
    "value", [np.bool_(True), np.float32(1), np.array(1), torch.tensor(1.0), True, Fraction(1), Decimal(1)]
)
def test_one_number_of_any_type_is_a_reward(value):
    assert evaluate(lambda rollout: value) == {None: 1.0}


def test_a_mapping_is_a_reward_an_agent():
    assert evaluate(lambda rollout: {"ann": 1, "bob": True}) == {"ann": 1.0, "bob": 1.0}


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (float("nan"), "nan"),
        (float("inf"), "inf"),
        (None, r"no score \(None\)"),
        ("1", "is a str"),
        (np.array([1.0]), "is a ndarray"),
        (10**400, "too large"),
        (Decimal("sNaN"), "nan"),
    ],
)
def test_a_reward_that_is_not_a_finite_number_is_refused_by_name(value, words):
    with pytest.raises(rewards.RewardError, match=f"reward .*judge .*{words}"):
        evaluate(lambda rollout: value)


@pytest.mark.parametrize("value", [float("nan"), None, "raise"])
def test_a_reward_function_that_fails_fails_the_attempt(play, value):
    @register_reward("test_broken")
    def broken(rollout):
        if value == "raise":
            raise ValueError("no judge\nat all")
        return value

    failed = play(task_of(rewards=("test_broken",))).last
    assert failed.cause == "reward_error"
    assert failed.message.startswith(("reward test_broken ", "reward function test_broken "))
    assert "\n" not in failed.message


def test_an_unknown_reward_fails_the_attempt_by_name(play):
    failed = play(task_of(rewards=("test_no_such",))).last
    assert "test_no_such" in failed.message


def test_a_function_that_hangs_is_named_in_the_timeout(play):
    @register_reward("test_slow")
    async def slow(rollout):
        await asyncio.sleep(60)

    failed = play(task_of(rewards=("test_slow",), rollout_timeout_s=1.0)).last
    assert failed.cause == "timeout"
    assert "test_slow" in failed.message


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"value": float("nan")}, "nan"),
        ({"value": -1e16}, "between -1e+15 and 1e+15"),
        ({"value": 1.0, "step_index": 5}, "step 5"),
        ({"value": 1.0, "agent": "eve"}, "eve"),
    ],
)
def test_a_reward_of_the_environment_that_is_wrong_is_a_reward_error(play, arguments, words):
    @register_environment("test_bad_reward")
    async def bad_reward(session):
        await session.reward(**arguments)

    failed = play(task_of("test_bad_reward")).last
    assert failed.cause == "reward_error"
    assert words in failed.message


def test_an_evaluator_named_like_a_reward_of_the_environment_fails_the_attempt(play):
    evaluators = {"reward": {"_type": "regex", "pattern": "5"}, "form": {"_type": "regex", "pattern": "5"}}
    failed = play(task_of(rewards=("form", "reward"), evaluators=evaluators), answers("5")).last
    assert failed.cause == "reward_error"
    assert "reward eval.evaluators.reward: the environment has recorded a reward named 'reward'" in failed.message
    assert failed.message.endswith("rename the evaluator, in a new run")


def test_a_reward_function_may_have_the_name_of_scores_of_candidates(play):
    @register_environment("test_scored_candidates")
    async def scored(session):
        replies = await session.sample([{"role": "user", "content": "?"}], 2)
        await session.score(replies, [1.0, 0.0], selected=0)

    form = {"score": {"_type": "regex", "pattern": "5"}}
    play(task_of("test_scored_candidates", rewards=("score",), evaluators=form), answers("5")).assert_complete()
