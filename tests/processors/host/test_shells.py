"""The folds' shells on a log in memory: what is acknowledged before a mark moves, and what a restart repeats."""

import asyncio
from dataclasses import replace

import pytest

from rollstream.eventlog import codec
from rollstream.eventlog.artifacts import ArtifactStore
from rollstream.eventlog.log import Position, partition_of
from rollstream.eventlog.memory.log import MemoryLog
from rollstream.processors.assemble.shell import MAX_UNDER_WAY, AssembleShell
from rollstream.processors.curate.shell import CurateShell
from rollstream.processors.host.app import Batch
from rollstream.schemas.base import Event
from rollstream.schemas.errors import LogError
from rollstream.schemas.events import (
    BatchPlanned,
    EpochSealed,
    GroupClosed,
    RunEnded,
    TaskRequested,
)
from tests.processors.host.groups_rig import RUN, close_groups, groups_batch, run_events, steps_batch
from tests.rigs.steps_rig import attempt, events_of, group, records_of, started


class _Unacknowledged(MemoryLog):
    """A log whose acknowledgements wait until they are let go."""

    def __init__(self):
        super().__init__(num_partitions=1)
        self.let_go = asyncio.Event()

    async def send_all(self, events, *, partition=None):
        await self.let_go.wait()
        return await super().send_all(events, partition=partition)

    async def send_raw(self, topic, **options):
        if topic == "dlq":
            await self.let_go.wait()
        return await super().send_raw(topic, **options)


def test_a_closed_group_names_where_its_trajectories_lie():
    async def go():
        log = MemoryLog(num_partitions=4)
        shell = AssembleShell(log, None, service="p")
        await shell.take(await steps_batch(log, [started(), *attempt(member=1), *attempt(member=0)]))
        await shell.drain()
        (closed,) = await events_of(log, "groups", GroupClosed)
        partition = partition_of(group(0), 4)
        assert {locator.partition for locator in closed.locators} == {partition}
        found = await log.fetch(
            Position("trajectories", locator.partition, locator.offset) for locator in closed.locators
        )
        assert [codec.decode(one).digest for one in found] == [member.digest for member in closed.members]
        assert shell.commit_offset(0) == 11

    asyncio.run(go())


def test_the_mark_waits_for_the_acknowledgement_of_what_closed():
    async def go():
        log = _Unacknowledged()
        shell = AssembleShell(log, None, service="p")
        batch = await steps_batch(log, [started(0, size=1), *attempt(), started(1, size=1)])
        await shell.take(batch)
        await asyncio.sleep(0.01)
        assert shell.commit_offset(0) == 0, "group 0 is closed, but nobody has acknowledged it"
        log.let_go.set()
        await shell.drain()
        assert shell.commit_offset(0) == 6, "the GroupStarted of group 1"

    asyncio.run(go())


def test_a_record_that_cannot_be_decoded_is_a_dead_letter_before_the_mark_passes_it():
    async def go():
        log = _Unacknowledged()
        shell = AssembleShell(log, None, service="p")
        await log.send_raw("steps", key=b"k", value=b"no json", partition=0)
        await shell.take(await steps_batch(log, [started(0, size=1), *attempt()]))
        await asyncio.sleep(0.01)
        assert shell.commit_offset(0) == 0
        log.let_go.set()
        await shell.drain()
        (letter,) = await records_of(log, "dlq")
        assert (letter.key, letter.value) == (b"k", b"no json")
        assert shell.commit_offset(0) == 7
        assert len(await records_of(log, "groups")) == 1

    asyncio.run(go())


def test_a_partition_that_comes_back_is_folded_again_from_where_it_is_read():
    async def go():
        log = MemoryLog(num_partitions=1)
        shell = AssembleShell(log, None, service="p")
        batch = await steps_batch(log, [started(0, size=1), *attempt()])
        await shell.take(Batch(0, 1, batch.records[:3]))
        shell.drop([0])
        assert shell.commit_offset(0) is None
        await shell.take(Batch(0, 2, batch.records))
        await shell.take(Batch(0, 2, batch.records[2:]))
        await shell.drain()
        assert len(await records_of(log, "groups")) == 1, "records that were folded already change nothing"

    asyncio.run(go())


def test_a_kept_fold_makes_progress_while_its_records_are_read_again():
    async def go():
        log = MemoryLog(num_partitions=1)
        shell = AssembleShell(log, None, service="p")
        batch = await steps_batch(log, [started(0, size=2), *attempt()])
        await shell.take(batch)
        await shell.prepare(0, 0)
        seen = [shell.progress(0)]
        for record in batch.records:
            await shell.take(Batch(0, 2, [record]))
            seen.append(shell.progress(0))
        assert shell.position(0) == len(batch.records)
        assert seen == sorted(set(seen)), "the watchdog sees that each record was read"

    asyncio.run(go())


def test_a_send_that_fails_ends_the_shell():
    class Refusing(MemoryLog):
        async def send_all(self, events, *, partition=None):
            raise LogError("refused")

    async def go():
        log = Refusing(num_partitions=1)
        shell = AssembleShell(log, None, service="p")
        batch = await steps_batch(log, [started(0, size=1), *attempt()])
        await shell.take(batch)
        with pytest.raises(LogError, match="refused"):
            await shell.drain()
        assert shell.commit_offset(0) == 0

    asyncio.run(go())


def test_a_batch_that_was_waiting_when_its_partition_went_leaves_nothing_behind():
    async def go():
        log = _Unacknowledged()
        shell = AssembleShell(log, None, service="p")
        one = await steps_batch(log, [started(0, size=1), *attempt()])
        for number in range(MAX_UNDER_WAY):
            await shell.take(Batch(number + 1, 1, one.records))
        waiting = asyncio.create_task(shell.take(Batch(0, 1, one.records[3:])))
        await asyncio.sleep(0.01)
        shell.drop([0])
        log.let_go.set()
        await waiting
        assert shell.commit_offset(0) is None, "its mark would be committed past the GroupStarted of an open group"
        await shell.take(Batch(0, 2, one.records))
        await shell.drain()
        assert len(await records_of(log, "groups")) == MAX_UNDER_WAY + 1

    asyncio.run(go())


def test_a_failed_send_is_reported_without_a_further_batch():
    class Refusing(MemoryLog):
        async def send_all(self, events, *, partition=None):
            raise LogError("refused")

    async def go():
        log = Refusing(num_partitions=1)
        shell = AssembleShell(log, None, service="p")
        await shell.take(await steps_batch(log, [started(0, size=1), *attempt()]))
        await asyncio.wait_for(shell.failed(), 30)
        with pytest.raises(LogError, match="refused"):
            await shell.drain()

    asyncio.run(go())


def test_records_that_are_missing_between_two_batches_end_the_shells(tmp_path):
    async def go():
        log, store = MemoryLog(num_partitions=1), ArtifactStore(str(tmp_path))
        batch = await steps_batch(log, [started(0, size=1), *attempt()])
        assembling = AssembleShell(log, None, service="p")
        await assembling.take(Batch(0, 1, batch.records[:1]))
        with pytest.raises(LogError, match=r"steps partition 0 .* offset 1, read 2"):
            await assembling.take(Batch(0, 1, batch.records[2:]))
        assert assembling.commit_offset(0) == 0
        await log.send_all(run_events(store))
        records = await groups_batch(log)
        curating = CurateShell(log, store, service="p")
        await curating.take(Batch(0, 1, records.records[:1]))
        with pytest.raises(LogError, match=r"groups partition 0 .* offset 1, read 2"):
            await curating.take(Batch(0, 1, records.records[2:]))
        assert curating.commit_offset(0) == 1

    asyncio.run(go())


def test_a_fold_that_raises_keeps_the_mark_before_what_it_had_closed():
    async def go():
        log = MemoryLog(num_partitions=1)
        shell = AssembleShell(log, None, service="p")
        batch = await steps_batch(log, [started(0, size=1), *attempt(), started(1)])
        broken = replace(batch.records[-1], offset="no offset")
        with pytest.raises(TypeError):
            await shell.take(Batch(0, 1, [*batch.records[:-1], broken]))
        assert shell.commit_offset(0) == 0

    asyncio.run(go())


# ---- curation ----


def test_an_epoch_is_asked_for_planned_and_sealed(tmp_path):
    async def go():
        log, store = MemoryLog(num_partitions=1), ArtifactStore(str(tmp_path))
        shell = CurateShell(log, store, service="p")
        await log.send_all(run_events(store))
        await shell.take(await groups_batch(log))
        assert shell.commit_offset(0) == 3
        tasks = await events_of(log, "tasks", TaskRequested)
        assert [task.inputs["i"] in (0, 1) for task in tasks] == [True, True]
        await close_groups(log)
        await shell.take(await groups_batch(log, 3))
        assert shell.commit_offset(0) == 5
        planned, sealed = await events_of(log, "batches", Event)
        assert isinstance(planned, BatchPlanned)
        assert isinstance(sealed, EpochSealed)
        assert len(planned.members) == 4

    asyncio.run(go())


@pytest.mark.parametrize("committed", [0, 1, 2, 3, 4])
def test_a_new_owner_repeats_only_what_lies_beyond_the_committed_offset(tmp_path, committed):
    async def go():
        log, store = MemoryLog(num_partitions=1), ArtifactStore(str(tmp_path))
        await log.send_all(run_events(store))
        await CurateShell(log, store, service="p").take(await groups_batch(log))
        await close_groups(log)
        records = await groups_batch(log)
        before = len(await events_of(log, "tasks", TaskRequested))
        owner = CurateShell(log, store, service="q")
        rest = records.records[committed:]
        await owner.take(Batch(0, 2, rest))
        again = (await events_of(log, "tasks", TaskRequested))[before:]
        assert len(again) == (2 if committed <= 2 else 0)
        batches = await events_of(log, "batches", Event)
        assert isinstance(batches[-1], EpochSealed)
        assert isinstance(batches[0], BatchPlanned)
        assert len(batches[0].members) == 4

    asyncio.run(go())


def test_a_run_whose_dataset_is_missing_fails_and_the_others_go_on(tmp_path):
    async def go():
        log, store = MemoryLog(num_partitions=1), ArtifactStore(str(tmp_path))
        shell = CurateShell(log, store, service="p")
        broken = run_events(store, run="broken", num_examples=1)
        for path in tmp_path.rglob("*.jsonl"):
            path.unlink()
        await log.send_all([*broken, *run_events(store)])
        await shell.take(await groups_batch(log))
        ends = [event for event in await events_of(log, "groups", Event) if isinstance(event, RunEnded)]
        assert [(end.run_id, end.cause) for end in ends] == [("broken", "failed")]
        assert {task.run_id for task in await events_of(log, "tasks", TaskRequested)} == {RUN}

    asyncio.run(go())


def test_a_groups_record_that_cannot_be_decoded_is_a_dead_letter(tmp_path):
    async def go():
        log, store = MemoryLog(num_partitions=1), ArtifactStore(str(tmp_path))
        await log.send_raw("groups", key=b"k", value=b'{"kind": "unheard_of"}')
        shell = CurateShell(log, store, service="p")
        await shell.take(await groups_batch(log))
        assert len(await records_of(log, "dlq")) == 1
        assert shell.commit_offset(0) == 1

    asyncio.run(go())
