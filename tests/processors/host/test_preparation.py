"""Curation's preparation: one that a rebalance cancels is finished by the next, and all that it reads is progress."""

import asyncio

import pytest

from rollstream.eventlog.artifacts import ArtifactStore
from rollstream.eventlog.log import TopicPartition
from rollstream.eventlog.memory.log import MemoryLog
from rollstream.processors.assemble.shell import AssembleShell
from rollstream.processors.curate.shell import CurateShell
from rollstream.processors.host.app import Batch
from rollstream.schemas.events import EpochStarted, RunEnded
from tests.processors.host.groups_rig import close_groups, groups_batch, run_events

WAIT_S = 120


class GatedLog(MemoryLog):
    """A log whose readers hand out one record a poll, when it is let through; a chosen one waits before it closes."""

    def __init__(self):
        super().__init__(num_partitions=1)
        self.polls: asyncio.Semaphore | None = None
        self.waiting = asyncio.Event()
        self.open_closes: int | None = None
        """So many readers close at once, the next one waits."""
        self.closing = asyncio.Event()

    async def reader(self, start):
        reader = await super().reader(start)
        poll, close = reader.poll, reader.close

        async def gated_poll(**options):
            if self.polls is None:
                return await poll(**options)
            self.waiting.set()
            await self.polls.acquire()
            return await poll(**(options | {"max_records": 1}))

        async def gated_close():
            if self.open_closes == 0:
                self.closing.set()
                await asyncio.Event().wait()
            if self.open_closes is not None:
                self.open_closes -= 1
            await close()

        reader.poll, reader.close = gated_poll, gated_close
        return reader


async def idle_and_busy(log, store):
    """A shell that has folded a run which stayed idle while another one's groups closed, and that other one's end."""
    await log.send_all([*run_events(store, run="idle"), *run_events(store, run="busy")])
    shell = CurateShell(log, store, service="p")
    await shell.take(await groups_batch(log))
    await close_groups(log, run="busy")
    await log.send(RunEnded(run_id="busy", time_ms=9, cause="completed"))
    await shell.take(await groups_batch(log, 6))
    return shell


def clocks(shell):
    return {run_id: idle.clocks for run_id, idle in shell._fold.state.idle_runs().items()}


@pytest.mark.parametrize("keeps", ["metadata", "nothing"])
def test_a_preparation_that_was_cancelled_before_its_last_step_is_finished_by_the_next(tmp_path, keeps):
    async def go():
        log, store = GatedLog(), ArtifactStore(str(tmp_path))
        owner = await idle_and_busy(log, store)
        offset, metadata = owner.commit_offset(0), owner.metadata(0) if keeps == "metadata" else ""
        assert offset is not None
        log.open_closes = 0 if metadata else 1  # without metadata, headers are read first
        shell = CurateShell(log, store, service="q")
        preparing = asyncio.create_task(shell.prepare(0, offset, metadata))
        await asyncio.wait_for(log.closing.wait(), WAIT_S)
        assert shell.position(0) == offset, "every record is folded"
        preparing.cancel()
        await asyncio.wait({preparing})
        log.open_closes = None
        await shell.prepare(0, offset, metadata)
        assert clocks(shell) == clocks(owner)
        assert shell._fold is not None
        assert list(shell._fold.datasets.by_run) == ["idle"]

    asyncio.run(go())


def test_a_preparation_that_was_cancelled_half_way_goes_on_where_it_was(tmp_path):
    async def go():
        log, store = GatedLog(), ArtifactStore(str(tmp_path))
        owner = await idle_and_busy(log, store)
        offset, metadata = owner.commit_offset(0), owner.metadata(0)
        assert offset is not None
        log.polls = asyncio.Semaphore(4)
        shell = CurateShell(log, store, service="q")
        preparing = asyncio.create_task(shell.prepare(0, offset, metadata))
        while shell.position(0) != 4:
            await asyncio.sleep(0)
        preparing.cancel()
        await asyncio.wait({preparing})
        log.polls = None
        before = shell.progress(0)
        await shell.prepare(0, offset, metadata)
        assert shell.progress(0) == before + offset - 4
        assert clocks(shell) == clocks(owner)

    asyncio.run(go())


async def progress_of(log, shell, doing):
    """Its progress each time that the log is asked for one more record."""
    log.polls, seen = log.polls or asyncio.Semaphore(0), []
    while not doing.done():
        log.waiting.clear()
        seen.append(shell.progress(0))
        log.polls.release()
        waiting = asyncio.create_task(log.waiting.wait())
        await asyncio.wait({doing, waiting}, timeout=WAIT_S, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
    await doing
    return seen


def test_the_look_for_ended_runs_by_headers_counts_as_progress(tmp_path):
    async def go():
        log, store = GatedLog(), ArtifactStore(str(tmp_path))
        await idle_and_busy(log, store)
        shell = CurateShell(log, store, service="q")
        seen = await progress_of(log, shell, asyncio.create_task(shell.prepare(0, 9)))
        assert len(set(seen)) >= 2 * 9, "both passes over nine records"

    asyncio.run(go())


def test_the_look_for_the_beginning_of_a_run_counts_as_progress(tmp_path):
    async def go():
        log, store = GatedLog(), ArtifactStore(str(tmp_path))
        await idle_and_busy(log, store)
        log.truncate(TopicPartition("groups", 0), 3)
        await log.send(EpochStarted(run_id="idle", time_ms=9, job_id="idle/rl", epoch=1))
        shell = CurateShell(log, store, service="q")
        await shell.prepare(0, 9)
        reader = await log.reader({TopicPartition("groups", 0): 9})
        batch = Batch(0, 1, await reader.poll(timeout_s=0, max_records=1))
        log.polls = asyncio.Semaphore(0)
        seen = await progress_of(log, shell, asyncio.create_task(shell.take(batch)))
        assert len(set(seen)) >= 6

    asyncio.run(go())


@pytest.mark.parametrize("shell_of", [CurateShell, AssembleShell])
def test_reading_the_dead_letters_counts_as_progress(tmp_path, shell_of):
    async def go():
        log, store = GatedLog(), ArtifactStore(str(tmp_path))
        for _ in range(7):
            await log.send_raw("dlq", key=b"k", value=b"v")
        shell = shell_of(log, store, service="q")
        seen = await progress_of(log, shell, asyncio.create_task(shell.prepare(0, 0)))
        assert len(set(seen)) >= 7

    asyncio.run(go())


class SlowLog(MemoryLog):
    """A log whose acknowledgements wait until they are let go."""

    def __init__(self):
        super().__init__(num_partitions=1)
        self.let_go, self.asked = asyncio.Event(), asyncio.Event()

    async def send_all(self, events, *, partition=None):
        self.asked.set()
        await self.let_go.wait()
        return await super().send_all(events, partition=partition)


def test_a_fold_that_waits_for_acknowledgements_is_waiting(tmp_path):
    async def go():
        log, store = SlowLog(), ArtifactStore(str(tmp_path))
        for event in run_events(store):
            await log.send(event)
        shell = CurateShell(log, store, service="p")
        taking = asyncio.create_task(shell.take(await groups_batch(log)))
        await asyncio.wait_for(log.asked.wait(), WAIT_S)
        assert shell.is_waiting(0)
        log.let_go.set()
        await taking
        assert not shell.is_waiting(0)

    asyncio.run(go())
