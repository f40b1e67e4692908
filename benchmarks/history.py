"""A long log in short time: one ended run made by the real folds, written again under other names of equal length.

An open run lies between the ended ones. Trajectories are left out: no service reads them when it starts.
"""

import asyncio
import hashlib
from collections.abc import Collection, Iterator
from typing import Any

import aiokafka
from aiokafka.structs import OffsetAndMetadata
from workload import MEMBERS

from rollstream.eventlog import codec
from rollstream.eventlog.kafka.security import client_options
from rollstream.eventlog.log import Headers, Position, Received, partition_of
from rollstream.processors.assemble import fold as assembly
from rollstream.processors.curate import fold as curate
from rollstream.schemas import ids
from rollstream.schemas.base import Event, Locator
from rollstream.schemas.events import (
    BatchPlanned,
    EpochStarted,
    GroupStarted,
    JobProgressed,
    JobStarted,
    JobSubmitted,
    JobSucceeded,
    RewardRecorded,
    RolloutEnded,
    RolloutStarted,
    RunEnded,
    RunStarted,
    StepRecorded,
    StepTrained,
    WeightsPublished,
)
from rollstream.schemas.events.rollouts import LLMCall, VersionSpan
from rollstream.schemas.kafka import KafkaSettings
from rollstream.schemas.settings import ArtifactRef, JobSettings, ModelSettings, PlanSettings, RolloutSettings
from rollstream.schemas.tokens import encode_floats, encode_ids
from rollstream.schemas.topics import TOPICS

TEMPLATE = "run-00000"
OPEN = "open-0000"
EPOCH_GROUPS = 64
GROUPS_PER_BATCH = 8
NUM_EXAMPLES = 100
EXAMPLES = {f"example-{index}": {} for index in range(NUM_EXAMPLES)}
Line = tuple[str, int, bytes, bytes, Headers]
"""Topic, partition, key, value, headers."""


def run_started(run: str, dataset: ArtifactRef, num_partitions: int) -> list[Event]:
    """A run and its job: epochs of 64 groups, eight batches each."""
    plan = PlanSettings(
        tasks_per_epoch=EPOCH_GROUPS,
        batches_per_epoch=EPOCH_GROUPS // GROUPS_PER_BATCH,
        max_staleness=10**6,
        num_generations=MEMBERS,
        num_epochs=10**6,
    )
    common: dict[str, Any] = {"run_id": run, "time_ms": 1}
    job: dict[str, Any] = {
        "job_id": ids.job_id(run, "rl"),
        "model_group": ids.model_group(run, "policy"),
        "base_version": 0,
    }
    start: dict[str, Any] = {"name": run, "config": {}, "seed": 0, "dataset": dataset, "num_examples": NUM_EXAMPLES}
    rollout = RolloutSettings(environment="none", agents={"agent": job["model_group"]})
    return [
        RunStarted(**common, **start, num_partitions=num_partitions),
        JobStarted(**common, **job, plan=plan, rollout=rollout),
    ]


def epoch_started(run: str, epoch: int) -> EpochStarted:
    """The start of an epoch."""
    return EpochStarted(run_id=run, time_ms=1, job_id=ids.job_id(run, "rl"), epoch=epoch)


def group_steps(run: str, epoch: int, index: int) -> Iterator[Event]:
    """All of a group's records in `steps`: of each rollout one call of four tokens."""
    group = ids.group_id(run, "rl", epoch, index)
    policy = ids.model_group(run, "policy")
    common: dict[str, Any] = {"job_id": ids.job_id(run, "rl"), "epoch": epoch, "index": index}
    limits: dict[str, Any] = {"size": MEMBERS, "minimum": 2, "timeout_ms": 3_600_000, "seed": index}
    base: dict[str, Any] = {"run_id": run, "time_ms": 1, "group_id": group}
    example = f"example-{index % NUM_EXAMPLES}"
    yield GroupStarted(**base, **common, **limits, example_id=example, agents={"agent": policy})
    for member in range(MEMBERS):
        rollout = ids.rollout_id(group, member, 0)
        yield RolloutStarted(**base, rollout_id=rollout, member=member, attempt=0, seed=member)
        call = LLMCall(
            prompt_ids=encode_ids([1, 2]),
            completion_ids=encode_ids([3, 4]),
            logprobs=encode_floats([-1.0, -1.0]),
            spans=(VersionSpan(model_group=policy, version=0, length=2),),
        )
        of_step: dict[str, Any] = {"step_index": 0, "agent": "agent", "event_type": "LLM_END", "uuid": str(member)}
        step = StepRecorded(**base, rollout_id=rollout, **of_step, llm=call)
        reward = RewardRecorded(**base, rollout_id=rollout, reward_index=0, name="task", value=member / 8 + index)
        yield from (step, reward)
        digest = codec.chain(rollout, [codec.content_digest(step), codec.content_digest(reward)])
        yield RolloutEnded(**base, rollout_id=rollout, num_steps=1, num_rewards=1, digest=digest)


def epoch_events(run: str, epoch: int, num_groups: int = EPOCH_GROUPS) -> Iterator[Event]:
    """An epoch's start, its groups' steps, and each group's closing, as assembly makes them."""
    yield epoch_started(run, epoch)
    for index in range(num_groups):
        state = assembly.initial()
        for offset, event in enumerate(group_steps(run, epoch, index)):
            yield event
            received = Received(event, codec.content_digest(event), Position("steps", 0, offset), 0)
            for closing in assembly.evolve(state, received):
                where = tuple(Locator(partition=0, offset=position) for position in range(len(closing.closed.members)))
                yield closing.closed.model_copy(update={"locators": where})


def run_events(run: str, num_epochs: int, dataset: ArtifactRef, num_partitions: int, *, ends: bool) -> Iterator[Event]:
    """All events of a run except its trajectories: its own, and the answers of curation and a learner."""
    events: list[Event] = run_started(run, dataset, num_partitions)
    settings = JobSettings(kind="rl", model=ModelSettings(path="/models/tiny"), num_versions=10**6)
    job: dict[str, Any] = {"job_id": ids.job_id(run, "rl"), "model_group": ids.model_group(run, "policy")}
    common: dict[str, Any] = {"run_id": run, "time_ms": 1}
    yield JobSubmitted(**common, **job, base_version=0, settings=settings)
    for epoch in range(num_epochs):
        events += epoch_events(run, epoch)
    events += [RunEnded(**common, cause="completed")] if ends else []
    state, version = curate.initial(), 0
    for offset, event in enumerate(events):
        yield event
        if event.TOPIC != "groups":
            continue
        received = Received(event, codec.content_digest(event), Position("groups", 0, offset), 0)
        for answer in curate.evolve(state, received, {run: EXAMPLES}):
            yield answer
            if isinstance(answer, BatchPlanned):
                version = answer.yields_version
                yield from _trained(answer, job)
    if ends:
        yield JobSucceeded(**common, **job, final_version=version)


def _trained(batch: BatchPlanned, job: dict[str, Any]) -> Iterator[Event]:
    version, sha256 = batch.yields_version, hashlib.sha256(batch.batch_id.encode()).hexdigest()
    common: dict[str, Any] = {"run_id": batch.run_id, "time_ms": 1, "batch_id": batch.batch_id, **job}
    common |= {"version": version, "term": 1}
    trained: dict[str, Any] = {"weights_sha256": sha256, "num_optimizer_steps": 1, "metrics": {"loss/total": 0.1}}
    yield StepTrained(**common, **trained, epoch=batch.epoch)
    artifact = ArtifactRef(uri=f"/gone/{sha256}", sha256=sha256, size_bytes=1)
    yield WeightsPublished(
        **common,
        parent=version - 1,
        weights_sha256=sha256,
        weights_format="full",
        base_model="/models/tiny",
        artifact=artifact,
    )
    yield JobProgressed(run_id=batch.run_id, time_ms=1, **job, version=version, percent=1.0)


def lines_of(topics: Collection[str], events: Iterator[Event]) -> list[Line]:
    """Encoded events of some topics, without their partition."""
    made = (codec.encode(event) for event in events if event.TOPIC in topics)
    return [(one.topic, 0, one.key, one.value, one.headers) for one in made]


def renamed(lines: list[Line], number: int) -> Iterator[Line]:
    """The template's records under another run's name."""
    old, new = TEMPLATE.encode(), f"run-{number:05d}".encode()
    for topic, partition, key, value, headers in lines:
        pairs = tuple((name, content and content.replace(old, new)) for name, content in headers)
        yield topic, partition, key.replace(old, new), value.replace(old, new), pairs


async def send(client: aiokafka.AIOKafkaProducer, lines: Iterator[Line], num_partitions: int) -> None:
    """Send records in order, each to its key's partition; returns once all are acknowledged."""
    last: dict[tuple[str, int], asyncio.Future[Any]] = {}
    for topic, _, key, value, headers in lines:
        is_scaled = topic in ("tasks", "steps", "trajectories")
        partition = partition_of(key, num_partitions) if is_scaled else 0
        name = TOPICS[topic].name
        last[topic, partition] = await client.send(name, value, key=key, partition=partition, headers=list(headers))
    for future in last.values():
        await future


async def commit(kafka: KafkaSettings, group: str, offsets: dict[tuple[str, int], tuple[int, str]]) -> None:
    """Commit offsets with metadata for a consumer group."""
    consumer = aiokafka.AIOKafkaConsumer(**client_options(kafka), group_id=group, enable_auto_commit=False)
    await consumer.start()
    committed = {
        aiokafka.TopicPartition(TOPICS[topic].name, partition): OffsetAndMetadata(offset, metadata)
        for (topic, partition), (offset, metadata) in offsets.items()
    }
    consumer.assign(list(committed))
    await consumer.commit(committed)
    await consumer.stop()
