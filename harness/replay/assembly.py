"""Replay of assembly: the recorded `steps` folded again, by any number of processes, against the closed groups."""

import asyncio
import multiprocessing
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

from rollstream.eventlog import codec
from rollstream.eventlog.log import EventLog, Received
from rollstream.eventlog.reading import read_to_end
from rollstream.harness.replay.report import Report, first_field
from rollstream.harness.replay.source import Source, place
from rollstream.processors import assembly
from rollstream.schemas.errors import DecodeError
from rollstream.schemas.events import GroupClosed

STAGE = "assembly"


@dataclass(frozen=True, slots=True)
class Range:
    """A part of one `steps` partition (first included, end not) and the records of it that are dead letters."""

    run_id: str
    partition: int
    first: int
    end: int
    dead: frozenset[int]


@dataclass(frozen=True, slots=True)
class Folded:
    """What folding a range again came to."""

    closed: dict[str, tuple[str, str]]
    """Digest and JSON of every group of the run that closed, by event id; the first one counts."""
    num_records: int
    damaged: tuple[str, ...]


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


async def fold(log: EventLog, part: Range) -> Folded:
    """Fold one range. Raises TruncatedError, naming the range, if its beginning is no longer kept."""
    state = assembly.initial(part.first)
    closed: dict[str, tuple[str, str]] = {}
    damaged: list[str] = []
    num_records = 0
    async for record in read_to_end(log, "steps", {part.partition: part.first}, {part.partition: part.end}):
        num_records += 1
        if record.offset in part.dead:
            continue
        try:
            received = codec.decode(record)
        except DecodeError as error:
            damaged.append(f"{place(record)} is not an event and has no dead letter: {error}")
            continue
        for closing in assembly.evolve(state, received):
            event = closing.closed
            if event.run_id == part.run_id:
                closed.setdefault(event.event_id, (codec.content_digest(event), event.model_dump_json()))
    return Folded(closed, num_records, tuple(damaged))


def compare(recorded: list[tuple[GroupClosed, Received]], folded: Iterable[Folded], report: Report) -> None:
    """Hold what the folds closed against the record, group by group."""
    again: dict[str, tuple[str, str]] = {}
    for part in folded:
        again |= part.closed
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


def _broken(recorded: GroupClosed, replayed: GroupClosed) -> str:
    """Names the attempt whose steps or rewards are not what its RolloutEnded says, if that is the reason."""
    before = {attempt.rollout_id: attempt for attempt in recorded.attempts}
    for attempt in replayed.attempts:
        was = before.get(attempt.rollout_id)
        if was is not None and was.cause != attempt.cause and attempt.cause in ("digest", "incomplete"):
            return f", attempt {attempt.rollout_id}, whose steps or rewards were changed"
    return ""


def fold_in_processes(source: Source, parts: list[Range], workers: int, tell: Callable[[str], None]) -> list[Folded]:
    """Fold the ranges in `workers` processes at a time."""
    context = multiprocessing.get_context("spawn")
    done: list[Folded] = []
    with ProcessPoolExecutor(max_workers=workers, mp_context=context) as pool:
        for folded in pool.map(_fold_alone, [source] * len(parts), parts):
            done.append(folded)
            tell(f"steps partition {parts[len(done) - 1].partition}: {len(folded.closed)} groups")
    return done


def _fold_alone(source: Source, part: Range) -> Folded:
    async def run() -> Folded:
        async with source.open() as (log, _):
            return await fold(log, part)

    return asyncio.run(run())
