"""A producers process that is killed with SIGKILL while agents outside play: no call is lost, none is doubled."""

import asyncio
import os
import subprocess
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from rollstream.eventlog.artifacts import ArtifactStore
from rollstream.eventlog.kafka.log import KafkaLog
from rollstream.schemas import tokens
from rollstream.schemas.events import RolloutEnded, RolloutFailed, StepRecorded
from tests.producers.gateway.kill_rig import Load, prepare, started, until_ended, write_settings

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(300)]

KILLS = int(os.environ.get("GATEWAY_KILLS", "2"))
GROUPS, MEMBERS, CALLS = 3, 2, 4 + 4 * KILLS


async def killing(settings: Path, output: Path, load: Load) -> "subprocess.Popen[bytes]":
    """Kill the process again and again while calls are answered; returns the last one."""
    process = started(settings, output)
    for number in range(KILLS):
        while len(load.answers) < (number + 1) * GROUPS * MEMBERS * 3:
            assert process.poll() is None, output.read_text()
            await asyncio.sleep(0.03)
        process.kill()
        process.wait()
        process = started(settings, output)
    return process


def test_a_kill_loses_no_call_and_doubles_none(tmp_path, own_broker):
    settings, output = write_settings(tmp_path, own_broker), tmp_path / "producers.log"

    async def scenario() -> tuple[Load, list[Any]]:
        load = Load(tmp_path / "w", CALLS)
        async with KafkaLog(own_broker, client_id="test") as log, aiohttp.ClientSession() as http:
            artifacts = ArtifactStore(str(tmp_path / "artifacts"))
            await prepare(log, artifacts, num_groups=GROUPS, num_members=MEMBERS, num_calls=CALLS)
            process = None
            try:
                async with asyncio.TaskGroup() as all_of_it:
                    for number in range(GROUPS * MEMBERS):
                        all_of_it.create_task(load.play(http, number))
                    process = await killing(settings, output, load)
                return load, await until_ended(log, GROUPS * MEMBERS)
            finally:
                if process is not None:
                    process.terminate()
                    process.wait(30)

    load, events = asyncio.run(scenario())
    ends = [event for event in events if isinstance(event, RolloutEnded | RolloutFailed)]
    assert [event.kind for event in ends] == ["rollout_ended"] * (GROUPS * MEMBERS), ends
    calls: dict[str, list[Any]] = {}
    for event in events:
        if isinstance(event, StepRecorded) and event.llm is not None:
            calls.setdefault(event.rollout_id, []).append(event)
    assert {name: len(found) for name, found in calls.items()} == {event.rollout_id: CALLS for event in ends}
    for name, found in calls.items():
        recorded = {tuple(tokens.decode_ids(step.llm.completion_ids)) for step in found}
        exact = [load.answers[name, number]["choices"][0]["logprobs"] for number in range(CALLS)]
        assert {tuple(one["token_ids"]) for one in exact} == recorded
        names = {load.answers[name, number]["id"] for number in range(CALLS)}
        assert len(names) == CALLS
    assert load.num_repeated > 0
