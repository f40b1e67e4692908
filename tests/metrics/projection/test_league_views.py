"""The views of a league give the numbers of the folds, in whatever order groups close, and if they are read twice."""

import asyncio
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from rollstream.eventlog.memory.log import MemoryLog
from rollstream.metrics.projection.projector import project_to_end
from rollstream.schemas import ids
from rollstream.schemas.base import Event
from rollstream.schemas.events import GroupClosed
from rollstream.schemas.events.training import MatchResult
from tests.metrics.conftest import ask, empty_file
from tests.rigs.runs.league_ratings import by_seat, elo, matches_of, payoffs

RUN, GROUP = "run-1", "run-1/policy"


def league(seed: int, num_epochs: int = 6) -> list[GroupClosed]:
    """Groups in which version 3 k plays epoch k, against itself, past versions, another run's and a scripted player."""
    rng, found = random.Random(seed), []
    for epoch in range(num_epochs):
        newest = ids.player(GROUP, 3 * epoch)
        past = [ids.player(GROUP, 3 * one) for one in range(epoch)]
        for index in range(5):
            opponent = rng.choice([newest, "scripted:perfect", "old/policy@4", *past])
            seats = rng.sample(["X", "O"], 2)
            is_valid = index == 4
            group_id = (
                ids.validation_group_id(RUN, "rl", epoch, "ab", index)
                if is_valid
                else ids.group_id(RUN, "rl", epoch, index)
            )
            scores = [rng.choice([(1.0, 0.0), (0.5, 0.5), (0.0, 1.0)]) for _ in range(3)]
            matches = tuple(
                MatchResult(
                    member=member,
                    players=dict(zip(seats, (newest, opponent), strict=True)),
                    scores=dict(zip(seats, score, strict=True)),
                )
                for member, score in enumerate(scores)
            )
            found.append(
                GroupClosed(
                    run_id=RUN,
                    time_ms=epoch + 1,
                    group_id=group_id,
                    example_id="x",
                    job_id=f"{RUN}/rl",
                    epoch=epoch,
                    index=index,
                    purpose="validation" if is_valid else "train",
                    reason="complete",
                    is_viable=True,
                    size=3,
                    members=(),
                    matches=matches,
                )
            )
    return found


def project_all(found: Iterable[Event], path: Path) -> None:
    async def project() -> None:
        log = MemoryLog(num_partitions=2)
        await log.send_all(list(found))
        await project_to_end(log, path)

    asyncio.run(project())


@pytest.mark.parametrize("seed", range(3))
def test_the_views_match_the_folds(tmp_path: Path, seed: int) -> None:
    groups = league(seed)
    matches = matches_of(groups)
    shuffled = [*groups, *groups[:7]]
    random.Random(seed).shuffle(shuffled)
    path = empty_file(tmp_path)
    project_all(shuffled, path)
    ratings = dict(ask(path, "SELECT player, rating FROM league_ratings"))
    assert ratings == pytest.approx(elo(matches), abs=1e-9)
    found = ask(path, "SELECT player, opponent, num_matches, num_wins, num_draws, num_losses FROM payoff_matrix")
    assert {row[:2]: row[2:] for row in found} == {
        pair: (one.num_matches, one.num_wins, one.num_draws, one.num_losses) for pair, one in payoffs(matches).items()
    }
    found = ask(path, "SELECT player, seat, opponent, sum(num_matches), sum(num_wins) FROM seat_results GROUP BY ALL")
    assert {row[:3]: row[3:] for row in found} == {
        seat: (one.num_matches, one.num_wins) for seat, one in by_seat(matches).items()
    }


def test_a_rating_names_the_version_it_is_of(tmp_path: Path) -> None:
    path = empty_file(tmp_path)
    project_all(league(0), path)
    found = ask(path, "SELECT player, model_group, version FROM league_ratings")
    assert ("run-1/policy@3", "run-1/policy", 3) in found
    assert ("old/policy@4", "old/policy", 4) in found
    assert ("scripted:perfect", "", None) in found


def test_without_a_league_the_views_are_empty(tmp_path: Path, synthetic: Any) -> None:
    path = empty_file(tmp_path)
    project_all(synthetic.all_events(), path)
    for name in ("matches", "payoff_matrix", "seat_results", "league_ratings"):
        assert ask(path, f"SELECT * FROM {name}") == []
