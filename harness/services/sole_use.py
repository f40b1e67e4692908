"""Checks that managed services have exclusive consumer groups: two sets in one group would fence each other forever."""

import asyncio
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Protocol

from rollstream.schemas.errors import ConfigError

if TYPE_CHECKING:
    from rollstream.eventlog.kafka.client import GroupMember

LOOK_EVERY_S = 0.5
MARGIN_S = 5.0
"""Beyond the session time-out: Kafka looks after members a little later."""


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
                    f"{location}: consumer group {group} is in use by services of another run ({who}), and both would "
                    f"fence each other; stop that run, or give this one its own topic_prefix and group_prefix"
                )
            if not is_told:
                notify(f"waiting for {who} to leave consumer group {group}, up to {session_timeout_s + MARGIN_S:.0f} s")
                is_told = True
            await asyncio.sleep(LOOK_EVERY_S)
