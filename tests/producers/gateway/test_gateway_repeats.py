"""A producers process that is killed with SIGKILL before it answers what the log has: who asks again is answered."""

import asyncio
from typing import Any

import aiohttp
import pytest

from rollstream.eventlog.artifacts import ArtifactStore
from rollstream.eventlog.kafka.log import KafkaLog
from rollstream.schemas.events import RewardRecorded, RolloutEnded, RolloutFailed, StepRecorded
from tests.producers.gateway.kill_rig import Load, prepare, started, steps_of, until_ended, write_settings

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(300)]


def test_a_kill_between_a_reward_or_an_end_and_its_answer_changes_nothing_and_the_repeat_is_answered(
    tmp_path, own_broker
):
    settings, output = write_settings(tmp_path, own_broker), tmp_path / "producers.log"
    points = "gateway/after-reward-before-answer:2,gateway/after-end-before-answer:2"
    variables = {"ROLLSTREAM_FAILPOINT": points, "ROLLSTREAM_FAILPOINT_ONCE": str(tmp_path / "once")}
    (tmp_path / "once").mkdir()

    async def again(processes: list[Any]) -> None:
        """A new process after each one that killed itself."""
        while True:
            if processes[-1].poll() is not None:
                processes.append(started(settings, output, **variables))
            await asyncio.sleep(0.05)

    async def scenario() -> list[Any]:
        load = Load(tmp_path / "w", 2)
        async with KafkaLog(own_broker, client_id="test") as log, aiohttp.ClientSession() as http:
            artifacts = ArtifactStore(str(tmp_path / "artifacts"))
            await prepare(log, artifacts, num_groups=2, num_members=2, num_calls=2)
            processes = [started(settings, output, **variables)]
            keeper = asyncio.create_task(again(processes))
            try:
                await asyncio.gather(*(load.play(http, number) for number in range(4)))
                keeper.cancel()
                assert len(processes) == 3, output.read_text()
                await until_ended(log, 4)
                processes[-1].kill()
                processes[-1].wait()
                processes.append(started(settings, output))
                for name, key in load.keys.items():  # of rollouts that ended in processes that are gone
                    assert await load.post(http, f"/rollouts/{name}/end", {}, key, "end") is not None
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
