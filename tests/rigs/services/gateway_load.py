"""Agents that play rollouts at the gateway of a real producers process, and the count of their calls over its kills."""

import asyncio
import json
import os
import subprocess
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollstream.eventlog import codec
from rollstream.eventlog.artifacts import ArtifactStore
from rollstream.eventlog.kafka.log import KafkaLog
from rollstream.eventlog.log import TopicPartition
from rollstream.producers import GatewayClient, RemoteRollout
from rollstream.producers.gateway.rollout_client import Retries
from rollstream.schemas import ids, tokens
from rollstream.schemas.events import RolloutEnded, RolloutFailed, StepRecorded, TaskRequested, WeightsPublished
from rollstream.schemas.kafka import KafkaSettings
from rollstream.schemas.settings import ArtifactRef, RolloutSettings, Sampling
from tests.rigs.services.service_processes import CLI

RUN = "run-gateway"
GROUPS, MEMBERS = 3, 2
CALLS_A_KILL = 4
ANSWER_TOKENS = 8
NO_MODEL = "none"
RETRIES = Retries(for_s=180.0)
"""A killed process is back only after it has reached its engine."""


def task_for_agents(index: int, *, members: int, calls: int, timeout_s: float, **settings: Any) -> TaskRequested:
    """A task whose rollouts agents outside play."""
    chosen = RolloutSettings(
        environment="gateway",
        agents={"agent": f"{RUN}/policy"},
        max_turns=calls,
        rollout_timeout_s=timeout_s,
        group_timeout_s=timeout_s + 30,
        **settings,
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
        num_rollouts=members,
        minimum=1,
        min_version=0,
        settings=chosen,
    )


def first_weights(artifact: ArtifactRef, base_model: str) -> WeightsPublished:
    """Version 0."""
    return WeightsPublished(
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
        base_model=base_model,
        artifact=artifact,
    )


@dataclass(frozen=True)
class ProducersProcess:
    """Settings and files of a producers process."""

    folder: Path
    kafka: KafkaSettings
    engine: dict[str, Any] = field(default_factory=lambda: {"kind": "scripted"})
    base_model: str = NO_MODEL

    @classmethod
    def on_vllm(cls, folder: Path, kafka: KafkaSettings, url: str, base: Path) -> "ProducersProcess":
        """With a running vLLM server of the base model."""
        engine = {"kind": "vllm", "base_urls": [url], "folder": str(folder / "versions"), "dtype": "float32"}
        return cls(folder, kafka, engine, str(base))

    def first_version(self) -> WeightsPublished:
        """Version 0: the base model's own weights. Without a model, weights that load nothing."""
        has_model = self.base_model != NO_MODEL
        weights = (Path(self.base_model) / "model.safetensors").read_bytes() if has_model else b"weights"
        return first_weights(self.artifacts.put_bytes(weights), self.base_model)

    @property
    def workspace(self) -> Path:
        return self.folder / "w"

    @property
    def artifacts(self) -> ArtifactStore:
        return ArtifactStore(str(self.folder / "artifacts"))

    @property
    def output(self) -> Path:
        """File with its output."""
        return self.folder / "producers.log"

    def start(self, **variables: str) -> "subprocess.Popen[bytes]":
        settings = self.folder / "settings.json"
        given: dict[str, Any] = {"workspace": str(self.workspace), "artifact_uri": str(self.folder / "artifacts")}
        given |= {"bootstrap_servers": self.kafka.bootstrap_servers, "session_timeout_s": 6.0, "engine": self.engine}
        given |= {"kafka": self.kafka.section.model_dump(mode="json"), "allow": [f"model:{self.base_model}"]}
        settings.write_text(json.dumps(given))
        with self.output.open("ab") as log:
            command = [*CLI, "serve", "producers", "--settings", str(settings)]
            return subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | variables)

    @contextmanager
    def running(self) -> Iterator["subprocess.Popen[bytes]"]:
        process = self.start()
        try:
            yield process
        finally:
            process.terminate()
            process.wait(60)


@dataclass
class Agents:
    """Agents that play all rollouts, and repeat under the same key what was not answered."""

    calls: int
    """Calls of each rollout."""
    rollouts: list[RemoteRollout] = field(default_factory=list)
    answers: dict[str, list[list[int]]] = field(default_factory=dict)
    """Token ids by rollout."""
    names: set[str] = field(default_factory=set)
    """Ids of the answers."""
    num_repeated: int = 0
    """First calls that were asked again, after later ones and usually after a kill."""
    changed: list[str] = field(default_factory=list)
    """Rollouts whose first call was answered differently when it was repeated."""

    @property
    def num_answers(self) -> int:
        return sum(map(len, self.answers.values()))

    async def play(self, gateway: GatewayClient) -> None:
        """Play the next rollout."""
        rollout = await gateway.claim(wait_s=60)
        assert rollout is not None, "no rollout to play"
        self.rollouts.append(rollout)
        given = self.answers.setdefault(rollout.task.rollout_id, [])
        messages: list[Any] = [{"role": "user", "content": "begin"}]
        async with rollout:
            for call in range(self.calls):
                answer = await rollout.chat(messages, idempotency_key=f"call {call}")
                self.names.add(answer["id"])
                choice = answer["choices"][0]
                given.append(choice["logprobs"]["token_ids"])
                messages += [choice["message"], {"role": "user", "content": f"go on {call}"}]
                if call % CALLS_A_KILL == CALLS_A_KILL - 1:
                    await self._repeat_first(rollout, messages[:1], given[0])
                await asyncio.sleep(0.1)
            await rollout.reward(1.0)

    async def _repeat_first(self, rollout: RemoteRollout, messages: list[Any], token_ids: list[int]) -> None:
        answer = await rollout.chat(messages, idempotency_key="call 0")
        self.num_repeated += 1
        if answer["id"] not in self.names or answer["choices"][0]["logprobs"]["token_ids"] != token_ids:
            self.changed.append(rollout.task.rollout_id)


@dataclass(frozen=True)
class CountedCalls:
    """Outcomes of the agents' calls."""

    kills: int
    answered: int
    recorded: int
    lost: int
    """Answers that no step holds."""
    doubled: int
    """Steps that no answer was made of."""
    named: int
    """Different ids of the answers."""
    repeated: int
    """First calls that were repeated later, beside those that a kill interrupted."""
    changed: Sequence[str]
    """Rollouts whose repeated call got another answer than the recorded one."""
    failed: Sequence[str]
    """Messages of rollouts that did not end in order."""


async def ask_for(
    log: KafkaLog,
    producers: ProducersProcess,
    *,
    groups: int,
    members: int,
    calls: int,
    timeout_s: float,
    **settings: Any,
) -> None:
    """Have the producers open so many groups of rollouts to agents, with their first version."""
    await log.ensure_topics(num_partitions=6)
    await log.send(producers.first_version())
    for index in range(groups):
        await log.send(task_for_agents(index, members=members, calls=calls, timeout_s=timeout_s, **settings))


async def killed_under_load(producers: ProducersProcess, kills: int) -> CountedCalls:
    """Kill the producers process again and again while agents play; every rollout is played to its end."""
    agents = Agents(CALLS_A_KILL * (kills + 1))
    async with KafkaLog(producers.kafka, client_id="agents") as log:
        how: dict[str, Any] = {"groups": GROUPS, "members": MEMBERS, "calls": agents.calls}
        how["sampling"] = Sampling(max_new_tokens=ANSWER_TOKENS)
        await ask_for(log, producers, **how, timeout_s=200.0 + 30 * kills)
        address = GatewayClient.of_workspace(producers.workspace, retries=RETRIES)
        async with address as gateway, asyncio.TaskGroup() as all_of_it:
            for _ in range(GROUPS * MEMBERS):
                all_of_it.create_task(agents.play(gateway))
            ended = all_of_it.create_task(until_ended(log, GROUPS * MEMBERS))
            process = await _killing(producers, agents, kills)
            try:
                events = await ended
            finally:
                process.terminate()
                process.wait(60)
    return _counted(events, agents, kills)


async def _killing(producers: ProducersProcess, agents: Agents, kills: int) -> "subprocess.Popen[bytes]":
    """The process that was started last."""
    process = producers.start()
    try:
        for number in range(kills):
            while agents.num_answers < (number + 1) * GROUPS * MEMBERS * (CALLS_A_KILL - 1):
                assert process.poll() is None, producers.output.read_text()
                await asyncio.sleep(0.03)
            process.kill()
            process.wait()
            process = producers.start()
    except BaseException:
        process.kill()
        process.wait()
        raise
    return process


async def until_ended(log: KafkaLog, num_rollouts: int) -> list[Any]:
    """Events of the run in `steps`, once so many rollouts are over."""
    while True:
        events = await steps_of(log)
        if sum(isinstance(event, RolloutEnded | RolloutFailed) for event in events) >= num_rollouts:
            return events
        await asyncio.sleep(1.0)


async def steps_of(log: KafkaLog) -> list[Any]:
    """Events of the run in `steps`."""
    begins, ends = await log.begin_offsets("steps"), await log.end_offsets("steps")
    filled = {TopicPartition("steps", one): begins[one] for one in begins if begins[one] < ends[one]}
    found: list[Any] = []
    if filled:
        reader = await log.reader(filled)
        while any(reader.position(where) < ends[where.partition] for where in filled):
            found += [codec.decode(record).event for record in await reader.poll()]
        await reader.close()
    return [event for event in found if event.run_id == RUN]


def _counted(events: Sequence[Any], agents: Agents, kills: int) -> CountedCalls:
    given = Counter((name, tuple(ids)) for name, found in agents.answers.items() for ids in found)
    steps = [event for event in events if isinstance(event, StepRecorded) and event.llm is not None]
    recorded = Counter(
        (step.rollout_id, tuple(tokens.decode_ids(step.llm.completion_ids))) for step in steps if step.llm is not None
    )
    return CountedCalls(
        kills=kills,
        answered=given.total(),
        recorded=recorded.total(),
        lost=(given - recorded).total(),
        doubled=(recorded - given).total(),
        named=len(agents.names),
        repeated=agents.num_repeated,
        changed=agents.changed,
        failed=[event.message for event in events if isinstance(event, RolloutFailed)],
    )
