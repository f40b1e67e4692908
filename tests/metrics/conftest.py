"""A coherent run made of events: an SFT job and an RL job, with failures, rejections and all that metrics show."""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from rollstream.eventlog.artifacts import ArtifactStore
from rollstream.eventlog.log import EventLog
from rollstream.eventlog.memory.log import MemoryLog
from rollstream.metrics.projection.connection import connect
from rollstream.metrics.projection.database import Database
from rollstream.metrics.projection.projector import project_to_end
from rollstream.schemas import events, ids, tokens
from rollstream.schemas.base import Event, Locator
from rollstream.schemas.events.rollouts import Completion, LLMCall, TokenSequence, VersionSpan
from rollstream.schemas.events.training import AttemptOutcome, BatchMember, MemberRef
from rollstream.schemas.settings import (
    ArtifactRef,
    JobSettings,
    ModelSettings,
    PlanSettings,
    RolloutSettings,
)

ARTIFACT = ArtifactRef(uri="file:///artifact", sha256="a" * 64, size_bytes=10)
TASKS = 3
SIZE = 4


@dataclass
class SyntheticRun:
    """Events of a run in an order that could have happened. Of each epoch's three groups the last is zero-variance;
    in the first group the first attempt at member 0 fails and is made again."""

    run_id: str = "demo-000001"
    num_epochs: int = 2
    version: int = 0
    time_ms: int = 1_790_000_000_000

    @property
    def model_group(self) -> str:
        return ids.model_group(self.run_id, "policy")

    def tick(self) -> int:
        self.time_ms += 250
        return self.time_ms

    def all_events(self, *, ended: bool = True) -> Iterator[Event]:
        """All of it; without `ended`, all but the run's end."""
        yield events.RunStarted(
            run_id=self.run_id, time_ms=self.tick(), name="demo", config={"a": 1}, seed=7, dataset=ARTIFACT,
            num_examples=TASKS, num_partitions=2,
        )  # fmt: skip
        yield self.claim(1)
        yield self.published(None, "sft", 1)
        yield from self.job("sft", "sft", 1)
        yield from self.job("rl", "rl", self.num_epochs)
        if ended:
            yield events.RunEnded(run_id=self.run_id, time_ms=self.tick(), cause="completed")

    def claim(self, term: int) -> Event:
        return events.LearnerClaimed(
            run_id=self.run_id, time_ms=self.tick(), model_group=self.model_group, term=term, learner=f"learner-{term}"
        )

    def job(self, name: str, kind: str, num_epochs: int) -> Iterator[Event]:
        job_id = ids.job_id(self.run_id, name)
        policy = "demonstration" if kind == "sft" else "model"
        settings = JobSettings.model_validate({"kind": kind, "model": ModelSettings(path="tiny")})
        yield events.JobSubmitted(
            run_id=self.run_id, time_ms=self.tick(), job_id=job_id, model_group=self.model_group,
            base_version=self.version, settings=settings,
        )  # fmt: skip
        yield events.JobStarted(
            run_id=self.run_id, time_ms=self.tick(), job_id=job_id, model_group=self.model_group,
            base_version=self.version, plan=PlanSettings(num_epochs=num_epochs),
            rollout=RolloutSettings.model_validate({"environment": "toy", "policy": policy}),
        )  # fmt: skip
        for epoch in range(num_epochs):
            yield from self.epoch(name, job_id, epoch, policy, is_last=epoch == num_epochs - 1)
        yield events.JobSucceeded(
            run_id=self.run_id, time_ms=self.tick(), job_id=job_id, model_group=self.model_group,
            final_version=self.version, finish_s=0.5,
        )  # fmt: skip

    def epoch(self, name: str, job_id: str, epoch: int, policy: str, *, is_last: bool) -> Iterator[Event]:
        yield events.EpochStarted(run_id=self.run_id, time_ms=self.tick(), job_id=job_id, epoch=epoch)
        closed: list[events.GroupClosed] = []
        for index in range(TASKS):
            for event in self.group(name, job_id, epoch, index, policy):
                if isinstance(event, events.GroupClosed):
                    closed.append(event)
                yield event
        trained = closed[:-1]
        members = tuple(
            BatchMember(
                trajectory_id=m.trajectory_id, rollout_id=m.rollout_id, group_id=group.group_id, digest=m.digest,
                reward=m.reward, staleness=self.version - m.min_version if policy == "model" else 0,
            )
            for group in trained for m in group.members
        )  # fmt: skip
        yield self.batch(job_id, epoch, members)
        for m in closed[-1].members:
            yield events.TrajectoryRejected(
                run_id=self.run_id, time_ms=self.tick(), job_id=job_id, epoch=epoch, group_id=closed[-1].group_id,
                rollout_id=m.rollout_id, trajectory_id=m.trajectory_id, cause="zero_variance", num_tokens=m.num_tokens,
            )  # fmt: skip
        means = [sum(m.reward for m in group.members) / len(group.members) for group in closed]
        yield events.EpochSealed(
            run_id=self.run_id, time_ms=self.tick(), job_id=job_id, epoch=epoch, is_last=is_last, num_groups=TASKS,
            num_trained_groups=TASKS - 1, num_batches=1, next_batch_index=epoch + 1, avg_reward=sum(means) / TASKS,
            filtered_avg_reward=sum(means[:-1]) / (TASKS - 1), zero_variance_groups=1,
            curriculum_percentile=min(1.0, 0.3 + 0.2 * epoch), curriculum_sha256="c" * 64,
        )  # fmt: skip
        batch = ids.batch_id(job_id, epoch)
        self.version += 1
        yield events.StepTrained(
            run_id=self.run_id, time_ms=self.tick(), model_group=self.model_group, job_id=job_id, batch_id=batch,
            epoch=epoch, version=self.version, term=1, weights_sha256=f"{self.version:064d}", num_optimizer_steps=1,
            metrics={"loss/total": 1.0 / self.version, "reward/mean": means[0]}, seconds={"fetch": 0.1},
        )  # fmt: skip
        yield self.published(batch, name, 1)
        yield events.JobProgressed(
            run_id=self.run_id, time_ms=self.tick(), job_id=job_id, model_group=self.model_group, version=self.version,
            percent=50.0,
        )  # fmt: skip

    def batch(self, job_id: str, epoch: int, members: tuple[BatchMember, ...]) -> events.BatchPlanned:
        return events.BatchPlanned(
            run_id=self.run_id, time_ms=self.tick(), batch_id=ids.batch_id(job_id, epoch), job_id=job_id,
            model_group=self.model_group, epoch=epoch, index=epoch, trains_at_version=self.version,
            yields_version=self.version + 1, members=members, seed=1, curriculum_sha256="c" * 64,
            previous_sha256="0" * 64,
        )  # fmt: skip

    def published(self, batch: str | None, name: str, term: int) -> events.WeightsPublished:
        return events.WeightsPublished(
            run_id=self.run_id, time_ms=self.tick(), model_group=self.model_group, job_id=ids.job_id(self.run_id, name),
            batch_id=batch, version=self.version, parent=self.version - 1 if self.version else None, term=term,
            weights_sha256=f"{self.version:064d}", weights_format="full", base_model="tiny", artifact=ARTIFACT,
        )  # fmt: skip

    def group(self, name: str, job_id: str, epoch: int, index: int, policy: str) -> Iterator[Event]:
        group_id = ids.group_id(self.run_id, name, epoch, index)
        common = {
            "run_id": self.run_id, "group_id": group_id, "example_id": f"ex{index}", "job_id": job_id, "epoch": epoch,
            "index": index,
        }  # fmt: skip
        settings = RolloutSettings.model_validate({"environment": "toy", "policy": policy})
        yield events.TaskRequested.model_validate(
            common
            | {"time_ms": self.tick(), "inputs": {"q": index}, "num_rollouts": SIZE, "minimum": 2, "seed": 3}
            | {"min_version": self.version, "settings": settings}
        )
        yield events.GroupStarted.model_validate(
            common
            | {"time_ms": self.tick(), "policy": policy, "size": SIZE, "minimum": 2, "timeout_ms": 1000, "seed": 3}
        )
        refs: list[MemberRef] = []
        outcomes: list[AttemptOutcome] = []
        for member in range(SIZE):
            attempt = 0
            if index == 0 and member == 0:
                failed = ids.rollout_id(group_id, member, 0)
                yield self.begun(group_id, failed, member, 0)
                yield self.step(group_id, failed, 0)
                yield events.RolloutFailed(
                    run_id=self.run_id, time_ms=self.tick(), group_id=group_id, rollout_id=failed,
                    cause="producer_lost", message="gone",
                )  # fmt: skip
                outcomes.append(
                    AttemptOutcome(
                        rollout_id=failed,
                        member=member,
                        attempt=0,
                        outcome="failed",
                        cause="producer_lost",
                        num_tokens=5,
                    )
                )
                attempt = 1
            rollout = ids.rollout_id(group_id, member, attempt)
            reward = 0.5 if index == TASKS - 1 else (member % 2) * (0.5 + 0.1 * epoch)
            yield from self.rollout(common, policy, rollout, member, attempt, reward)
            trajectory = ids.trajectory_id(rollout, "agent")
            refs.append(
                MemberRef(
                    trajectory_id=trajectory, rollout_id=rollout, agent="agent", member=member, digest="d" * 64,
                    reward=reward, num_tokens=10, num_completion_tokens=4, min_version=self.version,
                    max_version=self.version,
                )
            )  # fmt: skip
            outcomes.append(
                AttemptOutcome(rollout_id=rollout, member=member, attempt=attempt, outcome="complete", num_tokens=10)
            )
        yield events.GroupClosed.model_validate(
            common
            | {"time_ms": self.tick(), "policy": policy, "reason": "complete", "is_viable": True, "size": SIZE}
            | {"members": tuple(refs), "attempts": tuple(outcomes)}
            | {"locators": tuple(Locator(partition=0, offset=i) for i in range(len(refs)))}
        )

    def begun(self, group_id: str, rollout: str, member: int, attempt: int) -> Event:
        return events.RolloutStarted(
            run_id=self.run_id, time_ms=self.tick(), group_id=group_id, rollout_id=rollout, member=member,
            attempt=attempt, seed=11,
        )  # fmt: skip

    def step(self, group_id: str, rollout: str, index: int) -> Event:
        span = VersionSpan(model_group=self.model_group, version=self.version, length=2)
        return events.StepRecorded(
            run_id=self.run_id, time_ms=self.tick(), group_id=group_id, rollout_id=rollout, step_index=index,
            agent="agent", event_type="LLM_END", uuid=f"{rollout}/{index}", name="model",
            data={"input": "what?", "output": "that" * 2}, usage_info={"num_llm_calls": 1},
            llm=LLMCall(
                prompt_ids=tokens.encode_ids([1, 2, 3]), completion_ids=tokens.encode_ids([4, 5]),
                logprobs=tokens.encode_floats([-0.5, -0.25]), spans=(span,),
            ),
        )  # fmt: skip

    def rollout(
        self, common: dict[str, object], policy: str, rollout: str, member: int, attempt: int, reward: float
    ) -> Iterator[Event]:
        group_id = str(common["group_id"])
        yield self.begun(group_id, rollout, member, attempt)
        for index in range(2):
            yield self.step(group_id, rollout, index)
        yield events.RewardRecorded(
            run_id=self.run_id, time_ms=self.tick(), group_id=group_id, rollout_id=rollout, reward_index=0,
            name="right", value=reward,
        )  # fmt: skip
        yield events.RolloutEnded(
            run_id=self.run_id, time_ms=self.tick(), group_id=group_id, rollout_id=rollout, num_steps=2, num_rewards=1,
            digest="e" * 64,
        )  # fmt: skip
        span = VersionSpan(model_group=self.model_group, version=self.version, length=2)
        done = tuple(Completion(start=3 + 5 * i, length=2, step_index=i, spans=(span,)) for i in range(2))
        yield events.TrajectoryAssembled.model_validate(
            {key: value for key, value in common.items() if key != "index"}
            | {"time_ms": self.tick(), "rollout_id": rollout, "trajectory_id": ids.trajectory_id(rollout, "agent")}
            | {"agent": "agent", "model_group": self.model_group, "member": member, "attempt": attempt}
            | {
                "policy": policy,
                "reward": reward,
                "rewards": {"right": reward},
                "num_steps": 2,
                "steps_digest": "e" * 64,
            }
            | {"sequences": (TokenSequence(token_ids=tokens.encode_ids(range(10)), completions=done),)}
        )


@pytest.fixture
def synthetic() -> SyntheticRun:
    return SyntheticRun()


def answers(tmp_path: Path, found: list[Event], *queries: str) -> list[list[Any]]:
    """Rows that the queries find once the events are in a metrics file."""

    async def scenario() -> list[list[Any]]:
        log, file = MemoryLog(num_partitions=2), empty_file(tmp_path)
        await log.send_all(found)
        await project_to_end(log, file)
        with connect(file, read_only=True) as connection:
            return [connection.execute(query).fetchall() for query in queries]

    return asyncio.run(scenario())


def ask(path: Path, sql: str) -> list[Any]:
    """Rows of a metrics file."""
    with connect(path, read_only=True) as connection:
        return connection.execute(sql).fetchall()


def grow(log: EventLog, path: Path) -> None:
    """Project up to the log's end, as a service that stops at once."""
    asyncio.run(project_to_end(log, path))


def empty_file(folder: Path) -> Path:
    """A metrics file with its tables and views and no row; copied, for making one takes a tenth of a second."""
    path = folder / "metrics.duckdb"
    path.write_bytes(_empty())
    return path


@cache
def _empty() -> bytes:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "metrics.duckdb"
        Database(path).close()
        return path.read_bytes()


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    """An artifact store of a folder."""
    return ArtifactStore(str(tmp_path / "store"))


@pytest.fixture
def new_run(store: ArtifactStore) -> Callable[[str], SyntheticRun]:
    """Makes runs by their id; dataset and weights are in the store."""

    class Stored(SyntheticRun):
        def all_events(self, *, ended: bool = True) -> Iterator[Event]:
            for event in super().all_events(ended=ended):
                yield self.stored(event)

        def stored(self, event: Event) -> Event:
            match event:
                case events.RunStarted():
                    return event.model_copy(update={"dataset": store.put_bytes(b"examples", ".jsonl")})
                case events.WeightsPublished():
                    return event.model_copy(update={"artifact": store.put_bytes(f"weights {event.version}".encode())})
                case _:
                    return event

    return Stored
