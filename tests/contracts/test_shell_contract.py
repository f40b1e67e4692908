"""The contract of a fold's `Shell`, run on both: what the host may rely on before, between and after batches."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from rollstream.eventlog.artifacts import ArtifactStore
from rollstream.eventlog.log import Position
from rollstream.eventlog.memory.log import MemoryLog
from rollstream.processors.assemble.shell import AssembleShell
from rollstream.processors.curate.shell import CurateShell
from rollstream.processors.host.app import Batch, Shell

Scenario = Callable[[MemoryLog, Shell], Awaitable[None]]
SHELLS = {"steps": AssembleShell, "groups": CurateShell}


@pytest.fixture(params=sorted(SHELLS))
def topic(request: pytest.FixtureRequest) -> str:
    return request.param


def on(topic: str, folder: Path, scenario: Scenario) -> None:
    async def run() -> None:
        log = MemoryLog(num_partitions=1)
        shell = SHELLS[topic](log, ArtifactStore(str(folder / "artifacts")), service="processors-1")
        await asyncio.wait_for(scenario(log, shell), 120)

    asyncio.run(run())


async def take(log: MemoryLog, shell: Shell, topic: str, begin: int, end: int) -> None:
    records = await log.fetch([Position(topic, 0, offset) for offset in range(begin, end)])
    await shell.take(Batch(0, 1, records))


async def poisoned(log: MemoryLog, topic: str, count: int) -> None:
    """Records that no fold can read, each of which ends in a dead letter."""
    for number in range(count):
        await log.send_raw(topic, key=b"run-1", value=b"not an event %d" % number)


async def wait_until(is_so: Callable[[], bool]) -> None:
    while not is_so():
        await asyncio.sleep(0.001)


def test_a_partition_without_a_batch_has_neither_mark_nor_position(topic: str, tmp_path: Path) -> None:
    async def scenario(log: MemoryLog, shell: Shell) -> None:
        assert shell.topic == topic
        assert (shell.commit_offset(0), shell.position(0), shell.is_waiting(0)) == (None, None, False)
        shell.drop([0])
        await shell.prepare(0, 0)
        assert shell.commit_offset(0) in (None, 0)
        assert not shell.is_waiting(0)

    on(topic, tmp_path, scenario)


def test_the_mark_follows_the_position_once_all_is_acknowledged(topic: str, tmp_path: Path) -> None:
    async def scenario(log: MemoryLog, shell: Shell) -> None:
        await poisoned(log, topic, 5)
        await shell.prepare(0, 0)
        before = shell.progress(0)
        for begin in range(0, 5, 2):
            end = min(begin + 2, 5)
            await take(log, shell, topic, begin, end)
            assert shell.position(0) == end
            offset = shell.commit_offset(0)
            assert offset is not None
            assert offset <= end
        await wait_until(lambda: shell.commit_offset(0) == 5)
        assert shell.progress(0) != before
        assert isinstance(shell.metadata(0), str)
        assert (await log.end_offsets("dlq"))[0] == 5

    on(topic, tmp_path, scenario)


def test_a_dropped_partition_is_forgotten_and_read_again_to_the_same_end(topic: str, tmp_path: Path) -> None:
    async def scenario(log: MemoryLog, shell: Shell) -> None:
        await poisoned(log, topic, 4)
        await shell.prepare(0, 0)
        await take(log, shell, topic, 0, 4)
        await wait_until(lambda: shell.commit_offset(0) == 4)
        letters = (await log.end_offsets("dlq"))[0]
        shell.drop([0, 7])
        assert (shell.commit_offset(0), shell.position(0), shell.is_waiting(0)) == (None, None, False)
        await shell.prepare(0, 2)
        await take(log, shell, topic, 2, 4)
        await wait_until(lambda: shell.commit_offset(0) == 4)
        assert shell.position(0) == 4
        assert (await log.end_offsets("dlq"))[0] == letters, "what has a letter gets no second one"

    on(topic, tmp_path, scenario)
