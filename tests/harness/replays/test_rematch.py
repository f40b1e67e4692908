"""A match played again: equal with its own players, another with others, and clear about who there is not."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rollstream.harness.replays import rematch
from rollstream.replay.source import RunEvents, read_run
from rollstream.schemas import ids
from rollstream.schemas.config import RunConfig
from rollstream.schemas.errors import ConfigError, ModelError, NotAllowedError
from rollstream.schemas.events import GroupClosed, RunStarted
from rollstream.schemas.settings import ArtifactRef
from tests.harness.conftest import configuration
from tests.rigs.runs.league_rig import GROUP, RUN, League, close_groups, new_engine, play, task

pytestmark = pytest.mark.usefixtures("registered_alone")


class Recorded:
    """A run with four versions and three tasks that were played and have closed."""

    def __init__(self, folder: Path) -> None:
        self.league = League(folder)
        self.written = configuration(folder)
        self.written["workflow"] = {"environment": "tic_tac_toe_self_play"}
        builder: dict[str, Any] = self.written["trajectory_builders"]["b"]
        builder |= {
            "agents": ["X", "O"],
            "engine": {"kind": "scripted"},
            "environment_config": {"illegal_penalty": 0.0},
        }

    async def events(self) -> RunEvents:
        started = RunStarted(
            run_id=RUN,
            time_ms=1,
            name="run",
            config=self.written,
            seed=7,
            dataset=ArtifactRef(uri="memory://d", sha256="0" * 64, size_bytes=0),
            num_examples=1,
            num_partitions=1,
        )
        await self.league.log.send(started)
        self.published = [await self.league.publish(version) for version in range(4)]
        await play(self.league, *(task(index, 3) for index in range(3)))
        await close_groups(self.league)
        return await read_run(self.league.log, RUN)

    async def again(self, events: RunEvents, name: str = "0/0", member: int = 0, versions: str = "") -> rematch.Rematch:
        found = rematch.task_of(events, name)
        return await rematch.play(
            self.league.log,
            events,
            self.league.artifacts,
            new_engine(),
            self.config(events),
            task=found,
            member=member,
            versions=rematch.read_versions(versions),
        )

    def config(self, events: RunEvents) -> RunConfig:
        return rematch.config_of(events, trust=False)


def test_a_match_with_its_own_players_is_the_recorded_one(tmp_path: Path) -> None:
    async def main() -> None:
        run = Recorded(tmp_path)
        events = await run.events()
        for name in ("0/0", "0/1", task(2, 3).group_id):
            for member in (0, 1):
                found = await run.again(events, name, member)
                assert (found.recorded, found.first_difference) == (f"{found.group_id}/m{member}/a0", None)
                assert found.moves
                assert set(found.players) == {"X", "O"}
                assert f"{GROUP}@3" in found.players.values()
                assert found == await run.again(events, name, member)

    asyncio.run(main())


def test_a_seat_without_a_turn_has_the_version_that_the_task_waited_for(tmp_path: Path) -> None:
    async def main() -> None:
        run = Recorded(tmp_path)
        events = await run.events()
        found = rematch.task_of(events, "0/0")
        played = rematch.players_of(events, found, 0)
        event_id = ids.event_id("group_closed", found.group_id)
        received = events.by_id[event_id]
        assert isinstance(received.event, GroupClosed)
        silent = {"min_version": 0, "max_version": 0, "num_completion_tokens": 0}  # the first move ended the match
        members = tuple(one.model_copy(update=silent) for one in received.event.members)
        closed = received.event.model_copy(update={"members": members})
        by_id = {**events.by_id, event_id: received.with_event(closed)}
        assert rematch.players_of(replace(events, by_id=by_id), found, 0) == played
        assert f"{GROUP}@3" in played.values()

    asyncio.run(main())


def test_a_match_during_which_the_weights_changed_is_not_compared(tmp_path: Path) -> None:
    async def main() -> None:
        run = Recorded(tmp_path)
        events = await run.events()
        event_id = ids.event_id("group_closed", rematch.task_of(events, "0/0").group_id)
        received = events.by_id[event_id]
        assert isinstance(received.event, GroupClosed)
        members = tuple(one.model_copy(update={"min_version": 2}) for one in received.event.members)
        closed = received.event.model_copy(update={"members": members})
        changed = replace(events, by_id={**events.by_id, event_id: received.with_event(closed)})
        found = await run.again(changed)
        ((seat, versions),) = found.changed.items()
        assert (found.players[seat], versions, found.first_difference) == (f"{GROUP}@2", "2 to 3", None)
        assert list(rematch.lines_of(found))[-1] == (
            f"not compared: the weights changed during the recorded rollout {found.recorded}, which played {seat} by "
            "versions 2 to 3; this match has the oldest version of each"
        )
        other = await run.again(changed, versions=f"{seat}=0")
        assert (other.recorded, other.changed) == ("", {})

    asyncio.run(main())


def test_any_two_versions_can_play_a_recorded_match(tmp_path: Path) -> None:
    async def main() -> None:
        run = Recorded(tmp_path)
        events = await run.events()
        games = {}
        for versions in ("X=0,O=1", "X=1,O=0", "X=2,O=2", "X=perfect,O=run-1@1", "X=run-1/policy@2,O=random"):
            found = await run.again(events, versions=versions)
            assert found.recorded == ""
            assert found == await run.again(events, versions=versions)
            assert set(found.rewards["outcome"]) == {"X", "O"}
            games[versions] = tuple(found.moves)
        assert len(set(games.values())) > 2
        found = await run.again(events, versions="X=perfect,O=run-1@1")
        assert found.players == {"X": "scripted:perfect", "O": "run-1/policy@1"}

    asyncio.run(main())


def test_a_match_reads_move_by_move(tmp_path: Path) -> None:
    async def main() -> None:
        run = Recorded(tmp_path)
        found = await run.again(await run.events())
        lines = list(rematch.lines_of(found))
        assert lines[:3] == [f"match {found.group_id}, member 0", *(f"  {one}: {found.players[one]}" for one in "XO")]
        assert lines[3] == f"   1. {found.moves[0].agent}: {found.moves[0].output}"
        assert any(line.startswith("outcome: ") for line in lines)
        assert lines[-1] == f"equal: {found.recorded} was recorded with the same moves, token by token"
        changed = found._replace(first_difference=2)
        assert (
            list(rematch.lines_of(changed))[-1]
            == f"different: move 3 is not that of the recorded rollout {found.recorded}"
        )

    asyncio.run(main())


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"versions": "Z=1"}, r"--versions Z=1: seat 'Z' is unknown; seats: X, O"),
        (
            {"versions": "X=best"},
            r"--versions X=best: 'best' does not name a version; .*a scripted player: random, per",
        ),
        ({"versions": "X:1"}, r"--versions X:1: give seats and players as SEAT=PLAYER"),
        (
            {"name": "4/0"},
            r"--task 4/0: run run-1 has no task run-1/rl/e00004/t00000; name one from run-1/rl/e",
        ),
        ({"member": 2}, r"--member 2: task .* has the members 0 to 1"),
    ],
)
def test_an_unknown_player_or_match_is_named_in_the_error(tmp_path: Path, asked: dict[str, Any], says: str) -> None:
    async def main() -> None:
        run = Recorded(tmp_path)
        await run.again(await run.events(), **asked)

    with pytest.raises(ConfigError, match=says):
        asyncio.run(main())


def test_a_version_that_is_unknown_or_was_collected_is_named(tmp_path: Path) -> None:
    async def main() -> None:
        run = Recorded(tmp_path)
        events = await run.events()
        with pytest.raises(ModelError, match=r"player run-1/policy@9: this version is unknown; .* the newest .* is 3"):
            await run.again(events, versions="X=9")
        await run.league.collect(run.published[1])
        with pytest.raises(ModelError, match=r"player run-1/policy@1: its weights are gone: collected by gc at"):
            await run.again(events, versions="X=1")
        await run.again(events, versions="X=2")

    asyncio.run(main())


def test_code_that_only_the_record_names_is_not_run(tmp_path: Path) -> None:
    async def main() -> None:
        run = Recorded(tmp_path)
        run.written["trajectory_builders"]["b"]["modules"] = ["colorsys"]
        await run.again(await run.events())

    with pytest.raises(NotAllowedError, match="--trust"):
        asyncio.run(main())
