"""Metrics files in every state of their write-ahead log, and queries on them that may change no file."""

import hashlib
import json
import shutil
from contextlib import suppress
from pathlib import Path

from rollstream.eventlog.log import TopicPartition
from rollstream.metrics.projection.database import Database
from rollstream.metrics.sql.query import MEMORY_BYTES, Limits, QueryProcess, start
from rollstream.metrics.sql.result import Result, result_of
from rollstream.schemas.errors import QueryError

WAIT_S = 120.0
CHECKPOINTS = [
    "SELECT * FROM checkpoint()",
    "SELECT * FROM checkpoint('metrics')",
    "SELECT 1 WHERE EXISTS (SELECT * FROM checkpoint())",
    "SELECT * FROM force_checkpoint()",
    "SELECT * FROM destroy_external_resource('checkpoint', 'metrics')",
    "SELECT * FROM destroy_external_resource('force_checkpoint', 'metrics')",
]


def started(database: Database, sql: str, limits: Limits) -> QueryProcess:
    return database.fork(lambda connection: start(connection, database.path, sql, limits))


def ask(database: Database, sql: str, *, memory_bytes: int = MEMORY_BYTES) -> Result:
    asked = started(database, sql, Limits(10, WAIT_S, memory_bytes))
    try:
        assert asked.wait(WAIT_S)
        return result_of(json.loads(asked.answer()))
    finally:
        asked.close()
        database.fork_ended()


def files(folder: Path) -> dict[str, str]:
    """Hashes of all files of a folder."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir() if path.is_file()}


def copied(workspace: Path, to: Path) -> Path:
    """The files as a SIGKILL of their process leaves them at this moment."""
    to.mkdir(parents=True, exist_ok=True)
    for path in workspace.iterdir():
        if path.is_file():
            shutil.copy(path, to)
    return to


def left_by_kill(folder: Path, to: Path) -> Path:
    """A metrics file with a write-ahead log that nobody folded into it."""
    folder.mkdir()
    database = Database(folder / "metrics.duckdb")
    database.write({}, {TopicPartition("steps", 0): 5})
    copied(folder, to)
    database.close()
    assert (to / "metrics.duckdb.wal").stat().st_size
    return to / "metrics.duckdb"


def in_state(state: str, folder: Path) -> Database:
    """A database with a write-ahead log that is open, that was folded in, or that a killed process has left."""
    if state == "left":
        return Database(left_by_kill(folder / "before", folder / "now"))
    (folder / "now").mkdir()
    database = Database(folder / "now" / "metrics.duckdb")
    database.write({}, {TopicPartition("steps", 0): 5})
    if state == "folded":
        database.close()
        database = Database(database.path)
    return database


def assert_outlives_a_kill(database: Database, folder: Path) -> None:
    """Rows written from now on survive the next kill."""
    database.write({}, {TopicPartition("steps", 0): 7})
    again = Database(copied(database.path.parent, folder) / database.path.name)
    assert again.offsets() == {TopicPartition("steps", 0): 7}
    again.close()


def try_each(database: Database, statements: list[str]) -> None:
    before = files(database.path.parent)
    for sql in statements:
        with suppress(QueryError):
            ask(database, sql)
        assert files(database.path.parent) == before, sql
