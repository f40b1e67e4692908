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


def side(text: str | None, at: int = 1) -> dict[str, Any]:
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


def test_rollouts_with_tokens_are_grouped_by_datapoint(rig: GroupRig) -> None:
    reward = [[[1.0, 0.0], [0.5, 0.0]], [[0.0, 0.0], [0.0, 0.0]], [[2.0, 0.0], [0.0, 0.0]]]
    arrays = {
        "datapoint_id": [7, 8, 7],
        "agents": {
            "prompt_ids": [[[[1, 2], None], [None, [3]]]] * 3,
            "completion_ids": [[[[4], None], [None, [5]]]] * 3,
            "logprobs": [[[[-0.5], None], [None, [-1.0]]]] * 3,
        },
        "next": {"agents": {"reward": reward}},
    }
    groups = groups_of(arrays, grouped(rig)["prover"])
    assert [[rollout.rewards[0].value for rollout in group] for group in groups] == [[1.5, 2.0], [0.0]]
    (step,) = groups[0][0].steps
    assert step.tokens is not None
    assert list(tokens.decode_ids(step.tokens.completion_ids)) == [4]


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
