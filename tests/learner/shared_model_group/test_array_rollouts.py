"""Rollouts in nip's array form: the messages, prompts, labels, rewards and tokens that they become."""

import asyncio
import json
from typing import Any

import numpy as np
import pytest

from rollstream.learner.shared_model_group import GroupAgent
from rollstream.learner.shared_model_group.array_rollouts import examples_of, groups_of, labelled_of, rollouts_of
from rollstream.learner.shared_model_group.examples import dpo_examples, sft_examples
from rollstream.schemas import tokens
from rollstream.schemas.errors import ConfigError
from tests.rigs.runs.group_rig import GROUP, WAIT_S, GroupRig

HISTORY = [[None, "is it one?"], ["yes", None], [None, "accept"]]
"""(M, A): prover 0, verifier 1."""


def rollouts(**changes: Any) -> dict[str, Any]:
    """Two rollouts of three timesteps; only the last timestep has the whole history."""
    unfinished = [[None, None]] * 3
    return {
        "next": {
            "raw_message_history": [[unfinished, unfinished, HISTORY]] * 2,
            "agents": {"reward": [[[0.0, 0.5], [0.25, 0.0], [0.0, 1.0]]] * 2},
        },
        "question": [["claim"] * 3] * 2,
        "y": [[1] * 3, [0] * 3],
        **changes,
    }


class Ids:
    """The part of a group that an agent uses."""

    group_name = "players"
    model_name = "m"

    def agent_id(self, name: str) -> int:
        return ("prover", "verifier").index(name)


def grouped(rig: GroupRig, **changes: Any) -> dict[str, GroupAgent]:
    found = rig.agents()
    for agent in found:
        agent.group = Ids()
        for name, value in changes.items():
            setattr(agent, name, value)
    return {agent.name: agent for agent in found}


def texts(rollout: Any) -> list[tuple[list[tuple[str, str]], str]]:
    """Prompt and answer of every step."""
    return [
        ([(message["role"], message["content"]) for message in step.chat.messages], step.chat.answer["content"])
        for step in rollout.steps
    ]


def test_the_last_timestep_gives_every_round_with_what_came_before(rig: GroupRig) -> None:
    members = grouped(rig, system_prompt="Be brief.")
    first, second = rollouts_of(rollouts(), members["verifier"])
    before = [("system", "Be brief."), ("user", "claim")]
    assert texts(first) == [
        (before, "is it one?"),
        ([*before, ("assistant", "is it one?"), ("user", "yes")], "accept"),
    ]
    assert texts(second) == texts(first)
    assert [reward.value for reward in first.rewards] == [1.5]
    (conversation,) = texts(rollouts_of(rollouts(), members["prover"])[0])
    assert conversation == ([*before, ("user", "is it one?")], "yes")


def test_numpy_arrays_are_read_as_lists_are(rig: GroupRig) -> None:
    members, given = grouped(rig), rollouts()
    history = np.array(given["next"]["raw_message_history"], dtype=object)
    arrays = {
        "next": {"raw_message_history": history},
        "question": np.array(given["question"]),
        "y": np.array(given["y"]),
    }
    assert history.shape == (2, 3, 3, 2)
    plain = rollouts_of(
        {**given, "next": {"raw_message_history": given["next"]["raw_message_history"]}}, members["verifier"]
    )
    assert rollouts_of(arrays, members["verifier"]) == plain
    assert [label for _, label in labelled_of(arrays, members["verifier"])] == [1, 0]


def test_given_prompts_take_the_place_of_built_ones_and_padding_is_left_out(rig: GroupRig) -> None:
    asked = [{"role": "user", "content": "asked"}]
    prompts = [[[None, json.dumps(asked)], [asked, None], [None, asked]]] * 2
    given = rollouts(agents={"prompt": prompts}, padding=[[False, False, True]] * 2)
    assert texts(rollouts_of(given, grouped(rig)["verifier"])[0]) == [([("user", "asked")], "is it one?")]


def test_labels_take_the_place_of_the_verifiers_last_message(rig: GroupRig) -> None:
    found = sft_examples(grouped(rig), GROUP, {}, {"verifier": rollouts()})
    conversations = [texts(group.members[0].rollout) for group in found]
    assert [one[-1][1] for one in conversations] == ["Decision: accept", "Decision: reject"]
    assert [one[0][1] for one in conversations] == ["is it one?", "is it one?"]


def side(text: str | None, at: Any = 1) -> dict[str, Any]:
    """One example of the prover."""
    history = [[None, "is it one?"], [text, None]]
    return {"round": [at], "next": {"raw_message_history": [history]}, "question": ["claim"]}


def test_both_sides_of_a_pair_answer_the_same_history(rig: GroupRig) -> None:
    (pair,) = dpo_examples(grouped(rig), GROUP, {"prover": side("yes")}, {"prover": side("no")})
    better, worse = (member.rollout for member in pair.members)
    assert texts(better) == [([("user", "claim"), ("user", "is it one?")], "yes")]
    assert texts(worse)[0][1] == "no"
    assert [reward.value for reward in better.rewards] == [1.0, 1.0] if better else False


@pytest.mark.parametrize(
    ("positive", "negative", "message"),
    [
        (side("yes"), side(None), "agent prover, example 0: its message of round 1 is None"),
        (side("yes"), side("no", at=0), "agent prover, example 0: its message of round 0 is None"),
        (side("yes", at=5), side("no"), "agent prover, example 0: round 5 is not one of 2"),
        (side("yes", at=None), side("no"), "agent prover, example 0: round None is not one of 2"),
        (side("yes", at=0.5), side("no"), "agent prover, example 0: round 0.5 is not one of 2"),
        ({**side("yes"), "question": []}, side("no"), "question has 0 rows, others 1; leading shapes must agree"),
        ({**side("yes"), "agents": {"prompt": [[]]}}, side("no"), "prompt of row 0 has 0 agents, fewer than 1"),
        ({"round": [1]}, side("no"), "rollouts in array form have no key next/raw_message_history"),
        ({**side("yes"), "round": [1, 1]}, side("no"), "raw_message_history has 1 rows, others 2; leading shapes must"),
    ],
)
def test_broken_pairs_are_refused(rig: GroupRig, positive: Any, negative: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        dpo_examples(grouped(rig), GROUP, {"prover": positive}, {"prover": negative})


def test_pairs_of_different_rounds_are_refused(rig: GroupRig) -> None:
    messages = [["a", None], ["b", None]]
    sides = [{"round": [at], "next": {"raw_message_history": [messages]}, "question": ["claim"]} for at in (0, 1)]
    assert [examples_of(one, grouped(rig)["prover"])[0][0] for one in sides] == [0, 1]
    with pytest.raises(ConfigError, match="the positive is of round 0, the negative of round 1"):
        dpo_examples(grouped(rig), GROUP, {"prover": sides[0]}, {"prover": sides[1]})


def test_an_empty_prompt_is_refused(rig: GroupRig) -> None:
    given = rollouts()
    del given["question"]
    with pytest.raises(
        ConfigError, match="round 0 has an empty prompt; give question, a system_prompt or agents/prompt"
    ):
        rollouts_of(given, grouped(rig)["verifier"])


def timed(**changes: Any) -> dict[str, Any]:
    """Three rollouts of two timesteps with tokens and rewards; prover 0 acts in the first, verifier 1 in the second."""
    reward = [[[1.0, 0.0], [0.5, 0.0]], [[0.0, 0.0], [0.0, 0.0]], [[2.0, 0.0], [0.0, 0.0]]]
    tokens_R_T_A = {
        "prompt_ids": [[[[1, 2], None], [None, [3]]]] * 3,
        "completion_ids": [[[[4], None], [None, [5]]]] * 3,
        "logprobs": [[[[-0.5], None], [None, [-1.0]]]] * 3,
    }
    given = {"datapoint_id": [7, 8, 7], "reward": reward, **tokens_R_T_A, **changes}
    return {
        "datapoint_id": given["datapoint_id"],
        "agents": {name: given[name] for name in tokens_R_T_A},
        "next": {"agents": {"reward": given["reward"]}},
    }


def test_rollouts_with_tokens_are_grouped_by_datapoint(rig: GroupRig) -> None:
    groups = groups_of(timed(), grouped(rig)["prover"])
    assert [[rollout.rewards[0].value for rollout in group] for group in groups] == [[1.5, 2.0], [0.0]]
    (step,) = groups[0][0].steps
    assert step.tokens is not None
    assert list(tokens.decode_ids(step.tokens.completion_ids)) == [4]


def test_arrays_within_lists_are_read_as_lists_are(rig: GroupRig) -> None:
    agent = grouped(rig)["verifier"]
    given = rollouts()
    inner = rollouts(
        question=[np.array(row) for row in given["question"]],
        y=[np.array(row, dtype=float) for row in given["y"]],
        padding=[np.zeros(3, dtype=bool)] * 2,
    )
    inner["next"]["agents"]["reward"] = [np.array(row) for row in given["next"]["agents"]["reward"]]
    assert labelled_of(inner, agent) == labelled_of(given, agent)


@pytest.mark.parametrize("labels", [[1.0, 0.0], np.array([1.0, 0.0]), np.array([True, False]), [[1.0] * 3, [0.0] * 3]])
def test_labels_of_other_types_of_number_are_labels_too(rig: GroupRig, labels: Any) -> None:
    found = sft_examples(grouped(rig), GROUP, {}, {"verifier": rollouts(y=labels)})
    assert found == sft_examples(grouped(rig), GROUP, {}, {"verifier": rollouts()})


def with_history(history: Any) -> dict[str, Any]:
    return rollouts(next={"raw_message_history": history})


def with_reward(reward: Any) -> dict[str, Any]:
    return rollouts(next={"raw_message_history": [[HISTORY]] * 2, "agents": {"reward": reward}})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (with_history(None), "have no key next/raw_message_history; see the documented shapes"),
        (with_history("yes"), "raw_message_history has no axis of rollouts"),
        (with_history([[], []]), "raw_message_history of row 0 has 0 timesteps, fewer than 1; see the documented"),
        (with_history([[HISTORY], [None]]), "raw_message_history of row 1 has no axis of rounds"),
        (
            with_history([[[["yes"]]]] * 2),
            "raw_message_history of row 0 has 1 agents, fewer than 2; see the documented",
        ),
        (with_history([[[None]]] * 2), "raw_message_history of row 0 has no axis of agents"),
        (rollouts(question=["claim"]), "question has 1 rows, others 2; leading shapes must agree"),
        (rollouts(question=[["claim"], []]), "question of row 1 has 0 timesteps, fewer than 1"),
        (rollouts(question=[[["claim"]]] * 2), "question of row 0 is not one value"),
        (rollouts(padding=[[False] * 3]), "padding has 1 rows, others 2"),
        (rollouts(padding=[[False]] * 2), "timesteps of row 0: raw_message_history 3, padding 1, reward 3; leading"),
        (rollouts(padding=[False, False]), "padding of row 0 has no axis of timesteps"),
        (rollouts(agents={"prompt": [[[None, None]] * 3]}), "prompt has 1 rows, others 2"),
        (rollouts(agents={"prompt": [[[None]] * 3] * 2}), "prompt of row 0 has 1 agents, fewer than 2"),
        (rollouts(agents={"prompt": [[[None, "{"]] * 3] * 2}), r"agents/prompt at \(0, 0\) is not JSON"),
        (with_reward([[[0.0, 1.0]]]), "reward has 1 rows, others 2"),
        (with_reward([[[0.0]]] * 2), "reward of row 0 has 1 agents, fewer than 2"),
        (with_reward([[]] * 2), "reward of row 0 has 0 timesteps, fewer than 1"),
        (
            with_reward([[[0.0, None]]] * 2),
            "agent verifier, rollout 0, timestep 0: reward None is not a number; give 0",
        ),
        (with_reward([[[0.0, float("nan")]]] * 2), "timestep 0: reward nan is not a number"),
        (rollouts(y=[1]), "y has 1 rows, others 2"),
        (rollouts(y=[[], []]), "y of row 0 has 0 timesteps, fewer than 1"),
        (rollouts(y=[None, 0]), "agent verifier: label None is not 0 or 1"),
        (rollouts(y=[0.5, 0]), "agent verifier: label 0.5 is not 0 or 1"),
    ],
)
def test_rollouts_of_another_shape_are_refused(rig: GroupRig, given: Any, message: str) -> None:
    agents = grouped(rig)
    with pytest.raises(ConfigError, match=message):
        sft_examples(agents, GROUP, {"verifier": given}, {"verifier": given})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            timed(prompt_ids=[[[[1, 2], None]]] * 3),
            "row 0: prompt_ids 1, completion_ids 2, logprobs 2, reward 2; leading",
        ),
        (timed(logprobs=[[[[-0.5], None]] * 2] * 2), "logprobs has 2 rows, others 3"),
        (timed(reward=[[[None, 0.0]] * 2] * 3), "agent prover, rollout 0, timestep 0: reward None is not a number"),
        (timed(reward=[[[], []]] * 3), "reward of row 0 has 0 agents, fewer than 1"),
        (timed(logprobs=[[[None, None]] * 2] * 3), "timestep 0: logprobs is not a list of numbers; give the tokens of"),
        (timed(prompt_ids=[[[[], None]] * 2] * 3), "timestep 0: prompt_ids is not a list of numbers"),
        (timed(logprobs=[[[[-0.5, -0.5], None]] * 2] * 3), "1 completion_ids and 2 logprobs; give as many of each"),
        (timed(prompt_ids=[[[[1.5], None]] * 2] * 3), "give token ids as whole numbers and logprobs as numbers"),
        (timed(datapoint_id=[7, 8]), "prompt_ids has 3 rows, others 2"),
        (timed(datapoint_id=[{}, 8, 7]), "datapoint_id of row 0 is not one value"),
    ],
)
def test_tokens_of_another_shape_are_refused(rig: GroupRig, given: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        groups_of(given, grouped(rig)["prover"])


def test_a_job_is_trained_from_arrays(rig: GroupRig) -> None:
    async def body() -> None:
        async with rig.services(), await rig.open() as group:
            await group.create_supervised_fine_tune_job({"prover": rollouts(), "verifier": rollouts()})
            assert await group.wait_for_fine_tune_job(timeout=WAIT_S) == "succeeded", group.jobs
            await group.switch_to_next_model()
            await group.create_dpo_fine_tune_job({"prover": side("yes")}, {"prover": side("no")})
            assert await group.get_fine_tune_job_error_repr() == (
                "skipped: 1 examples, at least 2 are needed; the model stays at version 1"
            )

    asyncio.run(body())
