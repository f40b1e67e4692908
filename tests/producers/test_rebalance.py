"""Rebalancing on a real broker: what runs on partitions that stay with their owner is not interrupted."""

import asyncio

import pytest

from rollstream.eventlog.kafka.log import KafkaLog
from rollstream.schemas.events import RolloutEnded, RolloutFailed, RolloutStarted
from tests.producers import worker_rig as r

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(120)]
PARTITIONS = 2


def test_rollouts_go_on_where_a_partition_stays_and_run_again_where_it_moves(own_topics):
    asyncio.run(_join_and_leave(own_topics))


async def _join_and_leave(kafka):
    logs = [KafkaLog(kafka, session_timeout_s=6) for _ in range(2)]
    for log in logs:
        await log.start()
    await logs[0].ensure_topics(num_partitions=PARTITIONS)
    try:
        await _run(*logs)
    finally:
        for log in logs:
            await log.close()


async def _run(log, other):
    first_rollouts, second_rollouts = r.Rollouts(), r.Rollouts()
    first_rollouts.hangs = second_rollouts.hangs = {(0, 0), (1, 0)}
    async with r.Process(log, rollouts=first_rollouts, tick_s=0.5) as first:
        for partition in range(PARTITIONS):
            await log.send(r.task_in(partition, PARTITIONS))
        await r.wait_until(lambda: len(first_rollouts.calls) == 4, 30)
        async with r.Process(other, rollouts=second_rollouts, name="producer-2", tick_s=0.5) as second:
            await r.wait_until(lambda: second.rollouts.calls, 30)
            moved = {group_id for group_id, _, _ in second_rollouts.calls}
            first_rollouts.go_on.set()
            await r.wait_until(lambda: len(second_rollouts.calls) == 2, 30)
            await r.wait_until(lambda: first_rollouts.num_running == second_rollouts.num_running == 0, 30)
        member = first.wire.member
        assert member is not None
        await r.wait_until(lambda: len(member.assigned()) == PARTITIONS, 30)
    assert len(moved) == 1
    for partition in range(PARTITIONS):
        assert await r.all_settled(log, 1, partition)
        has_moved = r.task_in(partition, PARTITIONS).group_id in moved
        lost = [e.cause for e in await r.steps(log, RolloutFailed, partition)]
        assert lost == (["producer_lost"] * 2 if has_moved else [])
        assert len(await r.steps(log, RolloutEnded, partition)) == 2
        assert len(await r.steps(log, RolloutStarted, partition)) == (4 if has_moved else 2)
