"""The tables and views of a metrics file: made, told apart from those of another version, and replaced.

Every function runs in the transaction of its caller.
"""

import hashlib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

import duckdb

from rollstream.eventlog.log import TopicPartition
from rollstream.metrics.projection.columns import read_sql

START = "start of "
"""Beginning of the names in `log.meta` that say where the reading of a partition began."""


class _Made(NamedTuple):
    """A text of tables.sql and its hash."""

    sql: str
    sha256: str


@cache
def _tables_and_views() -> tuple[_Made, _Made]:
    tables, views = (_Made(sql, hashlib.sha256(sql.encode()).hexdigest()) for sql in read_sql())
    return tables, views


def are_of_another_version(connection: duckdb.DuckDBPyConnection) -> bool:
    """Whether the file has tables, and other ones than tables.sql makes."""
    return _has_tables(connection) and meta(connection, "tables_sha256") != _tables_and_views()[0].sha256


def make(connection: duckdb.DuckDBPyConnection) -> None:
    """Make tables where there are none, and views where they are others. Tables of another version keep their views."""
    tables, views = _tables_and_views()
    if not _has_tables(connection):
        connection.execute(tables.sql)
        connection.execute("INSERT INTO log.meta VALUES ('tables_sha256', $1)", [tables.sha256])
    if not are_of_another_version(connection) and meta(connection, "views_sha256") != views.sha256:
        connection.execute(views.sql)
        connection.execute("INSERT OR REPLACE INTO log.meta VALUES ('views_sha256', $1)", [views.sha256])


def make_again(connection: duckdb.DuckDBPyConnection) -> None:
    """Drop all rows and offsets with their tables, and make new ones. The file stays tied to its cluster."""
    cluster_id = meta(connection, "cluster_id")
    views = connection.execute(
        "SELECT schema_name, view_name FROM duckdb_views() WHERE NOT internal ORDER BY view_oid DESC"
    ).fetchall()
    for schema, view in views:
        connection.execute(f'DROP VIEW IF EXISTS "{schema}"."{view}" CASCADE')
    connection.execute("DROP SCHEMA log CASCADE")
    connection.execute("DROP TABLE IF EXISTS main.offsets")
    make(connection)
    if cluster_id is not None:
        tie_to(connection, cluster_id)


def tie_to(connection: duckdb.DuckDBPyConnection, cluster_id: str) -> None:
    """Note the cluster that the rows are from."""
    connection.execute("INSERT INTO log.meta VALUES ('cluster_id', $1)", [cluster_id])


def other_cluster(connection: duckdb.DuckDBPyConnection, path: Path, cluster_id: str) -> str:
    """A message about a file whose rows are from another cluster; empty if they are not."""
    found = meta(connection, "cluster_id") if _has_meta(connection) else None
    if found in (None, cluster_id):
        return ""
    return (
        f"the metrics file {path} was made from cluster {found}, not from {cluster_id}; move it away, or use another "
        "workspace"
    )


def starts(connection: duckdb.DuckDBPyConnection) -> dict[TopicPartition, int]:
    """Offset of the first record that was read, by partition; 0 for others."""
    found = connection.execute(f"SELECT name, value FROM log.meta WHERE starts_with(name, '{START}')").fetchall()
    named = [(name.removeprefix(START).rpartition(" "), int(offset)) for name, offset in found]
    return {TopicPartition(topic, int(number)): offset for (topic, _, number), offset in named}


def note_starts(connection: duckdb.DuckDBPyConnection, begun: Mapping[TopicPartition, int]) -> None:
    """Note where the reading of partitions begins, if the log had lost their first records by then."""
    for where, offset in begun.items():
        name = f"{START}{where.topic} {where.partition}"
        connection.execute("DELETE FROM log.meta WHERE name = $1", [name])
        if offset:
            connection.execute("INSERT INTO log.meta VALUES ($1, $2)", [name, str(offset)])


def note_export(connection: duckdb.DuckDBPyConnection) -> None:
    """Note that the rows are of an export that left other runs out, also once rows of a log are added."""
    connection.execute("INSERT OR REPLACE INTO log.meta VALUES ('export', 'part')")


def is_of_export(connection: duckdb.DuckDBPyConnection) -> bool:
    """Whether rows are of an export that left other runs out; earlier versions left the file without offsets alone."""
    found = connection.execute(
        "SELECT EXISTS (SELECT 1 FROM log.run_started) AND NOT EXISTS (SELECT 1 FROM main.offsets)"
    ).fetchone()
    return found == (True,) or meta(connection, "export") is not None


def meta(connection: duckdb.DuckDBPyConnection, name: str) -> str | None:
    """A value that the file has of itself."""
    found = connection.execute("SELECT value FROM log.meta WHERE name = $1", [name]).fetchone()
    return found[0] if found else None


def _has_meta(connection: duckdb.DuckDBPyConnection) -> bool:
    sql = "SELECT 1 FROM duckdb_tables() WHERE schema_name = 'log' AND table_name = 'meta'"
    return connection.execute(sql).fetchone() is not None


def _has_tables(connection: duckdb.DuckDBPyConnection) -> bool:
    return connection.execute("SELECT 1 FROM duckdb_schemas() WHERE schema_name = 'log'").fetchone() is not None
