"""Groups are started as the learner's lag and speed ask for: the formula, and a worker that keeps to it."""

import asyncio

import pytest

from rollstream.eventlog.memory.log import MemoryLog
from rollstream.producers.slots import MAX_JOBS, Pace, Slots, allowed_groups
from rollstream.schemas.events import BatchPlanned, GroupStarted, StepTrained
from rollstream.schemas.events.training import BatchMember
from rollstream.schemas.services import PaceSettings
from tests.producers import worker_rig as r

GROUP = f"{r.RUN}/policy"
GROUPS_PER_BATCH = 2


def planned(version, job_id=f"{r.RUN}/rl"):
    """The manifest that yields a version."""
    members = tuple(
        BatchMember(
            trajectory_id=f"t{number}",
            rollout_id=f"r{number}",
            group_id=f"g{number // 2}",
            digest="0" * 64,
            reward=1.0,
            staleness=0,
        )
        for number in range(2 * GROUPS_PER_BATCH)
    )
    return BatchPlanned(
        run_id=r.RUN,
        time_ms=1,
        batch_id=f"{job_id}/b{version - 1}",
        job_id=job_id,
        model_group=GROUP,
        epoch=0,
        index=version - 1,
        trains_at_version=version - 1,
        yields_version=version,
        members=members,
        seed=0,
        curriculum_sha256="0" * 64,
        previous_sha256="0" * 64,
    )


def trained(version, seconds=4.0):
    return StepTrained(
        run_id=r.RUN,
        time_ms=1,
        model_group=GROUP,
        job_id=f"{r.RUN}/rl",
        batch_id="b",
        epoch=0,
        version=version,
        term=1,
        weights_sha256="0" * 64,
        num_optimizer_steps=1,
        metrics={},
        seconds={"wait": 100.0, "forward_backward": seconds},
    )


@pytest.mark.parametrize(
    ("lag", "max_staleness", "group_s", "train_s", "allowed"),
    [
        (0, 3, 10.0, 1.0, None),  # the learner has nothing to do
        (1, 3, 0.0, 0.0, 12),  # nothing is measured: as many batches as may be behind
        (1, 3, 1.0, 10.0, 4),  # rollouts are faster: one batch is enough
        (1, 3, 15.0, 10.0, 8),
        (1, 3, 99.0, 10.0, 12),  # slower: never more than may be behind
        (2, 3, 99.0, 10.0, 8),  # of which one is planned already
        (4, 3, 99.0, 10.0, 0),
        (9, 3, 99.0, 10.0, 0),
        (2, 3, 1.0, 10.0, 0),
        (1, 1, 99.0, 10.0, 4),
    ],
)
def test_groups_in_progress_by_lag_staleness_and_speed(lag, max_staleness, group_s, train_s, allowed):
    found = allowed_groups(lag=lag, max_staleness=max_staleness, group_s=group_s, train_s=train_s, groups_per_batch=4)
    assert found == allowed


def test_a_worker_starts_no_more_groups_than_the_learner_has_time_for_and_goes_on_as_it_trains():
    async def main():
        log, rollouts = MemoryLog(num_partitions=1), r.Rollouts()
        rollouts.hangs = {(0, 0)}
        pace = Pace(PaceSettings(max_staleness=1), lambda group: 0)
        following = asyncio.create_task(pace.follow(log))
        await asyncio.sleep(0.01)
        await log.send(planned(1))
        await r.wait_until(lambda: pace._planned)
        async with r.Process(log, rollouts=rollouts, pace=pace):
            for index in range(6):
                await log.send(r.task(index))

            async def num_started():
                return len(await r.steps(log, GroupStarted))

            await r.wait_until(lambda: pace.retry_after_s() is not None and len(rollouts.calls) == 2 * GROUPS_PER_BATCH)
            assert await num_started() == GROUPS_PER_BATCH
            await log.send(trained(1, seconds=7.5))
            await r.wait_until(lambda: pace.retry_after_s() is None)  # nothing is planned: all may begin
            rollouts.go_on.set()
            await r.wait_until(lambda: r.all_settled(log, 6))
            assert await num_started() == 6
            await log.send(planned(2))
            await log.send(planned(3))
            await r.wait_until(lambda: pace._planned[f"{r.RUN}/rl"].version == 3)
            await log.send(r.task(6))
            await r.wait_until(lambda: pace.retry_after_s() == 8)
            assert await num_started() == 6
            await log.send(trained(3))
            await r.wait_until(lambda: r.all_settled(log, 7))
        following.cancel()

    asyncio.run(main())


def test_validations_are_not_held_back_and_go_first():
    async def main():
        pace = Pace(PaceSettings(max_staleness=1), lambda group: 0)
        pace.take(planned(5))
        await pace.admit(r.task(0).model_copy(update={"purpose": "validation"}))
        slots = Slots(1)
        held = slots.ask(slots.next_turn())
        train, validation = slots.ask(slots.next_turn()), slots.ask(slots.next_turn(is_first=True))
        slots.release(held)
        assert (train.done(), validation.done()) == (False, True)

    asyncio.run(main())


def test_several_processes_share_what_may_be_in_progress_and_what_is_remembered_is_bounded():
    async def main():
        pace = Pace(PaceSettings(max_staleness=1, num_producers=2), lambda group: 0)
        pace.take(planned(1))
        await pace.admit(r.task(0))
        waiting = asyncio.create_task(pace.admit(r.task(1)))
        await asyncio.sleep(0.01)
        assert not waiting.done()
        pace.leave(r.task(0).group_id)
        await waiting
        for number in range(MAX_JOBS + 5):
            pace.take(planned(1, f"{r.RUN}/job{number}"))
        assert len(pace._planned) == MAX_JOBS

    asyncio.run(main())


def test_a_group_that_closes_lets_the_next_of_its_job_begin_and_checks_no_other_that_waits():
    class Counting(Pace):
        num_checked = 0

        def _may_begin(self, job_id, settings):
            self.num_checked += 1
            return super()._may_begin(job_id, settings)

    async def main():
        pace, begun = Counting(PaceSettings(max_staleness=1), lambda group: 0), []
        pace.take(planned(1))
        pace.take(planned(1, f"{r.RUN}/other"))

        async def begin(task):
            await pace.admit(task)
            begun.append(task.index)

        tasks = [r.task(index) for index in range(50)]
        tasks.insert(20, r.task(99).model_copy(update={"job_id": f"{r.RUN}/other"}))
        waits = [asyncio.create_task(begin(task)) for task in tasks]
        await asyncio.sleep(0)
        assert begun == [0, 1, 99]
        pace.num_checked = 0
        pace.leave(r.task(1).group_id)
        waits[2].cancel()  # it has been granted its turn, which goes to the next
        waits[3].cancel()
        await r.wait_until(lambda: begun == [0, 1, 99, 4])
        assert pace.num_checked <= 6
        assert pace._num_open == {r.task(0).job_id: 2, f"{r.RUN}/other": 1}
        pace.take(trained(1))
        await asyncio.gather(*waits, return_exceptions=True)
        assert begun == [0, 1, 99, *range(4, 50)]
        assert pace.retry_after_s() is None
        assert not pace._held
        for task in tasks:
            pace.leave(task.group_id)
        assert not pace._num_open

    asyncio.run(main())
