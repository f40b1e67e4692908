"""Reading what a topic holds now, once, from its beginning or a part of it, to the end."""

import time
from collections.abc import AsyncIterator, Mapping

from rollstream.eventlog.log import EventLog, Record, TopicPartition, truncated

POLL_S = 1.0
MAX_RECORDS = 500
"""A poll; records may have megabytes."""
SILENCE_S = 60.0
"""After so long without a record the log is asked whether it still answers; a broker that died may be back by then."""


async def read_to_end(
    log: EventLog,
    topic: str,
    starts: Mapping[int, int] | None = None,
    ends: Mapping[int, int] | None = None,
    *,
    silence_s: float = SILENCE_S,
) -> AsyncIterator[Record]:
    """Records of a topic from `starts` up to `ends` by partition (default: all that there is now).

    Order holds in a partition. Raises TruncatedError, naming the range, if a start is no longer kept, LogError if the
    log is gone.
    """
    begins = await log.begin_offsets(topic)
    ends = ends or await log.end_offsets(topic)
    starts = starts or {partition: begins[partition] for partition in ends}
    where = {TopicPartition(topic, n): at for n, at in starts.items() if at < ends[n]}
    for partition, at in where.items():
        if at < begins[partition.partition]:
            raise truncated(partition, at, begins[partition.partition], ends[partition.partition])
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
