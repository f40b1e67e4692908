"""The rows of each event in the metrics file: (table, row) pairs by event kind. Pure; no token array is kept."""

from collections.abc import Callable, Iterator
from typing import Any

import orjson

from rollstream.eventlog.dead_letters import LINES, PREFIX
from rollstream.eventlog.log import Received, Record
from rollstream.metrics.projection.columns import Row, copied
from rollstream.metrics.projection.rows_rollouts import ROLLOUT_ROWS
from rollstream.metrics.projection.rows_training import TRAINING_ROWS
from rollstream.schemas.base import MAX_TIME_MS
from rollstream.schemas.ids import run_of
from rollstream.schemas.topics import BY_NAME

MAX_DIGITS = 18

BUILDERS: dict[str, Callable[[Any, Received], Iterator[tuple[str, Row]]]] = {**ROLLOUT_ROWS, **TRAINING_ROWS}
"""Row builder by event kind, for kinds that have more to say than their fields."""

COPIED = frozenset(
    {
        "task_cancelled",
        "reward_recorded",
        "epoch_started",
        "rollback_requested",
        "job_skipped",
        "model_switched",
        "trajectory_rejected",
        "epoch_sealed",
        "version_judged",
        "job_progressed",
        "learner_claimed",
        "weights_loaded",
    }
)
"""Kinds whose fields alone make the row of the table with their name; kinds that are in neither leave none (ticks)."""

WALL_TIMED = frozenset(
    {
        "run_started",
        "run_ended",
        "task_requested",
        "group_started",
        "group_closed",
        "job_started",
        "job_submitted",
        "job_skipped",
        "job_finished",
        "epoch_started",
        "epoch_sealed",
        "weights_published",
        "weights_loaded",
    }
)
"""Tables that also hold the wall time of the event's record; event time may stop or be copied from another event."""


def rows_of(received: Received) -> Iterator[tuple[str, Row]]:
    """Rows of one event, each with its position in the log and its event time."""
    event, where = received.event, received.position
    kind: str = event.kind  # pyright: ignore[reportAttributeAccessIssue]
    origin = {"time_ms": event.time_ms, "log_partition": where.partition, "log_offset": where.offset}
    if kind in COPIED:
        yield kind, {"run_id": event.run_id, **copied(kind, event), **origin, **_wall_time(kind, received)}
    elif (builder := BUILDERS.get(kind)) is not None:
        for table, row in builder(event, received):
            yield table, {"run_id": event.run_id, **row, **origin, **_wall_time(table, received)}


def _wall_time(table: str, received: Received) -> Row:
    return {"recorded_ms": _plausible(received.timestamp_ms)} if table in WALL_TIMED else {}


def _plausible(timestamp_ms: int) -> int | None:
    """A record's timestamp; None for one that no clock gives: its producer may be another program."""
    return timestamp_ms if 0 <= timestamp_ms <= MAX_TIME_MS else None


def dead_letter_row(record: Record) -> Row:
    """The row of a record of the topic dlq, by its error headers."""
    headers = {name: (value or b"").decode(errors="replace") for name, value in record.headers}
    topic = headers.get(PREFIX + "topic", "")
    key = None if record.key is None else record.key.decode(errors="replace")
    return {
        "log_partition": record.partition,
        "log_offset": record.offset,
        "run_id": run_of(key) if key and topic != LINES else None,  # the key of a line is its file
        "topic": BY_NAME[topic].short if topic in BY_NAME else topic,
        "partition": _number(headers.get(PREFIX + "partition")),
        "offset": _number(headers.get(PREFIX + "offset")),
        "service": headers.get(PREFIX + "connector.name"),
        "stage": headers.get(PREFIX + "stage"),
        "error_type": headers.get(PREFIX + "exception.class.name"),
        "reason": headers.get(PREFIX + "exception.message"),
        "key": key,
        "size_bytes": len(record.value or b""),
        "headers": orjson.dumps(headers).decode(),
        "time_ms": _plausible(record.timestamp_ms),
    }


def _number(text: str | None) -> int | None:
    """A number in a header, which another program may have written; None for other text, or too large a number."""
    return int(text) if text and text.isascii() and text.isdigit() and len(text) <= MAX_DIGITS else None
