"""A producers process that is killed with SIGKILL while agents outside play: no call is lost, none is doubled."""

import asyncio
import contextlib
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from rollstream.eventlog import codec
from rollstream.eventlog.artifacts import ArtifactStore
from rollstream.eventlog.kafka.log import KafkaLog
from rollstream.eventlog.log import TopicPartition
from rollstream.producers.gateway.marks import address_file, token_file
from rollstream.schemas import ids, tokens
from rollstream.schemas.events import RolloutEnded, RolloutFailed, StepRecorded, TaskRequested, WeightsPublished
from rollstream.schemas.settings import RolloutSettings
from tests.rigs.service_processes import CLI

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(300)]

KILLS = int(os.environ.get("GATEWAY_KILLS", "2"))
GROUPS, MEMBERS, CALLS = 3, 2, 4 + 4 * KILLS
RUN = "run-gateway"


class Load:
    """Agents that play all rollouts, and repeat under the same key what was not answered."""

    def __init__(self, workspace: Path) -> None:
        self.workspace = workspace
        self.answers: dict[tuple[str, int], Any] = {}
        """By rollout and number of the call."""
        self.num_repeated = 0
        self.is_over = asyncio.Event()

    async def post(self, http: aiohttp.ClientSession, path: str, body: Any, key: str, mark: str) -> Any:
        """The answer, however often it takes; None once all is over."""
        head = {"Authorization": f"Bearer {key}", "Idempotency-Key": mark, "Content-Type": "application/json"}
        while not self.is_over.is_set():
            with contextlib.suppress(aiohttp.ClientError, ConnectionError, OSError, ValueError):
                url = json.loads(address_file(self.workspace, "producers-1").read_text())["url"]
                async with http.post(url + path, data=json.dumps(body), headers=head) as response:
                    text = await response.text()
                    if response.status == 200:
                        return json.loads(text)
                    assert response.status in (204, 404, 500), (path, response.status, text)
            self.num_repeated += 1
            await asyncio.sleep(0.2)
        return None

    async def play(self, http: aiohttp.ClientSession, number: int) -> None:
        token = await self._token()
        claimed = await self.post(http, "/rollouts", {"wait_s": 5}, token, f"claim {number}")
        name, key = claimed["rollout_id"], claimed["key"]
        messages: list[Any] = [{"role": "user", "content": "begin"}]
        for call in range(CALLS):
            body = {"model": "policy", "messages": messages}
            answer = await self.post(http, "/v1/chat/completions", body, key, f"call {call}")
            self.answers[name, call] = answer
            messages += [answer["choices"][0]["message"], {"role": "user", "content": f"go on {call}"}]
            await asyncio.sleep(0.1)
        await self.post(http, f"/rollouts/{name}/reward", {"value": 1.0}, key, "reward")
        await self.post(http, f"/rollouts/{name}/end", {}, key, "end")

    async def _token(self) -> str:
        path = token_file(self.workspace, "producers-1")
        while not path.exists():
            await asyncio.sleep(0.05)
        return path.read_text().strip()


def requested(index: int) -> TaskRequested:
    settings = RolloutSettings(
        environment="gateway", agents={"agent": f"{RUN}/policy"}, max_turns=CALLS, rollout_timeout_s=250
    )
    return TaskRequested.of_run(
        7,
        run_id=RUN,
        time_ms=1,
        group_id=ids.group_id(RUN, "rl", 0, index),
        example_id=f"x{index}",
        job_id=f"{RUN}/rl",
        epoch=0,
        index=index,
        inputs={},
        num_rollouts=MEMBERS,
        minimum=1,
        min_version=0,
        settings=settings.model_copy(update={"group_timeout_s": 280.0}),
    )


async def prepare(log: KafkaLog, artifacts: ArtifactStore) -> None:
    artifact = artifacts.put_bytes(b"weights")
    await log.ensure_topics(num_partitions=6)
    await log.send(
        WeightsPublished(
            run_id=RUN,
            time_ms=1,
            model_group=f"{RUN}/policy",
            job_id=f"{RUN}/rl",
            batch_id=None,
            version=0,
            parent=None,
            term=1,
            weights_sha256=artifact.sha256,
            weights_format="full",
            base_model="none",
            artifact=artifact,
        )
    )
    for index in range(GROUPS):
        await log.send(requested(index))


async def steps_of(log: KafkaLog) -> list[Any]:
    begins, ends = await log.begin_offsets("steps"), await log.end_offsets("steps")
    filled = {TopicPartition("steps", one): begins[one] for one in begins if begins[one] < ends[one]}
    found: list[Any] = []
    if filled:
        reader = await log.reader(filled)
        while any(reader.position(where) < ends[where.partition] for where in filled):
            found += [codec.decode(record).event for record in await reader.poll()]
        await reader.close()
    return [event for event in found if event.run_id == RUN]


async def until_ended(log: KafkaLog, load: Load) -> list[Any]:
    while True:
        events = await steps_of(log)
        if sum(isinstance(event, RolloutEnded | RolloutFailed) for event in events) >= GROUPS * MEMBERS:
            load.is_over.set()
            return events
        await asyncio.sleep(1.0)


def started(settings: Path, output: Path) -> "subprocess.Popen[bytes]":
    with output.open("ab") as log:
        return subprocess.Popen([*CLI, "serve", "producers", "--settings", str(settings)], stdout=log, stderr=log)


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
    workspace, artifacts = tmp_path / "w", tmp_path / "artifacts"
    settings, output = tmp_path / "settings.json", tmp_path / "producers.log"
    given = {"workspace": str(workspace), "artifact_uri": str(artifacts), "engine": {"kind": "scripted"}}
    given |= {"bootstrap_servers": own_broker.bootstrap_servers, "session_timeout_s": 6.0, "allow": ["model:none"]}
    given |= {"kafka": own_broker.section.model_dump(mode="json")}
    settings.write_text(json.dumps(given))

    async def scenario() -> tuple[Load, list[Any]]:
        load = Load(workspace)
        async with KafkaLog(own_broker, client_id="test") as log, aiohttp.ClientSession() as http:
            await prepare(log, ArtifactStore(str(artifacts)))
            process = None
            try:
                async with asyncio.TaskGroup() as all_of_it:
                    for number in range(GROUPS * MEMBERS):
                        all_of_it.create_task(load.play(http, number))
                    ended = all_of_it.create_task(until_ended(log, load))
                    process = await killing(settings, output, load)
                return load, ended.result()
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
