"""The next manifest's trajectories are read while one is trained, which changes nothing but the time."""

import asyncio
import threading
from collections.abc import Iterable
from typing import Any

import pytest

from rollstream.eventlog.log import Position, Record
from rollstream.learner.reading.members import MemberReader, check_members, fetch_records
from rollstream.learner.trainer import JobTrainer
from rollstream.schemas.base import Locator
from rollstream.schemas.errors import DecodeError, TruncatedError
from rollstream.schemas.events import (
    BatchPlanned,
    JobCancelled,
    JobFailed,
    JobSucceeded,
    StepTrained,
    TrajectoryAssembled,
    WeightsPublished,
)

PATIENCE_S = 30.0


class WatchedLog:
    """A log that keeps the order of fetches of trajectories and of what a test adds to it."""

    def __init__(self, log: Any) -> None:
        self._log = log
        self.order: list[str] = []
        self.fetched = threading.Semaphore(0)
        """Released when the trajectories of a manifest have been asked for."""
        self.hangs_at = -1
        """Number of the fetch that is never answered."""
        self.is_given_up = asyncio.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._log, name)

    async def fetch(self, positions: Iterable[Position]) -> list[Record]:
        asked = list(positions)
        if all(position.topic == "trajectories" for position in asked):
            self.order.append("fetch")
            self.fetched.release()
            if self.order.count("fetch") > self.hangs_at >= 0:
                try:
                    await self.hang()
                finally:
                    self.is_given_up.set()
        return await self._log.fetch(asked)

    async def hang(self) -> None:
        await asyncio.Event().wait()


def test_the_next_batch_is_read_before_training_of_this_one_returns(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    train = JobTrainer.train
    waits: list[bool] = []

    async def scenario() -> None:
        log = WatchedLog(lab.log)

        def watched(self: JobTrainer, planned: BatchPlanned, *args: Any, **options: Any) -> Any:
            if planned.index == 0:
                log.fetched.acquire()  # its own
            if planned.index < 2:
                waits.append(log.fetched.acquire(timeout=PATIENCE_S))  # those of the next
            log.order.append(f"train {planned.index}")
            return train(self, planned, *args, **options)

        monkeypatch.setattr(JobTrainer, "train", watched)
        await lab.plan(await lab.submit())
        await lab.work(lab.has(JobSucceeded), lab.worker(log=log))
        assert log.order == ["fetch", "fetch", "train 0", "fetch", "train 1", "train 2"]

    asyncio.run(scenario())
    assert waits == [True, True]


def with_other_digest(planned: BatchPlanned) -> BatchPlanned:
    """A manifest whose last member was changed since."""
    *others, last = planned.members
    return planned.model_copy(update={"members": (*others, last.model_copy(update={"digest": "0" * 64}))})


def without_record(planned: BatchPlanned) -> BatchPlanned:
    """A manifest one of whose records is gone."""
    return planned.model_copy(update={"locators": (Locator(partition=0, offset=999), *planned.locators[1:])})


async def trajectories(lab: Any, planned: BatchPlanned) -> list[TrajectoryAssembled]:
    return check_members(planned, await fetch_records(lab.log, planned))


def test_members_read_ahead_equal_those_read_when_due(lab: Any) -> None:
    async def scenario() -> None:
        first, second, third = await lab.plan(await lab.submit())
        log = WatchedLog(lab.log)
        reader = MemberReader(log)  # pyright: ignore[reportArgumentType]
        reader.begin(second)
        assert await reader.members(second) == await trajectories(lab, second)
        assert len(log.order) == 1
        reader.begin(second)
        assert await reader.members(first) == await trajectories(lab, first)
        assert await reader.members(second) == await trajectories(lab, second)  # it was dropped
        reader.begin(second)
        reader.begin(third)
        assert await reader.members(third) == await trajectories(lab, third)
        reader.begin(second.model_copy(update={"adopts": 0, "members": (), "locators": ()}))
        await reader.close()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(scenario())


@pytest.mark.parametrize(("spoilt", "error"), [(with_other_digest, DecodeError), (without_record, TruncatedError)])
def test_an_error_of_what_is_read_ahead_is_raised_when_that_is_asked_for(lab: Any, spoilt: Any, error: Any) -> None:
    async def scenario() -> None:
        unhandled: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: unhandled.append(context))
        first, second, _ = await lab.plan(await lab.submit())
        reader = MemberReader(lab.log)
        for _ in range(2):
            reader.begin(spoilt(second))
            while len(asyncio.all_tasks()) > 1:
                await asyncio.sleep(0)
            assert await reader.members(first) == await trajectories(lab, first)  # what was wrong is dropped with it
        reader.begin(spoilt(second))
        with pytest.raises(error):
            await reader.members(spoilt(second))
        assert unhandled == []

    asyncio.run(scenario())


def test_a_batch_that_cannot_be_read_fails_its_job_once_the_versions_before_it_are_published(lab: Any) -> None:
    async def scenario() -> None:
        job = await lab.submit()
        (first,) = await lab.plan(job, 1, seal=False)
        other = type(lab)(lab.folder / "other", lab.model)
        previous = (await lab.received("batches"))[-1].digest
        (second,) = await other.plan(job, 1, first=1, previous=previous, seal=False)
        await lab.log.send(second.model_copy(update={"locators": first.locators}))
        await lab.work(lab.has(JobFailed))
        assert [one.version for one in await lab.events("weights", WeightsPublished)] == [0, 1]
        (failed,) = await lab.events("jobs", JobFailed)
        assert second.batch_id in failed.error
        assert "the record there is" in failed.error

    asyncio.run(scenario())


class CancellingLog(WatchedLog):
    """Its job is cancelled while the fetch that is never answered waits."""

    jobs: tuple[Any, ...]

    async def hang(self) -> None:
        (job,) = self.jobs
        event = JobCancelled(run_id=job.run_id, time_ms=2, job_id=job.job_id, model_group=job.model_group)
        await self._log.send(event)
        await super().hang()


def test_a_cancelled_job_reads_nothing_ahead_any_more(lab: Any) -> None:
    async def scenario() -> None:
        job = await lab.submit()
        await lab.plan(job)
        log = CancellingLog(lab.log)
        log.jobs, log.hangs_at = (job,), 1

        worker = asyncio.create_task(lab.worker(log=log).run())
        await asyncio.wait_for(log.is_given_up.wait(), PATIENCE_S)
        assert not worker.done()
        worker.cancel()
        await asyncio.wait([worker])
        assert not await lab.events("weights", StepTrained), "the version that it trained meanwhile is dropped"

    asyncio.run(scenario())


def test_a_worker_that_ends_leaves_nothing_that_reads(lab: Any) -> None:
    async def scenario() -> None:
        await lab.plan(await lab.submit())
        log = WatchedLog(lab.log)
        log.hangs_at = 1
        await lab.work(lab.has(WeightsPublished, "weights", 2), lab.worker(log=log))
        assert log.is_given_up.is_set()
        assert asyncio.all_tasks() == {asyncio.current_task()}
        await lab.work(lab.has(JobSucceeded))
        assert [one.version for one in await lab.events("weights", StepTrained)] == [1, 2, 3]

    asyncio.run(scenario())
