"""Agents that play rollouts at the gateway of a real producers process, and the count of their calls over its kills."""

import asyncio
import json
import os
import random
import subprocess
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
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
from tests.rigs.services.streamed_chat import StreamedChat

RUN = "run-gateway"
GROUPS, MEMBERS = 3, 2
CALLS_A_KILL = 4
ANSWER_TOKENS = 8
PLAIN = "plain"
KINDS: Mapping[str, dict[str, Any]] = {
    PLAIN: {},
    "streamed": {"stream": True},
    "several": {"n": 2},
    "several streamed": {"n": 2, "stream": True},
}
"""Further keys of calls, by the kind of call. A rollout has one call of each kind for a kill."""
ANSWERS_A_KILL = sum(options.get("n", 1) for options in KINDS.values())
KILLED = ("several streamed", "several", "streamed", PLAIN)
"""Kinds of call in turn, one of which is under way at a kill."""
NO_MODEL = "none"
RETRIES = Retries(for_s=180.0)
"""A killed process is back only after it has reached its engine."""
POLL_S, LATEST_KILL_S = 0.001, 0.005
"""A kill comes up to so long after a call is seen under way, but at once after a stream's first piece: calls of the
scripted engine take some milliseconds."""


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
    kinds: Sequence[str] = (PLAIN,)
    """Kinds of the calls, in turn; each rollout begins with another one."""
    rollouts: list[RemoteRollout] = field(default_factory=list)
    answers: dict[str, list[list[int]]] = field(default_factory=dict)
    """Token ids by rollout."""
    names: set[str] = field(default_factory=set)
    """Ids of the calls' answers."""
    num_calls: int = 0
    """Calls that are answered."""
    under_way: Counter[str] = field(default_factory=Counter)
    """Calls by kind that are not answered; of streamed ones those of which a piece has come."""
    num_broken: int = 0
    """Streams that broke off after their first piece."""
    num_repeated: int = 0
    """Calls that were asked again, after later ones and usually after a kill."""
    changed: list[str] = field(default_factory=list)
    """Rollouts of which a call was answered differently when it was repeated."""

    async def play(self, gateway: GatewayClient) -> None:
        """Play the next rollout."""
        rollout = await gateway.claim(wait_s=60)
        assert rollout is not None, "no rollout to play"
        first = len(self.rollouts)
        self.rollouts.append(rollout)
        given = self.answers.setdefault(rollout.task.rollout_id, [])
        messages: list[Any] = [{"role": "user", "content": "begin"}]
        done: list[_Call] = []
        async with rollout:
            for number in range(self.calls):
                call = _Call(f"call {number}", self.kinds[(first + number) % len(self.kinds)], tuple(messages))
                done.append(call)
                call.answer = answer = await self._asked(rollout, call)
                self.num_calls += 1
                self.names.add(answer["id"])
                given += _token_ids(answer)
                messages += [answer["choices"][0]["message"], {"role": "user", "content": f"go on {number}"}]
                if number % CALLS_A_KILL == CALLS_A_KILL - 1:
                    await self._repeat(rollout, done[number // CALLS_A_KILL])
                await asyncio.sleep(0.1)
            await rollout.reward(1.0)

    async def _asked(self, rollout: RemoteRollout, call: "_Call") -> dict[str, Any]:
        options = KINDS[call.kind]

        def count(change: int) -> None:
            self.under_way[call.kind] += change

        if "stream" in options:
            body = {"model": rollout.task.agents[0], "messages": [*call.messages], **options}
            stream = StreamedChat(count)
            answer = await stream.ask(rollout, body, call.key, for_s=RETRIES.for_s)
            self.num_broken += stream.num_broken
            return answer
        count(1)
        try:
            return await rollout.chat(call.messages, idempotency_key=call.key, **options)
        finally:
            count(-1)

    async def _repeat(self, rollout: RemoteRollout, call: "_Call") -> None:
        """A stream that came in pieces has an id of its own; what it said has to be the same."""
        answer = await self._asked(rollout, call)
        self.num_repeated += 1
        is_same_name = answer["id"] == call.answer["id"] or "stream" in KINDS[call.kind]
        if not is_same_name or _token_ids(answer) != _token_ids(call.answer):
            self.changed.append(rollout.task.rollout_id)


@dataclass
class _Call:
    """A call of an agent, to be asked again."""

    key: str
    kind: str
    messages: Sequence[Any]
    answer: dict[str, Any] = field(default_factory=dict)


def _token_ids(answer: Mapping[str, Any]) -> list[list[int]]:
    return [choice["logprobs"]["token_ids"] for choice in answer["choices"]]


@dataclass(frozen=True)
class CountedCalls:
    """Outcomes of the agents' calls."""

    kills: int
    hit: Mapping[str, int]
    """Calls by kind that were under way when the process was killed."""
    broken: int
    """Streams that broke off after their first piece."""
    answered: int
    """Answers; a call may have several."""
    recorded: int
    torn: int
    """Steps of calls for several answers of which a kill lost some; the calls were made again."""
    lost: int
    """Answers that no step holds."""
    doubled: int
    """Steps that no answer was made of, beside the torn ones."""
    named: int
    """Different ids of the calls' answers."""
    repeated: int
    """Calls that were repeated later, beside those that a kill interrupted."""
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
    agents, hit = Agents(CALLS_A_KILL * (kills + 1), tuple(KINDS)), Counter[str]()
    async with KafkaLog(producers.kafka, client_id="agents") as log:
        how: dict[str, Any] = {"groups": GROUPS, "members": MEMBERS, "calls": agents.calls}
        how["sampling"] = Sampling(max_new_tokens=ANSWER_TOKENS)
        await ask_for(log, producers, **how, timeout_s=200.0 + 30 * kills)
        address = GatewayClient.of_workspace(producers.workspace, retries=RETRIES)
        async with address as gateway, asyncio.TaskGroup() as all_of_it:
            for _ in range(GROUPS * MEMBERS):
                all_of_it.create_task(agents.play(gateway))
            ended = all_of_it.create_task(until_ended(log, GROUPS * MEMBERS))
            process = await _killing(producers, agents, kills, hit)
            try:
                events = await ended
            finally:
                process.terminate()
                process.wait(60)
    return _counted(events, agents, kills, hit)


async def _killing(
    producers: ProducersProcess, agents: Agents, kills: int, hit: Counter[str]
) -> "subprocess.Popen[bytes]":
    """The process that was started last. `hit`: gets the calls that were under way at a kill."""
    process, draws = producers.start(), random.Random(kills)
    try:
        for number in range(kills):
            kind, enough = KILLED[number % len(KILLED)], (number + 1) * GROUPS * MEMBERS * (CALLS_A_KILL - 1)
            after_s = 0.0 if "stream" in KINDS[kind] else draws.uniform(0, LATEST_KILL_S)
            while agents.num_calls < enough or not await _is_under_way(agents, kind, after_s):
                assert process.poll() is None, producers.output.read_text()
                await asyncio.sleep(POLL_S)
            process.kill()
            hit += +agents.under_way
            process.wait()
            process = producers.start()
    except BaseException:
        process.kill()
        process.wait()
        raise
    return process


async def _is_under_way(agents: Agents, kind: str, for_s: float) -> bool:
    """Whether a call is under way by now, and some time later still."""
    if not agents.under_way[kind]:
        return False
    await asyncio.sleep(for_s)
    return agents.under_way[kind] > 0


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


def _counted(events: Sequence[Any], agents: Agents, kills: int, hit: Mapping[str, int]) -> CountedCalls:
    given = Counter((name, tuple(ids)) for name, found in agents.answers.items() for ids in found)
    calls: dict[tuple[Any, ...], list[StepRecorded]] = {}
    for step in events:
        if isinstance(step, StepRecorded) and step.llm is not None:
            asked = (step.metadata or {})["gateway"]
            began = (step.rollout_id, asked["key_sha256"], asked["n"], step.span_event_timestamp)
            calls.setdefault(began, []).append(step)
    recorded, num_torn = Counter[tuple[str, tuple[int, ...]]](), 0
    for (*_, num, _), steps in calls.items():
        if len(steps) < num:
            num_torn += len(steps)
        else:
            recorded.update(
                (one.rollout_id, tuple(tokens.decode_ids(one.llm.completion_ids))) for one in steps if one.llm
            )
    return CountedCalls(
        kills=kills,
        hit=dict(hit),
        broken=agents.num_broken,
        answered=given.total(),
        recorded=recorded.total(),
        torn=num_torn,
        lost=(given - recorded).total(),
        doubled=(recorded - given).total(),
        named=len(agents.names),
        repeated=agents.num_repeated,
        changed=agents.changed,
        failed=[event.message for event in events if isinstance(event, RolloutFailed)],
    )
