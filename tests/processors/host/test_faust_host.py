"""The Faust host on a real broker: it commits the folds' marks, and workers come, go and die without loss."""

import asyncio
import os
import signal
import subprocess
import sys
import time

import orjson
import pytest
from aiokafka.admin import AIOKafkaAdminClient
from faust.transport.drivers import aiokafka as driver
from yarl import URL

from rollstream.eventlog import codec
from rollstream.eventlog.artifacts import ArtifactStore
from rollstream.eventlog.kafka.log import KafkaLog
from rollstream.eventlog.kafka.security import client_options
from rollstream.eventlog.log import Position, TopicPartition, partition_of
from rollstream.processors.assemble.shell import AssembleShell
from rollstream.processors.host import consumer as faust_consumer
from rollstream.processors.host import host as faust_host
from rollstream.schemas.events import (
    EpochSealed,
    EpochStarted,
    GroupClosed,
    JobStarted,
    RunEnded,
    RunStarted,
    StepRecorded,
)
from rollstream.schemas.events.rollouts import LLMCall, VersionSpan
from rollstream.schemas.settings import PlanSettings, RolloutSettings
from rollstream.schemas.tokens import encode_floats, encode_ids
from tests.rigs.steps_rig import attempt, content, fold, group, received_of, started

pytestmark = pytest.mark.kafka
PARTITIONS = 4


@pytest.fixture
def own_topics(own_topics):
    """They exist; all processors of a test share one consumer group."""
    asyncio.run(_make_topics(own_topics))
    return own_topics


async def _make_topics(kafka):
    log = KafkaLog(kafka)
    await log.start()
    await log.ensure_topics(num_partitions=PARTITIONS)
    await log.close()


class _AcksConsumer(faust_consumer.Consumer):
    """The same host, but what is committed is what Faust holds for acknowledged."""

    _new_offset = driver.Consumer._new_offset
    _filter_tps_with_pending_acks = driver.Consumer._filter_tps_with_pending_acks


class _AcksTransport(faust_consumer.Transport):
    Consumer = _AcksConsumer


async def committed_by(kafka, log, app_id, transport):
    """Offset that a host commits of a partition whose first group stays open."""
    shell = AssembleShell(log, None, service="p")
    host = faust_host.create_host(kafka, [shell], client_id="p", app_id=app_id)
    host.transport = transport([URL(f"kafka://{kafka.bootstrap_servers}")], host)
    await host.start()
    admin = AIOKafkaAdminClient(**client_options(kafka))
    await admin.start()
    partition = faust_consumer.TP(kafka.topic_name("steps"), 0)
    try:
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            found = {tuple(tp): at.offset for tp, at in (await admin.list_consumer_group_offsets(app_id)).items()}
            if found.get(tuple(partition), -1) > 0:
                return found[tuple(partition)]
            await asyncio.sleep(0.2)
        raise AssertionError("nothing was committed")
    finally:
        await admin.close()
        await host.stop()


def test_the_mark_is_committed_where_fausts_own_acks_would_pass_an_open_group(own_topics, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    async def go():
        log = KafkaLog(own_topics)
        await log.start()
        begin = (await log.end_offsets("steps"))[0]
        events = [started(0, size=1), *attempt(), started(2, size=1), *attempt(2)[:-1]]
        for event in events:
            await log.send(event, partition=0)
        ours = await committed_by(own_topics, log, "ours", faust_consumer.Transport)
        fausts = await committed_by(own_topics, log, "fausts", _AcksTransport)
        await log.close()
        assert ours == begin + 6, "the GroupStarted of the group that is open"
        assert fausts == begin + len(events), "past it: its first records would be lost to the next owner"

    asyncio.run(go())
    assert not list(tmp_path.iterdir()), "a host leaves nothing behind where it runs"


class _LossyConsumer(faust_consumer.Consumer):
    """The same host, but what is fetched first gets lost, as around a rebalance."""

    lost = 0

    async def _wait_next_records(self, timeout):
        found, active = await super()._wait_next_records(timeout)
        if found and self.lost < 3:
            self.lost += 1
            return {}, active
        return found, active


class _LossyTransport(faust_consumer.Transport):
    Consumer = _LossyConsumer


def test_records_that_were_fetched_and_lost_are_fetched_again_though_no_others_come(own_topics):
    async def go():
        log = KafkaLog(own_topics)
        await log.start()
        begin = (await log.end_offsets("steps"))[2]
        for event in [started(20, size=1), *attempt(20)]:
            await log.send(event, partition=2)
        shell = AssembleShell(log, None, service="p")
        host = faust_host.create_host(own_topics, [shell], client_id="p", app_id="lossy")
        host.transport = _LossyTransport([URL(f"kafka://{own_topics.bootstrap_servers}")], host)
        await host.start()
        try:
            end = (await log.end_offsets("steps"))[2]
            deadline = time.monotonic() + 60
            while shell.position(2) != end and time.monotonic() < deadline:
                await asyncio.sleep(0.2)
            assert isinstance(host.consumer, _LossyConsumer)
            assert host.consumer.lost == 3
            assert shell.position(2) == end > begin
        finally:
            await host.stop()
            await log.close()

    asyncio.run(go())


# ---- workers ----


class Worker:
    """A processors process, as `rollstream serve processors` starts it."""

    def __init__(self, kafka, workspace, name):
        self.log = workspace / f"{name}.log"
        env = os.environ | {
            "ROLLSTREAM_ARTIFACT_URI": str(workspace / "artifacts"),
            "ROLLSTREAM_WORKSPACE": str(workspace),
            "ROLLSTREAM_NUM_PARTITIONS": str(PARTITIONS),
        }
        settings = workspace / f"{name}.json"
        given = {"bootstrap_servers": kafka.bootstrap_servers, "kafka": kafka.section.model_dump(mode="json")}
        given["session_timeout_s"] = 6.0
        settings.write_bytes(orjson.dumps(given))
        command = [sys.executable, "-m", "rollstream.harness.cli.main", "serve", "processors", "--name", name]
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(
                [*command, "--settings", str(settings)], stdout=output, stderr=subprocess.STDOUT, env=env
            )

    async def ready(self):
        deadline = time.monotonic() + 60
        while b"ready" not in self.log.read_bytes():
            assert time.monotonic() < deadline, self.log.read_text()
            await asyncio.sleep(0.1)

    def end(self, number):
        self.process.send_signal(number)
        return self.process.wait(30)


def run_events(run, store, num_groups):
    lines = b"\n".join(orjson.dumps({"example_id": f"x{i}", "inputs": {}}) for i in range(num_groups))
    common = {"run_id": run, "time_ms": 0}
    plan = PlanSettings(
        tasks_per_epoch=num_groups, batches_per_epoch=num_groups // 4, max_staleness=num_groups, num_generations=2
    )
    job = {"job_id": f"{run}/rl", "model_group": f"{run}/policy", "base_version": 3}
    rollout = RolloutSettings(environment="none", agents={"agent": f"{run}/policy"})
    dataset = store.put_bytes(lines, ".jsonl")
    start = {"name": run, "config": {}, "seed": 0, "dataset": dataset, "num_examples": num_groups}
    return [
        RunStarted(**common, **start, num_partitions=PARTITIONS),
        JobStarted(**common, **job, plan=plan, rollout=rollout),
        EpochStarted(**common, job_id=f"{run}/rl", epoch=0),
    ]


def group_events(run, index):
    """A group of two members with different rewards."""
    first = started(index, run=run, timeout_ms=3_600_000)
    return [first, *attempt(index, 0, reward=0.0, run=run), *attempt(index, 1, reward=index + 1.0, run=run)]


async def send_groups(log, groups, *, seconds):
    """All groups, open four at a time with their records interleaved, and now and then a broken record."""
    pause = seconds * 4 / len(groups)
    for first in range(0, len(groups), 4):
        some = groups[first : first + 4]
        for records in zip(*some, strict=True):
            await asyncio.gather(*(log.send(one, partition=partition_of(one.key, PARTITIONS)) for one in records))
        await log.send_raw("steps", key=b"k", value=b"broken", partition=first % PARTITIONS)
        await asyncio.sleep(pause)


async def read_until(log, topic, start, is_last, *, seconds=90):
    """Received records of a topic from its offsets on, until one after which all is there."""
    reader = await log.reader({TopicPartition(topic, partition): at for partition, at in start.items()})
    found = []
    deadline = time.monotonic() + seconds
    while not (found and is_last(found)):
        assert time.monotonic() < deadline, f"{topic}: {len(found)} records, the last ones {found[-2:]}"
        found += [codec.decode(record) for record in await reader.poll(timeout_s=0.5)]
    await reader.close()
    return found


def once(received):
    """First occurrence by event id; repeats must say the same."""
    found = {}
    for one in received:
        first = found.setdefault(one.event.event_id, one)
        assert first.digest == one.digest, f"{one.event.event_id} says something else the second time"
    return found


@pytest.mark.slow
def test_workers_join_leave_and_die_without_a_group_lost_or_doubled(own_topics, tmp_path):
    asyncio.run(_join_leave_and_die(own_topics, tmp_path, "disturbed", num_groups=64))


async def _join_leave_and_die(kafka, workspace, run, *, num_groups):
    log = KafkaLog(kafka)
    await log.start()
    starts = {topic: await log.end_offsets(topic) for topic in ("groups", "batches", "dlq")}
    await log.send_all(run_events(run, ArtifactStore(str(workspace / "artifacts")), num_groups))
    groups = [group_events(run, index) for index in range(num_groups)]
    workers = [Worker(kafka, workspace, "first")]
    try:
        await workers[0].ready()
        sending = asyncio.create_task(send_groups(log, groups, seconds=14))
        await asyncio.sleep(2)
        workers.append(Worker(kafka, workspace, "second"))
        await workers[1].ready()
        await asyncio.sleep(2)
        workers[0].end(signal.SIGKILL)
        workers.append(Worker(kafka, workspace, "third"))
        await workers[2].ready()
        await asyncio.sleep(2)
        assert workers[1].end(signal.SIGTERM) == 0, workers[1].log.read_text()
        await sending
        sealed = await read_until(
            log, "batches", starts["batches"], lambda found: isinstance(found[-1].event, EpochSealed)
        )
        closed = await read_until(log, "groups", starts["groups"], _closes(run, num_groups))
        letters = {letter.offset for letter in await _letters(log, starts["dlq"])}
    except AssertionError as error:
        logs = (f"--- {worker.log.name}\n{worker.log.read_text()[-4000:]}" for worker in workers)
        raise AssertionError("\n".join([str(error)[:500], *logs])) from None
    finally:
        for worker in workers:
            worker.process.kill()
            worker.process.wait(10)
    await _check(log, run, groups, closed, sealed)
    assert len(letters) >= num_groups // 4
    await log.send(RunEnded(run_id=run, time_ms=0, cause="completed"))
    await log.close()


def _closes(run, num_groups):
    return lambda found: len({one.event.event_id for one in found if _is_closed(one.event, run)}) == num_groups


def _is_closed(event, run):
    return isinstance(event, GroupClosed) and event.run_id == run


async def _letters(log, start):
    reader = await log.reader({TopicPartition("dlq", 0): start[0]})
    found = []
    while more := await reader.poll(timeout_s=1.0):
        found += more
    await reader.close()
    return [record for record in found if record.value == b"broken"]


async def _check(log, run, groups, closed, sealed):
    """Every group once, as an undisturbed fold closes it, its trajectories where it says; every one in a manifest."""
    expected = content([closing for group in groups for closing in fold(received_of(group))])
    unique = once(one for one in closed if _is_closed(one.event, run))
    assert {name: one.digest for name, one in unique.items()} == {
        name: digest for name, digest in expected.items() if name.startswith("group_closed")
    }
    for one in unique.values():
        positions = [Position("trajectories", locator.partition, locator.offset) for locator in one.event.locators]
        assert [codec.decode(record).digest for record in await log.fetch(positions)] == [
            member.digest for member in one.event.members
        ]
    planned = once(one for one in sealed if one.event.run_id == run)
    members = [member.trajectory_id for one in planned.values() for member in getattr(one.event, "members", ())]
    assert len(members) == len(set(members)) == 2 * len(groups)


# ---- long trajectories ----

LONG_TOKENS = 32_768
LONG_MEMBERS = 16


def long_attempt(member):
    """One attempt with a single call of 32k tokens, log-probabilities included."""
    rollout = attempt(9, member)
    begun, ended = rollout[0], rollout[-1]
    half = LONG_TOKENS // 2
    call = LLMCall(
        prompt_ids=encode_ids(range(half)),
        completion_ids=encode_ids(range(half)),
        logprobs=encode_floats([-1.0] * half),
        spans=(VersionSpan(model_group="run/policy", version=0, length=half),),
    )
    step = StepRecorded(
        run_id=begun.run_id,
        time_ms=0,
        group_id=begun.group_id,
        rollout_id=begun.rollout_id,
        step_index=0,
        agent="agent",
        event_type="LLM_END",
        uuid=f"long-{member}",
        llm=call,
    )
    digest = codec.chain(begun.rollout_id, [codec.content_digest(step)])
    return [begun, step, ended.model_copy(update={"num_steps": 1, "num_rewards": 0, "digest": digest})]


def test_trajectories_of_32k_tokens_in_groups_of_16_pass(own_topics):
    async def go():
        log = KafkaLog(own_topics)
        await log.start()
        end = (await log.end_offsets("groups"))[0]
        host = faust_host.create_host(own_topics, [AssembleShell(log, None, service="p")], client_id="p", app_id="long")
        await host.start()
        await log.send(started(9, size=LONG_MEMBERS), partition=0)
        for member in range(LONG_MEMBERS):
            for event in long_attempt(member):
                await log.send(event, partition=0)
        reader = await log.reader({TopicPartition("groups", 0): end})
        closed = None
        deadline = time.monotonic() + 60
        while closed is None and time.monotonic() < deadline:
            for record in await reader.poll():
                event = codec.decode(record).event
                closed = event if isinstance(event, GroupClosed) and event.group_id == group(9) else closed
        assert closed is not None
        assert [member.num_tokens for member in closed.members] == [LONG_TOKENS] * LONG_MEMBERS
        positions = [Position("trajectories", at.partition, at.offset) for at in closed.locators]
        fetched = [codec.decode(record) for record in await log.fetch(positions)]
        assert [one.digest for one in fetched] == [member.digest for member in closed.members]
        await reader.close()
        await host.stop()
        await log.close()

    asyncio.run(go())
