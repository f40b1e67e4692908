"""The DuckDB file held for writing: its tables, and rows and offsets that are written as one.

Knows no event. One process may hold the file for writing; queries run on cursors of the same database.
"""

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import duckdb

from rollstream.eventlog.disk_space import disk_of
from rollstream.eventlog.failpoints import failpoint
from rollstream.eventlog.log import TopicPartition
from rollstream.metrics.projection import tables
from rollstream.metrics.projection.attempts import MEMBERS, PLANNED_AT, READ, TRAINED_BATCHES, Inserted, attempts_of
from rollstream.metrics.projection.columns import read_sql
from rollstream.metrics.projection.connection import (
    OPEN_CONFIG,
    MetricsFileError,
    cause_of,
    connect,
    damaged,
    is_disk_full,
    raise_full,
)
from rollstream.metrics.projection.inserts import inserts_into
from rollstream.metrics.projection.scratch import remove_left_scratch

logger = logging.getLogger(__name__)

CHECKPOINT_BYTES = 16 * 1024 * 1024
"""A write-ahead log of this size is folded into the file, as soon as no query reads what that would overwrite."""
CHECKPOINT_SPACE_FACTOR = 4
"""Free space for a checkpoint, in multiples of the write-ahead log; one without room ends the use of the file."""
MAX_WAL_BYTES = 8 * CHECKPOINT_BYTES
"""Size at which new queries wait for the running ones to end, so that the log is finally folded into the file."""
T = TypeVar("T")

Rows = Mapping[str, Sequence[Mapping[str, Any]]]
"""Rows by table name in schema `log`."""


class Database:
    """The metrics file, held for writing."""

    def __init__(self, path: Path, *, max_wal_bytes: int = MAX_WAL_BYTES) -> None:
        """Open the file and make its tables. Those of another version stay until `renew`, with their rows.

        Raises MetricsFileError, also for a file whose tables are not those of a metrics file.

        A write-ahead log that a killed process left is open afterwards: DuckDB opens it by name at its next use, which
        would be in a fork.
        """
        self.path = path
        self._wal = path.with_name(path.name + ".wal")
        is_left = self._wal_bytes() > 0
        self._connection = connect(path, read_only=False, config=OPEN_CONFIG)
        remove_left_scratch(path)
        self._inode = path.stat().st_ino
        self._idle = threading.Condition()
        self._num_forks = 0
        self._has_ended = False
        self._max_wal_bytes = max_wal_bytes
        try:
            with self._transaction():
                tables.make(self._connection)
            self.is_old = tables.are_of_another_version(self._connection)
            """Whether its tables are of another version: it can be read, and is written only after `renew`."""
        except duckdb.Error as error:
            self._connection.close()
            if is_disk_full(error):
                raise_full(path, error)
            raise damaged(path, error) from error
        self._inserts = inserts_into(read_sql()[0])
        if is_left:
            self._open_wal()

    def cursor(self) -> duckdb.DuckDBPyConnection:
        """A connection to the same database; it sees every finished transaction."""
        return self._connection.cursor()

    def fork(self, start: Callable[[duckdb.DuckDBPyConnection], T], *, timeout_s: float | None = None) -> T:
        """The result of `start`, which may fork this process: meanwhile the database is not in use.

        Raises TimeoutError if it could not begin within so many seconds.

        The fork reads blocks of the file as they are now. What is written goes to the write-ahead log and to free
        blocks; only a checkpoint frees blocks to be overwritten, so there is none before as many `fork_ended`.
        """
        with self._idle:
            if not self._idle.wait_for(self._may_fork, timeout_s):
                raise TimeoutError
            self._checkpoint_if_due()
            made = start(self._connection)
            self._num_forks += 1
            return made

    def _may_fork(self) -> bool:
        return self._num_forks == 0 or self._wal_bytes() < self._max_wal_bytes

    def fork_ended(self) -> None:
        """The forked process no longer reads the file."""
        with self._idle:
            self._num_forks -= 1
            self._idle.notify_all()

    def close(self) -> None:
        """Fold the write-ahead log into the file and let go of it, after a write of another thread."""
        with self._idle:
            try:
                self._connection.execute("CHECKPOINT")
            except duckdb.Error as error:
                logger.warning("the write-ahead log of %s was kept for the next start: %s", self.path, cause_of(error))
            self._connection.close()

    def check_in_place(self) -> None:
        """Raises MetricsFileError if the file was removed or replaced: what is written would be lost with it."""
        try:
            is_in_place = self.path.stat().st_ino == self._inode
        except FileNotFoundError:
            is_in_place = False
        if not is_in_place:
            raise MetricsFileError(
                f"the metrics file {self.path} was removed or replaced while in use; restart the metrics service to "
                f"rebuild it from the log"
            )

    def offsets(self) -> dict[TopicPartition, int]:
        """Next offset by partition, as of the last transaction."""
        found = self._connection.execute('SELECT topic, "partition", next_offset FROM main.offsets').fetchall()
        return {TopicPartition(topic, partition): offset for topic, partition, offset in found}

    def starts(self) -> dict[TopicPartition, int]:
        """Offset at which the reading of a partition began, where that was not 0."""
        return tables.starts(self._connection)

    def begin_at(self, offsets: Mapping[TopicPartition, int]) -> None:
        """Note where the reading of these partitions begins, and that nothing of them was read yet."""
        with self._transaction():
            tables.note_starts(self._connection, offsets)
        self.write({}, offsets)

    def claim_cluster(self, cluster_id: str) -> None:
        """Tie the file to a cluster. Raises MetricsFileError if it is tied to another one."""
        if message := tables.other_cluster(self._connection, self.path, cluster_id):
            raise MetricsFileError(message)
        if tables.meta(self._connection, "cluster_id") is None:
            tables.tie_to(self._connection, cluster_id)

    def renew(self) -> None:
        """Replace tables of another version by empty ones, which are to be filled from the start of the log.

        Raises MetricsFileError for a file of an export, whose run the log need not hold, and if the disk is full.
        """
        if tables.is_of_export(self._connection):
            raise MetricsFileError(
                f"the metrics file {self.path} was made from an export by another version of rollstream, and its rows "
                f"would be lost; repeat `rollstream rebuild --from EXPORT`, or move the file away"
            )
        with self._writing(), self._transaction():
            tables.make_again(self._connection)
        self.is_old = False

    def write(self, rows: Rows, offsets: Mapping[TopicPartition, int]) -> None:
        """Add rows and move offsets in one transaction. A row whose key is there already is left out.

        Raises MetricsFileError, caused by an OSError, if the disk is full: nothing is written then, and it may be tried
        again.
        """
        with self._writing():
            try:
                self._write(rows, offsets)
            except (duckdb.InvalidInputException, TypeError):  # an integer is too large; looking at all takes long
                self._write({name: self._inserts[name].fitting(found) for name, found in rows.items()}, offsets)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Keep forks waiting for a write, and fold the write-ahead log in after it. Raises as `write` does."""
        try:
            with self._idle:
                if self._has_ended:
                    self._reopen()
                yield
                self._checkpoint_if_due()
        except (duckdb.Error, MetricsFileError) as error:
            if not is_disk_full(error):
                raise
            self._has_ended |= isinstance(error, duckdb.FatalException)
            raise_full(self.path, error)

    def _write(self, rows: Rows, offsets: Mapping[TopicPartition, int]) -> None:
        with self._transaction():
            added: dict[str, Sequence[Mapping[str, Any]]] = {}
            for table, found in rows.items():
                returned = self._insert(table, found)
                if table in READ:
                    added[table] = _added(READ[table], returned, found)
            self._add_up(added)
            now = datetime.now(UTC).replace(tzinfo=None)
            self._connection.execute(
                "INSERT OR REPLACE INTO main.offsets "
                "SELECT unnest($1::VARCHAR[]), unnest($2::BIGINT[]), unnest($3::BIGINT[]), $4",
                [
                    [where.topic for where in offsets],
                    [where.partition for where in offsets],
                    list(offsets.values()),
                    now,
                ],
            )
            failpoint("metrics/inside-transaction")

    def keep_run(self, run_id: str, *, is_whole: bool) -> None:
        """Drop the rows of other runs; unless the run was all that there was, the offsets too."""
        with self._transaction():
            for table in sorted(set(self._inserts) - {"meta"}):
                dropped = self._connection.execute(f'DELETE FROM log."{table}" WHERE run_id <> $1', [run_id]).fetchone()
                is_whole &= dropped == (0,)
            if not is_whole:
                self._connection.execute("DELETE FROM main.offsets")
                tables.note_export(self._connection)

    def _insert(self, table: str, rows: Sequence[Mapping[str, Any]]) -> list[tuple[Any, ...]]:
        """Add rows; of a table in READ, those that were not there yet are returned, with the columns read of them."""
        returned: list[tuple[Any, ...]] = []
        insert = self._inserts[table]
        for text in insert.texts(rows):
            self._connection.execute(insert.statement, [text])
            if table in READ:
                returned += self._connection.fetchall()
        return returned

    def _add_up(self, added: Inserted) -> None:
        """Bring `log.attempt` up to the rows that were added."""
        asked = {row["batch_id"] for table in ("batch_planned", "step_trained") for row in added.get(table, ())}
        attempts = attempts_of(added, self._trained_members(sorted(asked)))
        if attempts:
            self._insert("attempt", attempts)

    def _trained_members(self, batch_ids: Sequence[str]) -> list[dict[str, Any]]:
        """Members of those of the batches that are planned and trained."""
        if not batch_ids:
            return []
        trained = [batch_id for (batch_id,) in self._connection.execute(TRAINED_BATCHES, [batch_ids]).fetchall()]
        planned = self._connection.execute(PLANNED_AT, [trained]).fetchall() if trained else []
        if not planned:
            return []
        offsets = [offset for _, offset in planned]
        # By offset first, for a block tells its least and greatest number; of a text it tells only how it begins.
        found = self._connection.execute(MEMBERS, [min(offsets), max(offsets), [batch_id for batch_id, _ in planned]])
        return [{"rollout_id": rollout_id, "run_id": run_id} for rollout_id, run_id in found.fetchall()]

    def _checkpoint_if_due(self) -> None:
        wal_bytes = self._wal_bytes()
        if self._num_forks or wal_bytes < CHECKPOINT_BYTES:
            return
        disk = disk_of(self.path.parent)
        if disk.free_bytes < CHECKPOINT_SPACE_FACTOR * wal_bytes:
            free = f"{disk.free_bytes:,} bytes are free"
            logger.warning("the write-ahead log of %s grows until there is free space: %s", self.path, free)
            return
        try:
            self._connection.execute("CHECKPOINT")
        except duckdb.IOException as error:  # what was committed is in the write-ahead log
            logger.warning("the write-ahead log of %s grows until there is free space: %s", self.path, cause_of(error))

    def _reopen(self) -> None:
        """DuckDB ends the use of a file on whose full disk a checkpoint failed; what was committed is in its log."""
        self._connection.close()
        self._connection = connect(self.path, read_only=False, config=OPEN_CONFIG)
        self._open_wal()
        self._has_ended = False

    def _open_wal(self) -> None:
        """Open the write-ahead log by a write, which fails on a full disk like any other; a failed checkpoint ends the
        use of the file.
        """
        try:
            self._connection.execute("UPDATE log.meta SET value = value WHERE name = 'tables_sha256'")
        except duckdb.Error as error:
            if not is_disk_full(error):
                raise
            logger.warning("the write-ahead log of %s cannot be written yet: %s", self.path, cause_of(error))

    def _wal_bytes(self) -> int:
        return self._wal.stat().st_size if self._wal.exists() else 0

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._connection.execute("BEGIN TRANSACTION")
        try:
            yield
        except BaseException:
            self._connection.execute("ROLLBACK")
            raise
        self._connection.execute("COMMIT")


def _added(
    columns: Sequence[str], returned: Sequence[tuple[Any, ...]], given: Sequence[Mapping[str, Any]]
) -> Sequence[Mapping[str, Any]]:
    """The rows that were really added: those that were given, unless the table had some already."""
    return given if len(returned) == len(given) else [dict(zip(columns, row, strict=True)) for row in returned]
