"""Agents that play rollouts of a real producers process over a real broker, while it is killed with SIGKILL."""

import asyncio
import contextlib
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import aiohttp

from rollstream.eventlog import codec
from rollstream.eventlog.artifacts import ArtifactStore
from rollstream.eventlog.kafka.log import KafkaLog
from rollstream.eventlog.log import TopicPartition
from rollstream.producers.gateway.marks import address_file, token_file
from rollstream.schemas import ids
from rollstream.schemas.events import RolloutEnded, RolloutFailed, TaskRequested, WeightsPublished
from rollstream.schemas.settings import RolloutSettings
from tests.rigs.service_processes import CLI

RUN = "run-gateway"


class Load:
    """Agents that play all rollouts, and repeat under the same key what was not answered."""

    def __init__(self, workspace: Path, num_calls: int) -> None:
        """`num_calls`: of each rollout."""
        self.workspace = workspace
        self.num_calls = num_calls
        self.statuses: list[int] = []
        """Of all answers that were no success."""
        self.answers: dict[tuple[str, int], Any] = {}
        """By rollout and number of the call."""
        self.num_repeated = 0
        self.keys: dict[str, str] = {}
        """By rollout."""

    async def post(self, http: aiohttp.ClientSession, path: str, body: Any, key: str, mark: str) -> Any:
        """The answer, however often it takes."""
        head = {"Authorization": f"Bearer {key}", "Idempotency-Key": mark, "Content-Type": "application/json"}
        while True:
            with contextlib.suppress(aiohttp.ClientError, ConnectionError, OSError, ValueError):
                url = json.loads(address_file(self.workspace, "producers-1").read_text())["url"]
                async with http.post(url + path, data=json.dumps(body), headers=head) as response:
                    text = await response.text()
                    if response.status == 200:
                        return json.loads(text)
                    self.statuses.append(response.status)
                    assert response.status in (204, 500, 503), (path, response.status, text)
            self.num_repeated += 1
            await asyncio.sleep(0.2)

    async def play(self, http: aiohttp.ClientSession, number: int) -> None:
        token = await self._token()
        claimed = await self.post(http, "/rollouts", {"wait_s": 5}, token, f"claim {number}")
        name, key = claimed["rollout_id"], claimed["key"]
        self.keys[name] = key
        messages: list[Any] = [{"role": "user", "content": "begin"}]
        for call in range(self.num_calls):
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


def requested(index: int, num_members: int, num_calls: int) -> TaskRequested:
    settings = RolloutSettings(
        environment="gateway", agents={"agent": f"{RUN}/policy"}, max_turns=num_calls, rollout_timeout_s=250
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
        num_rollouts=num_members,
        minimum=1,
        min_version=0,
        settings=settings.model_copy(update={"group_timeout_s": 280.0}),
    )


async def prepare(
    log: KafkaLog, artifacts: ArtifactStore, *, num_groups: int, num_members: int, num_calls: int
) -> None:
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
    for index in range(num_groups):
        await log.send(requested(index, num_members, num_calls))


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


async def until_ended(log: KafkaLog, num_rollouts: int) -> list[Any]:
    while True:
        events = await steps_of(log)
        if sum(isinstance(event, RolloutEnded | RolloutFailed) for event in events) >= num_rollouts:
            return events
        await asyncio.sleep(1.0)


def write_settings(folder: Path, broker: Any) -> Path:
    """Settings of the producers process, in whose workspace `folder / "w"` the gateway's address is."""
    path = folder / "settings.json"
    given = {"workspace": str(folder / "w"), "artifact_uri": str(folder / "artifacts"), "engine": {"kind": "scripted"}}
    given |= {"bootstrap_servers": broker.bootstrap_servers, "session_timeout_s": 6.0, "allow": ["model:none"]}
    given |= {"kafka": broker.section.model_dump(mode="json")}
    path.write_text(json.dumps(given))
    return path


def started(settings: Path, output: Path, **variables: str) -> "subprocess.Popen[bytes]":
    with output.open("ab") as log:
        command = [*CLI, "serve", "producers", "--settings", str(settings)]
        return subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | variables)
