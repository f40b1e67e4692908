"""The built-in environments: their rules, their rewards, and how well known players do."""

import random
import statistics

import pytest

from rollstream.producers.environments import tic_tac_toe_board as rules
from rollstream.producers.environments.guess_number import GuessNumber, bounds, compare
from rollstream.producers.rollout.registry import build_environment
from rollstream.schemas.permissions import NOTHING
from tests.producers.conftest import answers, task_of


def total(played):
    return sum(reward.value for reward in played.rewards)


def binary_search(prompt, rng, version):
    """Best play from the transcript: `<assistant>5<end><tool>H` narrows 0..9."""
    low, high = 0, 9
    for turn in prompt.split("<assistant>")[1:-1]:
        guess, answer = int(turn[0]), turn[-6]
        low, high = (guess + 1, high) if answer == "H" else (low, guess - 1)
    return str((low + high) // 2), 0.0


# ---- guess_number ----


def test_binary_search_earns_0_715_and_random_guessing_about_0_314(play):
    best = [total(play(task_of(inputs={"secret": secret}), binary_search)) for secret in range(10)]
    assert statistics.mean(best) == pytest.approx(0.715)
    by_chance = [total(play(task_of(inputs={"secret": n % 10}, seed=n))) for n in range(400)]
    assert statistics.mean(by_chance) == pytest.approx(0.314, abs=0.06)


def test_guesses_earn_less_turn_by_turn_and_nothing_at_the_end(play):
    wrong = ["1", "2", "3", "4", "5"]
    earned = [total(play(task_of(inputs={"secret": 7}), answers(*wrong[:n], "7"))) for n in range(6)]
    assert earned == pytest.approx([1.0, 0.85, 0.7, 0.55, 0.4, 0.25])
    lost = play(task_of(inputs={"secret": 7}), answers("1"))
    assert total(lost) == 0
    assert len(lost.texts()) == 6


def test_prompts_are_a_few_tokens(play):
    played = play(task_of(inputs={"secret": 7}), answers("1"))
    assert played.steps[-2].usage_info["token_usage"]["total_tokens"] < 50


@pytest.mark.parametrize(("guess", "answer"), [("3", "H"), ("9", "L"), (" 7 ", "="), ("", "X"), ("a", "X"), ("²", "X")])
def test_a_guess_is_compared(guess, answer):
    assert compare(guess, 7) == answer


@pytest.mark.parametrize("guess", ["9" * 5000, "²"])
def test_a_guess_that_python_does_not_read_as_a_number_is_none(guess):
    assert compare(guess, 7) == "X"
    assert bounds([{"role": "assistant", "content": guess}, {"role": "tool", "content": "X"}], 0, 9) == (0, 9)


def test_the_secret_is_the_task_s_and_equal_for_all_members(play):
    secrets = set()
    for seed in range(30):
        endings = [play(task_of(seed=seed, max_turns=6), member=member) for member in range(3)]
        found = {member.texts()[-1] for member in endings if total(member) > 0}
        assert len(found) <= 1
        secrets |= found
    assert len(secrets) > 5


def test_the_demonstrator_guesses_at_random(play):
    played = [play(task_of(policy="demonstration", seed=seed)) for seed in range(60)]
    guesses = {text for one in played for text in one.texts()}
    assert guesses == set("0123456789")
    assert statistics.mean(map(total, played)) == pytest.approx(0.314, abs=0.15)


def test_examples_are_as_often_each_number():
    made = GuessNumber().examples(25, seed=3)
    assert made == GuessNumber().examples(25, seed=3) != GuessNumber().examples(25, seed=4)
    counts = [made.count({"secret": number}) for number in range(10)]
    assert set(counts) == {2, 3}


# ---- arithmetic ----


def test_a_sum_is_right_or_wrong(play):
    inputs = {"a": 7, "b": 12, "op": "-"}
    right = play(task_of("arithmetic", inputs=inputs), answers("-5"))
    assert (total(right), right.steps[0].data["input"][0]["content"]) == (1.0, "7-12=")
    assert total(play(task_of("arithmetic", inputs=inputs), answers("5"))) == 0.0
    right.assert_complete()


@pytest.mark.parametrize("accuracy", [0.0, 0.7, 1.0])
def test_the_demonstrator_has_the_configured_accuracy(play, accuracy):
    config = {"demonstrator_accuracy": accuracy}
    seeds = range(120)
    earned = [
        total(play(task_of("arithmetic", policy="demonstration", environment_config=config, seed=n))) for n in seeds
    ]
    assert statistics.mean(earned) == pytest.approx(accuracy, abs=0.15)


def test_arithmetic_examples_stay_in_their_range():
    made = build_environment("arithmetic", {"highest": 3, "operations": "*"}, NOTHING).examples(20, seed=1)
    assert {example["op"] for example in made} == {"*"}
    assert max(max(example["a"], example["b"]) for example in made) <= 3


def test_a_wrong_setting_fails_by_name(play):
    failed = play(task_of("arithmetic", environment_config={"operations": "%"})).last
    assert "operations is '%'" in failed.message


# ---- tic_tac_toe ----


def test_the_empty_board_is_a_draw_and_a_fork_is_won():
    assert rules.value(rules.EMPTY, "X") == 0
    assert rules.value("XO2" + "3X5" + "67O", "X") == 1
    assert rules.best_moves("XX2" + "OO5" + "678", "X") == [2]


def test_no_player_beats_the_perfect_opponent_and_the_perfect_player_never_loses(play):
    def perfect(prompt, rng, version):
        board = prompt.rsplit("<end><assistant>", 1)[0][-9:]
        return str(rng.choice(rules.best_moves(board, "X"))), 0.0

    for seed in range(8):
        config = {"opponent": "perfect", "first": random.Random(seed).choice("XO")}
        task = task_of("tic_tac_toe", policy="demonstration", environment_config=config, seed=seed)
        by_chance = play(task)
        by_chance.assert_complete()
        assert by_chance.rewards[-1].value in (0.0, 0.5)
        drawn = play(task_of("tic_tac_toe", environment_config=config, seed=seed), perfect)
        assert drawn.rewards[-1].value == 0.5
        against_chance = play(task_of("tic_tac_toe", inputs={"first": "O"}, seed=seed), perfect)
        assert against_chance.rewards[-1].value >= 0.5
        assert all(reward.value == 0.0 for reward in against_chance.rewards[:-1])


def test_every_move_is_valued_at_its_step(play):
    board = "XX2" + "OO5" + "678"
    won = play(task_of("tic_tac_toe", inputs={"board": board}), answers("2"))
    assert [(reward.name, reward.value, reward.step_index) for reward in won.rewards] == [
        ("move", 0.0, 0),
        ("outcome", 1.0, None),
    ]
    config = {"opponent": "perfect"}
    lost = play(task_of("tic_tac_toe", inputs={"board": board}, environment_config=config), answers("8"))
    assert [reward.value for reward in lost.rewards] == [pytest.approx(-0.2), 0.0]


@pytest.mark.parametrize("move", ["0", "9", "", "33", "x", "²"])
def test_an_illegal_move_ends_the_game_with_a_penalty(play, move):
    played = play(task_of("tic_tac_toe", inputs={"board": "X12345678"}), answers(move))
    assert [(reward.name, reward.value) for reward in played.rewards] == [("outcome", -0.5)]
    played.assert_complete()


def candidates(played, turn):
    """Output, score and selection of a turn's candidates."""
    found = [step for step in played.steps if step.event_type == "TTC_END" and step.data["turn_index"] == turn]
    return [(step.data["output"], step.data["score"], step.metadata["is_selected"]) for step in found]


def test_candidates_are_scored_by_the_position_after_them_and_the_best_is_played(play):
    config = {"opponent": "perfect", "candidates": 4}
    task = task_of("tic_tac_toe", inputs={"board": "XX2OO5678"}, environment_config=config)
    played = play(task, answers("8", "5", "0", "2"))
    played.assert_complete()
    assert candidates(played, 0) == [("8", -1.0, False), ("5", 0.0, False), ("0", -2.0, False), ("2", 1.0, True)]
    scores = [(reward.step_index, reward.value) for reward in played.rewards if reward.is_score]
    assert scores == [(0, -1.0), (1, 0.0), (2, -2.0), (3, 1.0)]
    others = [(reward.name, reward.value, reward.step_index) for reward in played.rewards if not reward.is_score]
    assert others == [("move", 0.0, 3), ("outcome", 1.0, None)]
    (first, *_) = [step for step in played.steps if step.event_type == "TTC_END"]
    assert first.name == "dpo_candidate_move"
    assert first.data["input"] == [{"role": "user", "content": "XX2OO5678"}]
    assert first.metadata["step_index"] == 0


def test_the_game_goes_on_from_the_candidate_that_was_played(play):
    config = {"opponent": "perfect", "candidates": 2, "plays": "first"}
    task = task_of("tic_tac_toe", inputs={"board": "XX2OO5678"}, environment_config=config, max_turns=2)
    played = play(task, answers("5", "6", "2", "8"))
    played.assert_complete()
    assert [selected for _, _, selected in candidates(played, 0) + candidates(played, 1)] == [True, False, True, False]
    calls = [step for step in played.steps if step.llm]
    assert [step.llm.prefix and step.llm.prefix.step_index for step in calls] == [None, None, 0, 0]
    assert [step.data["output"] for step in calls] == ["5", "6", "2", "8"]
    assert {step.data["input"][1]["content"] for step in calls[2:]} == {"5"}
    turns = {step.data["turn_id"] for step in played.steps if step.event_type == "TTC_END"}
    assert len(turns) == 2
    assert all(turn.startswith(("turn_0_", "turn_1_")) for turn in turns)


def test_the_first_candidate_ends_the_game_if_it_is_illegal_and_the_best_does_not(play):
    inputs = {"board": "XX2OO5678"}
    for plays, outcome in (("first", -0.5), ("best", 1.0)):
        config = {"candidates": 2, "plays": plays}
        played = play(task_of("tic_tac_toe", inputs=inputs, environment_config=config), answers("0", "2"))
        assert [reward.value for reward in played.rewards if reward.name == "outcome"] == [outcome]


def value_for_x(board, mover):
    """The value of a position, worked out without remembering any."""
    if rules.is_over(board):
        return {"X": 1, None: 0, "O": -1}[rules.winner(board)]
    values = [value_for_x(rules.place(board, cell, mover), rules.other(mover)) for cell in rules.free_cells(board)]
    return max(values) if mover == "X" else min(values)


def test_a_position_s_value_does_not_depend_on_who_asked_before():
    boards = ["XX2OO5678", "X12345O7O", "OX2X4O678", "0OX3X56O8"]
    for board in [*boards, *reversed(boards)]:
        for mover, sign in (("X", 1), ("O", -1)):
            assert rules.value(board, mover) == sign * value_for_x(board, mover)


@pytest.mark.parametrize(("config", "says"), [({"candidates": 0}, "candidates is 0"), ({"plays": "x"}, "plays is 'x'")])
def test_candidates_that_cannot_be_are_named(play, config, says):
    assert says in play(task_of("tic_tac_toe", environment_config=config)).last.message


def test_a_board_that_is_none_is_named(play):
    assert "board is 'XX'" in play(task_of("tic_tac_toe", inputs={"board": "XX"})).last.message


def test_a_heeding_demonstrator_stays_between_the_bounds_of_its_hints() -> None:
    messages = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "3"},
        {"role": "tool", "content": "H"},
        {"role": "assistant", "content": "8"},
        {"role": "tool", "content": "L"},
    ]
    assert bounds(messages, 0, 9) == (4, 7)
