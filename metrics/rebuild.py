"""Makes the metrics file again from the topics or from an export: written aside, then swapped in.

Order: 1. the file's own lock is taken, so that no service holds it or opens it meanwhile; 2. everything is projected
into a file aside, by the same projector; 3. a write-ahead log that an old file left is removed; 4. the new file takes
the old one's name. A crash before 4 leaves the old file, at most without its last transactions.
"""

import fcntl
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import duckdb

from rollstream.eventlog.files import beside
from rollstream.eventlog.log import LogReader, ReadableLog, TopicPartition, check_kept
from rollstream.metrics.projection import tables
from rollstream.metrics.projection.connection import FileInUseError, MetricsFileError, connect, damaged
from rollstream.metrics.projection.database import Database
from rollstream.metrics.projection.projector import Projector
from rollstream.schemas.topics import TOPICS

Report = Callable[[int], None]
"""Told after every transaction how many rows there are."""
DUCKDB_MAGIC = b"DUCK"
MAGIC_AT = 8


class ExportedRun(NamedTuple):
    """The run of an export; `is_whole`: no record of another run was left out."""

    run_id: str
    is_whole: bool


async def rebuild(
    log: ReadableLog,
    path: Path,
    *,
    exported: ExportedRun | None = None,
    is_partial: bool = False,
    report: Report = lambda *_: None,
) -> None:
    """Project the whole log, up to its end now, into a new file at `path`.

    `exported`: what the log is an export of; only the rows of that run are kept, and where the export left records of
    other runs out, the file has no offsets, so that a projector that goes on with it reads the log from its start.
    `is_partial`: also of a log that has lost its beginning, whose rows the new file then lacks; else TruncatedError.
    Raises MetricsFileError if the file is in use or is none of DuckDB.
    """
    if not is_partial and exported is None:
        await _check_whole(log)
    with held(path), _new_file(path) as temporary:
        database = Database(temporary)
        try:
            projector = _ReportingProjector(log, database, report)
            projector.stop()
            await projector.run()
            if exported is not None:
                database.keep_run(exported.run_id, is_whole=exported.is_whole)
        finally:
            database.close()


async def _check_whole(log: ReadableLog) -> None:
    """Raises TruncatedError naming the first partition that has lost its beginning."""
    for topic in TOPICS:
        ends = await log.end_offsets(topic)
        for number, begin in sorted((await log.begin_offsets(topic)).items()):
            check_kept(TopicPartition(topic, number), 0, begin, ends[number])


class _ReportingProjector(Projector):
    """Tells after every transaction how far it is."""

    def __init__(self, log: ReadableLog, database: Database, report: Report) -> None:
        super().__init__(log, database)
        self._report = report
        self._num_rows = 0

    async def _write(self, reader: LogReader, rows: dict[str, list[dict[str, Any]]]) -> None:
        await super()._write(reader, rows)
        self._num_rows += sum(map(len, rows.values()))
        self._report(self._num_rows)


def check_file(path: Path, cluster_id: str | None) -> None:
    """Raises MetricsFileError if a metrics file cannot be written, is damaged, or is tied to another cluster than that,
    if any.
    """
    try:
        with closing(connect(path, read_only=False)) as connection:
            tables.are_of_another_version(connection)  # reads what the file has of itself
            message = tables.other_cluster(connection, path, cluster_id) if cluster_id is not None else ""
    except duckdb.Error as error:
        raise damaged(path, error) from error
    if message:
        raise MetricsFileError(message)


def check_replaceable(path: Path, cluster_id: str) -> None:
    """Raises MetricsFileError if a metrics file is in use, or tied to another cluster; one that cannot be read is not.

    Raises nothing if there is no file.
    """
    if not path.exists():
        return
    try:
        with closing(connect(path, read_only=True)) as connection:
            message = tables.other_cluster(connection, path, cluster_id)
    except FileInUseError:
        raise
    except (MetricsFileError, duckdb.Error):
        return
    if message:
        raise MetricsFileError(message)


@contextmanager
def held(path: Path) -> Iterator[None]:
    """Keep others from opening a metrics file; nothing if there is none. Raises MetricsFileError if one has it open."""
    if not path.exists():
        yield
        return
    with path.open("r+b") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise MetricsFileError(
                f"the metrics file {path} is in use by another process; stop the run or the metrics service, or give "
                f"another file with --output"
            ) from error
        head = file.read(MAGIC_AT + len(DUCKDB_MAGIC))
        if head and head[MAGIC_AT:] != DUCKDB_MAGIC:
            raise MetricsFileError(f"{path} is not a DuckDB file; remove it, or give another with --output")
        yield


@contextmanager
def _new_file(path: Path) -> Iterator[Path]:
    """A temporary path for the new file, which takes the name `path` at the end; remains of an earlier rebuild are
    removed.
    """
    with held(path.with_name(f"{path.name}.aside")), beside(path, is_alone=True) as temporary:
        _wal(temporary).unlink(missing_ok=True)
        try:
            yield temporary
            _wal(path).unlink(missing_ok=True)
        finally:
            _wal(temporary).unlink(missing_ok=True)


def _wal(path: Path) -> Path:
    return path.with_name(path.name + ".wal")
