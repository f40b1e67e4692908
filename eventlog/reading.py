"""Reads the current records of a topic once, from the beginning or given offsets to the end."""

import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence

from rollstream.eventlog.codec import decode, kind_of
from rollstream.eventlog.log import (
    ReadableLog,
    Received,
    Record,
    TopicPartition,
    check_exists,
    format_position,
    truncated,
)
from rollstream.schemas.errors import ConfigError, DecodeError

POLL_S = 1.0
MOST_RECORDS = ("group_closed", "trajectory_rejected")
"""The most frequent kinds in the topics of one partition; the state of a run can be derived without them."""
MAX_RECORDS = 500
"""A poll; records may have megabytes."""
SILENCE_S = 60.0
"""After so long without a record the log is asked whether it still answers; a broker that died may be back by then."""

logger = logging.getLogger(__name__)


def unknown_run(run_id: str, begin: int, *, unreadable: str = "") -> ConfigError:
    """The error of an unknown run. `begin`: oldest retained offset of the partition of `groups`; `unreadable`: the
    first of its records that is not an event of this version, as `unreadable_event` names it.
    """
    removed = f", and topic groups partition 0 no longer has records before offset {begin}" if begin else ""
    if unreadable:
        return ConfigError(
            f"run {run_id} has records that this version of rollstream cannot read, such as a newer version "
            f"writes{removed}: the first is {unreadable}; use the version that wrote them"
        )
    return ConfigError(f"run {run_id} does not exist{removed}; `rollstream runs` lists all runs")


def decode_or_none(record: Record, *, num_partitions: int | None = None, warns: bool = False) -> Received | None:
    """The event of a record; none if it cannot be decoded: dead letters are for the fold that answers its topic.

    `warns`: say so, where nobody else does.
    """
    try:
        return decode(record, num_partitions=num_partitions)
    except DecodeError as error:
        if warns:
            logger.warning("passing over %s offset %d: %s", record.topic, record.offset, error)
        return None


def unreadable_event(record: Record) -> str:
    """Position and error of a record that has the headers of an event and is not one of this version; else empty."""
    if kind_of(record) is None:
        return ""
    try:
        decode(record)
    except DecodeError as error:
        return f"{format_position(record.position)} ({error})"
    return ""


async def read_to_end(
    log: ReadableLog,
    topic: str,
    starts: Mapping[int, int] | None = None,
    ends: Mapping[int, int] | None = None,
    *,
    silence_s: float = SILENCE_S,
) -> AsyncGenerator[Record, None]:
    """Records of a topic from `starts` up to `ends` by partition (default: all current ones), in order by partition.

    Raises TruncatedError, naming the range, if a start is no longer retained or the partition ends before `ends`,
    TopicError for a partition that does not exist, LogError if the log is unreachable.
    """
    begins, present = await log.begin_offsets(topic), await log.end_offsets(topic)
    ends = ends or present
    starts = starts or {partition: begins[partition] for partition in ends}
    where = {TopicPartition(topic, n): at for n, at in starts.items() if at < ends[n]}
    for partition, at in where.items():
        _check_range(partition, at, ends[partition.partition], begins, present)
    if not where:
        return
    reader = await log.reader(where)
    heard = time.monotonic()
    try:
        while any(reader.position(partition) < ends[partition.partition] for partition in where):
            records = await reader.poll(timeout_s=POLL_S, max_records=MAX_RECORDS)
            if not records and time.monotonic() < heard + silence_s:
                continue
            if not records:
                await log.end_offsets(topic)
            heard = time.monotonic()
            for record in records:
                if record.offset < ends[record.partition]:
                    yield record
    finally:
        await reader.close()


def _check_range(
    where: TopicPartition, start: int, end: int, begins: Mapping[int, int], present: Mapping[int, int]
) -> None:
    check_exists(where, present)
    number = where.partition
    if start < begins[number]:
        raise truncated(where, start, begins[number], present[number])
    if end > present[number]:
        raise truncated(where, end, begins[number], present[number])


async def read_events(
    log: ReadableLog,
    topics: Sequence[str],
    *,
    skipped: Collection[str] = (),
    unreadable: Counter[str] | None = None,
) -> AsyncGenerator[Received, None]:
    """Current events of single-partition topics, in order by topic. Records that are not events are left out.

    `skipped`: kinds whose records are passed over undecoded. `unreadable`: counts those by topic that have the headers
    of an event and are none, as those of a newer version.
    """
    for topic in topics:
        async for record in read_to_end(log, topic):
            if skipped and kind_of(record) in skipped:
                continue
            if (received := decode_or_none(record)) is not None:
                yield received
            elif unreadable is not None and kind_of(record) is not None:
                unreadable[topic] += 1
