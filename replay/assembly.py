"""Replay of assembly: the recorded `steps` folded again, by any number of processes, against the closed groups."""

import asyncio
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import connection, forkserver
from types import MappingProxyType

from rollstream.eventlog import codec
from rollstream.eventlog.attempts import Cause
from rollstream.eventlog.log import ReadableLog, Received, format_position
from rollstream.eventlog.reading import read_to_end
from rollstream.processors.assemble import fold as assembly
from rollstream.processors.assemble.state import AssemblyState
from rollstream.producers.league.draw import seats_of
from rollstream.replay.report import MISSING, Report, first_field
from rollstream.replay.source import Source
from rollstream.schemas import ids
from rollstream.schemas.errors import DecodeError
from rollstream.schemas.events import GroupClosed, GroupStarted, RolloutStarted, StepRecorded, TaskRequested, Tick
from rollstream.schemas.events.rollouts import GroupEvent

STAGE = "assembly"
SAFE_PATH = "PYTHONSAFEPATH"
"""Environment variable without which `python -c` imports modules from the current folder first."""


@dataclass(frozen=True, slots=True)
class Range:
    """A part of one `steps` partition (first included, end not) and the records of it that are dead letters."""

    run_id: str
    partition: int
    first: int
    end: int
    dead: frozenset[int]


@dataclass(slots=True)
class Folded:
    """Result of folding a range again."""

    closed: dict[str, tuple[str, str]] = field(default_factory=dict[str, tuple[str, str]])
    """Digest and JSON of every group of the run that closed, by event id; the first one counts."""
    started: dict[str, str] = field(default_factory=dict[str, str])
    """JSON of every GroupStarted of the run, by group id; the first one counts."""
    num_records: int = 0
    damaged: list[str] = field(default_factory=list[str])
    differences: list[tuple[str, str, str]] = field(default_factory=list[tuple[str, str, str]])
    """Differences between recorded and derived values: location, recorded, derived."""
    versions: dict[tuple[str, int], str] = field(default_factory=dict[tuple[str, int], str])
    """Id of an event that names the version, by model group and version that tokens were sampled with."""


def ranges(run_id: str, closed: Iterable[GroupClosed], dead: Iterable[tuple[str, int, int]]) -> list[Range]:
    """The parts of the partitions that hold a run's groups. Every one begins at a GroupStarted of the run."""
    spans: dict[int, tuple[int, int]] = {}
    for event in closed:
        at = event.steps_at
        if at is None:
            continue
        first, last = spans.get(at.partition, (at.first_offset, at.last_offset))
        spans[at.partition] = min(first, at.first_offset), max(last, at.last_offset)
    letters = [(partition, offset) for topic, partition, offset in dead if topic == "steps"]
    return [
        Range(run_id, n, first, last + 1, frozenset(at for of, at in letters if of == n))
        for n, (first, last) in sorted(spans.items())
    ]


async def fold(log: ReadableLog, part: Range) -> Folded:
    """Fold one range. Raises TruncatedError, naming the range, if its beginning is no longer kept."""
    state, found = assembly.initial(part.first), Folded()
    begun: dict[str, set[str]] = {}
    async for record in read_to_end(log, "steps", {part.partition: part.first}, {part.partition: part.end}):
        found.num_records += 1
        if record.offset in part.dead:
            continue
        try:
            received = codec.decode(record)
        except DecodeError as error:
            found.damaged.append(f"{format_position(record.position)} is not an event and has no dead letter: {error}")
            continue
        event = received.event
        if isinstance(event, Tick) and event.partition != record.partition:
            at = f"{event.event_id} at {format_position(record.position)}: partition"  # a Tick has no key
            found.differences.append((at, str(event.partition), str(record.partition)))
        if event.run_id == part.run_id:
            _look_at(received, state, begun, found)
        elif isinstance(event, GroupEvent) and ids.run_of(event.group_id) == part.run_id:
            at = f"{event.event_id} at {format_position(record.position)}: run_id"
            found.differences.append((at, event.run_id, part.run_id))
        for closing in assembly.evolve(state, received):
            closed = closing.closed
            if closed.run_id == part.run_id:
                _close(closed, begun.pop(closed.group_id, set()), found, has_dead=_has_dead(closed, part))
    return found


def _look_at(received: Received, state: AssemblyState, begun: dict[str, set[str]], found: Folded) -> None:
    """Note what a record of the run says beside what its group closes with. `begun`: attempts by open group."""
    match received.event:
        case StepRecorded() as event:  # first: most are
            group = state.groups.get(event.group_id)
            if event.llm is not None and group is not None and group.started.policy == "model":
                for span in event.llm.spans:
                    sampled_with = span.model_group, span.version
                    if sampled_with not in found.versions:
                        found.versions[sampled_with] = event.event_id
        case GroupStarted() as event:
            found.started.setdefault(event.group_id, event.model_dump_json())
        case RolloutStarted() as event:
            if event.group_id in state.groups:
                begun.setdefault(event.group_id, set()).add(event.rollout_id)
            at = f"{event.event_id} at {format_position(received.position)}"
            found.differences += [(f"{at}: {name}", ours, theirs) for name, ours, theirs in _other(state, event)]
        case _:
            pass


def _close(event: GroupClosed, begun: set[str], found: Folded, *, has_dead: bool) -> None:
    """Note a closed group, and those of its attempts that lack the RolloutStarted with which every one begins.

    A dead letter may have been one.
    """
    if event.event_id in found.closed:
        return
    found.closed[event.event_id] = codec.content_digest(event), event.model_dump_json()
    if not has_dead:
        missing = [attempt.rollout_id for attempt in event.attempts if attempt.rollout_id not in begun]
        found.differences += [
            (ids.event_id("rollout_started", name), MISSING, "an attempt's start") for name in missing
        ]


def _has_dead(closed: GroupClosed, part: Range) -> bool:
    """Whether a record between the first and the last of a group is a dead letter, and so may have been one of its."""
    at = closed.steps_at
    return at is not None and any(at.first_offset <= offset <= at.last_offset for offset in part.dead)


def _other(state: AssemblyState, begun: RolloutStarted) -> Iterator[tuple[str, str, str]]:
    """Fields in which the start of an attempt differs from those derived from its group, member and number: field,
    recorded, derived.
    """
    derived = ids.rollout_id(begun.group_id, begun.member, begun.attempt)
    if derived != begun.rollout_id:
        yield "rollout_id", begun.rollout_id, derived
    group = state.groups.get(begun.group_id)
    if group is not None and (seed := ids.member_seed(group.started.seed, begun.member)) != begun.seed:
        yield "seed", str(begun.seed), str(seed)


def compare(
    recorded: list[tuple[GroupClosed, Received]],
    folded: Iterable[Folded],
    report: Report,
    tasks: Mapping[str, TaskRequested] = MappingProxyType({}),
) -> None:
    """Compare the groups that the folds closed with the record, one by one, and the starts of groups with their tasks.

    `tasks`: by group id.
    """
    again: dict[str, tuple[str, str]] = {}
    refused = {event.group_id for event, _ in recorded if _is_refused(event)}
    for part in folded:
        again |= part.closed
        for what, ours, theirs in part.differences:
            report.differ(STAGE, what, ours, theirs)
        for group_id, text in part.started.items():
            if group_id in tasks:
                started = GroupStarted.model_validate_json(text)
                _compare_started(tasks[group_id], started, report, is_refused=group_id in refused)
        report.count("step records", part.num_records)
        for what in part.damaged:
            report.differ(STAGE, what, "an event", "none")
    for event, received in recorded:
        report.count("groups")
        digest, text = again.get(event.event_id, ("", ""))
        if digest == received.digest:
            continue
        if not digest:
            report.differ(STAGE, event.event_id, f"closed as {event.reason}", "not closed by its steps")
            continue
        replayed = GroupClosed.model_validate_json(text)
        path, ours, theirs = first_field(event, replayed)
        report.differ(STAGE, f"{event.event_id}{_broken(event, replayed)}: {path}", ours, theirs)


def _is_refused(closed: GroupClosed) -> bool:
    """Whether no rollout of a task was run because of a name or requirement in it: its group has one failed attempt."""
    return closed.size == 1 and all(
        one.outcome == "failed" and one.cause in (Cause.NOT_ALLOWED, Cause.ENGINE_ERROR) for one in closed.attempts
    )


def _compare_started(task: TaskRequested, started: GroupStarted, report: Report, *, is_refused: bool) -> None:
    """Hold a group's beginning against the task that it was made from; a void group has no size, a refused one 1."""
    settings = task.settings
    wanted = {
        **{name: getattr(task, name) for name in ("example_id", "job_id", "epoch", "index", "purpose", "seed")},
        "policy": settings.policy,
        "size": (1 if is_refused else task.num_rollouts) if started.void_cause is None else 0,
        "minimum": task.minimum if started.void_cause is None else 0,
        "enough": 0 if is_refused or started.void_cause is not None else task.enough,
        "timeout_ms": max(1, int(settings.group_timeout_s * 1000)),
        "reward_weights": settings.reward_weights,
        "drop_dead_branches": settings.drop_dead_branches,
        **seats_of(task)._asdict(),
    }
    if started.void_cause == "undecodable":
        return
    for name, value in wanted.items():
        if getattr(started, name) != value:
            report.differ(STAGE, f"{started.event_id}: {name}", repr(getattr(started, name)), f"{value!r} in its task")


def _broken(recorded: GroupClosed, replayed: GroupClosed) -> str:
    """Names the attempt whose steps or rewards are not what its RolloutEnded says, if that is the reason."""
    before = {attempt.rollout_id: attempt for attempt in recorded.attempts}
    for attempt in replayed.attempts:
        was = before.get(attempt.rollout_id)
        if was is not None and was.cause != attempt.cause and attempt.cause in ("digest", "incomplete"):
            return f", attempt {attempt.rollout_id}, whose steps or rewards were changed"
    return ""


def prepare_processes(source: Source) -> None:
    """Start the process that workers are forked from: what they all import is imported there, once."""
    of_source = "rollstream.eventlog.kafka.log" if source.export is None else "rollstream.replay.archive.log"
    forkserver.set_forkserver_preload([__name__, of_source])
    before = os.environ.get(SAFE_PATH)
    os.environ[SAFE_PATH] = "1"
    try:
        forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ[SAFE_PATH]
        else:
            os.environ[SAFE_PATH] = before


async def fold_in_processes(
    source: Source, parts: list[Range], workers: int, on_progress: Callable[[str], None]
) -> list[Folded]:
    """Fold the ranges in `workers` processes at a time. If one fails or this is cancelled, no other range is begun."""
    pool = ProcessPoolExecutor(
        max_workers=workers, mp_context=multiprocessing.get_context("forkserver"), initializer=end_with_parent
    )

    async def folded(part: Range) -> Folded:
        found = await asyncio.wrap_future(pool.submit(_fold_alone, source, part))
        on_progress(f"steps partition {part.partition}: {len(found.closed)} groups")
        return found

    try:
        return await asyncio.gather(*map(folded, parts))
    finally:
        pool.shutdown(cancel_futures=True)


def end_with_parent() -> None:
    """End this process once its parent has died, which a worker of a pool would wait for without end."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def _fold_alone(source: Source, part: Range) -> Folded:
    async def run() -> Folded:
        async with source.open(is_checked=True) as (log, _):
            return await fold(log, part)

    return asyncio.run(run())
