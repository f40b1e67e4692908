"""Records of an export's Parquet files: by offset, and read on in order. Files are checked before they come here."""

import asyncio
from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import duckdb

from rollstream.eventlog.log import Record, TopicPartition, truncated
from rollstream.metrics.parquet import PARQUET_FILE, pattern_of
from rollstream.replay.archive.manifest import TopicFile
from rollstream.schemas.errors import LogError, TopicError, TruncatedError

CHUNK_RECORDS = 8000
CHUNK_BYTES = 64 * 1024 * 1024
"""A query reads at most so many records, and about so many bytes by the file's mean record: it unpacks whole row groups
even for a few records.
"""
NEAR = 64
"""Maximum distance of records that are fetched by one query."""
INDEX = f'SELECT "partition", "offset" FROM {PARQUET_FILE}'
COLUMNS = f"DESCRIBE SELECT * FROM {PARQUET_FILE}"
TYPES = {
    **dict.fromkeys(("partition", "offset", "timestamp_ms"), "BIGINT"),
    **dict.fromkeys(("key", "value"), "BLOB"),
    "headers": 'STRUCT("name" VARCHAR, "value" BLOB)[]',
}
WRONG = (
    f'SELECT 1 FROM {PARQUET_FILE} WHERE "partition" IS NULL OR "partition" NOT BETWEEN 0 AND $2 - 1 '
    'OR "offset" IS NULL OR timestamp_ms IS NULL LIMIT 1'
)
READ = (
    f'SELECT "offset", "key", "value", timestamp_ms, headers FROM {PARQUET_FILE} '
    'WHERE "partition" = $2 AND "offset" BETWEEN $3 AND $4 ORDER BY "offset"'
)


class Table:
    """The records of one topic: which offsets there are, held in memory, and their content, read from the file."""

    def __init__(self, cursor: duckdb.DuckDBPyConnection, topic: str, path: Path, file: TopicFile) -> None:
        self.covered = file.partitions
        self._topic = topic
        self._path = path
        self._cursor = cursor
        self._check_columns()
        self._offsets = [array("q") for _ in file.partitions]
        found = self._execute(INDEX, [])
        while rows := found.fetchmany(10_000):
            for partition, offset in rows:
                self._offsets[partition].append(offset)
        self._offsets = [array("q", sorted(offsets)) for offsets in self._offsets]
        mean_bytes = max(1, file.content_bytes // max(1, file.num_records))
        self._chunk = max(1, min(CHUNK_RECORDS, CHUNK_BYTES // mean_bytes))

    def _check_columns(self) -> None:
        """Raises LogError unless the file has the columns of an export, in partitions that the manifest names."""
        columns = {name: kind for name, kind, *_ in self._execute(COLUMNS, []).fetchall()}
        wrong = [name for name, kind in TYPES.items() if columns.get(name) != kind]
        reason = f"column {wrong[0]} is not {TYPES[wrong[0]]}" if wrong else ""
        if not wrong and self._execute(WRONG, [len(self.covered)]).fetchall():
            reason = f"a record is in none of {len(self.covered)} partitions, or lacks its offset or time"
        if reason:
            raise self._not_of_export(reason)

    def check(self, partition: int) -> None:
        """Raises TopicError if there is no such partition."""
        if not 0 <= partition < len(self.covered):
            count = len(self.covered)
            raise TopicError(
                f"partition {self._topic}/{partition} does not exist: topic {self._topic} has {count} partitions; "
                "name one of these"
            )

    def next_offset(self, partition: int, offset: int) -> int:
        """The first existing offset from `offset` on, else the end of the covered range."""
        offsets = self._offsets[partition]
        index = bisect_left(offsets, offset)
        return offsets[index] if index < len(offsets) else max(offset, self.covered[partition].end)

    def read(self, partition: int, offset: int) -> list[Record]:
        """The next records from `offset` on, at most a chunk. Raises TruncatedError."""
        covered, offsets = self.covered[partition], self._offsets[partition]
        if not covered.begin <= offset <= covered.end:
            raise truncated(TopicPartition(self._topic, partition), offset, covered.begin, covered.end)
        first = bisect_left(offsets, offset)
        last = min(first + self._chunk, len(offsets)) - 1
        return [] if last < first else self._between(partition, offsets[first], offsets[last])

    def at(self, partition: int, wanted: Sequence[int]) -> list[Record]:
        """The records at these offsets, which rise. Raises TruncatedError if one is not there."""
        self.check(partition)
        offsets = self._offsets[partition]
        spans: list[list[int]] = []
        for offset in wanted:
            index = bisect_left(offsets, offset)
            if index == len(offsets) or offsets[index] != offset:
                raise self._missing(partition, offset)
            if spans and index - spans[-1][1] <= NEAR:
                spans[-1][1] = index
            else:
                spans.append([index, index])
        chosen = set(wanted)
        found = [self._between(partition, offsets[first], offsets[last]) for first, last in spans]
        return [record for records in found for record in records if record.offset in chosen]

    def _between(self, partition: int, first: int, last: int) -> list[Record]:
        rows = self._execute(READ, [partition, first, last]).fetchall()
        try:
            return [_record(self._topic, partition, row) for row in rows]
        except TypeError as error:  # null in the place of a list or of a header
            raise self._not_of_export("a record lacks its headers") from error

    def _not_of_export(self, reason: str) -> LogError:
        return LogError(f"file {self._path} is not of an export: {reason}; restore it from a copy, or export again")

    def _missing(self, partition: int, offset: int) -> TruncatedError:
        covered = self.covered[partition]
        kept = f"of the offsets {covered.begin} to {covered.end - 1} it has those of one run"
        return TruncatedError(
            f"offset {offset} of topic {self._topic} partition {partition} is not in {self._path}: {kept}"
        )

    def _execute(self, sql: str, values: list[Any]) -> duckdb.DuckDBPyConnection:
        try:
            return self._cursor.cursor().execute(sql, [pattern_of(self._path), *values])
        except duckdb.Error as error:
            raise LogError(
                f"file {self._path} of an export cannot be read: {str(error).splitlines()[0]}; "
                "restore it from a copy, or export again"
            ) from error


class ExportReader:
    """`LogReader` over the files of an export."""

    def __init__(self, tables: Mapping[TopicPartition, Table], start: Mapping[TopicPartition, int]) -> None:
        self._tables = dict(tables)
        for where in start:
            tables[where].check(where.partition)
        self._next = {
            where: tables[where].covered[where.partition].begin if offset < 0 else offset
            for where, offset in start.items()
        }
        self._turn = deque(self._next)
        self._held: deque[Record] = deque()
        """Records of the first partition of `_turn` that the last query read and no poll has returned yet."""

    async def poll(self, *, timeout_s: float = 1.0, max_records: int = 10_000) -> list[Record]:
        """Next records of one partition; empty after `timeout_s` at the end. Raises TruncatedError."""
        for _ in range(0 if self._held else len(self._turn)):
            self._turn.rotate(-1)
            where = self._turn[0]
            self._held.extend(await asyncio.to_thread(self._tables[where].read, where.partition, self._next[where]))
            if self._held:
                break
        taken = [self._held.popleft() for _ in range(min(max_records, len(self._held)))]
        if taken:
            self._next[self._turn[0]] = taken[-1].offset + 1
        else:
            await asyncio.sleep(timeout_s)
        return taken

    def position(self, where: TopicPartition) -> int:
        """Offset of the next record that there is; the end of the covered range if there is none."""
        return self._tables[where].next_offset(where.partition, self._next[where])

    def seek(self, where: TopicPartition, offset: int) -> None:
        """Read on from `offset`."""
        self._next[where] = offset
        if self._turn and where == self._turn[0]:
            self._held.clear()

    async def close(self) -> None:
        """Nothing to let go of."""


def _record(topic: str, partition: int, row: tuple[Any, ...]) -> Record:
    offset, key, value, timestamp_ms, headers = row
    pairs = tuple((header["name"], header["value"]) for header in headers)
    return Record(topic, partition, offset, key, value, pairs, timestamp_ms)
