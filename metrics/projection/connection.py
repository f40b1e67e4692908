"""Opens a metrics file with every way out of it closed, and says what is wrong with one.

Knows no table.
"""

import errno
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import duckdb

from rollstream.eventlog.files import named_beside
from rollstream.metrics.projection.columns import quoted
from rollstream.schemas.errors import RollstreamError

MAX_SPILLED = "4GB"
OPEN_CONFIG: dict[str, Any] = {
    "autoinstall_known_extensions": "false",
    "autoload_known_extensions": "false",
    "python_enable_replacements": "false",
    "threads": "1",
    "async_threads": "0",
    "memory_limit": "2GB",
    "max_temp_directory_size": "0KB",
    "checkpoint_threshold": "1TB",
    "default_block_size": "65536",
}
"""Configuration of the file for a process that forks queries: no DuckDB threads, no temporary file that two processes
would write, no checkpoint other than ours (`Database.fork`). Only our own SQL runs on it: call `close_doors` before any
other.

Blocks are small: every column of every table takes at least one, which is most of a short run's file.
"""
SAFE_CONFIG: dict[str, Any] = OPEN_CONFIG | {
    "enable_external_access": "false",
    "lock_configuration": "true",
    "max_temp_directory_size": MAX_SPILLED,
}
"""No file, no network, no Python variable is reached from SQL, and no query can change that."""


class MetricsFileError(RollstreamError):
    """The metrics file cannot be opened, or belongs to another cluster."""


class FileInUseError(MetricsFileError):
    """Another process has the metrics file open."""


def metrics_file(workspace: Path) -> Path:
    """Path of a workspace's metrics file."""
    return workspace / "metrics.duckdb"


def connect(path: Path, *, read_only: bool, config: Mapping[str, Any] = SAFE_CONFIG) -> duckdb.DuckDBPyConnection:
    """Open the file. Raises MetricsFileError (FileInUseError) that names the file and the remedy."""
    try:
        return duckdb.connect(str(path), read_only=read_only, config=dict(config))
    except duckdb.IOException as error:
        if "lock" in str(error).lower():
            raise FileInUseError(
                f"the metrics file {path} is in use by another process{_holder(str(error))}; stop that process, or "
                f"query its SQL service"
            ) from error
        if is_disk_full(error):
            raise_full(path, error)
        raise MetricsFileError(
            f"the metrics file {path} cannot be opened: {cause_of(error)}; correct its permissions, run `rollstream "
            f"rebuild`, or remove it: it is rebuilt from the log"
        ) from error
    except duckdb.Error as error:
        raise MetricsFileError(
            f"the metrics file {path} cannot be read: {cause_of(error)}; run `rollstream rebuild`, or remove it: it is "
            f"rebuilt from the log"
        ) from error


def close_doors(connection: duckdb.DuckDBPyConnection, scratch: Path | None, memory_bytes: int) -> None:
    """Restrict the connection to SAFE_CONFIG from now on: no file, no network, no setting. `now()` is UTC.

    `memory_bytes`: memory that a query may use beyond the present use before it spills to `scratch`, or is refused more
    if `scratch` is None. For a process that runs one query and ends; nobody else may use the database.
    """
    found = connection.execute("SELECT coalesce(sum(memory_usage_bytes), 0)::BIGINT FROM duckdb_memory()").fetchone()
    used = found[0] if found else 0
    connection.execute(f"SET memory_limit = '{used + memory_bytes}B'")
    connection.execute(f"SET temp_directory = {quoted(str(scratch or ''))}")
    if scratch is not None:
        connection.execute(f"SET max_temp_directory_size = '{MAX_SPILLED}'")
    connection.execute("SET TimeZone = 'UTC'")  # else DuckDB takes the machine's
    connection.execute("SET enable_external_access = false")
    connection.execute("SET lock_configuration = true")


def cause_of(error: BaseException) -> str:
    """The message of an error in one line, without DuckDB's pointers into the text."""
    lines = [line.strip() for line in str(error).splitlines()]
    return " ".join(line for line in lines if line and not line.startswith(("^", "LINE ")))


def damaged(path: Path, error: duckdb.Error) -> MetricsFileError:
    """The error of a file that can be opened, but does not hold what a metrics file holds."""
    return MetricsFileError(
        f"the metrics file {path} is damaged: {cause_of(error)}; run `rollstream rebuild`, or remove it: it is rebuilt "
        "from the log"
    )


def raise_full(path: Path, error: Exception) -> NoReturn:
    """Raises MetricsFileError, caused by an OSError; it names the file that one beside it will replace."""
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path.with_name(named_beside(path.name))))
    full.__cause__ = error
    raise MetricsFileError(
        f"the metrics file {full.filename} cannot be written, because its disk is full; free space there"
    ) from full


def is_disk_full(error: Exception) -> bool:
    return os.strerror(errno.ENOSPC) in str(error)


def _holder(message: str) -> str:
    """` (PID 12)` if DuckDB names who holds the lock."""
    _, found, rest = message.partition("PID ")
    number = rest.split(")")[0].split(" ")[0].strip(".") if found else ""
    return f" (PID {number})" if number.isdigit() else ""
