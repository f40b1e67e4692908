"""Curation that begins again at the low-water mark answers as if it had never stopped, whatever the mark's metadata."""

import asyncio
import logging

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollstream.eventlog import codec
from rollstream.eventlog.artifacts import ArtifactStore
from rollstream.eventlog.log import MAX_METADATA_BYTES
from rollstream.eventlog.memory.log import MemoryLog
from rollstream.processors.curate import fold as curate
from rollstream.processors.curate.low_water import beginning_of, metadata_of
from rollstream.processors.curate.shell import CurateShell
from rollstream.processors.curate.state import Clock
from rollstream.processors.host.app import Batch
from rollstream.schemas.events import RunEnded, RunStarted
from tests.processors.curate.any_run import PLANS, RANDOMS, simulate
from tests.processors.host.groups_rig import close_groups, groups_batch, run_events

DATASET = b"\n".join(orjson.dumps({"example_id": f"x{n:03d}", "inputs": {"number": n}}) for n in range(5))


class _Recording(MemoryLog):
    """A log whose `groups` are given, and that keeps what is sent in place of appending it."""

    def __init__(self):
        super().__init__(num_partitions=1)
        self.sent = []

    async def send_all(self, events, *, partition=None):
        self.sent += [codec.encode(event).value for event in events]
        return []


async def written(partition, store):
    """The partition's records on a log, their datasets in the store."""
    log = _Recording()
    dataset = store.put_bytes(DATASET, ".jsonl")
    for received in partition.records:
        event = received.event
        await log.send(event.model_copy(update={"dataset": dataset}) if isinstance(event, RunStarted) else event)
    return log


async def take(shell, log, start, end):
    """Events that the shell sends for the records between two offsets, in batches of three."""
    log.sent.clear()
    records = log._store.read(("groups", 0), start, end - start)
    for first in range(0, len(records), 3):
        await shell.take(Batch(0, 1, records[first : first + 3]))
    return list(log.sent)


def without_clocks(metadata):
    """Metadata as of many runs."""
    reported = orjson.loads(metadata)
    for run in reported["runs"].values():
        run.pop("idle", None)
    return orjson.dumps(reported | {"has_clocks": False}).decode()


@settings(max_examples=60)
@given(
    plans=st.lists(PLANS, min_size=1, max_size=3),
    random=RANDOMS,
    shares=st.lists(st.floats(0, 1), min_size=1, max_size=3),
    keeps=st.sampled_from(["metadata", "runs only", "offset only", "nothing", "the fold"]),
)
def test_a_restart_at_any_offset_answers_as_if_there_had_been_none(
    plans, random, shares, keeps, new_partition, make_closed, make_member, tmp_path_factory
):
    partition = simulate(new_partition, plans, random, make_closed, make_member)
    store = ArtifactStore(str(tmp_path_factory.mktemp("store")))

    async def go():
        log = await written(partition, store)
        size = len(partition.records)
        whole = await take(CurateShell(log, store, service="p"), log, 0, size)
        stops = sorted({int(share * size) for share in shares} | {size})
        shell, begin, metadata, answers = CurateShell(log, store, service="p"), 0, "", []
        for stop in stops:
            await shell.prepare(0, begin, metadata)
            answers += await take(shell, log, begin, stop)
            if keeps == "metadata":
                metadata = shell.metadata(0)
            elif keeps == "runs only" and shell.metadata(0):
                metadata = without_clocks(shell.metadata(0))
            elif keeps == "offset only" and shell.metadata(0):
                metadata = orjson.dumps({"v": 1, "begin": orjson.loads(shell.metadata(0))["begin"]}).decode()
            shell = shell if keeps == "the fold" else CurateShell(log, store, service="q")
            begin = stop
        assert answers == whole

    asyncio.run(go())


@settings(max_examples=40)
@given(plans=st.lists(PLANS, min_size=1, max_size=2), random=RANDOMS, bad=st.floats(0, 1))
def test_a_record_that_cannot_be_folded_changes_nothing(
    plans, random, bad, new_partition, make_closed, make_member, tmp_path_factory
):
    partition = simulate(new_partition, plans, random, make_closed, make_member)
    store = ArtifactStore(str(tmp_path_factory.mktemp("store")))
    poison = int(bad * (len(partition.records) - 1))

    def raising(state, received, datasets):
        answer = curate.evolve(state, received, datasets)
        if received.position.offset == poison:
            raise ZeroDivisionError
        return answer

    async def go():
        log = await written(partition, store)
        found = await take(CurateShell(log, store, service="p", evolve=raising), log, 0, len(partition.records))
        state, wanted = curate.initial(), []
        for received in partition.records:
            if received.position.offset != poison:
                wanted += [codec.encode(one).value for one in curate.evolve(state, received, partition.datasets)]
        assert found == wanted

    asyncio.run(go())


def test_the_metadata_of_many_runs_is_their_beginning_alone(partition):
    for number in range(500):
        partition.start_run(f"run-{number:03d}")
    text = metadata_of(partition.state, 500)
    assert len(text) <= MAX_METADATA_BYTES
    found = beginning_of(text, 500)
    assert found is not None
    assert (found.offset, found.live) == (0, None)


def test_the_metadata_of_a_run_a_partition_too_many_names_the_runs_without_their_clocks(partition):
    for number in range(100):
        partition.start_run(f"run-{number:03d}")
        partition.state.runs[f"run-{number:03d}"].idle.clocks = {index: Clock(1, 1) for index in range(64)}
    text = metadata_of(partition.state, 100)
    assert len(text) <= MAX_METADATA_BYTES
    found = beginning_of(text, 100)
    assert found is not None
    assert not found.has_clocks
    assert list(found.live or {}) == list(partition.state.runs)


@pytest.mark.parametrize("text", ["nonsense", '{"v":2,"begin":0}', '{"v":1,"begin":7}', '{"v":1,"begin":-1}', "[]"])
def test_unreadable_commit_metadata_is_a_warning_and_not_used(text, caplog):
    with caplog.at_level(logging.WARNING):
        assert beginning_of(text, 5) is None
    assert len(caplog.records) == 1


def test_clocks_missing_from_the_metadata_are_restored_from_closed_groups(tmp_path):
    async def go():
        log, store = MemoryLog(num_partitions=1), ArtifactStore(str(tmp_path))
        await log.send_all([*run_events(store, run="idle"), *run_events(store, run="busy")])
        owner = CurateShell(log, store, service="p")
        await owner.take(await groups_batch(log))
        await close_groups(log, run="busy")
        await log.send(RunEnded(run_id="busy", time_ms=9, cause="completed"))
        await owner.take(await groups_batch(log, 6))
        shell = CurateShell(log, store, service="q")
        await shell.prepare(0, 9, without_clocks(owner.metadata(0)))
        assert owner._fold is not None
        assert shell._fold is not None
        reported = owner._fold.state.idle_runs()
        assert reported["idle"].clocks
        assert shell._fold.state.idle_runs() == reported

    asyncio.run(go())
