"""The hidden bits: played by every protocol through the real attempt, rewards and verdicts as they are recorded."""

import json
import random
import re
import statistics
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollstream.producers.environments.bit_proof import BitProof, Proof, as_positions
from rollstream.producers.protocols import table
from rollstream.producers.protocols.episode import Episode
from rollstream.schemas.events import RolloutEnded, RolloutFailed
from tests.producers.conftest import GROUP, answers, task_of

PROVERS = {
    "nip": ("prover",),
    "adp": ("prover",),
    "solo_verifier": (),
    "debate": ("prover0", "prover1"),
    "mnip": ("prover0", "prover1"),
    "merlin_arthur": ("prover0", "prover1"),
}
OTHER = "run-1/verifier_model"


def proof_task(protocol: Any = "nip", *, bits=None, agents=None, seed=11, policy="model", max_turns=16, **config):
    name = protocol if isinstance(protocol, str) else protocol["name"]
    agents = agents if agents is not None else {**dict.fromkeys(PROVERS[name], GROUP), "verifier": OTHER}
    inputs = {} if bits is None else {"bits": bits}
    return task_of(
        "bit_proof",
        inputs=inputs,
        seed=seed,
        agents=agents,
        policy=policy,
        max_turns=max_turns,
        environment_config={"protocol": protocol, **config},
    )


def rewards(played):
    return {reward.agent: reward.value for reward in played.rewards}


def tools(played, name):
    return [step.data for step in played.steps if step.event_type == "TOOL_END" and step.name == name]


def transcript(played):
    return [(step.agent, step.data["output"]) for step in played.steps if step.llm]


def spoke(played):
    return sorted({agent for agent, _ in transcript(played)})


def inputs_of(played, agent):
    """The messages of an agent's last call."""
    (*_, last) = [step for step in played.steps if step.llm and step.agent == agent]
    return [f"{message['role']}: {message['content']}" for message in last.data["input"]]


def test_a_proof_is_asked_for_looked_at_and_believed(play):
    played = play(proof_task(bits="0010"), answers("?", "2", "2", "Y"))
    played.assert_complete()
    assert transcript(played) == [("verifier", "?"), ("prover", "2"), ("verifier", "2"), ("verifier", "Y")]
    assert tools(played, "look") == [{"input": "2", "output": "1"}]
    assert tools(played, "verdict") == [
        {
            "input": {"verdict": "accept", "decision": 1.0, "end": "decided"},
            "output": {"label": "accept", "is_correct": True},
        }
    ]
    assert rewards(played) == {"verifier": 1.0, "prover": 1.0}
    assert inputs_of(played, "verifier") == [
        "system: verifier ????",
        "user: any 1?",
        "assistant: ?",
        "user: prover 2",
        "assistant: 2",
        "tool: 1",
    ]
    assert inputs_of(played, "prover") == ["system: prover Y ..2.", "user: any 1?", "user: verifier ?"]


def test_each_agent_speaks_through_its_own_model_group_and_keeps_its_tokens(play):
    played = play(proof_task(bits="0000"), answers("?", "2", "2", "N"))
    calls = [step for step in played.steps if step.llm]
    assert [step.name for step in calls] == [OTHER, GROUP, OTHER, OTHER]
    assert [step.llm.prefix and step.llm.prefix.step_index for step in calls] == [None, None, 0, 2]
    assert rewards(played) == {"verifier": 1.0, "prover": 0.0}


@pytest.mark.parametrize("protocol", list(PROVERS))
def test_skilled_players_prove_what_is_true_and_nothing_else(play, protocol):
    for bits in ("0100", "0000"):
        played = play(proof_task(protocol, bits=bits, policy="demonstration", skill=1.0))
        played.assert_complete()
        (verdict,) = tools(played, "verdict")
        assert verdict["output"]["is_correct"] or protocol in ("solo_verifier", "merlin_arthur")
        assert sorted(rewards(played)) == spoke(played)


def accuracy(play, protocol, skill, num=120):
    tasks = [proof_task(protocol, policy="demonstration", seed=seed, skill=skill) for seed in range(num)]
    return statistics.mean(tools(play(task), "verdict")[0]["output"]["is_correct"] for task in tasks)


def test_a_prover_is_worth_more_than_the_best_that_the_verifier_does_alone(play):
    assert accuracy(play, "adp", 1.0) == accuracy(play, "nip", 1.0) == 1.0
    assert accuracy(play, "solo_verifier", 1.0) == pytest.approx(0.625, abs=0.12)
    assert accuracy(play, "adp", 0.0) < 0.65


def test_members_of_a_group_have_the_same_secret_and_the_same_speaker(play):
    for protocol in ("nip", "merlin_arthur"):
        options = {"name": protocol, "randomize_prover_stance": True}
        seen = set()
        for seed in range(6):
            task = proof_task(options, seed=seed)
            members = [play(task, answers("?", "1", "Y"), member=member) for member in range(3)]
            openings = {tuple((agent, inputs_of(one, agent)[0]) for agent in spoke(one)) for one in members}
            assert len(openings) == 1
            seen |= openings
        assert len(seen) > 2


def test_the_secret_does_not_depend_on_the_protocol(play):
    def secret(protocol, seed):
        played = play(proof_task(protocol, seed=seed), answers("Y"))
        return tools(played, "verdict")[0]["output"]["label"]

    for seed in range(8):
        assert len({secret(protocol, seed) for protocol in ("solo_verifier", "nip", "adp", "debate")}) == 1


@pytest.mark.parametrize("text", ["", "x", "22", "9", "4", "y", "Y!"])
def test_a_malformed_message_of_the_verifier_is_a_turn_without_a_verdict(play, text):
    played = play(proof_task({"name": "nip", "max_rounds": 3}, bits="0010"), answers(text, "2", "N"))
    assert transcript(played) == [("verifier", text), ("prover", "2"), ("verifier", "N")]
    assert inputs_of(played, "prover")[-1] == "user: verifier -"
    assert rewards(played) == {"verifier": -1.0, "prover": 0.0}


def test_a_second_look_is_malformed(play):
    played = play(proof_task("solo_verifier", bits="0010"), answers("0", "1"))
    assert tools(played, "look") == [{"input": "0", "output": "0"}]
    assert tools(played, "verdict")[0]["input"] == {"verdict": None, "decision": None, "end": "no_verdict"}
    assert rewards(played) == {"verifier": -1.0}


def test_a_malformed_message_of_a_prover_is_empty_or_has_its_price(play):
    free = play(proof_task("adp", bits="0010"), answers("look at 2", "N"))
    assert inputs_of(free, "verifier")[-1] == "user: prover -"
    priced = play(
        proof_task({"name": "adp", "prover_invalid_response_penalty": -0.5}, bits="0010"), answers("look at 2", "N")
    )
    priced.assert_complete()
    assert rewards(priced) == {"verifier": 0.0, "prover": -0.5}
    assert tools(priced, "verdict")[0]["input"]["end"] == "invalid_response"


def test_an_agent_without_turns_left_ends_the_episode_without_a_verdict(play):
    played = play(proof_task("nip", bits="0010", max_turns=2), answers("?", "1"))
    played.assert_complete()
    assert played.last.stop_reason == "max_turns"
    assert rewards(played) == {"verifier": -1.0, "prover": 0.0}


def test_two_attempts_with_one_seed_play_alike(play):
    task = proof_task("debate", policy="demonstration", skill=0.5)
    assert play(task, member=1).contents() == play(task, member=1).contents()


@pytest.mark.parametrize(
    ("task", "words"),
    [
        (
            proof_task("nip", agents={"agent": GROUP}),
            "plays with the agents prover, verifier, but the run has no prover",
        ),
        (
            proof_task("debate", agents={"prover0": GROUP, "verifier": GROUP}),
            r"has no prover1; set .*\.agents: \[prover0",
        ),
        (proof_task("debat", agents={"agent": GROUP}), "did you mean debate"),
        (
            task_of("bit_proof", environment_config={"protocol": {"name": "nip", "rounds": 3}}),
            "protocol.rounds: unknown key",
        ),
        (proof_task(num_bits=11), "num_bits is 11; it must be in 1..10"),
        (proof_task("nip", bits="01x"), "bits is '01x'"),
    ],
)
def test_an_unplayable_proof_fails_with_the_reason(play, task, words):
    failed = play(task, answers("Y"))
    assert isinstance(failed.last, RolloutFailed)
    assert re.search(words, failed.last.message), failed.last.message


def test_examples_are_balanced_and_every_true_string_comes():
    made = [example["bits"] for example in BitProof().examples(16, seed=3)]
    assert made == [example["bits"] for example in BitProof().examples(16, seed=3)]
    assert made.count("0000") == 8
    assert {made.count(bits) for bits in ("1000", "0100", "0010", "0001")} == {2}
    json.dumps(made)


def test_a_verifier_alone_needs_no_prover(play):
    played = play(proof_task("solo_verifier", bits="0010"), answers("2", "Y"))
    assert isinstance(played.last, RolloutEnded)
    assert rewards(played) == {"verifier": 1.0}


BITS = st.sampled_from(["0000", "0100"])
ANSWERS = st.sampled_from(["Y", "N", "?", "0", "3", " 2 ", ""]) | st.text(max_size=3)


@given(
    st.sampled_from(sorted(PROVERS)),
    st.sampled_from(["0000", "0100"]),
    st.integers(0, 9),
    st.lists(ANSWERS, min_size=40),
)
def test_an_episode_ends_within_its_rounds_and_looks_whatever_the_answers(name, bits, seed, answers):
    protocol = table.protocol(name)
    proof = Proof(bits, Episode(protocol, protocol.draw(random.Random(seed)), "1" in bits), looks=2)
    texts = iter(answers)
    while proof.agent is not None:
        known = [message["content"] for message in proof.messages(proof.agent)]
        assert (as_positions(bits) in known[0]) == (proof.agent != "verifier")
        before, proof = proof, proof.play(next(texts))
        assert len(proof.episode.utterances) == len(before.episode.utterances) + 1
    assert len(proof.episode.utterances) <= 2 * protocol.max_rounds + 2
    assert {one.shown for one in proof.episode.utterances} <= set("0123YN?-")


def replacing(share, annealing="none", rate=0.1):
    return {
        "name": "adp",
        "verifier_guess_replacement_proportion": share,
        "verifier_guess_replacement_annealing": annealing,
        "verifier_guess_replacement_annealing_rate": rate,
    }


def test_the_right_verdict_is_recorded_beside_the_verifiers_in_a_share_of_the_episodes(play):
    task = proof_task(replacing(1.0), bits="0010")
    played = play(task, answers("2", "N"))
    played.assert_complete()
    assert transcript(played) == [("prover", "2"), ("verifier", "N"), ("verifier", "Y")]
    sampled, right = (step for step in played.steps if step.llm and step.agent == "verifier")
    assert sampled.data["input"] == right.data["input"]
    assert sampled.llm.spans
    assert (right.llm.spans, right.llm.logprobs) == ((), None)
    assert rewards(played)["verifier"] == -1.0, "the reward is that of the verdict that was sampled"
    assert transcript(play(proof_task(replacing(0.0), bits="0010"), answers("2", "N"))) == [
        ("prover", "2"),
        ("verifier", "N"),
    ]


def test_a_share_is_drawn_by_member_and_validations_are_left_alone(play):
    task = proof_task(replacing(0.5), bits="0010")
    found = [len(transcript(play(task, answers("2", "N"), member=member))) for member in range(16)]
    assert {2, 3} == set(found)
    validation = proof_task(replacing(1.0), bits="0010").model_copy(update={"purpose": "validation"})
    assert len(transcript(play(validation, answers("2", "N")))) == 2


def test_the_share_falls_from_epoch_to_epoch():
    def shares(annealing):
        settings = table.protocol(replacing(0.4, annealing, 0.25)).settings
        return [round(settings.guess_replacement(epoch), 4) for epoch in range(3)]

    assert shares("none") == [0.4, 0.4, 0.4]
    assert shares("linear") == [0.4, 0.15, 0.0]
    assert shares("exponential") == [0.4, 0.3, 0.225]
