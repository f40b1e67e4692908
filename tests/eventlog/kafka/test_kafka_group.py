"""Consumer groups on Kafka when a member is killed, or stands still and comes back."""

import asyncio
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

import pytest

from rollstream.eventlog.kafka.client import kafka_partition
from rollstream.eventlog.kafka.group import KafkaGroupReader
from rollstream.eventlog.kafka.log import KafkaLog
from rollstream.eventlog.log import GroupReader
from rollstream.schemas.events import TaskCancelled
from rollstream.schemas.kafka import KafkaSettings

pytestmark = [pytest.mark.kafka, pytest.mark.slow]

SESSION_TIMEOUT_S = 3.0
EVERYTHING = 6
MEMBER = """
import asyncio, sys
from rollstream.eventlog.kafka.log import KafkaLog
from rollstream.schemas.errors import FencedError
from rollstream.schemas.kafka import KafkaSettings

async def main():
    log = KafkaLog(KafkaSettings.model_validate_json(sys.argv[1]), session_timeout_s=float(sys.argv[3]))
    await log.start()
    member = await log.group_reader(sys.argv[2], ["tasks"])
    while not member.assigned():
        await asyncio.sleep(0.02)
    where = sorted(member.assigned())[-1]
    print("joined", flush=True)
    while True:
        try:
            await member.commit({where: 0})
        except FencedError:
            print("fenced", flush=True)
            break
        await asyncio.sleep(0.02)
    await member.close()
    await log.close()

asyncio.run(main())
"""


@contextmanager
def another_member(kafka: KafkaSettings, group: str) -> Iterator[subprocess.Popen[str]]:
    """A member in a process of its own, that commits until it is fenced."""
    command = [sys.executable, "-c", MEMBER, kafka.model_dump_json(), group, str(SESSION_TIMEOUT_S)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


async def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return (await asyncio.to_thread(process.stdout.readline)).strip()


async def owns(member: GroupReader, count: int, timeout_s: float = 20.0) -> float:
    """Seconds until the member owns so many partitions."""
    began = time.monotonic()
    while len(member.assigned()) != count:
        assert time.monotonic() - began < timeout_s, f"owns {len(member.assigned())} partitions"
        await asyncio.sleep(0.02)
    return time.monotonic() - began


def run(kafka: KafkaSettings, scenario: Callable[[KafkaLog, str], Awaitable[None]]) -> None:
    async def main() -> None:
        log = KafkaLog(kafka, session_timeout_s=SESSION_TIMEOUT_S)
        await log.start()
        try:
            await log.ensure_topics(num_partitions=EVERYTHING)
            await scenario(log, f"group-{secrets.token_hex(4)}")
        finally:
            await log.close()

    asyncio.run(main())


def test_a_member_that_leaves_hands_over_at_once(kafka: KafkaSettings) -> None:
    async def scenario(log: KafkaLog, group: str) -> None:
        one = await log.group_reader(group, ["tasks"])
        await owns(one, EVERYTHING)
        two = await log.group_reader(group, ["tasks"])
        await owns(two, EVERYTHING // 2)
        await one.close()
        assert await owns(two, EVERYTHING) < SESSION_TIMEOUT_S
        await two.close()

    run(kafka, scenario)


def test_partitions_of_a_killed_member_are_reassigned_after_its_session_timeout(kafka: KafkaSettings) -> None:
    async def scenario(log: KafkaLog, group: str) -> None:
        with another_member(kafka, group) as other:
            assert await line_of(other) == "joined"
            member = await log.group_reader(group, ["tasks"])
            await owns(member, EVERYTHING // 2)
            other.kill()
            assert await owns(member, EVERYTHING) < 3 * SESSION_TIMEOUT_S
            await member.close()

    run(kafka, scenario)


def test_a_poll_that_partitions_are_revoked_from_returns_no_record_before_the_next_assignment(
    kafka: KafkaSettings,
) -> None:
    """A record that is returned while its partition is revoked is passed over by the worker, and never comes again."""

    async def scenario(log: KafkaLog, group: str) -> None:
        await log.send(TaskCancelled(run_id="run-1", time_ms=0, group_id="run-1/rl/e00000/t00000", cause="test"))
        member = await log.group_reader(group, ["tasks"])
        assert isinstance(member, KafkaGroupReader)
        await owns(member, EVERYTHING)
        assigned = [kafka_partition(kafka, where) for where in member.assigned()]
        while not member._settled.is_set():
            await asyncio.sleep(0.02)
        for num_turns in range(4):  # of the event loop that the poll has had
            polling = asyncio.create_task(member.poll(timeout_s=2))
            for _ in range(num_turns):
                await asyncio.sleep(0)
            await member.on_partitions_revoked(assigned)
            assert await polling == []
            await member.on_partitions_assigned(assigned)
        assert await member.poll(timeout_s=30)
        await member.close()

    run(kafka, scenario)


def test_a_member_that_stood_still_is_fenced_when_it_comes_back(kafka: KafkaSettings) -> None:
    async def scenario(log: KafkaLog, group: str) -> None:
        with another_member(kafka, group) as other:
            assert await line_of(other) == "joined"
            other.send_signal(signal.SIGSTOP)
            member = await log.group_reader(group, ["tasks"])
            await owns(member, EVERYTHING)
            other.send_signal(signal.SIGCONT)
            assert await line_of(other) == "fenced"
            await member.close()

    run(kafka, scenario)


def test_a_poll_that_is_cancelled_as_partitions_are_assigned_ends(kafka: KafkaSettings) -> None:
    async def scenario(log: KafkaLog, group: str) -> None:
        member = await log.group_reader(group, ["tasks"])
        assert isinstance(member, KafkaGroupReader)
        await owns(member, EVERYTHING)
        while not member._settled.is_set():
            await asyncio.sleep(0.02)
        for num_turns in range(4):  # of the event loop between the two
            member._settled.clear()
            polling = asyncio.create_task(member.poll(timeout_s=2))
            await asyncio.sleep(0.05)
            member._settled.set()
            for _ in range(num_turns):
                await asyncio.sleep(0)
            if polling.cancel():  # else it has records already
                with pytest.raises(asyncio.CancelledError):
                    await polling
        await member.close()

    run(kafka, scenario)
