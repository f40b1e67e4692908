"""Reads every topic into the metrics file. Ours is one writer; it takes no part in any consumer group.

Order: 1. poll; 2. decode and make rows (first occurrence of a row's key wins); 3. one transaction with the rows and
the next offsets, tried again as long as the disk is full; 4. poll again. A crash between any two of these repeats
nothing and loses nothing.
"""

import asyncio
import logging
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rollstream.eventlog.blocking_calls import retrying
from rollstream.eventlog.codec import decode, kind_of, own_partition
from rollstream.eventlog.dead_letters import redriven
from rollstream.eventlog.failpoints import failpoint
from rollstream.eventlog.log import LogReader, ReadableLog, Received, Record, TopicPartition, check_kept
from rollstream.eventlog.reading import decode_or_none, read_to_end
from rollstream.metrics.projection.database import Database
from rollstream.metrics.projection.rows import dead_letter_row, rows_of
from rollstream.schemas.errors import DecodeError, TruncatedError
from rollstream.schemas.events import RunStarted
from rollstream.schemas.topics import TOPICS

logger = logging.getLogger(__name__)

POLL_RECORDS = 500
BATCH_ROWS = 20_000
"""Rows of one transaction, and records that it is made of: at most one poll more."""
POLL_S = 1.0
"""Wait for records at the log's end; a service that is asked to end waits as long at most."""
PAUSE_S = 2.0
"""Between two rounds when the log's end is reached, so that transactions are few and large: to plan one costs DuckDB
tens of milliseconds. A query wakes the projector."""


class _MisplacedError(Exception):
    """A record is in another partition than its own by the topic's present count of partitions."""


def project(
    records: Iterable[Record],
    num_partitions: Mapping[str, int] | None = None,
    recorded: Mapping[str, int] | None = None,
) -> dict[str, list[dict[str, Any]]]:
    """Rows by table. A record that is not an event leaves no row: its first reader sent it to the dead letters.

    `num_partitions`: by topic; where it is given, a record in another partition than its own is not an event either,
    unless it is its own by the count that its run began with (`recorded`, by run). Raises _MisplacedError for a record
    that `recorded`, where it is None, would have to decide.
    """
    rows: dict[str, list[dict[str, Any]]] = {}
    for record in records:
        if record.topic == "dlq":
            if redriven(record) is None:
                rows.setdefault("dead_letter", []).append(dead_letter_row(record))
            continue
        try:
            received = decode(record)
            if num_partitions is not None and not _is_in_place(received, num_partitions[record.topic]):
                if recorded is None:
                    raise _MisplacedError
                decode(record, num_partitions=recorded.get(received.event.run_id, num_partitions[record.topic]))
        except DecodeError as error:
            logger.debug("not an event: %s %s", record.position, error)
            continue
        for table, row in rows_of(received):
            rows.setdefault(table, []).append(row)
    return rows


def _is_in_place(received: Received, num_partitions: int) -> bool:
    return received.position.partition == own_partition(received.event, num_partitions)


async def _recorded_partitions(log: ReadableLog) -> dict[str, int]:
    """Number of partitions of the scaled topics when each run began: partitions may have been added since."""
    found: dict[str, int] = {}
    async for record in read_to_end(log, RunStarted.TOPIC):
        received = decode_or_none(record) if kind_of(record) == "run_started" else None
        if received is not None and isinstance(received.event, RunStarted):
            found.setdefault(received.event.run_id, received.event.num_partitions)
    return found


class Projector:
    """The way from a log to a metrics file, and how far it is."""

    def __init__(self, log: ReadableLog, database: Database) -> None:
        self._log = log
        self._database = database
        self._done: dict[TopicPartition, int] = {}
        self._num_partitions: dict[str, int] = {}
        self._recorded: dict[str, int] | None = None
        self._stopping = False
        self._max_left: float = math.inf
        self._silence_s: float | None = None
        self._wake = asyncio.Event()
        self._moved = asyncio.Condition()

    async def run(self) -> None:
        """Project until `stop`, then what it says is still to be projected. Raises LogError, MetricsFileError."""
        self._database.claim_cluster(await self._log.cluster_id())
        self._num_partitions = {topic: await self._log.num_partitions(topic) for topic in TOPICS}
        if self._database.is_old:
            await self._renew()
        self._done = await self._start_offsets()
        stored = self._database.offsets()
        new = {where: offset for where, offset in self._done.items() if where not in stored}
        await asyncio.to_thread(self._database.begin_at, new)  # a partition not read yet must not lose any
        reader = await self._log.reader(self._done)
        try:
            while not self._stopping:
                if await self._round(reader, timeout_s=POLL_S) < POLL_RECORDS:
                    await self._pause()
            await self._finish(reader)
        finally:
            await reader.close()

    async def _finish(self, reader: LogReader) -> None:
        """Project what `stop` says is still to be projected, as long as the log answers."""
        try:
            ends = await self.ends(silence_s=self._silence_s)
            left = sum(max(0, offset - self._done.get(where, 0)) for where, offset in ends.items())
            if left > self._max_left:
                logger.info("stopping %d records before the log's end; the next start continues there", left)
                return
            heard = time.monotonic()
            while not self._is_at(ends):
                if await self._round(reader, timeout_s=0.2, is_last=True):
                    heard = time.monotonic()
                elif self._silence_s is not None and time.monotonic() > heard + self._silence_s:
                    raise TimeoutError
        except TimeoutError:
            logger.warning("the log does not answer; the next start continues where this process ends")

    def stop(self, *, max_left: int | None = None, silence_s: float | None = None) -> None:
        """Let `run` finish with the records that are in the log now, or at once if that is more than `max_left`
        records, or if the log does not answer for `silence_s` seconds.
        """
        self._stopping, self._max_left = True, math.inf if max_left is None else max_left
        self._silence_s = silence_s
        self._wake.set()

    async def ends(self, *, silence_s: float | None = None) -> dict[TopicPartition, int]:
        """End of the log now: next offset by partition. Raises TimeoutError after `silence_s` without an answer."""
        found: dict[TopicPartition, int] = {}
        for topic in TOPICS:
            async with asyncio.timeout(silence_s):
                ends = await self._log.end_offsets(topic)
            found |= {TopicPartition(topic, partition): offset for partition, offset in ends.items()}
        return found

    async def wait_for(self, ends: Mapping[TopicPartition, int]) -> None:
        """Return once everything before `ends` is in the file."""
        self._wake.set()
        async with self._moved:
            await self._moved.wait_for(lambda: self._is_at(ends))

    def _is_at(self, ends: Mapping[TopicPartition, int]) -> bool:
        return all(self._done.get(where, 0) >= offset for where, offset in ends.items())

    async def _renew(self) -> None:
        """Empty a file of another version, to read the log again from its start.

        Raises TruncatedError if the log has lost something that the file has, MetricsFileError if it need not have it.
        """
        path, starts = self._database.path, self._database.starts()
        for where, stored in sorted(self._database.offsets().items()):
            begin = (await self._log.begin_offsets(where.topic)).get(where.partition, 0)
            end = (await self._log.end_offsets(where.topic)).get(where.partition, 0)
            try:
                for offset in (starts.get(where, 0), stored):
                    check_kept(where, offset, begin, end)
            except TruncatedError as error:
                raise TruncatedError(
                    f"{error}; the metrics file {path} was made by another version of rollstream and may have rows "
                    f"that the log lost: move it away to keep them, or `rollstream rebuild --partial` replaces it"
                ) from error
        logger.info("the tables of %s have another version: reading the log again from its start", path)
        await asyncio.to_thread(self._database.renew)

    async def _start_offsets(self) -> dict[TopicPartition, int]:
        """Offsets at which reading continues, from the file. Raises TruncatedError if the log does not hold them."""
        stored = self._database.offsets()
        start: dict[TopicPartition, int] = {}
        for topic in TOPICS:
            ends = await self._log.end_offsets(topic)
            for partition, begin in (await self._log.begin_offsets(topic)).items():
                where = TopicPartition(topic, partition)
                start[where] = stored.get(where, begin)
                try:
                    check_kept(where, start[where], begin, ends[partition])
                except TruncatedError as error:
                    raise TruncatedError(
                        f"{error}; move the metrics file {self._database.path} away to rebuild it from the retained "
                        f"records"
                    ) from error
        return start

    async def _round(self, reader: LogReader, *, timeout_s: float, is_last: bool = False) -> int:
        """Poll until nothing is at hand, a transaction is full or `stop` was called, then write.

        `is_last`: after `stop`. Returns how many records were read.
        """
        self._database.check_in_place()
        rows: dict[str, list[dict[str, Any]]] = {}
        num_records = num_rows = 0
        while max(num_rows, num_records) < BATCH_ROWS and (is_last or not self._stopping):
            records = await reader.poll(timeout_s=0.0 if num_records else timeout_s, max_records=POLL_RECORDS)
            if not records:
                break
            num_records += len(records)
            for table, found in (await self._projected(records)).items():
                rows.setdefault(table, []).extend(found)
                num_rows += len(found)
            await asyncio.sleep(0)  # records at hand are polled without a pause, and signals come between
        if num_records:
            await self._write(reader, rows)
        return num_records

    async def _projected(self, records: Sequence[Record]) -> dict[str, list[dict[str, Any]]]:
        """Rows of records. Runs are read only where a record is misplaced; later ones begin with the present count."""
        try:
            return project(records, self._num_partitions, self._recorded)
        except _MisplacedError:
            self._recorded = await _recorded_partitions(self._log)
            return project(records, self._num_partitions, self._recorded)

    async def _write(self, reader: LogReader, rows: dict[str, list[dict[str, Any]]]) -> None:
        positions = {where: reader.position(where) for where in self._done}
        moved = {where: offset for where, offset in positions.items() if offset > self._done[where]}
        await retrying(lambda: self._database.write(rows, moved), "project the log")
        failpoint("metrics/after-transaction")
        async with self._moved:
            self._done |= moved
            self._moved.notify_all()

    async def _pause(self) -> None:
        try:
            async with asyncio.timeout(PAUSE_S):
                await self._wake.wait()
        except TimeoutError:
            return
        self._wake.clear()


async def project_to_end(log: ReadableLog, path: Path) -> None:
    """Bring a metrics file up to date with the log. Raises LogError, MetricsFileError."""
    database = Database(path)
    try:
        projector = Projector(log, database)
        projector.stop()
        await projector.run()
    finally:
        database.close()
