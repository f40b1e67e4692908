"""Plays a match of a run again, with the versions that played it or with any others that the log knows.

All draws come from the recorded task, so equal players play equal games. Nothing is written. Reward functions are not
called: the environment's own rewards say how a match ends.
"""

import itertools
import json
import os
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from rollstream.eventlog import codec
from rollstream.eventlog.artifacts import ArtifactStore
from rollstream.eventlog.log import Position, ReadableLog
from rollstream.harness.config import file as config_file
from rollstream.harness.config.rewards import permissions_of
from rollstream.harness.runs.preflight import environment_of
from rollstream.harness.runs.stored_config import check_stored
from rollstream.producers import Engine, run_rollout
from rollstream.producers.engines.table import new_engine
from rollstream.producers.league.draw import frozen_player, seats_of
from rollstream.producers.league.opponents import OpponentWeights
from rollstream.replay.source import RunEvents, Source, of_type, read_run
from rollstream.schemas import ids
from rollstream.schemas.base import Event
from rollstream.schemas.config import RunConfig
from rollstream.schemas.engine_settings import EngineSettings
from rollstream.schemas.errors import ConfigError, DecodeError, RunFailedError
from rollstream.schemas.events import GroupClosed, RewardRecorded, RolloutFailed, StepRecorded, TaskRequested
from rollstream.schemas.events.recorded import MADE_ELSEWHERE
from rollstream.schemas.events.training import MemberRef


class Move(NamedTuple):
    """A message of a seat, or the answer of a tool."""

    agent: str
    name: str
    """Player, or name of the tool."""
    output: str
    tokens: str
    """Completion ids, as the log has them; empty without an LLM call."""


class Rematch(NamedTuple):
    """A match that was played again."""

    group_id: str
    member: int
    players: dict[str, str]
    """Players by seat."""
    moves: list[Move]
    rewards: dict[str, dict[str, float]]
    """Sums by reward's name and seat."""
    recorded: str
    """Id of the recorded rollout, if its players were these; empty otherwise."""
    first_difference: int | None
    """Index of the first move that is not the recorded one."""
    changed: dict[str, str]
    """Versions that played a seat whose weights changed during the recorded rollout, which is not compared then."""


def read_versions(text: str) -> list[tuple[str, str]]:
    """Seats and players of `X=3,O=perfect`. Raises ConfigError."""
    pairs = [part.strip().partition("=") for part in text.split(",") if part.strip()]
    for seat, equals, player in pairs:
        if not (seat and equals and player):
            raise ConfigError(f"--versions {text}: give seats and players as SEAT=PLAYER, for example X=3,O=perfect")
    return [(seat.strip(), player.strip()) for seat, _, player in pairs]


def config_of(events: RunEvents, *, trust: bool) -> RunConfig:
    """The run's configuration. Raises NotAllowedError for code and variables that it names, unless `trust`."""
    stored = dict(events.started.config)
    check_stored(stored, {}, run_id=events.run_id, trust=trust)
    config = config_file.resolve(stored, is_new=False).config
    if config.environment in MADE_ELSEWHERE or config.is_external:
        raise ConfigError(
            f"rollouts of run {events.run_id} were sampled elsewhere and cannot be played again "
            "here; use a run whose rollouts its producers sampled"
        )
    return config


def engine_settings(config: RunConfig) -> EngineSettings:
    """The run's engine, one sequence a forward, so that a match does not depend on what is sampled beside it."""
    engine = config.builder.engine
    return engine.model_copy(update={"deterministic": True}) if "deterministic" in type(engine).model_fields else engine


def task_of(events: RunEvents, name: str) -> TaskRequested:
    """The task that `EPOCH/INDEX` or a group's id names. Raises ConfigError."""
    group_id = ids.named_group(events.run_id, ids.TRAINING, name)
    found = events.by_id.get(ids.event_id("task_requested", group_id))
    if found is None or not isinstance(found.event, TaskRequested):
        there = [task.group_id for task, _ in of_type(events.by_topic.get("tasks", ()), TaskRequested)]
        known = f"name one from {there[0]} to {there[-1]}" if there else "the run has no tasks"
        raise ConfigError(f"--task {name}: run {events.run_id} has no task {group_id}; {known}")
    return found.event


def players_of(events: RunEvents, task: TaskRequested, member: int) -> dict[str, str]:
    """Players of a member of a task: as recorded if its group has closed, else the versions that the task waits for.

    So are those of seats that sampled nothing, whose members have no version. A seat whose weights changed meanwhile
    has its oldest version.
    """
    seats = seats_of(task)
    versions = {one.agent: one.min_version for one in _sampled(events, task, member)}
    trained = {
        agent: ids.player(group, versions.get(agent, task.wanted_version(group)))
        for agent, group in seats.agents.items()
    }
    return {agent: {**trained, **seats.opponents}[agent] for agent in task.settings.agents}


def _sampled(events: RunEvents, task: TaskRequested, member: int) -> list[MemberRef]:
    closed = _closed(events, task)
    return [one for one in closed.members if one.member == member and one.num_completion_tokens] if closed else []


def replaced(
    task: TaskRequested, players: Mapping[str, str], versions: Iterable[tuple[str, str]], scripted: Iterable[str]
) -> dict[str, str]:
    """Players with those of some seats replaced, by seat and `VERSION`, `RUN@VERSION`, `RUN/GROUP@VERSION` or the name
    of one of the environment's `scripted` players. Raises ConfigError.
    """
    found, names = dict(players), list(scripted)
    for seat, written in versions:
        if seat not in found:
            raise ConfigError(f"--versions {seat}={written}: seat {seat!r} is unknown; seats: {', '.join(found)}")
        try:
            found[seat] = (
                ids.SCRIPTED + written if written in names else frozen_player(written, task.settings.agents[seat])
            )
        except ValueError as error:
            known = f"; or a scripted player: {', '.join(names)}" if names else ""
            raise ConfigError(f"--versions {seat}={written}: {error}{known}") from error
    return found


async def play(
    log: ReadableLog,
    events: RunEvents,
    artifacts: ArtifactStore,
    engine: Engine,
    config: RunConfig,
    *,
    task: TaskRequested,
    member: int,
    versions: Iterable[tuple[str, str]] = (),
) -> Rematch:
    """Play a member of a task with its recorded players, or with others in some seats.

    `engine` is started; what it loads stays. Raises ConfigError for an unknown seat, member or player, ModelError for a
    version that is unknown or was collected, RunFailedError if the rollout fails.
    """
    if not 0 <= member < task.num_rollouts:
        raise ConfigError(
            f"--member {member}: task {task.group_id} has the members 0 to {task.num_rollouts - 1}; give one of these"
        )
    recorded = players_of(events, task, member)
    players = replaced(task, recorded, versions, environment_of(config).SCRIPTED)
    permissions = permissions_of(config)
    opponents = OpponentWeights(log, artifacts, engine, permissions=permissions)
    await opponents.hold(sorted({*players.values()}), 1, task.run_id)
    played: list[Event] = []

    async def emit(event: Event) -> None:
        played.append(event)

    settings = task.settings.model_copy(update={"rewards": (), "missing_score": "unneeded"})
    clock = itertools.count(task.time_ms)
    await run_rollout(
        task.model_copy(update={"settings": settings}),
        member=member,
        attempt=0,
        engine=engine,
        emit=emit,
        clock=lambda: next(clock),
        permissions=permissions,
        artifacts=artifacts,
        players=players,
    )
    if isinstance(played[-1], RolloutFailed):
        raise RunFailedError(f"the match of {task.group_id} failed: {played[-1].message}")
    moves = _moves(played)
    rollout_id, before = await _recorded(log, events, task, member) if players == recorded else ("", [])
    sampled = _sampled(events, task, member) if rollout_id else []
    changed = {
        one.agent: f"{one.min_version} to {one.max_version}" for one in sampled if one.min_version < one.max_version
    }
    difference = _first_difference(moves, before) if rollout_id and not changed else None
    return Rematch(task.group_id, member, players, moves, _rewards(played), rollout_id, difference, changed)


async def play_recorded(
    source: Source,
    artifacts: ArtifactStore,
    run: str,
    *,
    task: str,
    member: int,
    versions: list[tuple[str, str]],
    trust: bool,
) -> Rematch:
    """Play a match of a source's run again, on an engine of its own; `artifacts`: those of the topics.

    Raises what `config_of`, `task_of` and `play` raise.
    """
    async with source.open() as (log, exported):
        events = await read_run(log, run)
        config = config_of(events, trust=trust)
        asked = task_of(events, task)
        engine = new_engine(engine_settings(config), os.environ)
        try:
            await engine.start()
            return await play(
                log, events, exported or artifacts, engine, config, task=asked, member=member, versions=versions
            )
        finally:
            await engine.close()


def lines_of(played: Rematch) -> Iterable[str]:
    """The match as text, a move a line."""
    yield f"match {played.group_id}, member {played.member}"
    for seat, player in played.players.items():
        yield f"  {seat}: {player}"
    for number, move in enumerate(played.moves, 1):
        yield f"{number:4}. {move.agent}: {move.output}"
    for name, sums in played.rewards.items():
        yield f"{name}: " + ", ".join(f"{agent} {value:g}" for agent, value in sums.items())
    if played.first_difference is not None:
        yield f"different: move {played.first_difference + 1} is not that of the recorded rollout {played.recorded}"
    elif played.changed:
        seats = ", ".join(f"{seat} by versions {versions}" for seat, versions in played.changed.items())
        yield (
            f"not compared: the weights changed during the recorded rollout {played.recorded}, which played {seats}; "
            "this match has the oldest version of each"
        )
    elif played.recorded:
        yield f"equal: {played.recorded} was recorded with the same moves, token by token"


def _closed(events: RunEvents, task: TaskRequested) -> GroupClosed | None:
    found = events.by_id.get(ids.event_id("group_closed", task.group_id))
    return found.event if found is not None and isinstance(found.event, GroupClosed) else None


async def _recorded(log: ReadableLog, events: RunEvents, task: TaskRequested, member: int) -> tuple[str, list[Move]]:
    """The complete attempt at a member, and its messages; an empty id if the log has none."""
    closed = _closed(events, task)
    outcomes = closed.attempts if closed is not None else ()
    rollout_id = next((one.rollout_id for one in outcomes if one.member == member and one.outcome == "complete"), "")
    if closed is None or closed.steps_at is None or not rollout_id:
        return "", []
    where, steps = closed.steps_at, dict[int, StepRecorded]()
    offsets = range(where.first_offset, where.last_offset + 1)
    for record in await log.fetch(Position("steps", where.partition, offset) for offset in offsets):
        if record.key != task.group_id.encode():
            continue
        try:
            event = codec.decode(record).event
        except DecodeError:
            continue
        if isinstance(event, StepRecorded) and event.rollout_id == rollout_id:
            steps.setdefault(event.step_index, event)
    return rollout_id, _moves(steps.values())


def _moves(events: Iterable[Event]) -> list[Move]:
    steps = sorted((one for one in events if isinstance(one, StepRecorded)), key=lambda step: step.step_index)
    return [_move(step) for step in steps]


def _move(step: StepRecorded) -> Move:
    output: Any = (step.data or {}).get("output")
    text = output if isinstance(output, str) else json.dumps(output)
    return Move(step.agent, step.name or "", text, step.llm.completion_ids if step.llm is not None else "")


def _first_difference(moves: list[Move], before: list[Move]) -> int | None:
    """Index of the first move that differs in agent, text or tokens; names are not compared, since players are named by
    version here, and by model group there.
    """
    pairs = enumerate(itertools.zip_longest(moves, before))
    return next((index for index, (one, other) in pairs if _content(one) != _content(other)), None)


def _content(move: Move | None) -> tuple[str, str, str] | None:
    return None if move is None else (move.agent, move.output, move.tokens)


def _rewards(events: Iterable[Event]) -> dict[str, dict[str, float]]:
    sums: dict[str, dict[str, float]] = {}
    for event in events:
        if isinstance(event, RewardRecorded):
            by_agent = sums.setdefault(event.name, {})
            by_agent[event.agent or "all"] = by_agent.get(event.agent or "all", 0.0) + event.value
    return sums
