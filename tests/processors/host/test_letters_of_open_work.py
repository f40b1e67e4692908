"""The dead letters that a processor reads at an assignment: those about records that it may still fold."""

import asyncio

from rollstream.eventlog.artifacts import ArtifactStore
from rollstream.eventlog.dead_letters import DeadLetterIndex, send_dead_letter
from rollstream.eventlog.log import Record, TopicPartition
from rollstream.processors.assemble.shell import AssembleShell
from rollstream.processors.curate.shell import CurateShell
from rollstream.processors.host.app import Batch
from tests.processors.host.groups_rig import groups_batch, run_events
from tests.rigs.counting_log import CountingLog, counted
from tests.rigs.steps_rig import attempt, records_of, started

STEPS = TopicPartition("steps", 0)


async def add_dead_letter(log, offset, topic="steps", partition=0):
    record = Record(topic, partition, offset, b"k", b"v", (), 0)
    await send_dead_letter(log, record, service="p", stage="fold", error=ValueError("bad"))


def test_letters_are_needed_from_the_first_one_about_what_is_read_again():
    async def go():
        log = CountingLog(num_partitions=2)
        for offset in (3, 5, 4, 9):
            await add_dead_letter(log, offset)
        await add_dead_letter(log, 1, partition=1)
        found = DeadLetterIndex(log)
        await found.refresh()
        assert found.offsets(STEPS) == {3, 4, 5, 9}
        assert [found.needed_from(STEPS, offset) for offset in (0, 4, 5, 6, 10)] == [0, 1, 1, 3, 5]
        await found.refresh()
        assert found.needed_from(STEPS, 4) == 1  # assigned again from an older commit
        await add_dead_letter(log, 20)
        assert found.needed_from(STEPS, 10) == 5  # what has not been read yet counts

    asyncio.run(go())


def test_letters_about_what_is_not_read_again_are_forgotten_and_read_for_an_older_assignment():
    async def go():
        log = CountingLog(num_partitions=1)
        for offset in range(10):
            await add_dead_letter(log, offset)
        found = DeadLetterIndex(log)
        await found.refresh()
        offsets, poison = found.offsets(STEPS), found.poison(STEPS)
        assert found.needed_from(STEPS, 7) == 7
        assert offsets == poison == {7, 8, 9}
        await found.refresh(7)
        assert offsets == {7, 8, 9}
        counted(log)
        await found.refresh(4)  # the commit was lost
        assert counted(log)["dlq"] == 6  # from there to the end
        assert offsets == poison == {4, 5, 6, 7, 8, 9}

    asyncio.run(go())


def test_letters_before_are_read_when_an_older_assignment_needs_them():
    async def go():
        log = CountingLog(num_partitions=2)
        for offset in range(10):
            await add_dead_letter(log, offset, partition=offset % 2)
        found = DeadLetterIndex(log)
        await found.refresh(8)
        assert counted(log)["dlq"] == 2
        assert found.offsets(STEPS) == {8}
        await found.refresh(4)
        counted(log)
        assert found.offsets(STEPS) == {4, 6, 8}
        assert found.needed_from(STEPS, 5) == 6
        await found.refresh(6)
        assert counted(log)["dlq"] == 0
        await found.refresh(99)  # of a longer `dlq`, which was cut off
        assert found.offsets(STEPS) == {0, 2, 4, 6, 8}

    asyncio.run(go())


def test_letters_of_a_revoked_partition_are_dropped_and_read_when_it_comes_back():
    async def go():
        log = CountingLog(num_partitions=2)
        for offset in range(10):
            await add_dead_letter(log, offset, partition=offset % 2)
        found = DeadLetterIndex(log)
        await found.refresh(2)
        found.drop(STEPS)
        assert found.offsets(STEPS) == found.poison(STEPS) == set()
        assert found.offsets(TopicPartition("steps", 1)) == {3, 5, 7, 9}
        counted(log)
        await found.refresh(9)
        assert counted(log)["dlq"] == 0
        await found.refresh(4)
        assert found.offsets(STEPS) == found.poison(STEPS) == {4, 6, 8}
        assert found.needed_from(STEPS, 5) == 6

    asyncio.run(go())


def test_letters_that_are_read_while_their_partition_is_revoked_are_read_again():
    async def go():
        log = CountingLog(num_partitions=1)
        for offset in range(10):
            await add_dead_letter(log, offset)
        found = DeadLetterIndex(log)
        await found.refresh(8)
        read = found._read

        async def revoked_meanwhile(begin, end):
            await read(begin, end)
            found._read = read
            found.drop(STEPS)

        found._read = revoked_meanwhile
        await found.refresh(4)
        assert found.offsets(STEPS) == {4, 5, 6, 7, 8, 9}

    asyncio.run(go())


def test_a_shell_keeps_no_letter_of_another_topic_or_of_a_partition_that_was_revoked(tmp_path):
    async def go():
        log = CountingLog(num_partitions=2)
        for topic in ("ingest", "groups", "steps"):
            for partition in (0, 1):
                await add_dead_letter(log, 0, topic=topic, partition=partition)
        assembly = AssembleShell(log, None, service="p")
        await assembly.prepare(0, 0)
        assert sorted(assembly._dead._index._letters) == [("steps", 0), ("steps", 1)]
        assembly.drop([0])
        assert sorted(assembly._dead._index._letters) == [("steps", 1)]
        curation = CurateShell(log, ArtifactStore(str(tmp_path)), service="p")
        await curation.prepare(0, 0)
        assert {topic for topic, _ in curation._dead._index._letters} == {"groups"}

    asyncio.run(go())


def test_assembly_reads_no_letter_of_what_it_will_not_fold_again():
    async def go():
        log = CountingLog(num_partitions=1)
        for event in (started(0, size=1), *attempt(0)):
            await log.send(event, partition=0)
        for _ in range(50):
            await log.send_raw("steps", key=b"k", value=b"no event", partition=0)
        first = AssembleShell(log, None, service="p")
        await first.prepare(0, 0)
        await first.take(Batch(0, 1, await records_of(log, "steps")))
        await first.drain()
        offset = first.commit_offset(0)
        assert offset is not None
        second = AssembleShell(log, None, service="q")
        await second.prepare(0, offset, first.metadata(0))  # they were written after the first one had looked
        counted(log)
        third = AssembleShell(log, None, service="r")
        await third.prepare(0, offset, second.metadata(0))
        assert counted(log)["dlq"] == 0
        await log.send(started(1, size=1), partition=0)
        await log.send_raw("steps", key=b"k", value=b"no event", partition=0)
        await third.take(Batch(0, 1, (await records_of(log, "steps"))[offset:]))
        await third.drain()
        assert third.commit_offset(0) == offset
        again = AssembleShell(log, None, service="s")
        await again.prepare(0, offset, third.metadata(0))
        assert counted(log)["dlq"] == 1
        await again.take(Batch(0, 1, (await records_of(log, "steps"))[offset:]))
        await again.drain()
        assert len(await records_of(log, "dlq")) == 51  # the open group's poison has one letter, not two

    asyncio.run(go())


def test_curation_reads_no_letter_of_what_it_will_not_fold_again(tmp_path):
    async def go():
        log, store = CountingLog(num_partitions=1), ArtifactStore(str(tmp_path))
        for _ in range(20):
            await log.send_raw("groups", key=b"k", value=b"no event")
        await log.send_all(run_events(store))
        await log.send_raw("groups", key=b"run", value=b"no event")
        first = CurateShell(log, store, service="p")
        batch = await groups_batch(log)
        await first.take(batch)
        second = CurateShell(log, store, service="q")
        await second.prepare(0, len(batch.records), first.metadata(0))
        counted(log)
        await log.send_raw("groups", key=b"run", value=b"no event")
        await second.take(await groups_batch(log, len(batch.records)))
        third = CurateShell(log, store, service="r")
        await third.prepare(0, len(batch.records) + 1, second.metadata(0))
        assert counted(log)["dlq"] == 2  # of the open run: the twenty before it are not read

    asyncio.run(go())
