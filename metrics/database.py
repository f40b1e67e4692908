"""The DuckDB file: opened with every way out of it closed, its tables, and writing rows and offsets as one.

Knows no event. One process may hold the file for writing; queries run on cursors of the same database.
"""

import hashlib
import logging
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import duckdb

from rollstream.eventlog.failpoints import failpoint
from rollstream.eventlog.log import TopicPartition
from rollstream.schemas.errors import RollstreamError

logger = logging.getLogger(__name__)

VIEWS_MARK = "\n-- views\n"
SAFE_CONFIG: dict[str, Any] = {
    "enable_external_access": "false",
    "autoinstall_known_extensions": "false",
    "autoload_known_extensions": "false",
    "python_enable_replacements": "false",
    "lock_configuration": "true",
    "threads": "1",
    "memory_limit": "2GB",
    "max_temp_directory_size": "4GB",
    "default_block_size": "65536",
}
"""No file, no network, no Python variable is reached from SQL, and no query can change that.

Blocks are small: every column of every table takes at least one, which is most of a short run's file.
"""

Rows = Mapping[str, Sequence[Mapping[str, Any]]]
"""Rows by table name in schema `log`."""


class MetricsFileError(RollstreamError):
    """The metrics file cannot be opened, or belongs to another cluster."""


class FileInUseError(MetricsFileError):
    """Another process has the metrics file open."""


def metrics_file(workspace: Path) -> Path:
    """Where a workspace keeps its metrics."""
    return workspace / "metrics.duckdb"


def connect(path: Path, *, read_only: bool) -> duckdb.DuckDBPyConnection:
    """Open the file. Raises MetricsFileError (FileInUseError) that names the file and the remedy."""
    try:
        return duckdb.connect(str(path), read_only=read_only, config=SAFE_CONFIG)
    except duckdb.IOException as error:
        if "lock" in str(error).lower():
            raise FileInUseError(
                f"the metrics file {path} is in use by another process{_holder(str(error))}: stop that one, or ask "
                "its SQL service"
            ) from error
        raise MetricsFileError(
            f"the metrics file {path} cannot be opened: {one_line(error)}; give its permission, or remove it: the log "
            "fills it again"
        ) from error
    except duckdb.Error as error:
        raise MetricsFileError(
            f"the metrics file {path} cannot be read: {one_line(error)}; remove it, the log fills it again"
        ) from error


def one_line(error: BaseException) -> str:
    """What an error says, in one line, without DuckDB's pointers into the text."""
    lines = [line.strip() for line in str(error).splitlines()]
    return " ".join(line for line in lines if line and not line.startswith(("^", "LINE ")))


class Database:
    """The metrics file, held for writing."""

    def __init__(self, path: Path) -> None:
        """Open the file and make its tables. Tables of another rollstream are dropped, to be filled again."""
        self.path = path
        self._connection = connect(path, read_only=False)
        tables, _, views = (
            resources.files("rollstream.metrics").joinpath("tables.sql").read_text().partition(VIEWS_MARK)
        )
        self._tables_sha256 = hashlib.sha256(tables.encode()).hexdigest()
        self._views_sha256 = hashlib.sha256(views.encode()).hexdigest()
        with self._transaction():
            self._make_tables(tables)
            self._make_views(views)
        self._inserts = _inserts(tables)

    def cursor(self) -> duckdb.DuckDBPyConnection:
        """A connection to the same database; it sees every finished transaction."""
        return self._connection.cursor()

    def close(self) -> None:
        """Fold the write-ahead log into the file and let go of it."""
        self._connection.execute("CHECKPOINT")
        self._connection.close()

    def offsets(self) -> dict[TopicPartition, int]:
        """Next offset by partition, as of the last transaction."""
        found = self._connection.execute('SELECT topic, "partition", next_offset FROM main.offsets').fetchall()
        return {TopicPartition(topic, partition): offset for topic, partition, offset in found}

    def claim_cluster(self, cluster_id: str) -> None:
        """Tie the file to a cluster. Raises MetricsFileError if it is tied to another one."""
        found = self._meta("cluster_id")
        if found is None:
            self._connection.execute("INSERT INTO log.meta VALUES ('cluster_id', $1)", [cluster_id])
        elif found != cluster_id:
            raise MetricsFileError(
                f"the metrics file {self.path} was made from cluster {found}, not from {cluster_id}: move it away, "
                "or use another workspace"
            )

    def write(self, rows: Rows, offsets: Mapping[TopicPartition, int]) -> None:
        """Add rows and move offsets in one transaction. A row whose key is there already is left out."""
        with self._transaction():
            for table, found in rows.items():
                statement, names = self._inserts[table]
                self._connection.execute(statement, [[row[name] for row in found] for name in names])
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

    def _transaction(self) -> "_Transaction":
        return _Transaction(self._connection)

    def _make_tables(self, tables: str) -> None:
        schemas = self._connection.execute("SELECT 1 FROM duckdb_schemas() WHERE schema_name = 'log'").fetchone()
        if schemas is not None:
            if self._meta("tables_sha256") == self._tables_sha256:
                return
            logger.info("the tables of %s are of another version: the log is read again from its start", self.path)
            self._drop_everything()
        self._connection.execute(tables)
        self._connection.execute("INSERT INTO log.meta VALUES ('tables_sha256', $1)", [self._tables_sha256])

    def _make_views(self, views: str) -> None:
        if self._meta("views_sha256") == self._views_sha256:
            return
        self._connection.execute(views)
        self._connection.execute("INSERT OR REPLACE INTO log.meta VALUES ('views_sha256', $1)", [self._views_sha256])

    def _meta(self, name: str) -> str | None:
        found = self._connection.execute("SELECT value FROM log.meta WHERE name = $1", [name]).fetchone()
        return found[0] if found else None

    def _drop_everything(self) -> None:
        views = self._connection.execute(
            "SELECT schema_name, view_name FROM duckdb_views() WHERE NOT internal ORDER BY view_oid DESC"
        ).fetchall()
        for schema, view in views:
            self._connection.execute(f'DROP VIEW IF EXISTS "{schema}"."{view}" CASCADE')
        self._connection.execute("DROP SCHEMA log CASCADE")
        self._connection.execute("DROP TABLE IF EXISTS main.offsets")


class _Transaction:
    """BEGIN, then COMMIT, or ROLLBACK when the body raised."""

    def __init__(self, connection: duckdb.DuckDBPyConnection) -> None:
        self._connection = connection

    def __enter__(self) -> None:
        self._connection.execute("BEGIN TRANSACTION")

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._connection.execute("COMMIT" if kind is None else "ROLLBACK")


@cache
def _inserts(tables: str) -> dict[str, tuple[str, list[str]]]:
    """How rows go into each table of schema `log`: the statement, and the order of its columns."""
    columns: dict[str, dict[str, str]] = {}
    with duckdb.connect(":memory:", config=SAFE_CONFIG) as connection:
        connection.execute(tables)
        found = connection.execute(
            "SELECT table_name, column_name, data_type FROM duckdb_columns() "
            "WHERE schema_name = 'log' ORDER BY table_name, column_index"
        ).fetchall()
    for table, column, data_type in found:
        columns.setdefault(table, {})[column] = data_type
    return {table: _insert(table, of_table) for table, of_table in columns.items()}


def _insert(table: str, columns: Mapping[str, str]) -> tuple[str, list[str]]:
    """Statement that takes one list a column (far faster than a row at a time), and the columns' order."""
    values = ", ".join(_values(index, data_type) for index, data_type in enumerate(columns.values(), start=1))
    names = ", ".join(f'"{name}"' for name in columns)
    return f'INSERT INTO log."{table}" ({names}) SELECT {values} ON CONFLICT DO NOTHING', list(columns)


def _values(index: int, data_type: str) -> str:
    if data_type.startswith("MAP"):
        return f"CAST(CAST(unnest(${index}::VARCHAR[]) AS JSON) AS {data_type})"
    if data_type == "JSON":
        return f"CAST(unnest(${index}::VARCHAR[]) AS JSON)"
    return f"unnest(${index}::{data_type}[])"


def _holder(message: str) -> str:
    """` (PID 12)` if DuckDB names who holds the lock."""
    _, found, rest = message.partition("PID ")
    number = rest.split(")")[0].split(" ")[0].strip(".") if found else ""
    return f" (PID {number})" if number.isdigit() else ""
