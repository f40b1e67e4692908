"""The metadata of committed offsets: where a fold restarts, and state that it cannot rebuild from there.

For `groups`, answers are sent from the committed offset on. The low-water mark before it is the start of the oldest run
that is open or whose groups may still close; between the two only records of such runs count. Their idle times depend
on records of other runs and are therefore part of the metadata, with an entry for each run and steps partition. If that
is too large, only the runs are named and the times of other runs' closed groups are read again. If there are too many
runs, only the offset is stored, and every record between the two is decoded. `steps` is folded again from its committed
offset. Both store the offset from which dead letters must be read. Counts of poison records are stored for runs that
are not folded again.
"""

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rollstream.eventlog import codec
from rollstream.eventlog.log import MAX_METADATA_BYTES, Record
from rollstream.processors.curate import fold as curate
from rollstream.processors.curate.state import Clock, CurateState, Idle
from rollstream.processors.host.folding import Faults
from rollstream.schemas.errors import first_invalid
from rollstream.schemas.events import GroupClosed
from rollstream.schemas.events.training import StepsRange

CLOSED = GroupClosed.model_fields["kind"].default

logger = logging.getLogger(__name__)


class LiveRun(BaseModel):
    """State of a live run that depends on records of other runs."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    idle: dict[int, tuple[int, int]] = Field(default_factory=dict)
    """Newest event time and total idle time, in ms, by steps partition."""
    is_abandoned: bool = False
    has_ended: bool = False
    refused_at: int | None = None
    """Offset of the EpochStarted from which on nothing was answered."""


class LowWater(BaseModel):
    """A commit's metadata."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    v: int = Field(default=1, ge=1, le=1)
    begin: int = Field(ge=0)
    """Offset from which the partition must be folded again."""
    runs: dict[str, LiveRun] | None = None
    """Live runs by run id; None: too many to store."""
    has_clocks: bool = True
    """Whether `runs` includes idle times."""
    dlq: int = Field(default=0, ge=0)
    """Offset of `dlq` before which no letter is about a record from `begin` on."""
    faulty: dict[str, Faults] = Field(default_factory=dict[str, Faults])
    """Records that cannot be folded, by run, of runs that are not folded again."""


@dataclass(frozen=True, slots=True)
class Beginning:
    """Point at which a fold restarts, and what it needs for that."""

    offset: int
    live: Mapping[str, LiveRun] | None = None
    """Runs whose records count; none: not known."""
    keys: frozenset[bytes] = field(default=frozenset())
    """Their records' keys."""
    has_clocks: bool = True
    """Whether `live` includes idle times; else they are derived again from closed groups of other runs."""
    dlq: int = 0
    """Offset from which dead letters count."""
    faulty: Mapping[str, Faults] = field(default_factory=dict[str, Faults])
    """Records that cannot be folded, by run, of runs that are not folded again."""


def begin_of(state: CurateState, next_offset: int) -> int:
    """Offset at which a fold restarts that has reached `state` at `next_offset`."""
    return next_offset if state.low_water is None else state.low_water


def metadata_of(state: CurateState, next_offset: int, dlq: int = 0, faulty: Mapping[str, Faults] | None = None) -> str:
    """The metadata to commit with `next_offset` and its `state`: at most MAX_METADATA_BYTES.

    `faulty`: `FaultyRuns.committed` of the runs that `state` does not have.
    """
    common = {"v": 1, "begin": begin_of(state, next_offset), "dlq": dlq}
    texts = (orjson.dumps(common | form) for form in _forms(state, {"faulty": faulty} if faulty else {}))
    return next(text for text in texts if len(text) <= MAX_METADATA_BYTES).decode()


def _forms(state: CurateState, faulty: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Alternative contents, from the most detailed to none."""
    yield {"runs": _entries(state, has_clocks=True)} | faulty
    runs: dict[str, Any] = {"runs": _entries(state, has_clocks=False), "has_clocks": False}
    yield runs | faulty
    yield runs
    yield faulty
    yield {}


def names_runs(metadata: str) -> bool:
    """Whether metadata names the live runs."""
    return not metadata or '"runs":' in metadata


def metadata_of_steps(begin: int, dlq: int) -> str:
    """The metadata to commit with the low-water mark of a `steps` partition."""
    return orjson.dumps({"v": 1, "begin": begin, "dlq": dlq}).decode()


def beginning_of(metadata: str, committed: int, topic: str = "groups") -> Beginning | None:
    """Parse the start of an assignment's fold; logs a warning and returns None if the metadata cannot be used."""
    if not metadata:
        return None
    try:
        found = LowWater.model_validate_json(metadata)
    except ValidationError as error:
        logger.warning("metadata of offset %d of %s cannot be read: %s", committed, topic, first_invalid(error))
        return None
    if found.begin > committed:
        logger.warning("metadata of offset %d of %s has a later start offset: %d", committed, topic, found.begin)
        return None
    if found.runs is None:
        return Beginning(found.begin, dlq=found.dlq, faulty=found.faulty)
    keys = frozenset(run_id.encode() for run_id in found.runs)
    return Beginning(found.begin, found.runs, keys, found.has_clocks, found.dlq, found.faulty)


class _Closed(BaseModel):
    """The part of a GroupClosed that concerns other runs: its time."""

    model_config = ConfigDict(frozen=True)

    kind: str
    run_id: str
    time_ms: int
    steps_at: StepsRange | None = None


def pass_time(state: CurateState, record: Record) -> None:
    """Fold a record of a run that is not live: only its time, for other runs."""
    if codec.kind_of(record) not in (CLOSED, None) or record.value is None:
        return
    try:
        closed = _Closed.model_validate_json(record.value)
    except ValidationError:
        return  # its dead letter is acknowledged
    if closed.kind == CLOSED:
        curate.pass_time(state, closed.run_id, closed.time_ms, closed.steps_at)


def complete(state: CurateState, live: Mapping[str, LiveRun], *, has_clocks: bool = True) -> None:
    """Complete the state folded from the live runs' records only: drop other runs, set idle times."""
    for run_id in [*state.runs, *state.ended]:
        if run_id not in live:
            state.runs.pop(run_id, None)
            state.remember(run_id)
    for run_id, idle in state.idle_runs().items():
        if has_clocks:
            idle.clocks = {partition: Clock(*clock) for partition, clock in live[run_id].idle.items()}
        idle.is_abandoned = live[run_id].is_abandoned


def _entries(state: CurateState, *, has_clocks: bool) -> dict[str, dict[str, Any]]:
    return {
        run_id: _entry(idle, run_id in state.ended, state.refused.get(run_id), has_clocks=has_clocks)
        for run_id, idle in state.idle_runs().items()
    }


def _entry(idle: Idle, has_ended: bool, refused_at: int | None, *, has_clocks: bool) -> dict[str, Any]:
    clocks = has_clocks and {
        str(partition): (clock.newest_ms, clock.total_ms) for partition, clock in idle.clocks.items()
    }
    entry: dict[str, Any] = {"idle": clocks} if clocks else {}
    entry |= {} if refused_at is None else {"refused_at": refused_at}
    entry |= {"is_abandoned": True} if idle.is_abandoned else {}
    return entry | ({"has_ended": True} if has_ended else {})
