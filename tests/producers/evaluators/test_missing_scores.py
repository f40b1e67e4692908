"""Rollouts without a score, and errors of reward functions."""

import pytest

from rollstream.producers.rollout.registry import register_environment, register_reward
from rollstream.producers.rollout.rewards import NoScoreError
from rollstream.schemas.events import RolloutEnded, RolloutFailed
from tests.producers.conftest import GROUP, answers, task_of


@register_environment("test_gives_no_reward")
async def gives_no_reward(session):
    await session.chat([{"role": "user", "content": "?"}])


def attempt(play, **settings):
    return play(task_of("test_gives_no_reward", inputs={"answer": "7"}, **settings), answers("it is 7"))


@register_reward("test_none")
def none(rollout):
    return None


@register_reward("test_half_none")
def half_none(rollout):
    return {"agent": None}


@pytest.mark.parametrize("names", [("test_none",), ("test_half_none",), ()])
def test_a_missing_score_is_an_error_or_a_rejection_and_never_zero(play, names):
    failed = attempt(play, rewards=names).last
    assert isinstance(failed, RolloutFailed)
    assert failed.cause == "reward_error"
    no_score = "gave no score (None); return a number, or leave such rollouts out (trajectory_builders.X.missing_score"
    assert (f"reward {names[0]} {no_score}" if names else "finetuning.reward_function.name") in failed.message
    rejected = attempt(play, rewards=names, missing_score="reject")
    rejected.assert_complete()
    assert isinstance(rejected.last, RolloutEnded)
    assert list(rejected.last.missing_scores) == [names[0] if names else "reward"]
    assert rejected.rewards == []
    used = attempt(play, rewards=names, missing_score="unneeded")
    used.assert_complete()
    assert (used.last.missing_scores, used.rewards) == ({}, [])


def test_a_function_that_raises_is_an_error_whatever_is_chosen(play):
    @register_reward("test_raises_in_reject")
    def raises(rollout):
        raise ValueError("broken")

    failed = attempt(play, rewards=("test_raises_in_reject",), missing_score="reject").last
    assert failed.cause == "reward_error"


def looks_up(found):
    return at_depth(found)


def at_depth(found):
    return found["no such key"]


@register_reward("test_raises_at_depth")
def raises_at_depth(rollout):
    return looks_up({})


@register_reward("test_has_no_verdict")
def has_no_verdict(rollout):
    try:
        return looks_up({})
    except KeyError as error:
        raise NoScoreError("no verdict") from error


@pytest.mark.parametrize("missing_score", ["error", "reject"])
@pytest.mark.parametrize("name", ["test_raises_at_depth", "test_has_no_verdict"])
def test_an_exception_in_a_reward_is_logged_with_traceback_and_recorded_with_line(play, caplog, name, missing_score):
    last = attempt(play, rewards=(name,), missing_score=missing_score).last
    raised = (has_no_verdict, 5, "NoScoreError", "no verdict")
    if name == "test_raises_at_depth":
        raised = (at_depth, 1, "KeyError", "'no such key'")
    function, offset, kind, message = raised
    location = f"test_missing_scores.py line {function.__code__.co_firstlineno + offset}, in {function.__name__}"
    expected = f"reward {name} raised {kind} ({location}): {message}"
    is_rejected = (name, missing_score) == ("test_has_no_verdict", "reject")
    assert (last.missing_scores[name] if is_rejected else last.message) == expected
    (record,) = [one for one in caplog.records if one.levelname == ("WARNING" if is_rejected else "ERROR")]
    functions = [line.rsplit(" ", 1)[1] for line in record.getMessage().splitlines() if line.startswith("  File ")]
    assert [found for found in functions if found in ("looks_up", "at_depth")] == ["looks_up", "at_depth"]
    assert "KeyError: 'no such key'" in record.getMessage()


def test_demonstrations_and_turns_that_are_over_need_no_reward(play):
    demonstrated = play(task_of("arithmetic", policy="demonstration", inputs={"a": 1, "b": 2, "op": "+"}))
    demonstrated.assert_complete()

    @register_environment("test_talks_unrewarded")
    async def talks(session):
        while True:
            await session.chat([{"role": "user", "content": "?"}])

    ended = play(task_of("test_talks_unrewarded", max_turns=2)).last
    assert (ended.stop_reason, ended.missing_scores) == ("max_turns", {})


def test_an_agent_that_nobody_rewards_is_named(play):
    @register_environment("test_rewards_one_of_two")
    async def one_of_two(session):
        for agent in ("ann", "bob"):
            await session.chat([{"role": "user", "content": "?"}], agent=agent)
        await session.reward(1.0, agent="ann")

    agents = {"ann": GROUP, "bob": GROUP}
    play(task_of("test_rewards_one_of_two", agents=agents, frozen_agents=("bob",))).assert_complete()
    failed = play(task_of("test_rewards_one_of_two", agents=agents)).last
    assert failed.cause == "reward_error"
    assert "agents without a reward: bob" in failed.message
    assert "by `await session.reward(...)`, which does nothing without `await`" in failed.message


@register_reward("test_scores_ann")
def scores_ann(rollout):
    return {"ann": 1.0}


def test_a_reward_of_weight_0_does_not_score_an_agent(play):
    @register_environment("test_rewards_both")
    async def both(session):
        for agent in ("ann", "bob"):
            await session.chat([{"role": "user", "content": "?"}], agent=agent)
        await session.reward(0.3)

    settings = {"agents": {"ann": GROUP, "bob": GROUP}, "rewards": ("test_scores_ann",)}
    weights = {"*": 0.0, "test_scores_ann": 1.0}
    play(task_of("test_rewards_both", **settings)).assert_complete()
    failed = play(task_of("test_rewards_both", **settings, reward_weights=weights)).last
    assert "agents without a reward: bob (one of weight 0 does not count)" in failed.message
    own = ({"*": 0.0, "reward": 1.0},)
    play(task_of("test_rewards_both", **settings, reward_weights=weights, algorithm_weights=own)).assert_complete()
    rejected = play(task_of("test_rewards_both", **settings, reward_weights=weights, missing_score="reject")).last
    assert list(rejected.missing_scores) == ["reward"]
