"""Elo and pay-offs as folds over closed groups: by hand, in any order of closing, and with repeats."""

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollstream.schemas import ids
from rollstream.schemas.events import GroupClosed
from rollstream.schemas.events.training import MatchResult
from tests.rigs.runs.league_ratings import INITIAL, K, Match, by_seat, elo, expected_score, matches_of, payoffs

GROUP = "run-1/policy"


def closed(epoch=0, index=0, games=(), *, purpose: Any = "train"):
    """A group of games, each given as the player and score of X, and of O."""
    group_id = (
        ids.group_id("run-1", "rl", epoch, index)
        if purpose == "train"
        else ids.validation_group_id("run-1", "rl", epoch, "ab", index)
    )
    return GroupClosed(
        run_id="run-1",
        time_ms=1,
        group_id=group_id,
        example_id="x",
        job_id="run-1/rl",
        epoch=epoch,
        index=index,
        purpose=purpose,
        reason="complete",
        is_viable=True,
        size=len(games),
        members=(),
        matches=tuple(
            MatchResult(member=number, players={"X": x, "O": o}, scores={"X": won, "O": lost})
            for number, ((x, won), (o, lost)) in enumerate(games)
        ),
    )


def v(number):
    return ids.player(GROUP, number)


def test_elo_is_the_formula_by_hand() -> None:
    games = [((v(1), 1.0), ("scripted:perfect", 0.0)), ((v(1), 0.5), ("scripted:perfect", 0.5))]
    table = elo(matches_of([closed(games=games)]))
    first = INITIAL + K * (1 - 0.5)
    second = first + K * (0.5 - 1 / (1 + 10 ** ((INITIAL - 16 - first) / 400)))
    assert table[v(1)] == pytest.approx(second, abs=1e-9)
    assert table[v(1)] + table["scripted:perfect"] == pytest.approx(2 * INITIAL)
    assert expected_score(1600, 1200) == pytest.approx(10 / 11)


def test_a_version_begins_at_the_rating_of_the_version_below_it() -> None:
    games = [closed(0, 0, [((v(3), 1.0), ("scripted:random", 0.0))]), closed(1, 0, [((v(8), 0.5), (v(3), 0.5))])]
    table = elo(matches_of(games))
    assert table[v(8)] == table[v(3)] == INITIAL + K / 2


def test_a_match_against_itself_is_not_rated_and_counts_by_seat() -> None:
    matches = matches_of([closed(games=[((v(1), 1.0), (v(1), 0.0))])])
    assert elo(matches) == {}
    assert by_seat(matches)[(v(1), "X", v(1))].mean_score == 1.0
    assert by_seat(matches)[(v(1), "O", v(1))].mean_score == 0.0


def test_payoffs_count_wins_draws_and_losses_both_ways() -> None:
    a, b = v(1), v(2)
    games = [((a, 1.0), (b, 0.0)), ((b, 1.0), (a, 0.0)), ((a, 0.5), (b, 0.5)), ((a, 0.2), (b, 0.9))]
    found = payoffs(matches_of([closed(games=games)]))
    assert (found[(a, b)].num_wins, found[(a, b)].num_draws, found[(a, b)].num_losses) == (1, 1, 2)
    assert found[(a, b)].mean_score + found[(b, a)].mean_score == 1.0


def test_of_three_seats_every_pair_is_a_match() -> None:
    group = closed(games=[((v(1), 1.0), (v(2), 0.0))])
    result = MatchResult(member=0, players={"a": v(1), "b": v(2), "c": v(3)}, scores={"a": 1, "b": 0, "c": 0})
    matches = matches_of([group.model_copy(update={"matches": (result,)})])
    assert [(match.seats, match.score) for match in matches] == [
        (("a", "b"), 1.0),
        (("a", "c"), 1.0),
        (("b", "c"), 0.5),
    ]


players = st.sampled_from([v(0), v(1), v(2), v(5), "scripted:perfect"])
game = st.tuples(players, players, st.sampled_from([0.0, 0.5, 1.0])).map(
    lambda one: ((one[0], one[2]), (one[1], 1 - one[2]))
)
groups = st.lists(
    st.tuples(st.integers(0, 2), st.sampled_from(["train", "validation"]), st.lists(game, max_size=4)), max_size=8
).map(lambda found: [closed(epoch, index, games, purpose=what) for index, (epoch, what, games) in enumerate(found)])


@given(groups, st.randoms())
def test_the_order_in_which_groups_close_and_repeats_change_nothing(events, rng: random.Random) -> None:
    shuffled = [*events, *rng.sample(events, len(events) // 2)]
    rng.shuffle(shuffled)
    assert matches_of(shuffled) == matches_of(events)
    assert elo(matches_of(shuffled)) == elo(matches_of(events))


@given(groups)
def test_ratings_are_zero_sum(events) -> None:
    matches = [match for match in matches_of(events) if match.players[0] != match.players[1]]
    fresh: list[Match] = []
    for match in matches:  # rated beside scripted players only, nobody inherits a rating
        fresh.append(match._replace(players=(f"scripted:{match.players[0]}", f"scripted:{match.players[1]}")))
    table = elo(fresh)
    assert sum(table.values()) == pytest.approx(INITIAL * len(table))
