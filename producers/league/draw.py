"""Draw of the players of a task's seats: the newest weights, past or frozen versions, or players of the environment.
Pure.

A draw depends on the task alone: on its settings, its seed (which derives from the run's and the task's id) and the
version that it waits for. So a new owner of its partition, a repeated attempt and a replay draw the same opponents. The
pool of a task consists of versions below the one that it waits for: all of them were published before the task can
start.
"""

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from pydantic import JsonValue

from rollstream.schemas import ids
from rollstream.schemas.errors import ConfigError
from rollstream.schemas.events import StepRecorded, TaskRequested
from rollstream.schemas.league import FROZEN_VERSION, LeagueSettings

LEAGUE = "league"
UNTRAINED: dict[str, JsonValue] = {"rollstream": {"untrained": "opponent"}}
"""Metadata of an opponent's steps."""
_SEEDS = 1 << 63


def opponents_of(task: TaskRequested) -> dict[str, str]:
    """Opponents by seat, in the order of the run's agents; empty if the newest weights play all seats.

    One seat at least stays with the newest weights; which one is drawn where opponents may take all of them.
    """
    league, agents = task.settings.league, task.settings.agents
    if league is None or task.settings.policy != "model" or len(agents) < 2:
        return {}
    if ids.derive_seed(task.seed, LEAGUE, "latest") / _SEEDS < league.latest_ratio:
        return {}
    open_seats = [seat for seat in agents if not league.seats or seat in league.seats]
    if len(open_seats) == len(agents):
        open_seats.remove(_drawn(open_seats, task.seed, "seat"))
    found: dict[str, str] = {}
    for seat in open_seats:
        candidates = candidates_for(league, agents[seat], task.wanted_version(agents[seat]))
        if candidates:
            found[seat] = _drawn(candidates, task.seed, "opponent", seat)
    return found


def candidates_for(league: LeagueSettings, model_group: str, version: int) -> list[str]:
    """Players that may be drawn for a seat of a model group in a task that waits for `version`, without repeats."""
    newest = (version - 1) // league.every * league.every if version > 0 else -1
    oldest = newest - (league.pool - 1) * league.every
    past = [ids.player(model_group, one) for one in range(newest, max(oldest, 0) - 1, -league.every)]
    scripted = [ids.SCRIPTED + name for name in league.scripted]
    frozen = [frozen_player(one, model_group) for one in league.frozen]
    there = [one for one in frozen if one not in _not_yet(frozen, model_group, version)]
    return list(dict.fromkeys([*past[: league.pool], *scripted, *there]))


def _not_yet(players: Iterable[str], model_group: str, version: int) -> set[str]:
    """Players of the seat's own model group that the task's start does not wait for."""
    named = {one: ids.version_of(one) for one in players}
    return {one for one, found in named.items() if found and found[0] == model_group and found[1] >= version}


def check_league(
    league: LeagueSettings,
    location: str,
    agents: Collection[str],
    scripted: Collection[str],
    *,
    trained: Collection[str],
) -> None:
    """Raises ConfigError for seats or scripted players that there are not, or if nobody can be an opponent.

    Also if opponents could leave nothing to train beside agents that others serve, or that are frozen. `location`: of
    the settings in the file; `agents`: the run's, of which `trained` are trained; `scripted`: the players that its
    environment has.
    """
    if len(agents) < 2:
        raise ConfigError(f"{location}: a league needs at least two agents; name the environment's seats in agents")
    for seat in league.seats:
        if seat not in agents:
            raise ConfigError(f"{location}.seats: seat {seat!r} is unknown; the run's agents are {', '.join(agents)}")
    for player in league.scripted:
        if player not in scripted:
            known = ", ".join(scripted) or "none"
            raise ConfigError(f"{location}.scripted: the environment has no player {player!r}; it has {known}")
    if not (league.pool or league.scripted or league.frozen):
        raise ConfigError(f"{location}: there is nobody to play against; set pool, scripted or frozen")
    untrained = [agent for agent in agents if agent not in trained]
    if untrained and league.latest_ratio < 1 and all(not league.seats or seat in league.seats for seat in trained):
        raise ConfigError(
            f"{location}.seats: opponents may take the seats of all trained agents ({', '.join(trained)}), and the "
            f"others ({', '.join(untrained)}) are not trained; leave a trained agent out of seats"
        )


def frozen_player(written: str, model_group: str) -> str:
    """The player that an entry of `league.frozen` names for a seat of a model group. Raises ValueError for other text.

    What the entry leaves out is the model group's own: its run, and its name there.
    """
    found = FROZEN_VERSION.fullmatch(written)
    if found is None:
        raise ValueError(f"{written!r} does not name a version; write VERSION, RUN@VERSION or RUN/GROUP@VERSION")
    run_id, name = found["run"] or ids.run_of(model_group), found["group"] or ids.name_of(model_group)
    return ids.player(ids.model_group(run_id, name), int(found["version"]))


def is_opponents(step: StepRecorded) -> bool:
    """Whether a step is an opponent's, which has no trajectory and needs no reward."""
    return (step.metadata or {}).get("rollstream") == UNTRAINED["rollstream"]


class Seats(NamedTuple):
    """Players of a task, in the fields of its GroupStarted."""

    agents: dict[str, str]
    """Model group by agent, of the agents that the newest weights play: only they get trajectories."""
    opponents: dict[str, str]
    """Player by agent, of the others."""
    outcome: str
    """Name of the reward that decides; empty: the task is not a match."""


def seats_of(task: TaskRequested) -> Seats:
    """Players of a task."""
    opponents, league = opponents_of(task), task.settings.league
    agents = {agent: group for agent, group in task.settings.agents.items() if agent not in opponents}
    is_match = league is not None and task.settings.policy == "model"
    return Seats(agents, opponents, league.outcome if league is not None and is_match else "")


def _drawn(values: Sequence[str], seed: int, *what: str) -> str:
    return values[ids.derive_seed(seed, LEAGUE, *what) % len(values)]
