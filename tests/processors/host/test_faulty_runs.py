"""A run whose records curation cannot fold: a few letters and the run's end, however long its log is."""

import asyncio

import orjson
import pytest

from rollstream.eventlog import codec
from rollstream.eventlog.artifacts import ArtifactStore
from rollstream.eventlog.dead_letters import original, send_dead_letter
from rollstream.eventlog.log import MAX_METADATA_BYTES
from rollstream.eventlog.memory.log import MemoryLog
from rollstream.processors.curate import fold as curate
from rollstream.processors.curate.low_water import beginning_of, metadata_of
from rollstream.processors.curate.shell import CurateShell
from rollstream.processors.host.app import Batch
from rollstream.processors.host.folding import MAX_OF_A_RUN, RUNS_COMMITTED, RUNS_REMEMBERED, FaultyRuns
from rollstream.replay.report import Report
from rollstream.replay.source import read_run
from rollstream.replay.verify import compare_curation, dataset_of
from rollstream.schemas.base import Event
from rollstream.schemas.events import (
    BatchPlanned,
    EpochSealed,
    GroupClosed,
    RunContinued,
    RunEnded,
    TaskCancelled,
    TrajectoryRejected,
)
from tests.processors.host.groups_rig import Raising, close_groups, run_events
from tests.rigs.steps_rig import events_of, records_of

NUM_RECORDS = 3000
BAD, GOOD = "bad", "good"


def raises_on(*kinds):
    """A curate fold that raises on events of these kinds of the run BAD."""
    return Raising(curate.evolve, lambda received: received.event.run_id == BAD and isinstance(received.event, kinds))


async def a_long_log(store):
    """`groups` of two runs, of which BAD has NUM_RECORDS further records, some of them groups that close."""
    log = MemoryLog(num_partitions=1)
    await log.send_all([*run_events(store, run=BAD), *run_events(store, run=GOOD)])
    source = MemoryLog(num_partitions=1)
    await close_groups(source, run=BAD)
    closed = (await events_of(source, "groups", GroupClosed))[0]
    for number in range(NUM_RECORDS // 2):
        await log.send(closed.model_copy(update={"group_id": f"{closed.group_id}-{number}"}))
        await log.send(RunContinued(run_id=BAD, time_ms=5 + number))
    await close_groups(log, run=GOOD)
    return log


async def curated(log, shell, start=0, *, size=200):
    """Fold what lies in `groups` from an offset on, what the fold itself adds included."""
    while batch := (await records_of(log, "groups"))[start:]:
        for first in range(0, len(batch), size):
            await shell.take(Batch(0, 1, batch[first : first + size]))
        start += len(batch)
    return start


async def letters_of(log):
    return [original(letter, ArtifactStore("/nowhere")).offset for letter in await records_of(log, "dlq")]


async def of_run(log, topic, run):
    found = [codec.decode(record).event for record in await records_of(log, topic)]
    return [event for event in found if event.run_id == run]


def known_metadata(metadata, knows):
    """Part of the committed metadata that a restart gets."""
    if knows == "metadata":
        return metadata
    return orjson.dumps({**orjson.loads(metadata), "runs": None}).decode() if "metadata" in knows else ""


@pytest.mark.parametrize(
    "kinds",
    [(GroupClosed,), (GroupClosed, RunContinued), (GroupClosed, RunContinued, RunEnded), (Event,)],
    ids=["one kind", "two kinds", "the end too", "every record"],
)
@pytest.mark.parametrize("knows", ["metadata", "metadata without runs", "nothing"])
def test_a_long_log_of_a_run_that_cannot_be_folded_makes_few_letters_and_ends_the_run(tmp_path, kinds, knows):
    async def go():
        store = ArtifactStore(str(tmp_path))
        log = await a_long_log(store)
        shell = CurateShell(log, store, service="p", evolve=raises_on(*kinds))
        half = (await records_of(log, "groups"))[: NUM_RECORDS // 2]
        await shell.take(Batch(0, 1, half))
        letters, metadata = await letters_of(log), shell.metadata(0)
        assert len(letters) == MAX_OF_A_RUN
        (ended,) = [one for one in await of_run(log, "groups", BAD) if isinstance(one, RunEnded)]
        assert ended.cause == "failed"
        assert "16 records of the run" in ended.message

        later = CurateShell(log, store, service="q", evolve=raises_on(*kinds))
        await later.prepare(0, len(half), known_metadata(metadata, knows))
        assert await letters_of(log) == letters, "folding again writes none"
        end = await curated(log, later, len(half))
        num_ends = len([one for one in await of_run(log, "groups", BAD) if isinstance(one, RunEnded)])
        assert num_ends == 1
        assert len(await letters_of(log)) <= MAX_OF_A_RUN + num_ends
        assert later.commit_offset(0) == end

        last = CurateShell(log, store, service="r", evolve=raises_on(*kinds))
        letters = await letters_of(log)
        await last.prepare(0, end, known_metadata(later.metadata(0), knows))
        assert await letters_of(log) == letters
        return await of_run(log, "tasks", GOOD), await of_run(log, "batches", GOOD)

    found = asyncio.run(go())
    assert all(found), "the other run goes on"


def test_the_end_of_such_a_run_cancels_its_tasks_and_groups_that_close_later_are_in_the_ledger(tmp_path):
    async def go():
        store = ArtifactStore(str(tmp_path))
        log = await a_long_log(store)
        shell = CurateShell(
            log,
            store,
            service="p",
            evolve=Raising(
                curate.evolve,
                lambda received: isinstance(received.event, GroupClosed) and "-" in received.event.group_id,
            ),
        )
        end = await curated(log, shell)
        cancelled = [one for one in await of_run(log, "tasks", BAD) if isinstance(one, TaskCancelled)]
        assert len(cancelled) == 2
        await close_groups(log, run=BAD)
        await curated(log, shell, end)
        rejected = [one for one in await of_run(log, "batches", BAD) if isinstance(one, TrajectoryRejected)]
        assert {one.cause for one in rejected} == {"run_ended"}
        assert len(await letters_of(log)) == MAX_OF_A_RUN

    asyncio.run(go())


def test_such_a_run_is_verified_without_what_was_passed_over(tmp_path):
    async def go():
        store = ArtifactStore(str(tmp_path))
        log = await a_long_log(store)
        fold = Raising(curate.evolve, lambda received: "-" in getattr(received.event, "group_id", ""))
        shell = CurateShell(log, store, service="p", evolve=fold)
        await close_groups(log, run=BAD)  # would be planned if it were folded
        await curated(log, shell)
        events, report = await read_run(log, BAD), Report()
        assert len(events.poison) == MAX_OF_A_RUN
        compare_curation(events, {BAD: dataset_of(events, store)}, report)
        assert report.differences == []

    asyncio.run(go())


def test_records_that_were_not_decoded_and_would_be_now_do_not_end_their_run(tmp_path):
    """Those of a later version, of which the letters of an earlier one tell."""

    async def go():
        store = ArtifactStore(str(tmp_path))
        log = MemoryLog(num_partitions=1)
        await log.send_all(run_events(store, run=GOOD))
        for number in range(2 * MAX_OF_A_RUN):
            at = await log.send(RunContinued(run_id=GOOD, time_ms=5 + number))
            (record,) = await log.fetch([at])
            await send_dead_letter(log, record, service="p", stage="curate", error=ValueError("unknown kind"))
        await close_groups(log, run=GOOD)
        shell = CurateShell(log, store, service="p")
        await shell.prepare(0, 0)
        end = await curated(log, shell)
        again = CurateShell(log, store, service="q")
        await again.prepare(0, end)
        await log.send(RunContinued(run_id=GOOD, time_ms=99))
        await curated(log, again, end)
        assert [one for one in await of_run(log, "groups", GOOD) if isinstance(one, RunEnded)] == []
        assert {type(one) for one in await of_run(log, "batches", GOOD)} == {BatchPlanned, EpochSealed}
        assert (await read_run(log, GOOD)).poison == []

    asyncio.run(go())


def test_a_run_is_ended_once_and_the_newest_runs_are_remembered():
    faulty = FaultyRuns()
    assert [faulty.add(BAD) for _ in range(MAX_OF_A_RUN + 2)].count(True) == 1
    assert faulty.passes_over(RunContinued(run_id=BAD, time_ms=0))
    assert not faulty.passes_over(RunEnded(run_id=BAD, time_ms=0, cause="stopped"))
    faulty.end(BAD)
    assert not faulty.is_given_up(BAD)
    assert not any(faulty.add(BAD) for _ in range(MAX_OF_A_RUN))
    faulty.end(BAD)
    assert faulty.is_given_up(BAD)
    faulty.begin(BAD)
    assert not faulty.is_given_up(BAD)
    for number in range(2 * RUNS_REMEMBERED):
        faulty.add(f"run-{number}")
    assert len(faulty._runs) == RUNS_REMEMBERED
    assert not faulty.is_given_up(BAD)


def test_the_newest_faulty_runs_that_are_not_folded_again_are_committed_and_known_after_a_restart():
    faulty = FaultyRuns()
    for number in range(2 * RUNS_COMMITTED):
        for _ in range(number):
            faulty.add(f"run-{number:096d}")
    faulty.add("x" * 5000)
    live = {f"run-{31:096d}"}
    state = curate.initial()
    for name, committed in (("many", faulty.committed(live)), ("none", {})):
        text = metadata_of(state, 7, 3, committed)
        assert len(text) <= MAX_METADATA_BYTES // 2, name
        found = beginning_of(text, 7)
        assert found is not None
        again = FaultyRuns()
        again.restore(found.faulty)
        assert again.committed(()) == committed
    assert [count for count, _ in faulty.committed(live).values()] == list(range(15, 31))
    assert "faulty" not in metadata_of(state, 7), "an older version reads what it knows"
    forged = {"\0" * 100 + str(number): (16, False) for number in range(RUNS_COMMITTED)}
    assert len(metadata_of(state, 7, 3, forged)) <= MAX_METADATA_BYTES
