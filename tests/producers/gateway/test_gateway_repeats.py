"""A producers process that is killed with SIGKILL before it answers what the log has: a second request is answered."""

import asyncio
from typing import Any

import pytest

from rollstream.eventlog.kafka.log import KafkaLog
from rollstream.producers import GatewayClient
from rollstream.schemas.events import RewardRecorded, RolloutEnded, RolloutFailed, StepRecorded
from tests.rigs.services.gateway_load import Agents, ProducersProcess, ask_for, steps_of, until_ended

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(300)]


def test_a_kill_between_a_reward_or_an_end_and_its_answer_changes_nothing_and_the_repeat_is_answered(
    tmp_path, own_topics
):
    producers = ProducersProcess(tmp_path, own_topics, {"kind": "scripted"})
    points = "gateway/after-reward-before-answer:2,gateway/after-end-before-answer:2"
    variables = {"ROLLSTREAM_FAILPOINT": points, "ROLLSTREAM_FAILPOINT_ONCE": str(tmp_path / "once")}
    (tmp_path / "once").mkdir()

    async def again(processes: list[Any]) -> None:
        """A new process after each one that killed itself."""
        while True:
            if processes[-1].poll() is not None:
                processes.append(producers.start(**variables))
            await asyncio.sleep(0.05)

    async def scenario() -> list[Any]:
        agents = Agents(calls=2)
        async with (
            KafkaLog(own_topics, client_id="test") as log,
            GatewayClient.of_workspace(producers.workspace) as gateway,
        ):
            await ask_for(log, producers, groups=2, members=2, calls=2, timeout_s=250.0)
            processes = [producers.start(**variables)]
            keeper = asyncio.create_task(again(processes))
            try:
                await asyncio.gather(*(agents.play(gateway) for _ in range(4)))
                keeper.cancel()
                assert len(processes) == 3, producers.output.read_text()
                await until_ended(log, 4)
                processes[-1].kill()
                processes[-1].wait()
                processes.append(producers.start())
                for rollout in agents.rollouts:  # that ended in processes that are gone
                    await rollout.end()
                    await rollout.close()
                return await steps_of(log)
            finally:
                keeper.cancel()
                processes[-1].kill()
                processes[-1].wait()

    events = asyncio.run(scenario())
    ended = [event for event in events if isinstance(event, RolloutEnded | RolloutFailed)]
    assert [event.kind for event in ended] == ["rollout_ended"] * 4, ended
    assert sum(isinstance(event, RewardRecorded) for event in events) == 4
    names = [event.name for event in events if isinstance(event, StepRecorded)]
    assert (names.count("gateway.end"), len(names)) == (4, 4 * (2 + 2))
