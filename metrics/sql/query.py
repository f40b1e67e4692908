"""One SELECT in a process of its own: killed at its limit of time, refused memory above its limit.

DuckDB looks at its limits between the blocks of a query, so a single call of a function may take any time and memory.
The process is a fork of the one that has the file open: it sees all that is committed at that moment and copies
nothing, it has a read-only descriptor of the file, and whoever writes goes on beside it (`Database.fork`). It can
change no file but what it spills: a SELECT may call any function of DuckDB, and some write and open files by name.
"""

import ctypes
import faulthandler
import gc
import math
import os
import resource
import select
import shutil
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, NoReturn

import duckdb

from rollstream.metrics.projection.connection import close_doors
from rollstream.metrics.projection.scratch import new_scratch
from rollstream.metrics.sql.landlock import write_only_below
from rollstream.metrics.sql.result import to_json_bytes
from rollstream.metrics.sql.select_only import run_select
from rollstream.schemas.errors import QueryError

MEMORY_BYTES = 2_000_000_000
"""Memory of one query beyond that of the forked process."""
SPILL_SHARE = 0.6
"""DuckDB takes this much of it for its blocks, then writes them to its temporary folder; the rest is for results."""
MAX_ANSWER_BYTES = 256 * 1024 * 1024
CHUNK_BYTES = 1024 * 1024
PR_SET_PDEATHSIG = 1
STDERR = 2
_ROWS, _REFUSED, _MEMORY = b"+", b"-", b"m"
LENGTH_BYTES = 8
"""An answer begins with its kind, a byte, and its length, which shows whether a dying process cut it off."""
EXIT_MEMORY = 3
EXIT_UNKNOWN = 0


class Limits(NamedTuple):
    """Limits of a query."""

    rows: int
    timeout_s: float
    memory_bytes: int = MEMORY_BYTES


class QueryProcess:
    """A query that was started: wait for it, take its answer, and close it, which ends it if it still runs."""

    def __init__(self, pid: int, reading: int, scratch: Path, limits: Limits) -> None:
        self.pid = pid
        self._reading = reading
        self._scratch = scratch
        self._limits = limits
        self._parts: list[bytes] = []
        self._size = 0
        self._is_over = False
        self._exit_code: int | None = None
        self._waiting = threading.Lock()
        self._ending = threading.Lock()

    def wait(self, timeout_s: float) -> bool:
        """Whether it is over within so many seconds. May be called again."""
        with self._waiting:
            return self._read(timeout_s)

    def _read(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        poll = select.poll()
        poll.register(self._reading, select.POLLIN)
        while not self._is_over:
            left_s = deadline - time.monotonic()
            if left_s <= 0 or not poll.poll(left_s * 1000):
                return False
            part = os.read(self._reading, CHUNK_BYTES)
            self._parts.append(part)
            self._size += len(part)
            self._is_over = not part or self._size > MAX_ANSWER_BYTES
        return True

    def answer(self) -> bytes:
        """The result as JSON, of a query that is over. Raises QueryError; of one that was broken off it says how."""
        if self._size > MAX_ANSWER_BYTES:
            raise QueryError(
                f"SQL: the answer is larger than {MAX_ANSWER_BYTES >> 20} MiB; select fewer columns, or add LIMIT"
            )
        answer = memoryview(b"".join(self._parts))
        kind, length, body = bytes(answer[:1]), answer[1 : 1 + LENGTH_BYTES], answer[1 + LENGTH_BYTES :]
        if len(length) < LENGTH_BYTES or len(body) != int.from_bytes(length):
            raise self._broken_off(self._reap())
        if kind == _ROWS:
            return bytes(body)
        raise self._needed_too_much() if kind == _MEMORY else QueryError(bytes(body).decode(errors="replace"))

    def _broken_off(self, exit_code: int) -> QueryError:
        """The error for a process that ended before its answer was complete."""
        if exit_code == EXIT_MEMORY:
            return self._needed_too_much()
        if exit_code == -signal.SIGXCPU:
            return self.took_too_long()
        if exit_code == -signal.SIGKILL:
            return QueryError(
                "SQL: the query's process was killed (SIGKILL), probably because this machine is out of memory; run "
                "a smaller query"
            )
        how = signal.Signals(-exit_code).name if exit_code < 0 else f"exit status {exit_code}"
        return QueryError(f"SQL: the query's process crashed ({how}); the metrics are unharmed, rewrite the query")

    def _needed_too_much(self) -> QueryError:
        return QueryError(
            f"SQL: the query needed more than {self._limits.memory_bytes / 1e9:g} GB of memory and was stopped; "
            "aggregate, filter by run_id, or add LIMIT"
        )

    def took_too_long(self) -> QueryError:
        """The error of a query that was not over at its limit."""
        return QueryError(
            f"SQL: the query took longer than {self._limits.timeout_s:g} s and was stopped; aggregate, filter by "
            "run_id, or add LIMIT"
        )

    def kill(self) -> None:
        """End it at once; `wait` then returns."""
        with self._ending:
            if self._exit_code is None:
                os.kill(self.pid, signal.SIGKILL)

    def close(self) -> None:
        """End it if it still runs, and remove what it spilled."""
        self.kill()
        with self._waiting:
            self._reap()
        os.close(self._reading)
        shutil.rmtree(self._scratch, ignore_errors=True)

    def _reap(self) -> int:
        """Its exit status, or the negative number of the signal that ended it."""
        with self._ending:
            if self._exit_code is None:
                status = EXIT_UNKNOWN
                with suppress(ChildProcessError):  # without a status where SIGCHLD is ignored
                    status = os.waitpid(self.pid, 0)[1]
                self._exit_code = os.waitstatus_to_exitcode(status)
            return self._exit_code


def start(connection: duckdb.DuckDBPyConnection, path: Path, sql: str, limits: Limits) -> QueryProcess:
    """Begin a query on a fork of this process, in which `connection` has the file at `path` open.

    No other thread may be using the database meanwhile. Raises QueryError if no process can be had.
    """
    parent = os.getpid()
    try:
        scratch = new_scratch(path)
        reading, writing = os.pipe()
    except OSError as error:
        raise QueryError(f"SQL: the query cannot be started ({error.strerror}); try again") from error
    # A signal that came before the child has handlers of its own would be passed to the parent's event loop.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        pid = os.fork()
        if pid == 0:
            _run_and_exit(connection, path, sql, limits, scratch, writing, parent)
    except OSError as error:
        os.close(reading)
        scratch.rmdir()
        raise QueryError(f"SQL: the query cannot be started ({error.strerror}); try again") from error
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os.close(writing)
    return QueryProcess(pid, reading, scratch, limits)


def _run_and_exit(
    connection: duckdb.DuckDBPyConnection,
    path: Path,
    sql: str,
    limits: Limits,
    scratch: Path,
    writing: int,
    parent: int,
) -> NoReturn:
    """The child. It leaves by `_exit`, so that nothing of the parent is closed or written by it."""
    exit_code = 1
    try:
        gc.disable()  # finalizers would close numbers of files that are ours by now
        _take_leave(path, writing, parent)
        rest = _serialized_result(connection, sql, limits, scratch)
        with suppress(BrokenPipeError):
            while rest:
                rest = rest[os.write(writing, rest[:CHUNK_BYTES]) :]
        exit_code = 0
    except MemoryError:
        exit_code = EXIT_MEMORY
    finally:
        os._exit(exit_code)


def _serialized_result(connection: duckdb.DuckDBPyConnection, sql: str, limits: Limits, scratch: Path) -> memoryview:
    try:
        _limit(limits)
        cursor = connection.cursor()
        close_doors(cursor, _confined(scratch), int(limits.memory_bytes * SPILL_SHARE))
        kind, body = _ROWS, to_json_bytes(run_select(cursor, sql, limit=limits.rows))
    except MemoryError:
        kind, body = _MEMORY, b""
    except (QueryError, duckdb.Error, OSError, ValueError) as error:
        kind, body = _REFUSED, str(error).encode(errors="replace")
    return memoryview(b"".join((kind, len(body).to_bytes(LENGTH_BYTES), body)))


def _take_leave(path: Path, writing: int, parent: int) -> None:
    """Have nothing in common with the parent but the file, which is read-only from here on."""
    faulthandler.disable()  # a crash is for `QueryProcess.answer` to report, in one line
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGXCPU):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to answer
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    held = path.stat()
    for number in [int(name) for name in os.listdir("/proc/self/fd")]:
        if number <= STDERR or number == writing:
            continue
        with suppress(OSError):
            found = os.fstat(number)
            if (found.st_dev, found.st_ino) == (held.st_dev, held.st_ino):
                os.dup2(os.open(path, os.O_RDONLY), number)
            else:
                os.close(number)


def _confined(scratch: Path) -> Path | None:
    """Give up changing files outside `scratch`; where the kernel offers only all or nothing, everywhere: then None."""
    if write_only_below(scratch):
        return scratch
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    return None


def _limit(limits: Limits) -> None:
    """The kernel's limits, which hold inside any call: memory beyond what there is, processor time, no core file."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    seconds = math.ceil(limits.timeout_s) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    if sys.platform == "linux":
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
        most = pages * resource.getpagesize() + limits.memory_bytes
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
