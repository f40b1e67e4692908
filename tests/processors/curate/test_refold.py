"""Curation that is folded again: what it waits for, what costs nothing, what it keeps, and what the log lost."""

import asyncio
import pickle
from dataclasses import replace

import orjson
import pytest

from rollstream.eventlog import codec
from rollstream.eventlog.artifacts import ArtifactStore
from rollstream.eventlog.blocking_calls import Retry
from rollstream.eventlog.log import Position, Received, Record, TopicPartition
from rollstream.eventlog.memory.log import MemoryLog
from rollstream.processors.curate import fold as curate
from rollstream.processors.curate.shell import CurateShell
from rollstream.processors.host.app import Batch
from rollstream.replay.report import Report
from rollstream.replay.source import read_run
from rollstream.replay.verify import compare_curation, dataset_of
from rollstream.schemas import ids
from rollstream.schemas.base import Event
from rollstream.schemas.events import (
    BatchPlanned,
    EpochSealed,
    EpochStarted,
    GroupClosed,
    JobStarted,
    RunEnded,
    RunStarted,
    TaskRequested,
)
from rollstream.schemas.settings import ArtifactRef, PlanSettings, RolloutSettings
from rollstream.schemas.topics import TOPICS
from tests.processors.host.groups_rig import close_groups, groups_batch, run_events
from tests.rigs.steps_rig import events_of, records_of

QUICK = Retry(first_wait_s=0.01, max_wait_s=0.01)
RUN = "run"


class CountingStore(ArtifactStore):
    """A store that counts what is read of it."""

    reads = 0

    def read(self, ref, *, max_bytes=None):
        self.reads += 1
        return super().read(ref, max_bytes=max_bytes)


async def opened(tmp_path, *, run=RUN):
    """A log with an open run whose first epoch was answered, and the store that holds its dataset."""
    log, store = MemoryLog(num_partitions=1), CountingStore(str(tmp_path / "artifacts"))
    await log.send_all(run_events(store, run=run))
    shell = CurateShell(log, store, service="p", retry=QUICK)
    await shell.take(await groups_batch(log))
    return log, store, shell


def test_a_store_that_is_away_while_open_runs_are_folded_again_is_waited_for(tmp_path):
    async def go():
        log, store, before = await opened(tmp_path)
        away = (tmp_path / "artifacts").rename(tmp_path / "away")
        shell = CurateShell(log, store, service="q", retry=QUICK)
        preparing = asyncio.create_task(shell.prepare(0, 3, before.metadata(0)))
        reads = store.reads
        while store.reads < reads + 5:
            await asyncio.sleep(0)
        assert shell.is_waiting(0)
        assert not preparing.done()
        away.rename(tmp_path / "artifacts")
        await preparing
        assert not shell.is_waiting(0)
        await close_groups(log)
        await shell.take(await groups_batch(log, 3))
        planned, sealed = await events_of(log, "batches", Event)
        assert isinstance(planned, BatchPlanned)
        assert isinstance(sealed, EpochSealed)
        assert len(planned.members) == 4
        assert [one for one in await events_of(log, "groups", Event) if isinstance(one, RunEnded)] == []

    asyncio.run(go())


def test_a_store_that_is_away_when_an_epoch_starts_is_tried_again_before_the_run_is_ended(tmp_path):
    async def go():
        log, store = MemoryLog(num_partitions=1), CountingStore(str(tmp_path / "artifacts"))
        await log.send_all(run_events(store))
        away = (tmp_path / "artifacts").rename(tmp_path / "away")
        shell = CurateShell(log, store, service="p", retry=QUICK)
        taking = asyncio.create_task(shell.take(await groups_batch(log)))
        while store.reads < 5:
            await asyncio.sleep(0)
        assert shell.is_waiting(0)
        away.rename(tmp_path / "artifacts")
        await taking
        assert len(await events_of(log, "tasks", TaskRequested)) == 2
        assert all(not isinstance(one, RunEnded) for one in await events_of(log, "groups", Event))

    asyncio.run(go())


def test_a_store_that_stays_away_ends_the_run_once_patience_has_ended(tmp_path):
    async def go():
        log, store = MemoryLog(num_partitions=1), CountingStore(str(tmp_path / "artifacts"))
        await log.send_all(run_events(store))
        (tmp_path / "artifacts").rename(tmp_path / "away")
        retry = Retry(patience_s=0.05, first_wait_s=0.01)
        await CurateShell(log, store, service="p", retry=retry).take(await groups_batch(log))
        (ended,) = [one for one in await events_of(log, "groups", Event) if isinstance(one, RunEnded)]
        assert ended.cause == "failed"

    asyncio.run(go())


@pytest.mark.parametrize("knows", ["metadata", "nothing"])
def test_ended_runs_whose_datasets_are_gone_cost_no_look_at_the_store(tmp_path, knows):
    async def go():
        log, store, shell = await opened(tmp_path, run="old")
        await close_groups(log, run="old")
        await log.send(RunEnded(run_id="old", time_ms=9, cause="completed"))
        await log.send_all(run_events(store, run="new", num_examples=3))
        await shell.take(await groups_batch(log, 3))
        old = (await events_of(log, "groups", Event))[0]
        assert isinstance(old, RunStarted)
        store.remove(old.dataset)
        reads, metadata = store.reads, shell.metadata(0) if knows == "metadata" else ""
        again = CurateShell(log, store, service="q", retry=QUICK)
        await again.prepare(0, len((await groups_batch(log)).records), metadata)
        assert store.reads == reads + 1, "the dataset of the open run"
        if knows == "metadata":
            assert again.progress(0) == 3, "records of the ended run are not even passed"

    asyncio.run(go())


def test_a_run_whose_dataset_went_goes_on_with_what_it_asked_for_and_ends_at_its_next_epoch(tmp_path):
    async def go():
        log, store, before = await opened(tmp_path)
        for path in (tmp_path / "artifacts").rglob("*.jsonl"):
            path.unlink()
        shell = CurateShell(log, store, service="q", retry=QUICK)
        await shell.prepare(0, 3, before.metadata(0))
        await close_groups(log)
        await log.send(EpochStarted(run_id=RUN, time_ms=9, job_id=ids.job_id(RUN, "rl"), epoch=1))
        await shell.take(await groups_batch(log, 3))
        planned, _ = await events_of(log, "batches", Event)
        assert isinstance(planned, BatchPlanned)
        assert len(planned.members) == 4
        (ended,) = [one for one in await events_of(log, "groups", Event) if isinstance(one, RunEnded)]
        assert ended.cause == "failed"
        assert "cannot be read" in ended.message

    asyncio.run(go())


def test_an_epoch_that_was_refused_stays_refused_when_the_dataset_is_back(tmp_path):
    async def go():
        log, store = MemoryLog(num_partitions=1), ArtifactStore(str(tmp_path / "artifacts"))
        await log.send_all([*run_events(store), *run_events(store, run="other", num_examples=3)])
        started = (await events_of(log, "groups", Event))[0]
        assert isinstance(started, RunStarted)
        (path,) = (tmp_path / "artifacts").rglob(f"{started.dataset.sha256}*")
        away = path.rename(tmp_path / "away")
        before = CurateShell(log, store, service="p", retry=QUICK)
        await before.take(await groups_batch(log))
        away.rename(path)
        shell = await restarted(log, store, before)
        await log.send(EpochStarted(run_id=RUN, time_ms=9, job_id=ids.job_id(RUN, "rl"), epoch=1))
        await shell.take(await groups_batch(log, 6))
        tasks = await events_of(log, "tasks", Event)
        assert {one.run_id for one in tasks} == {"other"}, "nobody asked for tasks of the refused run"
        assert shell._fold is not None
        assert shell._fold.state.refused == {}
        assert not compared(await read_run(log, RUN), store).differences

    asyncio.run(go())


async def restarted(log, store, before):
    """A shell that goes on from the commit metadata of another one at offset 6, with the same state."""
    shell = CurateShell(log, store, service="q", retry=QUICK)
    await shell.prepare(0, 6, before.metadata(0))
    assert shell._fold is not None
    assert before._fold is not None
    assert shell._fold.state == before._fold.state
    return shell


def enlarged(events, store):
    """The events of a run whose settings and examples have room in a task each, and not together."""
    start, job, epoch = events
    limit = TOPICS["tasks"].max_record_bytes
    lines = orjson.dumps({"example_id": "x0", "inputs": {"text": "x" * (limit // 2)}})
    rollout = job.rollout.model_copy(update={"environment_config": {"text": "x" * (limit // 2)}})
    dataset = store.put_bytes(lines, ".jsonl")
    return [start.model_copy(update={"dataset": dataset}), job.model_copy(update={"rollout": rollout}), epoch]


def test_a_run_whose_tasks_no_record_has_room_for_ends_and_others_go_on(tmp_path):
    async def go():
        log, store = MemoryLog(num_partitions=1), ArtifactStore(str(tmp_path / "artifacts"))
        large = enlarged(run_events(store, num_examples=1), store)
        await log.send_all([*large, *run_events(store, run="other", num_examples=3)])
        before = CurateShell(log, store, service="p", retry=QUICK)
        await before.take(await groups_batch(log))
        assert {one.run_id for one in await events_of(log, "tasks", Event)} == {"other"}
        (ended,) = [one for one in await events_of(log, "groups", Event) if isinstance(one, RunEnded)]
        assert (ended.run_id, ended.cause, ended.refused_at) == (RUN, "failed", 2)
        assert "a record for topic tasks has" in ended.message
        shell = await restarted(log, store, before)
        await log.send(EpochStarted(run_id=RUN, time_ms=9, job_id=ids.job_id(RUN, "rl"), epoch=1))
        await shell.take(await groups_batch(log, 6))
        assert {one.run_id for one in await events_of(log, "tasks", Event)} == {"other"}
        assert await events_of(log, "dlq", Event) == []
        assert not compared(await read_run(log, RUN), store).differences

    asyncio.run(go())


def test_a_run_whose_manifest_no_record_has_room_for_ends_without_it(tmp_path):
    async def go():
        log, _, shell = await opened(tmp_path)
        await close_groups(log)
        long: list[Record] = []
        for record in (await records_of(log, "groups"))[3:]:
            closed = codec.decode(record).event
            assert isinstance(closed, GroupClosed)
            members = tuple(one.model_copy(update={"digest": "f" * 600_000}) for one in closed.members)
            value = codec.encode(closed.model_copy(update={"members": members})).value
            long.append(replace(record, value=value))
        await shell.take(Batch(0, 1, long))
        assert await events_of(log, "batches", BatchPlanned) == []
        (ended,) = [one for one in await events_of(log, "groups", Event) if isinstance(one, RunEnded)]
        assert "a record for topic batches has" in ended.message

    asyncio.run(go())


def compared(events, store):
    report = Report()
    compare_curation(events, {RUN: dataset_of(events, store)}, report)
    return report


@pytest.mark.parametrize("stopped_first", [False, True])
def test_a_run_whose_dataset_was_away_at_a_later_epoch_is_replayed_to_the_same_requests(tmp_path, stopped_first):
    async def go():
        log, store, _ = await opened(tmp_path)
        tasks = await events_of(log, "tasks", TaskRequested)
        shell = CurateShell(log, store, service="q", retry=QUICK)
        await shell.prepare(0, 3, "")
        assert shell._fold is not None
        shell._fold.datasets.drop(RUN)
        (path,) = [path for path in (tmp_path / "artifacts").rglob("*") if path.is_file()]
        away = path.rename(tmp_path / "away")
        await log.send(EpochStarted(run_id=RUN, time_ms=9, job_id=ids.job_id(RUN, "rl"), epoch=1))
        if stopped_first:
            await log.send(RunEnded(run_id=RUN, time_ms=9, cause="stopped"))
        await shell.take(await groups_batch(log, 3))
        away.rename(path)
        await shell.take(await groups_batch(log, 4))
        refused = [one.refused_at for one in await events_of(log, "groups", Event) if isinstance(one, RunEnded)]
        assert refused[-1] == 3
        report = compared(await read_run(log, RUN), store)
        assert report.differences == []
        assert report.counts["curated events"] >= len(tasks)

    asyncio.run(go())


def test_a_partition_that_comes_back_keeps_its_fold_and_one_that_others_had_goes_on_from_there(tmp_path):
    async def go():
        log, store, shell = await opened(tmp_path)
        assert shell.progress(0) == 3
        await shell.prepare(0, 3, shell.metadata(0))
        assert shell.progress(0) == 3, "nothing is folded again"
        await close_groups(log)
        other = CurateShell(log, store, service="q", retry=QUICK)
        await other.prepare(0, 3, shell.metadata(0))
        await other.take(await groups_batch(log, 3))
        await shell.prepare(0, 5, other.metadata(0))
        assert shell.progress(0) == 5
        assert shell.commit_offset(0) is None, "the other one has committed that"
        await log.send(EpochStarted(run_id=RUN, time_ms=9, job_id=ids.job_id(RUN, "rl"), epoch=1))
        await shell.take(await groups_batch(log, 5))
        assert [one.epoch for one in await events_of(log, "tasks", TaskRequested)] == [0, 0, 1, 1]

    asyncio.run(go())


def test_a_run_that_ended_before_the_low_water_mark_is_not_taken_for_a_lost_one(tmp_path):
    async def go():
        log, store, shell = await opened(tmp_path, run="old")
        await close_groups(log, run="old")
        closed = (await events_of(log, "groups", Event))[3]
        await log.send(RunEnded(run_id="old", time_ms=9, cause="completed"))
        await shell.take(await groups_batch(log, 3))
        log.truncate(TopicPartition("groups", 0), 2)
        await log.send(closed)  # assembly has started again
        again = CurateShell(log, store, service="q", retry=QUICK)
        await again.prepare(0, 6, shell.metadata(0))
        reader = await log.reader({TopicPartition("groups", 0): 6})
        await again.take(Batch(0, 1, await reader.poll(timeout_s=0)))
        assert (await log.end_offsets("groups"))[0] == 7, "no end is sent for it"

    asyncio.run(go())


# ---- what the length of the log costs ----

RUNS, RECORDS, EPOCH = 200, 2_000_000, 99


def history(run, num_records, *, is_submitted):
    """About so many events of a run that comes to its end; of a submitted one, some groups are in no submission."""
    common = {"run_id": run, "time_ms": 0}
    planning = "submitted" if is_submitted else "stream"
    plan = PlanSettings(planning=planning, tasks_per_epoch=EPOCH, num_epochs=10**6, num_generations=1)
    job = {"job_id": f"{run}/rl", "model_group": f"{run}/policy", "base_version": 0}
    dataset = ArtifactRef(uri="memory:none", sha256="0" * 64, size_bytes=1)
    yield RunStarted(**common, name=run, config={}, seed=0, dataset=dataset, num_examples=1, num_partitions=1)
    yield JobStarted(**common, **job, plan=plan, rollout=RolloutSettings(environment="none"))
    group = GroupClosed(
        **common,
        group_id="g",
        example_id="x",
        job_id=f"{run}/rl",
        epoch=0,
        index=0,
        reason="failed",
        is_viable=False,
        size=1,
        members=(),
    )
    for epoch in range(num_records // (EPOCH + 1)):
        yield EpochStarted(**common, job_id=f"{run}/rl", epoch=epoch, num_tasks=EPOCH - 9 if is_submitted else 0)
        for index in range(EPOCH):
            name = ids.group_id(run, "rl", epoch, index)
            yield group.model_copy(update={"group_id": name, "epoch": epoch, "index": index})
    yield RunEnded(**common, cause="completed")


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_two_million_records_of_ended_runs_leave_a_state_of_the_same_size():
    state, sizes, largest, offset = curate.initial(), [], 0, 0
    datasets = {f"run-{number:03d}": {"x": {}} for number in range(RUNS)}
    for number in range(RUNS):
        for event in history(f"run-{number:03d}", RECORDS // RUNS, is_submitted=number % 4 == 0):
            if isinstance(event, RunEnded):
                largest = max(largest, len(pickle.dumps(state.runs)))
            curate.evolve(state, Received(event, "", Position("groups", 0, offset), 0), datasets)
            offset += 1
        state.ended = {}  # event time stands still here; an hour of it would let go of the submitted ones
        sizes.append(len(pickle.dumps(state)))
    assert offset >= RECORDS
    assert max(sizes) - sizes[0] < 100 * RUNS, "a name and nothing else of each ended run"
    assert largest < 100_000, "bytes of a run of 10,000 records"


def test_an_ended_run_whose_groups_do_not_close_is_let_go_of_in_an_hour_of_others_time(partition, make_closed):
    tasks = partition.start(num_generations=2, tasks_per_epoch=2)
    partition.end_run()
    partition.start_run("other", idle_timeout_s=10**6)
    partition.start_job("other")
    assert "run-1" in partition.state.ended
    steps_at = {"partition": 0, "first_offset": 0, "last_offset": 1}
    others = [
        task.model_copy(update={"run_id": "other", "group_id": f"other/x/{n}"}) for n, task in enumerate(tasks * 4)
    ]
    for number, task in enumerate(others):
        partition.write(make_closed(task, (), time_ms=number * 900_000, steps_at=steps_at))
    assert "run-1" not in partition.state.ended
    assert partition.state.low_water == next(iter(partition.state.runs.values())).first_offset
