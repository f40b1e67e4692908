"""Raw records on their way to a Parquet file: written in small parts, then joined to one file, zstd-compressed.

DuckDB takes 2048 rows at a time, which of large records is more than memory: a part holds no more than it should.
Lossless: null keys, values and header contents stay null, headers keep their order and repeats.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import duckdb

from rollstream.eventlog.files import sync_file
from rollstream.eventlog.log import Record
from rollstream.metrics.parquet import PARQUET_FILE, pattern_of
from rollstream.metrics.projection.columns import quoted
from rollstream.metrics.projection.connection import cause_of
from rollstream.replay.archive.manifest import hash_file
from rollstream.schemas.errors import LogError

FLUSH_RECORDS = 2000
FLUSH_BYTES = 16 * 1024 * 1024
"""A part has at most so many records, and ends when it has so many bytes."""
MEMORY_LIMIT = "512MB"
ROW_GROUP_BYTES = "8MB"

CREATE = (
    'CREATE OR REPLACE TABLE staging ("partition" BIGINT, "offset" BIGINT, timestamp_ms BIGINT, "key" BLOB, '
    '"value" BLOB, headers STRUCT("name" VARCHAR, "value" BLOB)[])'
)
INSERT = (
    'INSERT INTO staging SELECT "partition", "offset", timestamp_ms, "key", "value", '
    "list_transform(list_zip(names, contents), lambda header: {'name': header[1], 'value': header[2]}) "
    'FROM (SELECT unnest($1::BIGINT[]) AS "partition", unnest($2::BIGINT[]) AS "offset", '
    'unnest($3::BIGINT[]) AS timestamp_ms, unnest($4::BLOB[]) AS "key", unnest($5::BLOB[]) AS "value", '
    "unnest($6::VARCHAR[][]) AS names, unnest($7::BLOB[][]) AS contents)"
)


class Written(NamedTuple):
    """A Parquet file that is on the disk."""

    sha256: str
    num_records: int
    content_bytes: int


class Staging:
    """Gathers the records of one topic after the other. Bounded memory, whatever their number and size."""

    def __init__(self, scratch: Path) -> None:
        """`scratch`: folder for the parts; created here, removed by the caller."""
        scratch.mkdir(parents=True)
        self._scratch = scratch
        self._connection = duckdb.connect(
            config={
                "threads": "1",
                "memory_limit": MEMORY_LIMIT,
                "temp_directory": str(scratch / "spilled"),
                "preserve_insertion_order": "false",  # else row groups cannot be cut by their size
                "autoinstall_known_extensions": "false",
            }
        )
        self._begin()

    def close(self) -> None:
        """Discard files that were not completed."""
        self._connection.close()

    def add(self, records: Sequence[Record]) -> None:
        """Take records in."""
        for record in records:
            self._held.append(record)
            self._held_bytes += len(record.key or b"") + len(record.value or b"")
            if len(self._held) >= FLUSH_RECORDS or self._held_bytes >= FLUSH_BYTES:
                self._flush()

    def write(self, path: Path) -> Written:
        """Write the added records to a file and start a new one. Raises LogError if the file cannot be written."""
        if self._held or not self._parts:
            self._flush()
        parts = ", ".join(quoted(pattern_of(part)) for part in self._parts)
        self._copy(f"(SELECT * FROM read_parquet([{parts}], hive_partitioning = false))", path, "zstd")
        sync_file(path)
        written = Written(hash_file(path), self._num_records, self._content_bytes)
        for part in self._parts:
            part.unlink()
        self._begin()
        return written

    def holds(self, path: Path, partition: int, offset: int) -> bool:
        """Whether a file that was written has a record."""
        sql = f'SELECT 1 FROM {PARQUET_FILE} WHERE "partition" = $2 AND "offset" = $3'
        return bool(self._connection.execute(sql, [pattern_of(path), partition, offset]).fetchall())

    def _begin(self) -> None:
        self._parts: list[Path] = []
        self._held: list[Record] = []
        self._held_bytes = 0
        self._num_records = 0
        self._content_bytes = 0

    def _flush(self) -> None:
        columns: list[list[Any]] = [
            [record.partition for record in self._held],
            [record.offset for record in self._held],
            [record.timestamp_ms for record in self._held],
            [record.key for record in self._held],
            [record.value for record in self._held],
            [[name for name, _ in record.headers] for record in self._held],
            [[content for _, content in record.headers] for record in self._held],
        ]
        self._connection.execute(CREATE)
        self._connection.execute(INSERT, columns)
        part = self._scratch / f"{len(self._parts)}.parquet"
        self._copy("staging", part, "snappy")
        self._parts.append(part)
        self._num_records += len(self._held)
        self._content_bytes += self._held_bytes
        self._held, self._held_bytes = [], 0

    def _copy(self, source: str, path: Path, codec: str) -> None:
        options = f"FORMAT parquet, COMPRESSION {codec}, ROW_GROUP_SIZE_BYTES '{ROW_GROUP_BYTES}'"
        try:
            self._connection.execute(f"COPY {source} TO {quoted(str(path))} ({options})")
        except duckdb.Error as error:
            raise LogError(
                f"file {path} of the export cannot be written: {cause_of(error)}; free space there, "
                "or give another --output"
            ) from error
