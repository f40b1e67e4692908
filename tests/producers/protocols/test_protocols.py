"""The protocols round by round: who speaks, who hears what, when a verdict counts; and what an episode earns."""

import random
import re
from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollstream.producers.protocols import table
from rollstream.producers.protocols.base import Draw, InteractionProtocol, ProtocolSettings, Turn
from rollstream.producers.protocols.episode import Episode, conversation
from rollstream.producers.protocols.rewards import RewardSettings, prover_reward, verdict_of, verifier_reward
from rollstream.schemas.errors import ConfigError

DOCUMENT = Path(__file__).parents[3] / "docs" / "shared-models.md"
PRESENTED = ["nip", "adp", "solo_verifier", "debate", "mnip", "merlin_arthur"]


def drawn(protocol, seed=0):
    return protocol.draw(random.Random(seed))


def order(written, seed=0):
    """Speakers by round."""
    protocol = table.protocol(written)
    draw = drawn(protocol, seed)
    return [
        " ".join(turn.agent for turn in protocol.turns(number, draw)) for number in range(protocol.num_rounds(draw))
    ]


def episode_of(written, *, is_true=True, seed=0):
    protocol = table.protocol(written)
    return Episode(protocol, drawn(protocol, seed), is_true)


# ---- who speaks ----

V, P, P0, P1, BOTH = "verifier", "prover", "prover0", "prover1", "prover0 prover1"


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("nip", [V, P, V, P, V, P, V]),
        ({"name": "nip", "verifier_first": False}, [P, V, P, V, P, V, P, V]),
        ({"name": "nip", "max_rounds": 3}, [V, P, V]),
        ({"name": "nip", "max_rounds": 5, "verifier_first": False}, [P, V, P, V]),
        ("adp", [P, V]),
        ("solo_verifier", [V]),
        ({"name": "debate", "max_rounds": 4}, [V, BOTH, V]),
        ({"name": "debate", "max_rounds": 4, "verifier_first": False}, [BOTH, V, BOTH, V]),
        ({"name": "debate", "max_rounds": 7, "sequential": True}, [V, P0, P1, V, P0, P1, V]),
        (
            {"name": "debate", "max_rounds": 3, "sequential": True, "verifier_first": False, "prover0_first": False},
            [P1, P0, V],
        ),
        ({"name": "mnip", "max_rounds": 3}, [V, BOTH, V]),
        ({"name": "mnip", "max_rounds": 4, "sequential": True, "prover0_first": False}, [V, P1, P0, V]),
    ],
)
def test_rounds_end_with_the_verifiers_last_turn(written, expected):
    assert order(written) == expected


def test_one_of_merlin_and_arthurs_provers_speaks_and_chance_decides_which():
    assert {tuple(order("merlin_arthur", seed)) for seed in range(20)} == {(P0, V), (P1, V)}


@pytest.mark.parametrize("name", table.names())
def test_an_agent_speaks_only_where_it_hears(name):
    protocol = table.protocol(name)
    draw = drawn(protocol)
    for number in range(protocol.num_rounds(draw)):
        for turn in protocol.turns(number, draw):
            assert turn.agent in protocol.agents
            assert all(protocol.sees(turn.agent, channel) for channel in turn.channels)
    assert protocol.turns(protocol.num_rounds(draw), draw) == ()


def test_a_verdict_counts_from_the_first_round_that_allows_it():
    protocol = table.protocol({"name": "nip", "min_rounds": 3})
    assert [protocol.may_decide(number) for number in range(4)] == [False, False, True, True]
    early = episode_of({"name": "nip", "min_rounds": 3}).speak("Y", decision=1.0)
    assert (early.end, early.num_no_guess) == (None, 1)
    assert early.speak("2").speak("Y", decision=1.0).end == "decided"


# ---- stances ----


def stances(written, seed):
    return dict(drawn(table.protocol(written), seed).stances)


@pytest.mark.parametrize(
    ("name", "usual"),
    [
        ("nip", {P: "accept"}),
        ("adp", {P: "accept"}),
        ("debate", {P0: "reject", P1: "accept"}),
        ("merlin_arthur", {P0: "reject", P1: "accept"}),
        ("mnip", {P0: "accept", P1: "accept"}),
        ("solo_verifier", {}),
    ],
)
def test_stances_are_the_protocols_or_all_turned_round_by_chance(name, usual):
    turned = {prover: "reject" if stance == "accept" else "accept" for prover, stance in usual.items()}
    assert [stances(name, seed) for seed in range(8)] == [usual] * 8
    found = [stances({"name": name, "randomize_prover_stance": True}, seed) for seed in range(40)]
    assert usual in found
    assert turned in found
    assert all(one in (usual, turned) for one in found)


def test_randomised_stances_take_as_many_draws():
    for name in table.names():
        left, right = random.Random(3), random.Random(3)
        table.protocol(name).draw(left)
        table.protocol({"name": name, "randomize_prover_stance": True}).draw(right)
        assert left.random() == right.random()


# ---- who hears what ----


def heard(episode, agent):
    return [(one.agent, one.shown) for one in episode.seen_by(agent)]


def two_rounds(name, **options):
    return episode_of({"name": name, "max_rounds": 8} | options).speak("?").speak("a").speak("b").speak("?")


def test_debaters_hear_each_other_a_round_later():
    episode = episode_of("debate").speak("?").speak("a")
    assert heard(episode, P1) == [(V, "?")]
    assert heard(episode, V) == [(V, "?")]
    later = two_rounds("debate")
    assert heard(later, P1) == [(V, "?"), (P1, "b"), (P0, "a"), (V, "?")]
    assert heard(later, P0) == [(V, "?"), (P0, "a"), (P1, "b"), (V, "?")]
    assert heard(later.speak("c").speak("d"), V) == [(V, "?"), (P0, "a"), (P1, "b"), (V, "?"), (P0, "c"), (P1, "d")]


def test_sequential_debaters_hear_who_spoke_before_them():
    episode = episode_of({"name": "debate", "sequential": True}).speak("?").speak("a")
    assert episode.turn == Turn(P1, ("prover1_channel",))
    assert heard(episode, P1) == [(V, "?"), (P0, "a")]


def test_the_provers_of_mnip_never_hear_each_other():
    later = two_rounds("mnip", sequential=True).speak("c")
    assert {agent for agent, _ in heard(later, P0)} == {V, P0}
    assert {agent for agent, _ in heard(later, P1)} == {V, P1}
    assert {agent for agent, _ in heard(later, V)} == {V, P0, P1}


def test_the_answer_of_a_tool_is_seen_by_its_caller_alone():
    episode = episode_of("nip").consult("2", "1").speak("?")
    assert heard(episode, P) == [(V, "?")]
    assert heard(episode, V) == [(V, "1"), (V, "?")]
    opening = [{"role": "system", "content": "verifier"}]
    assert [message["content"] for message in conversation(episode.speak("3"), V, opening)] == [
        "verifier",
        "2",
        "1",
        "?",
        "prover 3",
    ]


def test_a_conversation_only_grows():
    for name in table.names():
        episode, before = episode_of(name), {}
        while episode.turn is not None:
            messages = conversation(episode, episode.turn.agent, [])
            assert messages[: len(before.get(episode.turn.agent, []))] == before.get(episode.turn.agent, [])
            text = f"m{len(episode.utterances)}"
            before[episode.turn.agent] = [*messages, {"role": "assistant", "content": text}]
            episode = episode.speak(text)


# ---- how it ends, and what it earns ----

numbers = st.floats(-5, 5).map(lambda number: number + 0.0)  # not -0.0, which no range from 0.0 on may end with
decisions = st.floats(-1, 1)


@st.composite
def settings_of(draw):
    low, high = sorted((draw(numbers), draw(numbers)))
    neither = draw(st.none() | st.floats(low, high))
    return RewardSettings(verifier_reward=high, verifier_incorrect_penalty=low, verifier_neither_reward=neither)


@given(settings_of(), decisions, st.booleans())
def test_a_verifiers_reward_is_in_its_range_and_symmetric(settings, decision, is_true):
    reward = verifier_reward(decision, is_true=is_true, settings=settings)
    low, high = settings.verifier_incorrect_penalty, settings.verifier_reward
    assert low - 1e-9 <= reward <= high + 1e-9
    assert reward == verifier_reward(-decision, is_true=not is_true, settings=settings)


@given(settings_of(), decisions, decisions, st.booleans())
def test_a_decision_nearer_to_the_label_never_earns_less(settings, one, other, is_true):
    worse, better = sorted((one, other), reverse=not is_true)
    earned = [verifier_reward(decision, is_true=is_true, settings=settings) for decision in (worse, better)]
    assert earned[0] <= earned[1] + 1e-9


@given(st.floats(-1, 0), st.floats(0, 1))
def test_a_verifiers_reward_is_linear_on_each_side(wrong, right):
    settings = RewardSettings(verifier_reward=2.0, verifier_incorrect_penalty=-3.0, verifier_neither_reward=1.0)
    assert verifier_reward(right, is_true=True, settings=settings) == pytest.approx(1.0 + right)
    assert verifier_reward(wrong, is_true=True, settings=settings) == pytest.approx(1.0 + 4.0 * wrong)


def test_the_usual_reward_is_the_decision_itself():
    settings = RewardSettings()
    assert [verifier_reward(d, is_true=True, settings=settings) for d in (-1, -0.5, 0, 0.5, 1)] == [-1, -0.5, 0, 0.5, 1]
    with pytest.raises(ValueError, match=r"decision is 1\.5; it must be in \[-1, 1\]"):
        verifier_reward(1.5, is_true=True, settings=settings)


@given(decisions)
def test_of_two_opponents_at_most_one_is_paid(decision):
    settings = RewardSettings()
    paid = [prover_reward(stance, decision, settings) for stance in ("accept", "reject")]
    assert sum(paid) == (0.0 if verdict_of(decision) is None else 1.0)


@given(st.sampled_from(table.names()), st.booleans(), st.integers(0, 99), st.data())
def test_every_episode_ends_and_pays_whoever_may_speak(name, is_true, seed, data):
    episode, num = episode_of(name, is_true=is_true, seed=seed), 0
    while episode.turn is not None:
        decision = data.draw(st.none() | decisions)
        episode = episode.speak("x", decision=decision, valid=data.draw(st.booleans()))
        num += 1
    assert num <= 3 * episode.protocol.max_rounds
    assert set(episode.rewards()) == {V, *episode.draw.provers}
    assert all(-1 <= reward <= 1 for reward in episode.rewards().values())
    with pytest.raises(ValueError, match="the episode is over"):
        episode.speak("more")


def test_rounds_without_a_verdict_cost_the_verifier_and_pay_nobody():
    options = {"name": "nip", "max_rounds": 3, "verifier_no_guess_reward": -0.25}
    episode = episode_of(options).speak("?").speak("2").speak("?")
    assert (episode.end, episode.verdict) == ("no_verdict", None)
    assert episode.rewards() == {V: -1.25, P: 0.0}
    assert episode_of(options).speak("?").run_out().rewards() == {V: -1.25, P: 0.0}


@pytest.mark.parametrize(
    ("written", "verdict", "expected"),
    [
        ("nip", 1.0, {V: 1.0, P: 1.0}),
        ("nip", -1.0, {V: -1.0, P: 0.0}),
        ("debate", 1.0, {V: 1.0, P0: 0.0, P1: 1.0}),
        ("debate", -1.0, {V: -1.0, P0: 1.0, P1: 0.0}),
        ("mnip", 1.0, {V: 1.0, P0: 1.0, P1: 1.0}),
        ({"name": "mnip", "shared_reward": True}, -0.5, {V: -0.5, P0: -0.5, P1: -0.5}),
        ({"name": "nip", "prover_reward": 3.0}, 0.25, {V: 0.25, P: 3.0}),
        ({"name": "nip", "force_guess": "reject"}, 1.0, {V: -1.0, P: 0.0}),
        ({"name": "nip", "force_guess": "label"}, None, {V: 1.0, P: 1.0}),
        ("nip", 0.0, {V: 0.0, P: 0.0}),
        ("solo_verifier", 1.0, {V: 1.0}),
    ],
)
def test_a_verdict_pays_by_the_protocol(written, verdict, expected):
    assert episode_of(written).speak("verdict", decision=verdict).rewards() == expected


def test_a_malformed_message_of_a_prover_ends_the_episode_if_it_has_a_price():
    free = episode_of("debate").speak("?").speak("???", shown="-", valid=False)
    assert free.end is None
    priced = episode_of({"name": "debate", "prover_invalid_response_penalty": -2.0}).speak("?").speak("??", valid=False)
    assert priced.end == "invalid_response"
    assert priced.rewards() == {V: 0.0, P0: -2.0, P1: 0.0}


# ---- by name ----


@pytest.mark.parametrize(
    ("written", "words"),
    [
        ("debat", r"protocol: 'debat' is unknown; did you mean debate\?"),
        ("zzz", "known protocols: adp, debate, merlin_arthur, mnip, nip, solo_verifier"),
        ({"max_rounds": 3}, "protocol: name is missing"),
        ({"name": "nip", "max_round": 3}, r"protocol\.max_round: unknown key; did you mean max_rounds\?"),
        ({"name": "adp", "max_rounds": 3}, r"protocol\.max_rounds: unknown key"),
        ({"name": "nip", "max_rounds": 2, "min_rounds": 3}, "min_rounds 3 exceeds max_rounds 2"),
        ({"name": "nip", "max_rounds": 1, "verifier_first": False}, "leaves the verifier no verdict .it has no turn."),
        ({"name": "nip", "max_rounds": 4, "min_rounds": 4}, "its last turn is in round 3"),
        ({"name": "nip", "force_guess": "maybe"}, "protocol.force_guess: "),
        ("python:nothing", "write python:module.Name"),
        ("python:no_such_module.Thing", "no_such_module cannot be imported"),
        ("python:rollstream.producers.protocols.builtin.Nipp", "did you mean Nip"),
        ("python:random.Random", "must be a subclass of"),
        ("python:rollstream.producers.protocols.base.InteractionProtocol", "does not define cycle"),
    ],
)
def test_an_invalid_protocol_is_refused_with_the_reason(written, words):
    with pytest.raises(ConfigError, match=words):
        table.protocol(written)


class Interview(InteractionProtocol):
    """The verifier asks, the prover answers, the verifier decides."""

    stances = {P: "accept"}  # noqa: RUF012
    channels: ClassVar = {"main": (P, V)}
    max_rounds = 3

    def cycle(self, draw: Draw) -> tuple[tuple[Turn, ...], ...]:
        return (Turn(V, ("main",)),), (Turn(P, ("main",)),)


class Crowded(Interview):
    def cycle(self, draw: Draw) -> tuple[tuple[Turn, ...], ...]:
        return ((Turn(V, ("main",)), Turn(P, ("main",))),)


class Eavesdropping(Interview):
    channels: ClassVar = {"main": (V,)}


class Silent(Interview):
    def cycle(self, draw: Draw) -> tuple[tuple[Turn, ...], ...]:
        return (Turn(V, ("main",)),), ()


def test_a_protocol_of_ones_own_is_found_by_its_path_and_by_the_name_that_it_registers():
    assert order(f"python:{__name__}.Interview") == [V, P, V]
    table.register_protocol("test_interview")(Interview)
    table.register_protocol("test_interview")(Interview)
    assert order("test_interview") == [V, P, V]
    with pytest.raises(ConfigError, match=r"'test_interview' is registered twice: by .*Interview and by .*Crowded"):
        table.register_protocol("test_interview")(Crowded)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Crowded", "round 1: two agents speak in channel main"),
        ("Eavesdropping", "round 2: prover speaks in channel main but does not see it"),
        ("Silent", "round 2 has no turn"),
    ],
)
def test_a_cycle_that_cannot_be_played_is_refused(name, words):
    with pytest.raises(ConfigError, match=words):
        table.protocol(f"python:{__name__}.{name}")


def test_the_protocol_of_the_documents_can_be_played():
    text = DOCUMENT.read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    (code,) = [block for block in blocks if "@register_protocol" in block]
    exec(compile(code, str(DOCUMENT), "exec"), {"__name__": "guide"})
    assert order("interview") == [V, P, V]
    listed = re.findall(r"^\| `(\w+)` \|", text.partition("### Differences")[0], re.MULTILINE)
    assert [name for name in listed if name in table.names()] == PRESENTED
    options = re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (`\w+`(?:, `\w+`)*) \|", text, re.MULTILINE)))
    assert set(ProtocolSettings.model_fields) <= set(options)
