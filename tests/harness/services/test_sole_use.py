"""Two runs in one consumer group: refused with who is in it; what a killed run left is waited for."""

import asyncio
import uuid

import pytest

from rollstream.eventlog.kafka.client import GroupMember
from rollstream.eventlog.kafka.log import KafkaLog
from rollstream.harness.services import sole_use
from rollstream.harness.services.sole_use import check_sole_use
from rollstream.schemas.errors import ConfigError
from rollstream.schemas.kafka import KafkaSettings

LOCATION = "trajectory_builders.b.kafka.group_prefix"


class Leaving:
    """A group whose members leave one after the other, one at each look."""

    def __init__(self, *members: str) -> None:
        self.members = [GroupMember(name, "10.0.0.1") for name in members]

    async def group_members(self, group: str) -> list[GroupMember]:
        found = list(self.members)
        self.members = self.members[1:]
        return found


def test_members_of_a_killed_run_are_waited_for_and_it_is_told_once() -> None:
    lines: list[str] = []
    groups = Leaving("producers-1", "producers-2")
    asyncio.run(check_sole_use(groups, ["g-producers"], LOCATION, session_timeout_s=600.0, notify=lines.append))
    (line,) = lines
    assert "producers-1 at 10.0.0.1, producers-2 at 10.0.0.1 to leave consumer group g-producers" in line


@pytest.mark.kafka
def test_a_group_that_others_are_in_is_refused_with_their_names_and_the_remedy(kafka: KafkaSettings) -> None:
    async def scenario() -> None:
        log, other = KafkaLog(kafka, client_id="finetune"), KafkaLog(kafka, client_id="producers-1")
        await log.start()
        await other.start()
        await log.ensure_topics(num_partitions=6)
        group, lines = f"g-{uuid.uuid4().hex[:8]}", list[str]()
        await check_sole_use(log, [group], LOCATION, session_timeout_s=600.0, notify=lines.append)
        assert not lines
        member = await other.group_reader(group, ["tasks"])
        while not await log.group_members(group):
            await member.poll(timeout_s=0.1)
        with pytest.raises(
            ConfigError, match=rf"{LOCATION}: consumer group {group} is in use .*producers-1 at .*; stop"
        ):
            await check_sole_use(log, [group], LOCATION, session_timeout_s=-sole_use.MARGIN_S, notify=lines.append)
        checking = asyncio.create_task(
            check_sole_use(log, [group], LOCATION, session_timeout_s=600.0, notify=lines.append)
        )
        while not lines:
            await asyncio.sleep(0.01)
        await member.close()
        await checking
        await other.close()
        await log.close()

    asyncio.run(scenario())
