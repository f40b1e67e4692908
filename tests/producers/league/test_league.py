"""Draws of opponents: they depend on the task alone, and name only versions that exist before the task starts."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from rollstream.harness.recorded.tasks import played_by
from rollstream.producers.league.draw import candidates_for, frozen_player, opponents_of, seats_of
from rollstream.schemas import ids
from rollstream.schemas.events import TaskRequested
from rollstream.schemas.league import LeagueSettings
from rollstream.schemas.settings import RolloutSettings

GROUP = "run-1/policy"
leagues = st.builds(
    LeagueSettings,
    pool=st.integers(0, 30),
    every=st.integers(1, 7),
    latest_ratio=st.sampled_from([0.0, 0.3, 1.0]),
    scripted=st.sampled_from([(), ("perfect",), ("perfect", "random")]),
    frozen=st.sampled_from([(), ("0",), ("other@3", "0")]),
    seats=st.sampled_from([(), ("X",), ("O",), ("X", "O")]),
)


def task_of(league=None, *, seed=11, min_version=9, agents=("X", "O"), policy: Any = "model"):
    return TaskRequested(
        run_id="run-1",
        time_ms=1,
        group_id=ids.group_id("run-1", "rl", 0, 0),
        example_id="x0",
        job_id="run-1/rl",
        epoch=0,
        index=0,
        inputs={},
        num_rollouts=4,
        minimum=2,
        seed=seed,
        min_version=min_version,
        settings=RolloutSettings(
            environment="tic_tac_toe_self_play", agents=dict.fromkeys(agents, GROUP), league=league, policy=policy
        ),
    )


@given(leagues, st.integers(0, 2**63 - 1), st.integers(0, 100))
def test_a_draw_is_the_same_for_whoever_reads_the_task_again(league, seed, version) -> None:
    task = task_of(league, seed=seed, min_version=version)
    again = TaskRequested.model_validate_json(task.model_dump_json())
    assert opponents_of(task) == opponents_of(again)


@given(leagues, st.integers(0, 2**63 - 1), st.integers(0, 100))
def test_opponents_are_candidates_and_one_seat_stays_with_the_newest_weights(league, seed, version) -> None:
    task = task_of(league, seed=seed, min_version=version)
    opponents = opponents_of(task)
    assert opponents.keys() ^ seats_of(task).agents.keys() == {"X", "O"}
    assert seats_of(task).agents
    assert seats_of(task).opponents == opponents
    for seat, player in opponents.items():
        assert player in candidates_for(league, GROUP, version)
        assert not league.seats or seat in league.seats


@given(leagues, st.integers(0, 100))
def test_the_pool_are_the_newest_versions_before_the_tasks_own(league, version) -> None:
    found = [ids.version_of(one) for one in candidates_for(league, GROUP, version)]
    frozen = {frozen_player(one, GROUP) for one in league.frozen}
    past = [one[1] for one in found if one and ids.player(*one) not in frozen]
    wanted = [one for one in range(version - 1, -1, -1) if one % league.every == 0][: league.pool]
    assert past == [one for one in wanted if ids.player(GROUP, one) not in frozen]


@given(st.integers(0, 2**63 - 1))
def test_without_a_pool_or_a_model_the_newest_weights_play_every_seat(seed) -> None:
    assert opponents_of(task_of(LeagueSettings(latest_ratio=0), seed=seed, min_version=0)) == {}
    assert opponents_of(task_of(LeagueSettings(latest_ratio=1, scripted=("perfect",)), seed=seed)) == {}
    assert opponents_of(task_of(LeagueSettings(latest_ratio=0), seed=seed, policy="demonstration")) == {}
    assert opponents_of(task_of(LeagueSettings(latest_ratio=0), seed=seed, agents=("X",))) == {}
    assert opponents_of(task_of(None, seed=seed)) == {}


def test_all_candidates_seats_and_the_newest_weights_get_their_share() -> None:
    league = LeagueSettings(pool=2, every=4, latest_ratio=0.5, scripted=("perfect",), frozen=("old@7",))
    found = [tuple(opponents_of(task_of(league, seed=seed)).items()) for seed in range(4000)]
    counts = {one: found.count(one) for one in set(found)}
    players = ["run-1/policy@8", "run-1/policy@4", "scripted:perfect", "old/policy@7"]
    assert set(counts) == {(), *(((seat, player),) for seat in "XO" for player in players)}
    assert 1800 < counts.pop(()) < 2200
    assert all(180 < count < 320 for count in counts.values()), counts


@given(leagues, st.integers(0, 2**63 - 1), st.integers(0, 100), st.integers(0, 100))
def test_with_several_model_groups_a_seat_meets_versions_of_its_own_group(league, seed, one, two) -> None:
    task = task_of(league, seed=seed)
    groups, wanted = {"X": "run-1/one", "O": "run-1/two"}, {"run-1/one": one, "run-1/two": two}
    settings = task.settings.model_copy(update={"agents": groups})
    task = task.model_copy(update={"settings": settings, "min_versions": wanted})
    opponents = opponents_of(task)
    assert seats_of(task).agents == {seat: group for seat, group in groups.items() if seat not in opponents}
    for seat, player in opponents.items():
        model_group, version = ids.version_of(player) or ("", -1)
        assert player in candidates_for(league, groups[seat], wanted[groups[seat]])
        assert not model_group or model_group == "other/" + ids.name_of(groups[seat]) or version < wanted[groups[seat]]
        assert model_group in ("", groups[seat], "other/" + ids.name_of(groups[seat]))


def test_a_frozen_entry_names_what_it_leaves_out_by_the_seats_own() -> None:
    assert frozen_player("3", GROUP) == "run-1/policy@3"
    assert frozen_player("old@3", GROUP) == "old/policy@3"
    assert frozen_player("old/prover@3", GROUP) == "old/prover@3"
    assert LeagueSettings.model_validate({"frozen": (0, "old@3")}).frozen == ("0", "old@3")
    with pytest.raises(ValidationError, match="'old@newest' does not name a version; write VERSION, RUN@VERSION"):
        LeagueSettings(frozen=("old@newest",))
    with pytest.raises(ValueError, match="'newest' does not name a version"):
        frozen_player("newest", GROUP)


def test_a_players_name_leads_back_to_its_version() -> None:
    assert ids.version_of(ids.player(GROUP, 12)) == (GROUP, 12)
    assert ids.version_of("scripted:perfect") is None
    assert ids.version_of("scripted:v@3") is None


def test_recorded_rollouts_have_no_opponents() -> None:
    settings = played_by(task_of(LeagueSettings(latest_ratio=0)).settings)
    assert settings.league is None
