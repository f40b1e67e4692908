"""A small configuration, its jobs, and a scripted counterpart that plays learner and curate on a log."""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from rollstream.eventlog.codec import decode
from rollstream.eventlog.log import EventLog, TopicPartition
from rollstream.harness.config import registry
from rollstream.schemas.base import Event
from rollstream.schemas.errors import DecodeError
from rollstream.schemas.events import (
    EpochSealed,
    EpochStarted,
    JobFailed,
    JobStarted,
    JobSubmitted,
    JobSucceeded,
    RunEnded,
    RunStarted,
    WeightsPublished,
)
from rollstream.schemas.settings import ArtifactRef, JobSettings, JobSpec, ModelSettings, PlanSettings, RolloutSettings

RUN = "run-1"
GROUP = f"{RUN}/policy"


def configuration(folder: Path) -> dict[str, Any]:
    """A configuration whose model folder exists (without weights)."""
    model = folder / "model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text("{}")
    return {
        "workflow": "guess_number",
        "trajectory_builders": {"b": {"_type": "rollstream", "num_partitions": 2}},
        "trainer_adapters": {"a": {"_type": "rollstream", "model": {"path": str(model)}}},
        "trainers": {"t": {"_type": "rollstream"}},
        "finetuning": {
            "trainer": "t",
            "trajectory_builder": "b",
            "trainer_adapter": "a",
            "output_dir": str(folder / "output"),
        },
    }


@pytest.fixture
def written(tmp_path: Path) -> dict[str, Any]:
    """A configuration as read from a file."""
    return configuration(tmp_path)


@pytest.fixture
def write(tmp_path: Path) -> Callable[[dict[str, Any]], Path]:
    """Writes a configuration to a file."""

    def to_file(content: dict[str, Any]) -> Path:
        path = tmp_path / "run.yaml"
        path.write_text(yaml.safe_dump(content))
        return path

    return to_file


@pytest.fixture
def registered_alone() -> Iterator[None]:
    """Whatever a test registers is forgotten after it."""
    registry.discover()
    known = (registry.trainers, registry.trajectory_builders, registry.trainer_adapters)
    before = [dict(one) for one in known]
    yield
    for one, content in zip(known, before, strict=True):
        one.clear()
        one.update(content)


def run_started(run_id: str = RUN) -> RunStarted:
    dataset = ArtifactRef(uri="memory://d", sha256="0" * 64, size_bytes=0)
    return RunStarted(
        run_id=run_id, time_ms=1000, name="run", config={}, seed=0, dataset=dataset, num_examples=1, num_partitions=2
    )


def job_spec(name: str = "rl", num_epochs: int = 3, run_id: str = RUN) -> JobSpec:
    return JobSpec(
        f"{run_id}/{name}",
        f"{run_id}/policy",
        JobSettings(kind="rl", model=ModelSettings(path="m"), num_versions=num_epochs),
        PlanSettings(num_epochs=num_epochs),
        RolloutSettings(environment="e"),
    )


def published(version: int, job_id: str, run_id: str = RUN) -> WeightsPublished:
    return WeightsPublished(
        run_id=run_id,
        time_ms=2000 + version,
        model_group=f"{run_id}/policy",
        job_id=job_id,
        batch_id=None if version == 0 else f"{job_id}/b",
        version=version,
        parent=None if version == 0 else version - 1,
        term=1,
        weights_sha256="0" * 64,
        weights_format="full",
        base_model="m",
        artifact=ArtifactRef(uri="memory://w", sha256="0" * 64, size_bytes=0),
    )


def sealed(
    job_id: str, epoch: int, *, is_last: bool, reward: float | None = 0.5, num_groups: int = 4, run_id: str = RUN
) -> EpochSealed:
    return EpochSealed(
        run_id=run_id,
        time_ms=3000 + epoch,
        job_id=job_id,
        epoch=epoch,
        is_last=is_last,
        num_groups=num_groups,
        num_trained_groups=num_groups,
        num_batches=1,
        next_batch_index=epoch + 1,
        avg_reward=reward,
        filtered_avg_reward=reward,
        zero_variance_groups=0,
        curriculum_percentile=1.0,
        curriculum_sha256="0" * 64,
    )


class Counterpart:
    """Plays learner and curate: answers each event of the conductor at once, every epoch with one version."""

    def __init__(self, log: EventLog, *, fails_at: int | None = None, stops_at: int | None = None) -> None:
        self.log = log
        self.fails_at = fails_at
        self.stops_at = stops_at
        self.version = -1
        self.plans: dict[str, PlanSettings] = {}
        self.seen: list[str] = []

    async def play(self) -> None:
        """Until cancelled."""
        topics = ("groups", "jobs")
        reader = await self.log.reader({TopicPartition(topic, 0): 0 for topic in topics})
        while True:
            for record in await reader.poll(timeout_s=0.5):
                try:
                    event = decode(record).event
                except DecodeError:
                    continue
                if event.event_id not in self.seen:
                    self.seen.append(event.event_id)
                    await self.log.send_all(self._answer(event))

    def _answer(self, event: Event) -> list[Event]:
        match event:
            case JobSubmitted() if self.version < 0:
                self.version = 0
                return [published(0, event.job_id)]
            case JobStarted():
                self.plans[event.job_id] = event.plan
                return []
            case EpochStarted():
                return self._epoch(event)
            case _:
                return []

    def _epoch(self, event: EpochStarted) -> list[Event]:
        job_id, epoch = event.job_id, event.epoch
        if epoch == self.fails_at:
            return [JobFailed(run_id=RUN, time_ms=4000, job_id=job_id, model_group=GROUP, error="out of memory")]
        if epoch == self.stops_at:
            return [RunEnded(run_id=RUN, time_ms=4000, cause="stopped")]
        self.version += 1
        is_last = epoch == self.plans[job_id].num_epochs - 1
        answers: list[Event] = [sealed(job_id, epoch, is_last=is_last), published(self.version, job_id)]
        if is_last:
            answers.append(
                JobSucceeded(run_id=RUN, time_ms=4000, job_id=job_id, model_group=GROUP, final_version=self.version)
            )
        return answers


async def with_counterpart(counterpart: Counterpart, work: Any) -> Any:
    """The result of `work` while the counterpart plays."""
    playing = asyncio.create_task(counterpart.play())
    try:
        async with asyncio.timeout(30):
            return await work
    finally:
        playing.cancel()


@pytest.fixture
def script() -> SimpleNamespace:
    """Ways to write a run's events, and the counterpart."""
    return SimpleNamespace(
        run=RUN,
        run_started=run_started,
        job_spec=job_spec,
        published=published,
        sealed=sealed,
        counterpart=Counterpart,
        with_counterpart=with_counterpart,
    )
