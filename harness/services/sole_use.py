"""Checks that services have their names, and managed ones their consumer groups, for themselves.

Two sets of services in one group would fence each other without end. Two services of one name would overwrite each
other's files.
"""

import asyncio
import fcntl
import hashlib
import os
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
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
_held: set[int] = set()
"""Descriptors of the locks of this process."""


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


def sole_output(workspace: Path, output_dir: Path) -> AbstractAsyncContextManager[None]:
    """A folder for a run's files, for one of the runs that share a workspace at a time. As `alone`."""
    name = hashlib.sha256(os.fsencode(output_dir.resolve())).hexdigest()[:16]
    refusal = (
        f"finetuning.output_dir: {output_dir} is in use by another run of workspace {workspace.absolute()}; set "
        f"another folder, or wait for that run's end"
    )
    return alone(Workspace(workspace).health / f"{name}.output.lock", refusal)


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
    with suppress(BlockingIOError, FileNotFoundError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(lock), path.stat()):
            return lock
    os.close(lock)
    return None


def _leave_to_parent() -> None:
    """In a process that users' code forked: it may outlive its parent, whose locks it would keep."""
    for lock in _held:
        os.close(lock)
    _held.clear()


os.register_at_fork(after_in_child=_leave_to_parent)
