"""A run whose beginning the topic `groups` does not hold any more is ended with an error, and others go on."""

import asyncio

from rollstream.eventlog import codec
from rollstream.eventlog.artifacts import ArtifactStore
from rollstream.eventlog.log import TopicPartition
from rollstream.eventlog.memory.log import MemoryLog
from rollstream.processors.curate.shell import CurateShell
from rollstream.processors.host.app import Batch
from rollstream.schemas.events import EpochSealed, EpochStarted, JobStarted, RunEnded, RunStarted
from rollstream.schemas.settings import PlanSettings, RolloutSettings

GROUPS = TopicPartition("groups", 0)


def run_events(run, dataset):
    job = {"run_id": run, "time_ms": 1, "job_id": f"{run}/rl"}
    started = {"name": run, "config": {}, "seed": 0, "dataset": dataset, "num_examples": 0, "num_partitions": 1}
    rollout = RolloutSettings(environment="none")
    return [
        RunStarted(run_id=run, time_ms=1, **started),
        JobStarted(**job, model_group=f"{run}/policy", base_version=0, plan=PlanSettings(), rollout=rollout),
        EpochStarted(**job, epoch=0),
    ]


async def written(log, topic):
    """Events of a topic."""
    reader = await log.reader({TopicPartition(topic, 0): -1})
    return [codec.decode(record).event for record in await reader.poll(timeout_s=0)]


async def records(log, start):
    return await (await log.reader({GROUPS: start})).poll(timeout_s=0)


def test_a_run_that_goes_on_without_its_beginning_is_ended_and_another_one_goes_on(tmp_path):
    async def go():
        log, artifacts = MemoryLog(num_partitions=1), ArtifactStore(str(tmp_path))
        dataset = artifacts.put_bytes(b"", ".jsonl")
        lost, kept = run_events("lost", dataset), run_events("kept", dataset)
        await log.send_all([*lost[:2], *kept[:2], lost[2], kept[2]])
        log.truncate(GROUPS, 1)
        shell = CurateShell(log, artifacts, service="p")
        await shell.take(Batch(0, 1, await records(log, 4)))
        (ended,) = [event for event in await written(log, "groups") if isinstance(event, RunEnded)]
        assert (ended.run_id, ended.cause) == ("lost", "failed")
        assert "topic groups partition 0 no longer has records before offset 1" in ended.message
        assert [e.run_id for e in await written(log, "batches") if isinstance(e, EpochSealed)] == ["kept"]
        await shell.take(Batch(0, 1, await records(log, 6)))  # the end comes back, and counts
        await log.send(lost[2].model_copy(update={"epoch": 1}))
        await shell.take(Batch(0, 1, await records(log, 7)))
        assert sum(isinstance(event, RunEnded) for event in await written(log, "groups")) == 1

    asyncio.run(go())


def test_ended_runs_may_lose_their_beginning(tmp_path):
    async def go():
        log, artifacts = MemoryLog(num_partitions=1), ArtifactStore(str(tmp_path))
        old = run_events("old", artifacts.put_bytes(b"", ".jsonl"))
        end = RunEnded(run_id="old", time_ms=2, cause="completed")
        await log.send_all([*old, end, old[2].model_copy(update={"epoch": 1})])
        log.truncate(GROUPS, 2)
        await CurateShell(log, artifacts, service="p").take(Batch(0, 1, await records(log, 4)))
        assert [event for event in await written(log, "groups") if isinstance(event, RunEnded)] == [end]

    asyncio.run(go())
