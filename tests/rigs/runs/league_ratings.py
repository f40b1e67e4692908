"""The oracle of the views of a league: ratings of its players, as pure folds over the matches of a run's closed groups.

A match counts once, however often its group is read: the first GroupClosed of a group counts. Matches are rated in the
order of their tasks (epoch, validation before training, index, member), not in the order in which groups happened to
close, so that a run that was killed and resumed has the same table. The views `league_ratings`, `payoff_matrix` and
`seat_results` (metrics/projection/tables.sql) must give the same numbers.

Elo (A. Elo, The Rating of Chessplayers, Past and Present, 1978): of two players with ratings a and b, the first one is
expected to score E = 1 / (1 + 10^((b - a) / 400)); after a match in which it scored S (1 a win, 0.5 a draw, 0 a loss)
its rating is a + K (S - E), and the other one's b - K (S - E), with K = 32. A player begins at 1200, a weight version
at the present rating of the highest version below it that has played. Whoever plays itself is not rated.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple

from rollstream.schemas import ids
from rollstream.schemas.base import Event
from rollstream.schemas.events import GroupClosed

INITIAL = 1200.0
K = 32.0
BASE = 10.0
SCALE = 400.0


class Match(NamedTuple):
    """Two players of one rollout; with more than two seats, every pair is a match."""

    order: tuple[int, int, str, int]
    """Epoch, 0 for validation or 1 for training, group id, member."""
    seats: tuple[str, str]
    """The two seats in ascending order."""
    players: tuple[str, str]
    score: float
    """Score of the first seat: 1 a win, 0.5 a draw, 0 a loss."""


@dataclass(frozen=True, slots=True)
class Payoff:
    """Results of one player against another."""

    num_matches: int
    num_wins: int
    num_draws: int
    num_losses: int

    @property
    def mean_score(self) -> float:
        """Wins count 1, draws 0.5."""
        return (self.num_wins + self.num_draws / 2) / self.num_matches


def matches_of(events: Iterable[Event]) -> list[Match]:
    """Matches of the closed groups of one run, in the order of their tasks."""
    first: dict[str, GroupClosed] = {}
    for event in events:
        if isinstance(event, GroupClosed):
            first.setdefault(event.group_id, event)
    return sorted(match for closed in first.values() for match in _matches(closed))


def elo(matches: Iterable[Match]) -> dict[str, float]:
    """Rating by player after all matches, in the given order."""
    ratings: dict[str, float] = {}
    for match in matches:
        first, second = match.players
        if first == second:
            continue
        before = _rating(ratings, first), _rating(ratings, second)
        gain = K * (match.score - expected_score(*before))
        ratings[first], ratings[second] = before[0] + gain, before[1] - gain
    return ratings


def expected_score(rating: float, opponent: float) -> float:
    """Expected score of a player with `rating` against one with `opponent`, in 0..1."""
    return 1 / (1 + BASE ** ((opponent - rating) / SCALE))


def payoffs(matches: Iterable[Match]) -> dict[tuple[str, str], Payoff]:
    """Results by player and opponent, both ways."""
    scores: dict[tuple[str, str], list[float]] = {}
    for match in matches:
        first, second = match.players
        scores.setdefault((first, second), []).append(match.score)
        scores.setdefault((second, first), []).append(1 - match.score)
    return {players: _result(found) for players, found in scores.items()}


def by_seat(matches: Iterable[Match]) -> dict[tuple[str, str, str], Payoff]:
    """Results by player, its seat, and opponent."""
    scores: dict[tuple[str, str, str], list[float]] = {}
    for match in matches:
        first, second = match.players
        scores.setdefault((first, match.seats[0], second), []).append(match.score)
        scores.setdefault((second, match.seats[1], first), []).append(1 - match.score)
    return {key: _result(found) for key, found in scores.items()}


def _result(scores: list[float]) -> Payoff:
    return Payoff(len(scores), scores.count(1.0), scores.count(0.5), scores.count(0.0))


def _matches(closed: GroupClosed) -> Iterable[Match]:
    is_training = int(closed.purpose != "validation")
    for played in closed.matches:
        order = (closed.epoch, is_training, closed.group_id, played.member)
        for one, two in combinations(sorted(played.players), 2):
            difference = played.scores[one] - played.scores[two]
            score = 0.5 if difference == 0 else float(difference > 0)
            yield Match(order, (one, two), (played.players[one], played.players[two]), score)


def _rating(ratings: dict[str, float], player: str) -> float:
    if player in ratings:
        return ratings[player]
    found = ids.version_of(player)
    if found is None:
        return INITIAL
    group, version = found
    played = [one[1] for one in map(ids.version_of, ratings) if one is not None and one[0] == group]
    below = max((one for one in played if one < version), default=None)
    return INITIAL if below is None else ratings[ids.player(group, below)]
