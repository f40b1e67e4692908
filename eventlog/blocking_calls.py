"""Runs blocking reads and writes in threads, and retries those of the artifact store during an outage, with back-off.

A full disk is waited for without limit, because the operator can free space; a store that is unreachable is retried for
minutes only. Errors of missing or changed artifacts are raised at once.
"""

import asyncio
import contextlib
import contextvars
import functools
import logging
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, ParamSpec, TypeVar, cast

from rollstream.eventlog.artifacts import ArtifactStore
from rollstream.eventlog.disk_space import disk_of, is_full
from rollstream.schemas.errors import RollstreamError, StoreUnavailableError
from rollstream.schemas.settings import ArtifactRef

logger = logging.getLogger(__name__)
T = TypeVar("T")
P = ParamSpec("P")


@dataclass(frozen=True, slots=True)
class Retry:
    """Durations for the retries of a call to the store."""

    patience_s: float = 600.0
    """Seconds after which an outage counts as a failure; infinity: never."""
    first_wait_s: float = 0.5
    max_wait_s: float = 15.0


class NotNeededError(RollstreamError):
    """The result of a call that is tried again has no use any more."""


class NeededSpace(NamedTuple):
    """The space that a write needs, for the message of a full disk."""

    folder: Path
    size_bytes: int


def start_thread(
    call: Callable[[], T], name: str, *, is_daemon: bool = True
) -> tuple[threading.Thread, "asyncio.Future[tuple[T | None, BaseException | None]]"]:
    """Start a blocking call in a thread of its own; one that `is_daemon` does not hold up the process's exit.

    The future gets its result or its exception: a future cannot hold every exception (StopIteration).
    """
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[tuple[T | None, BaseException | None]] = loop.create_future()

    def resolve(outcome: tuple[T | None, BaseException | None]) -> None:
        if not answer.done():
            answer.set_result(outcome)

    def run() -> None:
        outcome: tuple[T | None, BaseException | None]
        try:
            outcome = call(), None
        except BaseException as error:  # noqa: BLE001 -- whatever it raises is raised where it is awaited
            outcome = None, error
        with contextlib.suppress(RuntimeError):  # too late: the loop is closed
            loop.call_soon_threadsafe(resolve, outcome)

    thread = threading.Thread(target=contextvars.copy_context().run, args=(run,), name=name, daemon=is_daemon)
    thread.start()
    return thread, answer


_own_threads: set[threading.Thread] = set()
"""Those of `in_own_thread`, of which the ones that are done leave with the next call."""


async def in_own_thread(function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """`asyncio.to_thread` for a process that runs users' code, with a thread for each call.

    Users' code may take every thread of `asyncio.to_thread`, and keep it without limit. The process's exit waits for
    the call: one that is in native code then would abort the process.
    """
    thread, answer = start_thread(functools.partial(function, *args, **kwargs), "blocking call", is_daemon=False)
    _own_threads.difference_update([one for one in _own_threads if not one.is_alive()])
    _own_threads.add(thread)
    value, error = await answer
    if error is not None:
        raise error
    return cast(T, value)


async def own_threads_ended() -> None:
    """Return once no call of `in_own_thread` is running."""
    while any(thread.is_alive() for thread in _own_threads):
        await asyncio.sleep(0.05)


async def retrying(
    call: Callable[[], T],
    doing: str,
    retry: Retry = Retry(),
    *,
    space: NeededSpace | None = None,
    in_thread: Callable[[Callable[[], T]], Awaitable[T]] = asyncio.to_thread,
    is_needed: Callable[[], Awaitable[bool]] | None = None,
) -> T:
    """Run the blocking `call` in a thread and return its result.

    `doing` names the operation in log messages. A call that fails because a disk is full (`space`: the space needed) is
    retried until there is space. Raises StoreUnavailableError when the retry time has passed, NotNeededError if
    `is_needed`, which is asked before each further try, says so, and all other errors at once.
    """
    began = time.monotonic()
    wait_s = retry.first_wait_s
    is_reported = False
    while True:
        try:
            return await in_thread(call)
        except (RollstreamError, OSError) as error:
            away_s = time.monotonic() - began
            if is_full(error):
                if not is_reported:
                    logger.error("%s: %s; waiting for free space", doing, _full(error, space))
                is_reported = True
            elif not isinstance(error, StoreUnavailableError) or away_s + wait_s > retry.patience_s:
                raise
            logger.warning("%s: %s; retrying in %.1f s (%.0f s so far)", doing, error, wait_s, away_s)
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, retry.max_wait_s)
        if is_needed is not None and not await is_needed():
            raise NotNeededError(f"{doing}: given up after {time.monotonic() - began:.0f} s, it is not needed any more")


async def put(
    artifacts: ArtifactStore,
    data: bytes,
    suffix: str,
    doing: str,
    retry: Retry = Retry(),
) -> ArtifactRef:
    """Store bytes, retrying while the store is unreachable or its disk is full. Raises like `retrying`."""
    space = NeededSpace(artifacts.folder, len(data)) if artifacts.folder else None
    return await retrying(lambda: artifacts.put_bytes(data, suffix), doing, retry, space=space, in_thread=in_own_thread)


def _full(error: BaseException, space: NeededSpace | None) -> str:
    if space is None:
        return str(error)
    free_bytes = disk_of(space.folder).free_bytes
    return f"the disk of {space.folder} is full: {space.size_bytes:,} bytes are needed, {free_bytes:,} are free"
