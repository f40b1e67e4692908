"""Producers' reads at a start and their memory: proportional to what is open, however long the log is."""

import asyncio

from rollstream.eventlog.artifacts import ArtifactStore
from rollstream.eventlog.log import MAX_METADATA_BYTES
from rollstream.eventlog.memory.log import MemoryLog
from rollstream.eventlog.recent_set import RecentSet
from rollstream.eventlog.run_offsets import ends_now
from rollstream.producers.ended_runs import NUM_COMMITTED_ENDS, CommitMetadata, EndedRuns
from rollstream.producers.engines.scripted import MAX_KEPT, ScriptedEngine
from rollstream.producers.engines.weight_follower import WeightFollower
from rollstream.schemas.algorithms import GrpoSettings
from rollstream.schemas.events import GroupStarted, JobSubmitted, LearnerClaimed, RunEnded, TaskCancelled
from rollstream.schemas.events import WeightsPublished as Published
from rollstream.schemas.permissions import NOTHING
from rollstream.schemas.settings import JobSettings, ModelSettings, OptimizerSettings
from tests.producers import worker_rig as r
from tests.rigs.counting_log import CountingLog, counted

CLOSED = (("ce_type", b"rollstream.group_closed.v1"),)


async def other_groups(log, count):
    await log.send_many("groups", count, key=b"run-0", value=b"{}", headers=CLOSED)


def test_a_recent_set_keeps_the_newest():
    found = RecentSet(3, "abca")
    assert list(found) == ["b", "c", "a"]
    found.add("d")
    found.discard("c")
    found.discard("x")
    assert (list(found), len(found), "b" in found, "d" in found) == (["a", "d"], 2, False, True)


def test_ends_of_runs_are_read_back_to_the_offset_in_the_commit_metadata():
    async def go():
        log = CountingLog(num_partitions=1)
        await other_groups(log, 50)
        for number in range(NUM_COMMITTED_ENDS + 5):
            await log.send(RunEnded(run_id=f"run-{number}", time_ms=1, cause="completed"))
        ended = []
        ends = await EndedRuns.open(log, ended.append)
        await ends.read_back([None])
        assert len(ended) == NUM_COMMITTED_ENDS + 5
        assert counted(log) == {"groups": 50 + NUM_COMMITTED_ENDS + 5}
        metadata = CommitMetadata.of(ends.metadata(7).text())
        assert metadata is not None
        assert metadata == CommitMetadata(
            7, 50 + NUM_COMMITTED_ENDS + 5, tuple(f"run-{number}" for number in range(5, NUM_COMMITTED_ENDS + 5))
        )
        await other_groups(log, 3)
        await log.send(RunEnded(run_id="run-x", time_ms=1, cause="completed"))
        again = await EndedRuns.open(log, ended.append)
        await again.read_back([metadata, metadata])
        await again.read_back([metadata])
        assert counted(log) == {"groups": 4}
        assert list(again.ended) == [*metadata.ended, "run-x"]
        assert CommitMetadata.of('{"steps": 3}') == CommitMetadata(3)
        assert CommitMetadata.of("") is None

    asyncio.run(go())


def test_ends_that_are_read_back_later_do_not_pass_for_the_newest():
    async def go():
        log = CountingLog(num_partitions=1)
        for number in range(4):
            await log.send(RunEnded(run_id=f"old-{number}", time_ms=1, cause="completed"))
        ends = await EndedRuns.open(log, lambda run_id: None)
        following = asyncio.create_task(ends.follow())
        newest = tuple(f"new-{number}" for number in range(NUM_COMMITTED_ENDS))
        for run_id in newest:
            await log.send(RunEnded(run_id=run_id, time_ms=1, cause="completed"))
        await r.wait_until(lambda: newest[-1] in ends.ended)
        await ends.read_back([CommitMetadata(0, 3, ("old-1", "old-2"))])
        assert ends.metadata(0).ended == newest
        assert list(ends.ended) == ["old-1", "old-2", "old-3", *newest]
        await ends.read_back([CommitMetadata(0, 1, ("gone", "old-0")), CommitMetadata(0, 2, ("old-0", "old-1"))])
        assert list(ends.ended) == ["gone", "old-0", "old-1", "old-2", "old-3", *newest]
        assert ends.metadata(0).ended == newest
        following.cancel()
        await asyncio.wait({following})
        await ends.close()

    asyncio.run(go())


def test_ended_runs_of_long_names_leave_room_in_the_commit_metadata():
    for ended in (
        tuple("r" * 300 + str(n) for n in range(16)),
        tuple("ä" * 100 + str(n) for n in range(16)),
        ("x" * 9000,),
    ):
        text = CommitMetadata(7, 8, ended).text()
        assert len(text.encode()) <= MAX_METADATA_BYTES
        found = CommitMetadata.of(text)
        assert found is not None
        assert (found.steps, found.groups) == (7, 8)
        assert found.ended == ended[len(ended) - len(found.ended) :]


def test_a_longer_log_takes_no_more_reading_to_be_ready():
    async def go():
        log = CountingLog(num_partitions=1)
        read = []
        for number in range(4):
            counted(log)
            await log.send(r.task(number))
            async with r.Process(log) as process:
                await r.wait_until(lambda settled=number + 1: r.all_settled(log, settled))
                read.append(counted(log)["groups"])
                await other_groups(log, 10 * 10**number)
                await r.wait_until(lambda up=process: _has_read_all(up, log))
        assert read == [0, 0, 0, 0]

    async def _has_read_all(process, log):
        return process.worker._ended_runs.metadata(0).groups == (await log.end_offsets("groups"))[0]

    asyncio.run(go())


def test_a_task_that_comes_after_the_end_of_its_run_is_not_run_by_a_producer_that_starts_later():
    async def go():
        log = MemoryLog(num_partitions=1)
        rollouts = r.Rollouts()
        await log.send(r.task(0, run_id="run-2"))
        async with r.Process(log, rollouts=rollouts) as process:
            await r.wait_until(lambda: r.all_settled(log, 1))
            await log.send(RunEnded(run_id=r.RUN, time_ms=1, cause="stopped"))
            await log.send(r.task(1, run_id="run-2"))
            await r.wait_until(lambda: r.all_settled(log, 2))
            await r.wait_until(lambda: _has_noted(process, r.RUN))
        await log.send(r.task(0))
        async with r.Process(log, rollouts=rollouts):
            await r.wait_until(lambda: r.all_settled(log, 3))
        started = {event.group_id: event for event in await r.steps(log, GroupStarted)}
        assert started[r.task(0).group_id].void_cause == "run_ended"
        assert {call[0].split("/")[0] for call in rollouts.calls} == {"run-2"}

    async def _has_noted(process, run_id):
        metadata = CommitMetadata.of((await r.commit_of(process))[1])
        return metadata is not None and run_id in metadata.ended

    asyncio.run(go())


def test_cancelled_and_settled_groups_of_ended_runs_are_forgotten():
    async def go():
        log = MemoryLog(num_partitions=1)
        async with r.Process(log) as process:
            for number in range(5):
                task = r.task(number, run_id=f"run-{number}")
                cancelled = {"run_id": task.run_id, "time_ms": 1, "group_id": task.group_id, "cause": "x"}
                await log.send(TaskCancelled(**cancelled))
                await log.send(task)
                await log.send(TaskCancelled(**{**cancelled, "group_id": f"{task.run_id}/rl/e0/t00099"}))
                await r.wait_until(lambda settled=number + 1: r.all_settled(log, settled))
                await log.send(RunEnded(run_id=task.run_id, time_ms=1, cause="completed"))
            await r.wait_until(lambda: _is_empty(process.worker))

    async def _is_empty(worker):
        (owner,) = worker._owners.values()
        return not (len(owner._settled) + len(owner._cancelled) + len(owner._runs) + len(owner._in_progress))

    asyncio.run(go())


class Rig:
    """A log, and a follower of weights on it."""

    def __init__(self, folder):
        self.log = CountingLog(num_partitions=1)
        self.artifacts = ArtifactStore(str(folder))
        self.engine = ScriptedEngine()
        self.follower = WeightFollower(self.log, self.artifacts, self.engine, engine_id="engine-0", permissions=NOTHING)

    async def run_of(self, run_id, num_versions, *, is_placed=True):
        ids = {"run_id": run_id, "time_ms": 1, "model_group": f"{run_id}/policy"}
        settings = JobSettings(
            kind="rl",
            model=ModelSettings(path="m"),
            algorithm=GrpoSettings(),
            optimizer=OptimizerSettings(learning_rate=1e-2),
            num_versions=9,
        )
        offsets = await ends_now(self.log) if is_placed else None
        job_id = f"{run_id}/rl"
        await self.log.send(
            JobSubmitted(**ids, job_id=job_id, base_version=0, settings=settings, start_offsets=offsets)
        )
        await self.log.send(LearnerClaimed(**ids, term=1, learner="one"))
        artifact = self.artifacts.put_bytes(run_id.encode())
        for version in range(num_versions):
            await self.log.send(
                Published(
                    **ids,
                    job_id=job_id,
                    batch_id=None,
                    version=version,
                    parent=None,
                    term=1,
                    weights_sha256=artifact.sha256,
                    weights_format="full",
                    base_model="none",
                    artifact=artifact,
                )
            )


def test_weights_are_read_from_where_the_run_of_a_wanted_model_group_begins(tmp_path):
    async def go():
        rig = Rig(tmp_path)
        for number in range(20):
            await rig.run_of(f"run-{number}", 50)
        await rig.run_of("run-new", 3)
        await rig.run_of("run-beside", 5)
        following = asyncio.create_task(rig.follower.run())
        async with asyncio.timeout(10):
            await rig.follower.wait_for("run-new/policy", 2)
            assert counted(rig.log) == {"jobs": 22, "weights": 4 + 6}
            await rig.follower.wait_for("run-7/policy", 49)
            await rig.run_of("run-late", 1, is_placed=False)
            await rig.follower.wait_for("run-late/policy", 0)
        assert {name: rig.engine.version(f"{name}/policy") for name in ("run-new", "run-7", "run-late")} == {
            "run-new": 2,
            "run-7": 49,
            "run-late": 0,
        }
        following.cancel()
        await asyncio.wait({following})

    asyncio.run(go())


def test_model_groups_of_ended_runs_and_of_runs_that_nobody_plays_are_not_held(tmp_path):
    async def go():
        rig = Rig(tmp_path)
        following = asyncio.create_task(rig.follower.run())
        async with asyncio.timeout(10):
            for number in range(10):
                await rig.run_of(f"run-{number}", 5)
                await rig.run_of(f"nobody-{number}", 5)
                await rig.follower.wait_for(f"run-{number}/policy", 4)
                await rig.log.send(RunEnded(run_id=f"run-{number}", time_ms=1, cause="completed"))
        assert len(rig.follower._groups) <= 3
        following.cancel()
        await asyncio.wait({following})

    asyncio.run(go())


def test_a_scripted_engine_remembers_the_newest_requests_only(tmp_path):
    async def go():
        rig = Rig(tmp_path)
        await rig.run_of("run-1", 1)
        following = asyncio.create_task(rig.follower.run())
        await rig.follower.wait_for("run-1/policy", 0)
        rig.engine.loaded *= MAX_KEPT + 7
        published = rig.engine.loaded[0]
        await rig.engine.load(published, tmp_path)
        assert len(rig.engine.loaded) == MAX_KEPT
        following.cancel()
        await asyncio.wait({following})

    asyncio.run(go())
