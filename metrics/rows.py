"""What each event becomes in the metrics file: (table, row) pairs by event kind. Pure; no token array is kept."""

from collections.abc import Callable, Iterator
from typing import Any

import orjson

from rollstream.eventlog.log import Received, Record
from rollstream.metrics.rows_rollouts import ROLLOUT_ROWS
from rollstream.metrics.rows_training import TRAINING_ROWS
from rollstream.schemas.ids import run_of
from rollstream.schemas.topics import BY_NAME

Row = dict[str, Any]

CONNECT = "__connect.errors."
"""How the names of Kafka Connect's error headers begin."""

BUILDERS: dict[str, Callable[[Any, str], Iterator[tuple[str, Row]]]] = {**ROLLOUT_ROWS, **TRAINING_ROWS}
"""Row builder by event kind; kinds that are not named leave no row (ticks)."""


def rows_of(received: Received) -> Iterator[tuple[str, Row]]:
    """Rows of one event, each with where it lies in the log and its event time."""
    event, where = received.event, received.position
    builder = BUILDERS.get(event.kind)  # pyright: ignore[reportAttributeAccessIssue]
    if builder is None:
        return
    place = {"time_ms": event.time_ms, "log_partition": where.partition, "log_offset": where.offset}
    for table, row in builder(event, received.digest):
        yield table, {"run_id": event.run_id, **row, **place}


def dead_letter_row(record: Record) -> Row:
    """The row of a record of the topic dlq, by its error headers."""
    headers = {name: (value or b"").decode(errors="replace") for name, value in record.headers}
    topic = headers.get(CONNECT + "topic", "")
    key = None if record.key is None else record.key.decode(errors="replace")
    return {
        "log_partition": record.partition,
        "log_offset": record.offset,
        "run_id": run_of(key) if key else None,
        "topic": BY_NAME[topic].short if topic in BY_NAME else topic,
        "partition": _number(headers.get(CONNECT + "partition")),
        "offset": _number(headers.get(CONNECT + "offset")),
        "service": headers.get(CONNECT + "connector.name"),
        "stage": headers.get(CONNECT + "stage"),
        "error_type": headers.get(CONNECT + "exception.class.name"),
        "reason": headers.get(CONNECT + "exception.message"),
        "key": key,
        "size_bytes": len(record.value or b""),
        "headers": orjson.dumps(headers).decode(),
        "time_ms": record.timestamp_ms,
    }


def _number(text: str | None) -> int | None:
    return int(text) if text and text.isascii() and text.isdigit() else None
