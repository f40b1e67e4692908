"""Tic-tac-toe with an agent in each seat."""

import pytest

from rollstream.producers.environments import tic_tac_toe_board as rules
from tests.producers.conftest import GROUP, answers, task_of

OTHER = "run-1/other"


def game(*, agents=None, inputs=None, seed=11, policy="model", max_turns=5, **config):
    return task_of(
        "tic_tac_toe_self_play",
        inputs=inputs,
        seed=seed,
        agents=agents or {"X": GROUP, "O": OTHER},
        policy=policy,
        max_turns=max_turns,
        environment_config=config,
    )


def outcome(played):
    return {reward.agent: reward.value for reward in played.rewards if reward.name == "outcome"}


def moves(played):
    return [(step.agent, step.data["output"]) for step in played.steps if step.llm]


def boards(played, agent):
    (*_, last) = [step for step in played.steps if step.llm and step.agent == agent]
    return [message["content"] for message in last.data["input"]]


def test_the_seats_move_in_turn_through_their_own_model_groups(play):
    played = play(game(), answers("0", "3", "1", "4", "2"))
    played.assert_complete()
    assert moves(played) == [("X", "0"), ("O", "3"), ("X", "1"), ("O", "4"), ("X", "2")]
    assert {step.agent: step.name for step in played.steps} == {"X": GROUP, "O": OTHER}
    assert outcome(played) == {"X": 1.0, "O": 0.0}
    assert boards(played, "O") == ["X12345678", "3", "XX2O45678"]
    assert boards(played, "X") == ["012345678", "0", "X12O45678", "1", "XX2OO5678"]


def test_every_move_is_valued_for_its_own_seat(play):
    board = "XX2" + "OO5" + "678"
    played = play(game(inputs={"board": board}), answers("8", "5"))
    valued = [(one.agent, one.name, one.value) for one in played.rewards]
    assert valued == [
        ("X", "move", pytest.approx(-0.2)),
        ("O", "move", 0.0),
        ("X", "outcome", 0.0),
        ("O", "outcome", 1.0),
    ]
    assert [one.step_index for one in played.rewards] == [0, 1, None, None]


def test_the_turn_follows_from_a_given_board(play):
    played = play(game(inputs={"board": "XX2O45678"}), answers("2", "4", "5"))
    assert moves(played)[0][0] == "O"
    failed = play(game(inputs={"board": "XXX345678"}), answers("3"))
    assert "X must have as many marks as O, or one more" in failed.last.message


@pytest.mark.parametrize("move", ["0", "9", "", "33", "x", "²"])
def test_an_illegal_move_costs_who_made_it_and_wins_nothing(play, move):
    played = play(game(), answers("0", move))
    played.assert_complete()
    assert outcome(played) == {"X": 0.5, "O": -0.5}


def test_perfect_players_draw_and_a_draw_is_half(play):
    def perfect(prompt, rng, version):
        board = prompt.rsplit("<end><assistant>", 1)[0][-9:]
        return str(rng.choice(rules.best_moves(board, rules.mover(board)))), 0.0

    for seed in range(4):
        played = play(game(seed=seed, opening_moves=seed % 2), perfect)
        assert outcome(played) == {"X": 0.5, "O": 0.5}
        for seat, other in (("X", "O"), ("O", "X")):
            against = play(game(seed=seed, agents={seat: GROUP}, scripted={other: "random"}), perfect)
            assert against.last.kind == "rollout_ended"
            assert outcome(against)[seat] >= 0.5
            drawn = play(game(seed=seed, agents={seat: GROUP}, scripted={other: "perfect"}), perfect)
            assert outcome(drawn) == {seat: 0.5}


def test_openings_are_the_groups_and_demonstrations_are_legal(play):
    tasks = [game(seed=seed, policy="demonstration", opening_moves=3) for seed in range(8)]
    first = {tuple(boards(play(task, member=member), "O")[0] for member in range(3)) for task in tasks}
    assert all(len(set(found)) == 1 for found in first)
    assert len(first) > 4
    played = [play(task) for task in tasks]
    assert all(set(outcome(one).values()) in ({1.0, 0.0}, {0.5}) for one in played)
    assert all(one.steps[0].agent == "O" for one in played)


def test_an_agent_without_turns_left_draws(play):
    played = play(game(max_turns=1), answers("0", "4"))
    assert played.last.stop_reason == "max_turns"
    assert outcome(played) == {"X": 0.5, "O": 0.5}


@pytest.mark.parametrize(
    ("task", "words"),
    [
        (game(agents={"agent": GROUP}), "plays with the agents X, O, but the run has no X, O"),
        (game(agents={"X": GROUP}), "the run has no O"),
        (game(scripted={"X": "random", "O": "perfect"}), "scripted has both seats"),
        (game(scripted={"Z": "random"}), "scripted.Z is 'random'; write X or O with random or perfect"),
        (game(opening_moves=5), "opening_moves is 5; it must be in 0..4"),
    ],
)
def test_an_unplayable_game_fails_with_the_reason(play, task, words):
    assert words in play(task, answers("0")).last.message
