"""A tiny model, and a lab that plays every other service of a run on a MemoryLog."""

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from rollstream.eventlog import codec
from rollstream.eventlog.artifacts import ArtifactStore
from rollstream.eventlog.log import Received, Record, TopicPartition
from rollstream.eventlog.memory.log import MemoryLog
from rollstream.eventlog.run_offsets import ends_now
from rollstream.learner.worker import Worker
from rollstream.schemas import ids, tokens
from rollstream.schemas.algorithms import GrpoSettings
from rollstream.schemas.base import Event, Locator
from rollstream.schemas.events import (
    BatchPlanned,
    EpochSealed,
    JobProgressed,
    JobSubmitted,
    JobSucceeded,
    RunStarted,
    StepTrained,
    TrajectoryAssembled,
    WeightsPublished,
)
from rollstream.schemas.events.rollouts import Completion, TokenSequence
from rollstream.schemas.events.training import BatchMember
from rollstream.schemas.events.weights import FineTune
from rollstream.schemas.permissions import Permissions
from rollstream.schemas.revisions import NEWEST_REVISION
from rollstream.schemas.settings import JobSettings, ModelSettings, OptimizerSettings
from tests.rigs.counting_log import CountingLog

RUN = "run-1"
GROUP = f"{RUN}/main"


def manifest_of(job: JobSubmitted, index: int, previous_sha256: str, **given: Any) -> BatchPlanned:
    """The manifest of a job with an index; its epoch has the same number."""
    return BatchPlanned(
        run_id=RUN,
        time_ms=10 + index,
        batch_id=ids.batch_id(job.job_id, index),
        job_id=job.job_id,
        model_group=job.model_group,
        epoch=index,
        index=index,
        trains_at_version=job.base_version + index,
        yields_version=job.base_version + index + 1,
        seed=index,
        curriculum_sha256="0" * 64,
        previous_sha256=previous_sha256,
        **given,
    )


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a Qwen2 with about 5,000 parameters and tied embeddings."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=128,
        tie_word_embeddings=True,
    )
    path = tmp_path_factory.mktemp("tiny") / "model"
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return path


def sequence(rng: random.Random, *, with_logprobs: bool = True) -> TokenSequence:
    """A sequence with two completions between prompts."""
    parts = [rng.randint(1, 5), rng.randint(1, 4), rng.randint(1, 4), rng.randint(1, 4)]
    token_ids = [rng.randrange(32) for _ in range(sum(parts))]
    completions = (
        Completion(start=parts[0], length=parts[1], step_index=0),
        Completion(start=sum(parts[:3]), length=parts[3], step_index=1),
    )
    logprobs = [-3.4 + rng.random() * 0.2 for _ in range(parts[1] + parts[3])]
    return TokenSequence(
        token_ids=tokens.encode_ids(token_ids),
        logprobs=tokens.encode_floats(logprobs) if with_logprobs else None,
        completions=completions,
    )


@dataclass
class Lab:
    """Plays harness, producers and processors on a log in memory."""

    folder: Path
    model: Path
    log: MemoryLog = field(default_factory=lambda: MemoryLog(num_partitions=2))

    @property
    def artifacts(self) -> ArtifactStore:
        return ArtifactStore(str(self.folder / "artifacts"))

    @property
    def permissions(self) -> Permissions:
        """A learner's that may load the lab's models."""
        return Permissions.of([f"model:{folder}" for folder in (self.folder, self.model)], {})

    def settings(self, **changes: Any) -> JobSettings:
        defaults: dict[str, Any] = {
            "kind": "rl",
            "model": ModelSettings(path=str(self.model), device="cpu"),
            "algorithm": GrpoSettings(),
            "optimizer": OptimizerSettings(learning_rate=1e-2),
            "num_versions": 3,
            "threads": 1,
            "revision": NEWEST_REVISION,
        }
        return JobSettings(**{**defaults, **changes})

    async def outcome(self) -> tuple[Any, ...]:
        """Result of a run, without terms, durations and places."""
        steps = [(s.version, s.weights_sha256, s.metrics) for s in await self.events("weights", StepTrained)]
        published = [(p.version, p.weights_sha256, p.batch_id) for p in await self.events("weights", WeightsPublished)]
        progress = [(p.version, p.percent) for p in await self.events("jobs", JobProgressed)]
        return steps, published, progress, [e.final_version for e in await self.events("jobs", JobSucceeded)]

    async def begin(self, inputs: dict[str, Any]) -> None:
        """Write the start of the run, with one example."""
        dataset = self.artifacts.put_bytes(orjson.dumps({"example_id": "x", "inputs": inputs}), ".jsonl")
        given: dict[str, Any] = {"config": {}, "seed": 0, "dataset": dataset, "num_examples": 1, "num_partitions": 2}
        await self.log.send(RunStarted(run_id=RUN, time_ms=1, name="n", **given))

    async def submit(
        self,
        name: str = "rl",
        *,
        base_version: int = 0,
        model_group: str = GROUP,
        fine_tune: FineTune | None = None,
        **changes: Any,
    ) -> JobSubmitted:
        job = JobSubmitted(
            run_id=RUN,
            time_ms=1,
            job_id=ids.job_id(RUN, name),
            model_group=model_group,
            base_version=base_version,
            settings=self.settings(**changes),
            fine_tune=fine_tune,
        )
        await self.log.send(job)
        return job

    async def plan(
        self,
        job: JobSubmitted,
        count: int = 3,
        *,
        seal: bool = True,
        first: int = 0,
        previous: str = "0" * 64,
        with_logprobs: bool = True,
        num_adopted: int = 0,
    ) -> list[BatchPlanned]:
        """Trajectories and manifests `first` to `first + count - 1`, two groups of four each."""
        planned: list[BatchPlanned] = []
        for index in range(first, first + count):
            members, locators = await self._members(job, index, with_logprobs=with_logprobs)
            batch = manifest_of(
                job, index, previous, members=tuple(members), locators=tuple(locators), num_adopted=num_adopted
            )
            previous = codec.content_digest(batch)
            await self.log.send(batch)
            planned.append(batch)
        if seal:
            await self.seal(job, first + count)
        return planned

    async def seal(self, job: JobSubmitted, num_batches: int) -> None:
        await self.log.send(
            EpochSealed(
                run_id=RUN,
                time_ms=99,
                job_id=job.job_id,
                epoch=num_batches,
                is_last=True,
                num_groups=2,
                num_trained_groups=2,
                num_batches=1,
                next_batch_index=num_batches,
                avg_reward=0.5,
                filtered_avg_reward=0.5,
                zero_variance_groups=0,
                curriculum_percentile=1.0,
                curriculum_sha256="0" * 64,
            )
        )

    async def _members(
        self, job: JobSubmitted, index: int, *, with_logprobs: bool
    ) -> tuple[list[BatchMember], list[Locator]]:
        members: list[BatchMember] = []
        locators: list[Locator] = []
        for member in range(8):
            trajectory = self.trajectory(job, index, member, with_logprobs=with_logprobs)
            position = await self.log.send(trajectory)
            locators.append(Locator(partition=position.partition, offset=position.offset))
            members.append(
                BatchMember(
                    trajectory_id=trajectory.trajectory_id,
                    rollout_id=trajectory.rollout_id,
                    group_id=trajectory.group_id,
                    digest=codec.content_digest(trajectory),
                    reward=trajectory.reward,
                    staleness=member % 2,
                )
            )
        return members, locators

    def trajectory(
        self, job: JobSubmitted, index: int, position: int, *, with_logprobs: bool = True
    ) -> TrajectoryAssembled:
        rng = random.Random(f"{job.job_id}/{index}/{position}")
        group = ids.group_id(RUN, job.job_id.split("/")[1], index, position // 4)
        rollout = ids.rollout_id(group, position % 4, 0)
        return TrajectoryAssembled(
            run_id=RUN,
            time_ms=5,
            group_id=group,
            rollout_id=rollout,
            trajectory_id=ids.trajectory_id(rollout, "agent"),
            agent="agent",
            model_group=job.model_group,
            member=position % 4,
            attempt=0,
            example_id="x",
            job_id=job.job_id,
            epoch=index,
            reward=(reward := rng.random()),
            rewards={"a": reward},
            sequences=tuple(sequence(rng, with_logprobs=with_logprobs) for _ in range(1 + position % 2)),
            num_steps=2,
            steps_digest="0" * 64,
        )

    def worker(self, name: str = "learner-0", log: Any = None, **changes: Any) -> Worker:
        changes = {"permissions": self.permissions, "threads": 1} | changes
        return Worker(log or self.log, self.artifacts, name=name, checkpoints=self.folder / "checkpoints", **changes)

    async def received(self, topic: str) -> list[Received]:
        ends = await self.log.end_offsets(topic)
        reader = await self.log.reader({TopicPartition(topic, n): -1 for n in ends})
        records: list[Record] = []
        while any(reader.position(TopicPartition(topic, n)) < end for n, end in ends.items()):
            records += await reader.poll(timeout_s=1)
        await reader.close()
        return [codec.decode(record) for record in records]

    async def events(self, topic: str, kind: type[Event] = Event) -> list[Any]:
        return [r.event for r in await self.received(topic) if isinstance(r.event, kind)]

    async def work(self, holds: Callable[[], Awaitable[bool]], worker: Worker | None = None) -> None:
        """Run a worker until `holds` does; what the worker raises comes through."""
        task = asyncio.create_task((worker or self.worker()).run())
        try:
            async with asyncio.timeout(60):
                while not await holds():
                    if task.done():
                        break
                    await asyncio.sleep(0.01)
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    def has(self, kind: type[Event], topic: str = "jobs", count: int = 1) -> Callable[[], Awaitable[bool]]:
        async def inspect() -> bool:
            return len(await self.events(topic, kind)) >= count

        return inspect


@pytest.fixture
def lab(tmp_path: Path, tiny_model: Path) -> Lab:
    """An empty log, an empty workspace and the tiny model."""
    return Lab(tmp_path, tiny_model)


@pytest.fixture
def counting_lab(tmp_path: Path, tiny_model: Path) -> Lab:
    """A lab whose log counts what is read."""
    return Lab(tmp_path, tiny_model, CountingLog(num_partitions=2))


@dataclass
class PairLab(Lab):
    """A lab whose `plan_pairs` makes groups of four that answer one prompt, each twice, and are scored by step."""

    answers: str = "none"
    """`scored`, `flat` (all scores equal), or those of any Lab."""

    async def plan_pairs(
        self,
        job: JobSubmitted,
        count: int = 3,
        *,
        seal: bool = True,
        first: int = 0,
        previous: str = "0" * 64,
        is_flat: bool = False,
    ) -> str:
        """Manifests as `plan` makes them; the digest of the last one."""
        self.answers = "flat" if is_flat else "scored"
        planned = await self.plan(job, count, seal=seal, first=first, previous=previous, with_logprobs=False)
        self.answers = "none"
        return codec.content_digest(planned[-1])

    def trajectory(
        self, job: JobSubmitted, index: int, position: int, *, with_logprobs: bool = True
    ) -> TrajectoryAssembled:
        made = super().trajectory(job, index, position, with_logprobs=with_logprobs)
        if self.answers == "none":
            return made
        of_group, of_member = random.Random(made.group_id), random.Random(made.rollout_id)
        prompt = [of_group.randrange(32) for _ in range(5)]
        sequences: list[TokenSequence] = []
        for step in range(2):
            answer = [of_member.randrange(32) for _ in range(1 + step)]
            completion = Completion(start=5, length=len(answer), step_index=step)
            sequences.append(TokenSequence(token_ids=tokens.encode_ids(prompt + answer), completions=(completion,)))
        scores = {str(step): 1.0 if self.answers == "flat" else of_member.random() for step in range(2)}
        return made.model_copy(update={"sequences": tuple(sequences), "step_scores": scores})


@pytest.fixture
def pair_lab(tmp_path: Path, tiny_model: Path) -> PairLab:
    """An empty log, an empty workspace and the tiny model."""
    return PairLab(tmp_path, tiny_model)


async def submit(lab: Any, run_id: str, *, offsets: bool = True) -> JobSubmitted:
    """Submit a job of a run, with the offsets at which the run begins."""
    job = JobSubmitted(
        run_id=run_id,
        time_ms=1,
        job_id=f"{run_id}/rl",
        model_group=f"{run_id}/main",
        base_version=0,
        settings=lab.settings(num_versions=1000),
        start_offsets=await ends_now(lab.log) if offsets else None,
    )
    await lab.log.send(job)
    return job
