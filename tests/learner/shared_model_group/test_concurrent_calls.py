"""Calls of one group at the same time, on a log whose sends take a while: each builds on those before it."""

import asyncio

import pytest

from rollstream.eventlog.log import Encoded, Position
from rollstream.eventlog.memory.log import MemoryLog
from rollstream.learner.shared_model_group.group_view import view
from rollstream.schemas.base import Event
from rollstream.schemas.events import JobCancelled, JobSkipped, JobSubmitted, ModelSwitched
from tests.rigs.runs.group_rig import GROUP, RUN, GroupRig, chat_rollout

FIRST = {"prover": [chat_rollout("1"), chat_rollout("2")]}
SECOND = {"prover": [chat_rollout("3"), chat_rollout("4")]}


class Slow(MemoryLog):
    """A log whose sends let other tasks run first."""

    async def send(self, event: Event | Encoded, *, partition: int | None = None) -> Position:
        await asyncio.sleep(0.02)
        return await super().send(event, partition=partition)


@pytest.fixture
def slow(rig: GroupRig) -> GroupRig:
    """The rig on a slow log."""
    rig.log = Slow(num_partitions=2)
    return rig


def test_each_of_two_jobs_created_at_once_has_its_id_and_its_versions(slow: GroupRig) -> None:
    async def body() -> None:
        async with await slow.open() as group:
            created = await asyncio.gather(
                group.create_supervised_fine_tune_job(FIRST, job_name="a"),
                group.create_supervised_fine_tune_job(SECOND, job_name="b"),
            )
            submitted = await slow.events("jobs", JobSubmitted)
            assert {job.fine_tune.name: job.job_id for job in submitted} == dict(zip("ab", created, strict=True))
            assert [job.base_version for job in submitted] == [0, 1]
            assert group.fine_tune_job_id in created

    asyncio.run(body())


def test_a_job_created_or_skipped_twice_at_once_is_recorded_once(slow: GroupRig) -> None:
    async def body() -> None:
        async with await slow.open() as group:
            few = {"prover": FIRST["prover"][:1]}
            given = (FIRST, FIRST, few, few)
            ids = await asyncio.gather(*(group.create_supervised_fine_tune_job(one) for one in given))
            assert ids[:2] == [ids[0]] * 2
            assert ids[2:] == [ids[2]] * 2
        assert len(await slow.events("jobs", JobSubmitted)) == len(await slow.events("jobs", JobSkipped)) == 1

    asyncio.run(body())


def test_retries_and_cancellations_at_once_build_on_each_other(slow: GroupRig) -> None:
    async def body() -> None:
        async with await slow.open() as group:
            first = await group.create_supervised_fine_tune_job(FIRST)
            await asyncio.gather(group.cancel_fine_tune_job(first), group.cancel_fine_tune_job(first))
            assert len(await slow.events("jobs", JobCancelled)) == 1
            again, again_too, other = await asyncio.gather(
                group.retry_fine_tune_job(first),
                group.retry_fine_tune_job(first),
                group.create_supervised_fine_tune_job(SECOND),
            )
            assert again == again_too
            submitted = {job.job_id: job.base_version for job in await slow.events("jobs", JobSubmitted)}
            assert {submitted[again], submitted[other]} == {0, 1}

    asyncio.run(body())


def test_a_state_has_the_records_that_another_call_has_just_read(rig: GroupRig) -> None:
    """Whoever reads first holds the records for a moment before they are in the state."""

    async def body() -> None:
        group = await view(rig.log, GROUP)
        for version in range(1, 8):
            waiting = asyncio.create_task(group.wait(5.0))
            await asyncio.sleep(0)
            await rig.log.send(
                ModelSwitched(run_id=RUN, time_ms=1, job_id=f"{GROUP}-{version}", model_group=GROUP, version=version)
            )
            for _ in range(version):
                await asyncio.sleep(0)
            assert (await group.refresh()).version == version
            await waiting
        await group.close()

    asyncio.run(body())
