"""Checks that services have their names, and managed ones their consumer groups, for themselves.

Two sets of services in one group would fence each other without end. Two services of one name would overwrite each
other's files.
"""

import asyncio
import errno
import fcntl
import logging
import os
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from rollstream.harness.services.workspace import Workspace
from rollstream.schemas.errors import ConfigError

if TYPE_CHECKING:
    from rollstream.eventlog.kafka.client import GroupMember

LOOK_EVERY_S = 0.5
MARGIN_S = 5.0
"""Beyond the session time-out: Kafka looks after members a little later."""
PATIENCE_S = 10.0
"""Maximum seconds for which a killed process may still hold its lock."""
OUTPUT_LOCK = ".run.lock"
"""Inside `output_dir`, where the runs of all workspaces see it."""
NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP})
_held: set[int] = set()
"""Descriptors of the locks of this process."""

logger = logging.getLogger(__name__)


class Groups(Protocol):
    """Lists the members of consumer groups."""

    async def group_members(self, group: str) -> "list[GroupMember]":
        """Current members."""
        ...


async def check_sole_use(
    log: Groups, groups: Iterable[str], location: str, *, session_timeout_s: float, notify: Callable[[str], None]
) -> None:
    """Return when the groups have no members.

    Killed services remain members until their session times out, so this waits that long. `location`: key of the groups
    in the configuration. Raises ConfigError naming the group, its members and the remedy.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + session_timeout_s + MARGIN_S
    for group in groups:
        is_told = False
        while members := await log.group_members(group):
            who = ", ".join(sorted({f"{member.client_id} at {member.host}" for member in members}))
            if loop.time() >= deadline:
                raise ConfigError(
                    f"{location}: consumer group {group} is in use by other services ({who}), and both would fence "
                    f"each other; stop them, set services: external to use them, or give this run its own "
                    f"topic_prefix and group_prefix"
                )
            if not is_told:
                notify(f"waiting for {who} to leave consumer group {group}, up to {session_timeout_s + MARGIN_S:.0f} s")
                is_told = True
            await asyncio.sleep(LOOK_EVERY_S)


def sole_name(workspace: Path, name: str) -> AbstractAsyncContextManager[None]:
    """The name of a service of a workspace, for one process at a time. As `alone`."""
    refusal = (
        f"another process named {name} serves workspace {workspace.absolute()}; stop it, or give --name; or, for a "
        f"run that it is to serve, set services: external"
    )
    return alone(Workspace(workspace).health / f"{name}.lock", refusal)


def sole_run(workspace: Path, run_id: str) -> AbstractAsyncContextManager[None]:
    """A run of a workspace, conducted by one process at a time. As `alone`."""
    refusal = f"run {run_id} is conducted by another process; stop it (rollstream stop {run_id}), or wait for its end"
    return alone(Workspace(workspace).health / f"{run_id}.run.lock", refusal)


@asynccontextmanager
async def sole_output(output_dir: Path) -> AsyncIterator[None]:
    """A folder for a run's files, for one run of any workspace at a time. Creates the folder. As `alone`.

    A file system without locks only gives a warning: the run that saves last moves the other's files away.
    """
    refusal = (
        f"finetuning.output_dir: {output_dir} is in use by another run, of this or another workspace; set another "
        f"folder, or wait for that run's end"
    )
    async with AsyncExitStack() as stack:
        try:
            output_dir.mkdir(parents=True, exist_ok=True)
            await stack.enter_async_context(alone(output_dir / OUTPUT_LOCK, refusal))
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise ConfigError(
                    f"finetuning.output_dir: {output_dir / OUTPUT_LOCK} cannot be locked: {error.strerror}; choose "
                    "another folder, or remove the file if a run of another user left it"
                ) from error
            (output_dir / OUTPUT_LOCK).unlink(missing_ok=True)
            logger.warning(
                "finetuning.output_dir: the file system of %s has no locks, so two runs that use it are not noticed",
                output_dir,
            )
        yield


@asynccontextmanager
async def alone(path: Path, refusal: str) -> AsyncIterator[None]:
    """Hold a lock file until the block or its process ends. Waits for one that is held by a process which is dying.

    Raises ConfigError with the text `refusal` if the lock remains held, OSError if the file cannot be created.
    """
    loop = asyncio.get_running_loop()
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    deadline = loop.time() + PATIENCE_S
    while (lock := _taken(path)) is None:
        if loop.time() >= deadline:
            raise ConfigError(refusal)
        await asyncio.sleep(LOOK_EVERY_S)
    _held.add(lock)
    try:
        yield
    finally:
        with suppress(OSError):
            path.unlink(missing_ok=True)
        _held.discard(lock)
        os.close(lock)


def _taken(path: Path) -> int | None:
    """The lock, None if another process has it; one on a file that its holder has just removed does not count."""
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    is_taken = False
    try:
        with suppress(BlockingIOError, FileNotFoundError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_taken = os.path.samestat(os.fstat(lock), path.stat())
        return lock if is_taken else None
    finally:
        if not is_taken:
            os.close(lock)


def _leave_to_parent() -> None:
    """In a process that users' code forked: it may outlive its parent, whose locks it would keep."""
    for lock in _held:
        os.close(lock)
    _held.clear()


os.register_at_fork(after_in_child=_leave_to_parent)
