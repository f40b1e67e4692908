"""Poison of every kind in `steps` and `groups`: one dead letter each, kept unchanged, and nothing else is lost."""

import asyncio

import orjson
import pytest

from rollstream.eventlog import codec
from rollstream.eventlog.artifacts import ArtifactStore
from rollstream.eventlog.dead_letters import original
from rollstream.eventlog.log import Record, TopicPartition, partition_of
from rollstream.eventlog.memory.log import MemoryLog
from rollstream.processors.assemble import fold as assembly
from rollstream.processors.assemble.shell import AssembleShell
from rollstream.processors.curate import fold as curate
from rollstream.processors.curate.shell import CurateShell
from rollstream.processors.host.app import Batch
from rollstream.processors.host.folding import MAX_IN_A_ROW
from rollstream.schemas.errors import FoldError
from rollstream.schemas.events import EpochStarted, GroupClosed, JobStarted, RewardRecorded, RunStarted
from rollstream.schemas.settings import PlanSettings, RolloutSettings
from rollstream.schemas.topics import MIB
from tests.processors.host.groups_rig import Raising
from tests.rigs.steps_rig import attempt, events_of, fold, group, received_of, records_of, started, tick

PARTITIONS = 4
OWN = partition_of(group(0), PARTITIONS)
ELSEWHERE = next(index for index in range(99) if partition_of(group(index), PARTITIONS) != OWN)
REWARD = codec.encode(next(event for event in attempt() if isinstance(event, RewardRecorded)))


def reward(**changes):
    """The JSON of a reward, with changes; a change to None leaves the field out."""
    value = orjson.loads(REWARD.value) | changes
    return orjson.dumps({name: one for name, one in value.items() if one is not None})


POISON = {
    "invalid UTF-8": (b'{"kind": "\xff"}', {}, "UTF-8 JSON"),
    "invalid JSON": (b"{", {}, "JSON"),
    "unknown kind": (reward(kind="reward_dreamt"), {}, "unknown kind 'reward_dreamt'"),
    "unknown version": (reward(v=99), {}, "reward_recorded: v: "),
    "missing field": (reward(name=None), {}, "reward_recorded: name: "),
    "NaN": (REWARD.value.replace(b'"value":1.0', b'"value":NaN'), {}, "JSON"),
    "NaN as text": (reward(value="NaN"), {}, "reward_recorded: value: "),
    "infinity": (REWARD.value.replace(b'"value":1.0', b'"value":1e999'), {}, "reward_recorded|JSON"),
    "10 MB": (b"\x00" * 10 * MIB, {}, "JSON"),
    "10 MB of an event": (reward(name="x" * 10 * MIB, surprise=1), {}, "surprise"),
    "null value": (None, {}, "null value"),
    "wrong key": (REWARD.value, {"key": b"run/rl/e00000/t00077"}, "wrong key"),
    "wrong partition": (
        codec.encode(attempt(ELSEWHERE)[1]).value,
        {"key": group(ELSEWHERE).encode()},
        "wrong partition",
    ),
    "a tick of another partition": (
        codec.encode(tick(5).model_copy(update={"partition": OWN + 1})).value,
        {"key": b""},
        "wrong partition",
    ),
}


class _Large(MemoryLog):
    """A log whose broker took a record above the limit: a client of another make compresses before it measures."""

    async def put(self, value, *, key, partition):
        if value is None or len(value) < 8 * MIB:
            await self.send_raw("steps", key=key, value=value, headers=(("h", b"\xfe"),), partition=partition)
            return
        end = (await self.end_offsets("steps"))[partition]
        self._store.append(Record("steps", partition, end, key, value, (("h", b"\xfe"),), 5))


@pytest.mark.parametrize("name", POISON)
def test_poison_is_one_letter_kept_unchanged_and_the_group_closes_without_it(name, tmp_path):
    value, where, says = POISON[name]

    async def go():
        log, store = _Large(num_partitions=PARTITIONS), ArtifactStore(str(tmp_path))
        records = [started(0, size=1), *attempt()]
        for event in records[:3]:
            await log.send(event, partition=OWN)
        await log.put(value, key=where.get("key", REWARD.key), partition=OWN)
        for event in records[3:]:
            await log.send(event, partition=OWN)
        shell = AssembleShell(log, store, service="processors-1")
        batch = Batch(OWN, 1, await records_of(log, "steps", OWN))
        await shell.take(batch)
        await shell.drain()
        (letter,) = await records_of(log, "dlq")
        kept = original(letter, store)
        assert (kept.topic, kept.partition, kept.offset) == ("steps", OWN, 3)
        assert kept.key == where.get("key", REWARD.key)
        assert kept.value == value
        assert kept.headers == (("h", b"\xfe"),)
        reported = dict(letter.headers)
        assert reported["__connect.errors.stage"] == b"assemble"
        reason = reported["__connect.errors.exception.message"].decode()
        assert any(one in reason for one in says.split("|")), reason
        (closed,) = await events_of(log, "groups", GroupClosed)
        assert [one.outcome for one in closed.attempts] == ["complete"]
        assert shell.commit_offset(OWN) == len(batch.records)

    asyncio.run(go())


# ---- a fold that raises on some records ----


def workload(num_groups):
    """Groups of two whose records interleave, four groups at a time."""
    events = []
    for first in range(0, num_groups, 4):
        indices = range(first, min(first + 4, num_groups))
        events += [started(index) for index in indices]
        attempts = [attempt(index, member) for index in indices for member in (0, 1)]
        events += [event for turn in zip(*attempts, strict=True) for event in turn]
    return events


async def assembled(log, shell, events, *, batch_size, partition=0):
    for event in events:
        await log.send(event, partition=partition)
    records = await records_of(log, "steps", partition)
    for first in range(0, len(records), batch_size):
        await shell.take(Batch(partition, 1, records[first : first + batch_size]))
    await shell.drain()
    return records


@pytest.mark.parametrize("batch_size", [1, 7, 256])
@pytest.mark.parametrize("every", [3, 1000])
def test_a_fold_that_raises_now_and_then_leaves_the_state_as_if_the_record_were_not_there(batch_size, every):
    async def go():
        log = MemoryLog(num_partitions=1)
        bad = Raising(assembly.evolve, lambda received: received.position.offset % every == every // 2)
        shell = AssembleShell(log, None, service="p", evolve=bad)
        events = workload(24 if every < 1000 else 120)
        records = await assembled(log, shell, events, batch_size=batch_size)
        letters = await records_of(log, "dlq")
        expected = [record for record in records if record.offset % every == every // 2]
        assert [original(letter, ArtifactStore("/nowhere")).offset for letter in letters] == [
            record.offset for record in expected
        ]
        assert {dict(letter.headers)["__connect.errors.stage"] for letter in letters} == {b"fold"}
        assert dict(letters[0].headers)["__connect.errors.class.name"] == b"ZeroDivisionError"
        received = [one for one in received_of(events) if one.position.offset % every != every // 2]
        state = assembly.initial()
        wanted = [one.closed for one in fold(received, state)]
        found = await events_of(log, "groups", GroupClosed)
        assert [one.model_copy(update={"locators": ()}) for one in found] == wanted
        assert shell.position(0) == len(records)
        assert shell.commit_offset(0) == min(state.low_water, len(records))
        return len(wanted)

    assert asyncio.run(go()) >= (20 if every == 1000 else 1)


def test_a_letter_of_the_fold_that_is_sent_again_joins_its_group():
    async def go():
        log = MemoryLog(num_partitions=1)
        bad = Raising(assembly.evolve, lambda received: received.position.offset == 2)
        shell = AssembleShell(log, None, service="p", evolve=bad)
        records = [started(0, size=1), *attempt()]
        await assembled(log, shell, records[:-1], batch_size=256)
        assert shell.commit_offset(0) == 0
        (letter,) = await records_of(log, "dlq")
        again = original(letter, ArtifactStore("/nowhere"))
        await log.send_raw("steps", key=again.key, value=again.value, headers=again.headers, partition=0)
        await log.send(records[-1], partition=0)
        await shell.take(Batch(0, 1, (await records_of(log, "steps"))[len(records) - 1 :]))
        await shell.drain()
        (closed,) = await events_of(log, "groups", GroupClosed)
        assert [one.outcome for one in closed.attempts] == ["complete"]

    asyncio.run(go())


def test_a_fold_that_raises_on_every_record_ends_the_worker_and_moves_no_mark():
    async def go():
        log = MemoryLog(num_partitions=1)
        bad = Raising(assembly.evolve, lambda received: received.position.offset > 0)
        shell = AssembleShell(log, None, service="p", evolve=bad)
        with pytest.raises(FoldError, match=r"steps/0@17 .* cannot be folded: ZeroDivisionError"):
            await assembled(log, shell, workload(4), batch_size=256)
        assert shell.commit_offset(0) == 0
        await shell.drain()
        assert len(await records_of(log, "dlq")) == MAX_IN_A_ROW

    asyncio.run(go())


@pytest.mark.parametrize("batch_size", [1, 7, 256])
def test_a_broken_fold_ends_the_worker_however_few_records_come_at_once(batch_size):
    async def go():
        log = MemoryLog(num_partitions=1)
        shell = AssembleShell(log, None, service="p", evolve=Raising(assembly.evolve, lambda received: True))
        with pytest.raises(FoldError, match=r"steps/0@16 .* cannot be folded: ZeroDivisionError"):
            await assembled(log, shell, workload(8), batch_size=batch_size)
        await shell.drain()
        assert len(await records_of(log, "dlq")) == MAX_IN_A_ROW

    asyncio.run(go())


def test_a_new_owner_of_the_partition_comes_to_the_same_groups():
    async def go():
        log = MemoryLog(num_partitions=1)

        def shell():
            bad = Raising(assembly.evolve, lambda received: received.position.offset % 11 == 5)
            return AssembleShell(log, None, service="p", evolve=bad)

        one = shell()
        records = await assembled(log, one, workload(24), batch_size=64)
        before = [codec.decode(record) for record in await records_of(log, "groups")]
        two = shell()
        await two.take(Batch(0, 2, records))
        await two.drain()
        after = [codec.decode(record) for record in await records_of(log, "groups")][len(before) :]
        assert [one.digest for one in after] == [one.digest for one in before]
        letters = [original(letter, ArtifactStore("/nowhere")).offset for letter in await records_of(log, "dlq")]
        assert letters == list(range(5, len(records), 11)), "a letter is not written twice"

    asyncio.run(go())


def test_a_letter_decides_even_if_a_new_owner_could_fold_its_record():
    async def go():
        log = MemoryLog(num_partitions=1)
        bad = Raising(assembly.evolve, lambda received: received.position.offset == 2)
        records = await assembled(
            log, AssembleShell(log, None, service="p", evolve=bad), [started(0, size=1), *attempt()], batch_size=64
        )
        mended = AssembleShell(log, None, service="p")
        await mended.take(Batch(0, 2, records))
        await mended.drain()
        one, two = [codec.decode(record).digest for record in await records_of(log, "groups")]
        assert one == two

    asyncio.run(go())


class _Leaving(MemoryLog):
    """A log on which the partition is taken away while it is folded again."""

    shell: AssembleShell | None = None

    async def reader(self, start):
        if self.shell is not None and TopicPartition("steps", 0) in start:
            self.shell.drop([0])
        return await super().reader(start)


def test_a_partition_that_goes_while_it_is_folded_again_leaves_nothing_behind():
    async def go():
        log = _Leaving(num_partitions=1)
        bad = Raising(assembly.evolve, lambda received: received.position.offset == 20)
        for event in workload(4):
            await log.send(event, partition=0)
        records = await records_of(log, "steps")
        shell = log.shell = AssembleShell(log, None, service="p", evolve=bad)
        await shell.take(Batch(0, 1, records))
        await shell.drain()
        assert shell.commit_offset(0) is None
        assert await records_of(log, "groups") == []

    asyncio.run(go())


# ---- curation ----


def run_events(store, run="run", *, num_epochs=3):
    lines = b"\n".join(orjson.dumps({"example_id": f"x{i}", "inputs": {"i": i}}) for i in range(2))
    common = {"run_id": run, "time_ms": 5}
    plan = PlanSettings(tasks_per_epoch=2, num_generations=2, min_generations=1, num_epochs=num_epochs)
    rollout = RolloutSettings(environment="none", agents={"agent": f"{run}/policy"})
    dataset = store.put_bytes(lines, ".jsonl")
    job = {"job_id": f"{run}/rl", "model_group": f"{run}/policy", "base_version": 3}
    return [
        RunStarted(**common, name=run, config={}, seed=1, dataset=dataset, num_examples=2, num_partitions=1),
        JobStarted(**common, **job, plan=plan, rollout=rollout),
        *(EpochStarted(**common, job_id=f"{run}/rl", epoch=epoch) for epoch in range(num_epochs)),
    ]


async def sent_by(shell, log, batch_size=3):
    """All that curate sends for `groups`, read in batches; letters are told by their offset."""
    records = await records_of(log, "groups")
    for first in range(0, len(records), batch_size):
        await shell.take(Batch(0, 1, records[first : first + batch_size]))
    assert shell.commit_offset(0) == len(records)
    sent = [codec.decode(record).event for topic in ("tasks", "batches") for record in await records_of(log, topic)]
    letters = [original(letter, ArtifactStore("/nowhere")).offset for letter in await records_of(log, "dlq")]
    return sent, letters


async def groups_log(store, *, without=()):
    """A log whose `groups` hold a run with closed groups, without some offsets of them."""
    source, log = MemoryLog(num_partitions=1), MemoryLog(num_partitions=1)
    await source.send_all(run_events(store))
    shell = AssembleShell(source, None, service="p")
    events = [one for index in range(4) for member in (0, 1) for one in attempt(index, member, reward=float(member))]
    await assembled(source, shell, [*(started(index) for index in range(4)), *events], batch_size=256)
    for record in await records_of(source, "groups"):
        if record.offset not in without:
            await log.send_raw("groups", key=record.key, value=record.value)
    return log


@pytest.mark.parametrize("bad", [3, 5, 6])
def test_curation_goes_on_as_if_the_record_that_its_fold_raises_on_were_not_there(tmp_path, bad):
    async def go():
        store = ArtifactStore(str(tmp_path))
        expected, _ = await sent_by(CurateShell(log := await groups_log(store, without=[bad]), store, service="p"), log)
        log = await groups_log(store)
        fold_of_curate = Raising(curate.evolve, lambda received: received.position.offset == bad)
        shell = CurateShell(log, store, service="p", evolve=fold_of_curate)
        found, letters = await sent_by(shell, log)
        assert letters == [bad]
        assert [one.event_id for one in found] == [one.event_id for one in expected]
        assert found == expected
        owner = CurateShell(log, store, service="q")
        await owner.take(Batch(0, 2, (await records_of(log, "groups"))[bad + 1 :]))
        again = [codec.decode(one).event for topic in ("tasks", "batches") for one in await records_of(log, topic)]
        assert {one.event_id: codec.content_digest(one) for one in again} == {
            one.event_id: codec.content_digest(one) for one in found
        }, "a new owner whose fold would take the record answers as the one before it"

    asyncio.run(go())


def test_a_curation_that_raises_on_every_record_ends_the_worker(tmp_path):
    async def go():
        log, store = MemoryLog(num_partitions=1), ArtifactStore(str(tmp_path))
        for number in range(10):
            await log.send_all(run_events(store, f"run{number}"))
        shell = CurateShell(log, store, service="p", evolve=Raising(curate.evolve, lambda received: True))
        with pytest.raises(FoldError, match="groups/0@16"):
            await shell.take(Batch(0, 1, await records_of(log, "groups")))
        assert shell.commit_offset(0) is None

    asyncio.run(go())
