"""A run on a log in memory that components conduct: real producers with a script, real folds, a learner that is played.

The learner publishes a version for every manifest, without training; so versions, seals and statuses are as in a run.
"""

import asyncio
import contextlib
import io
import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any, TypeVar

from rollstream.eventlog.artifacts import ArtifactStore
from rollstream.eventlog.codec import decode
from rollstream.eventlog.log import TopicPartition
from rollstream.eventlog.memory.log import MemoryLog
from rollstream.harness.components.adapter import RollstreamTrainerAdapter
from rollstream.harness.components.build import Components
from rollstream.harness.components.builder import RollstreamTrajectoryBuilder
from rollstream.harness.components.conduct import conduct_components
from rollstream.harness.components.trainer import RollstreamTrainer
from rollstream.harness.config import file as config_file
from rollstream.harness.config.jobs import ENDPOINT
from rollstream.harness.config.resolve import block_of
from rollstream.harness.runs.display import Display
from rollstream.harness.runs.plan import RunPlan, new_run, open_run
from rollstream.harness.runs.run_handle import RunHandle
from rollstream.learner.untrained import end_of
from rollstream.processors.assemble.shell import AssembleShell
from rollstream.processors.curate.shell import CurateShell
from rollstream.processors.host.app import Batch
from rollstream.producers.engines.scripted import ScriptedEngine
from rollstream.producers.service import run as produce
from rollstream.schemas.base import Event
from rollstream.schemas.engine_settings import ScriptedSettings
from rollstream.schemas.events import (
    BatchPlanned,
    EpochSealed,
    GroupClosed,
    JobFailed,
    JobProgressed,
    JobSubmitted,
    LearnerClaimed,
    RunEnded,
    StepTrained,
    TaskRequested,
    TrajectoryRejected,
    WeightsLoaded,
    WeightsPublished,
)
from rollstream.schemas.finetuning import EpisodeItem, EpisodeItemRole, Trajectory, TrajectoryCollection
from rollstream.schemas.services import ProducerSettings
from rollstream.schemas.settings import EXTERNAL

E = TypeVar("E", bound=Event)


class EpochwiseRig:
    """Producers, folds and learner of a workspace, on one log for all its runs."""

    def __init__(self, folder: Path, written, *, script=None, fails_at=None, trains_slowly=None, serves=None):
        """`fails_at`: the version that the learner cannot make; `trains_slowly`: what it awaits before each; `serves`:
        the newest version that the endpoint loads.
        """
        self.folder, self.written = folder, written
        self.log = MemoryLog(num_partitions=2)
        self.artifacts = ArtifactStore(str(folder / "artifacts"))
        self.checkpoints = None
        self.engine = ScriptedEngine(script) if script else ScriptedEngine()
        self.fails_at, self.trains_slowly, self.serves = fails_at, trains_slowly, serves
        self.loaded = config_file.resolve(written)
        self.shown = io.StringIO()
        self._bases: dict[str, JobSubmitted] = {}

    @contextlib.asynccontextmanager
    async def services(self):
        """All that stands around a run."""
        settings = ProducerSettings(
            bootstrap_servers="none",
            artifact_uri=self.artifacts.uri,
            workspace=self.folder,
            name="producers-1",
            num_partitions=2,
            tick_interval_s=0.2,
            engine=ScriptedSettings(),
        )
        curating = CurateShell(self.log, self.artifacts, service="p")
        works = [
            produce(settings, self.log, self.engine),
            self._pump("steps", AssembleShell(self.log, None, service="p")),
            self._pump("groups", curating),
            self._learn(),
        ]
        tasks = [asyncio.create_task(work) for work in works]
        try:
            yield self
            while (curating.commit_offset(0) or 0) < (await self.log.end_offsets("groups"))[0]:
                await asyncio.sleep(0.005)  # what came last is answered too
        finally:
            for task in tasks:
                if task.done():
                    task.result()
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def plan(self, run_id="run-1", *, resume=False) -> RunPlan:
        if resume:
            return await open_run(self.log, self.artifacts, self.loaded, run_id)
        return await new_run(self.log, self.artifacts, self.loaded, "run", run_id=run_id)

    async def open_run(self, run_id="run-1", *, resume=False) -> RunHandle:
        """The run, to be used as a context."""
        return RunHandle(
            self.log,
            self.artifacts,
            await self.plan(run_id, resume=resume),
            self.loaded.config,
            workspace=self.folder,
            display=Display(self.shown),
        )

    async def events(self, topic: str, kind: type[E]) -> list[E]:
        """Every event of a type that a topic has so far, repeats apart."""
        found: dict[str, Event] = {}
        for partition, end in (await self.log.end_offsets(topic)).items():
            reader = await self.log.reader({TopicPartition(topic, partition): 0})
            while reader.position(TopicPartition(topic, partition)) < end:
                for record in await reader.poll(timeout_s=0):
                    event = decode(record).event
                    found.setdefault(event.event_id, event)
        return [event for event in found.values() if isinstance(event, kind)]

    async def _pump(self, topic, shell):
        partitions = range(await self.log.num_partitions(topic))
        reader = await self.log.reader({TopicPartition(topic, partition): 0 for partition in partitions})
        while True:
            records = sorted(await reader.poll(timeout_s=1.0), key=lambda record: record.partition)
            for partition, several in itertools.groupby(records, key=lambda record: record.partition):
                await shell.take(Batch(partition, 1, list(several)))

    async def _learn(self):
        reader = await self.log.reader({TopicPartition(topic, 0): 0 for topic in ("jobs", "batches")})
        seen = set()
        while True:
            for record in await reader.poll(timeout_s=1.0):
                event = decode(record).event
                if event.event_id not in seen:
                    seen.add(event.event_id)
                    await self._answer(event)

    async def _answer(self, event):
        match event:
            case JobSubmitted() if event.settings.kind != EXTERNAL:
                self._bases[event.job_id] = event
                common = {"run_id": event.run_id, "time_ms": event.time_ms, "model_group": event.model_group}
                await self.log.send(LearnerClaimed(**common, term=1, learner="learner-1"))
                if event.base_version == 0:
                    await self._publish(event, 0, None)
            case BatchPlanned():
                await self._train(event)
            case EpochSealed() if event.is_last and event.job_id in self._bases:
                job = self._bases[event.job_id]
                trained = {"num_trained": event.next_batch_index, "time_ms": event.time_ms, "finish_s": 0.0}
                await self.log.send(await end_of(self.log, job, **trained))

    async def _train(self, planned):
        job = self._bases[planned.job_id]
        if self.trains_slowly is not None:
            await self.trains_slowly(planned)
        if planned.yields_version == self.fails_at:
            common = {"run_id": job.run_id, "time_ms": planned.time_ms, "model_group": job.model_group}
            await self.log.send(JobFailed(**common, job_id=job.job_id, error="out of memory"))
            return
        await self._publish(job, planned.yields_version, planned)

    async def _publish(self, job, version, planned):
        await publish(self.log, self.artifacts, job, version, planned)
        if self.serves is not None and version <= self.serves:
            loaded = WeightsLoaded(
                run_id=job.run_id,
                time_ms=job.time_ms,
                model_group=job.model_group,
                version=version,
                engine=ENDPOINT,
                num_skipped=0,
                seconds=0.1,
            )
            await self.log.send(loaded)


async def publish(log, artifacts, job, version, planned):
    """Write a learner's events for a version that it made from a manifest; None: for the first version."""
    common = {"run_id": job.run_id, "time_ms": job.time_ms, "model_group": job.model_group, "job_id": job.job_id}
    artifact = artifacts.put_bytes(f"{job.job_id} {version}".encode(), ".safetensors")
    if planned is not None:
        step = StepTrained(
            **common,
            batch_id=planned.batch_id,
            epoch=planned.epoch,
            version=version,
            term=1,
            weights_sha256=artifact.sha256,
            num_optimizer_steps=1,
            metrics={},
        )
        await log.send(step)
    await log.send(
        WeightsPublished(
            **common,
            batch_id=planned.batch_id if planned else None,
            version=version,
            parent=None if planned is None else version - 1,
            term=1,
            weights_sha256=artifact.sha256,
            weights_format="full",
            base_model="none",
            artifact=artifact,
        )
    )
    if planned is not None:
        await log.send(JobProgressed(**common, version=version, percent=50.0))


def configuration(folder: Path, *, num_epochs: int = 3, num_examples: int = 4, **finetuning: Any) -> dict[str, Any]:
    (folder / "model").mkdir(exist_ok=True)
    (folder / "model" / "config.json").write_text("{}")
    for name, count in (("train", num_examples), ("valid", 2)):
        lines = [json.dumps({"id": f"{name}-{number}", "secret": number}) for number in range(count)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    return {
        "workflow": "guess_number",
        "eval": {"general": {"dataset": {"_type": "jsonl", "file_path": str(folder / "train.jsonl")}}},
        "trajectory_builders": {
            "b": {"_type": "rollstream", "num_generations": 3, "num_partitions": 2, "workspace": str(folder)}
        },
        "trainer_adapters": {
            "a": {"_type": "rollstream", "model": {"path": str(folder / "model")}, "workspace": str(folder)}
        },
        "trainers": {"t": {"_type": "rollstream", "planning": "submitted"}},
        "finetuning": {
            "trainer": "t",
            "trajectory_builder": "b",
            "trainer_adapter": "a",
            "num_epochs": num_epochs,
            "output_dir": str(folder / "output"),
            **finetuning,
        },
    }


def scored_configuration(folder: Path) -> dict[str, Any]:
    """With an evaluator as reward function, and weights of it and of the environment's own reward."""
    written = configuration(folder, reward_function={"name": "has_digit"})
    written["eval"]["evaluators"] = {"has_digit": {"_type": "numeric_match", "answer_key": "secret"}}
    written["trajectory_builders"]["b"]["reward_weights"] = {"reward": 0.5, "has_digit": 2.0}
    return written


def components_for(rig: EpochwiseRig):
    finetune = rig.loaded.finetune
    return Components(
        RollstreamTrainer(block_of(finetune, "trainer")),
        RollstreamTrajectoryBuilder(block_of(finetune, "trajectory_builder")),
        RollstreamTrainerAdapter(block_of(finetune, "trainer_adapter")),
    )


class Choosy(RollstreamTrajectoryBuilder):
    """Gives only the first two members of every group."""

    async def finalize(self, run_id: str, meta: dict[str, Any] | None = None) -> TrajectoryCollection:
        collection = await super().finalize(run_id, meta)
        return TrajectoryCollection(trajectories=[group[:2] for group in collection.trajectories], run_id=run_id)


async def conducted(rig: EpochwiseRig, *, run_id: str = "run-1", resume: bool = False, parts: Components | None = None):
    """A whole run with its end; the progress after it."""
    async with asyncio.timeout(300), rig.services(), await rig.open_run(run_id, resume=resume) as handle:
        progress = await conduct_components(handle, parts or components_for(rig), rig.loaded.finetune)
        if progress.ended is None:
            cause = "completed" if handle.job_progress.outcome == "succeeded" else "failed"
            await rig.log.send(RunEnded(run_id=run_id, time_ms=1, cause=cause))
        return progress


@contextlib.asynccontextmanager
async def opened_rig(rig: EpochwiseRig, **how):
    """Components that are initialized on an open handle, for steps by hand."""
    async with asyncio.timeout(300), rig.services(), await rig.open_run(**how) as handle:
        parts = components_for(rig)
        await parts.trainer.bind_components(parts.trajectory_builder, parts.trainer_adapter)
        await parts.trainer.initialize(rig.loaded.finetune)
        yield handle, parts


async def assert_every_attempt_has_one_outcome(rig: EpochwiseRig):
    closed = await rig.events("groups", GroupClosed)
    complete = Counter(member.trajectory_id for group in closed for member in group.members)
    planned = Counter(m.trajectory_id for batch in await rig.events("batches", BatchPlanned) for m in batch.members)
    rejected = Counter(event.trajectory_id for event in await rig.events("batches", TrajectoryRejected))
    assert planned + rejected == complete
    asked = {task.group_id for task in await rig.events("tasks", TaskRequested)}
    assert {group.group_id for group in closed} == asked


def answers_of(trajectory: Trajectory) -> list[EpisodeItem]:
    """Messages of the assistant in an episode."""
    items = [item for item in trajectory.episode if isinstance(item, EpisodeItem)]
    return [item for item in items if item.role == EpisodeItemRole.ASSISTANT]


def submitting(rig: EpochwiseRig) -> EpochwiseRig:
    """The same with planning `submitted`, as it is where a component is not ours."""
    trainer = rig.loaded.config.trainer.model_copy(update={"planning": "submitted"})
    rig.loaded = rig.loaded._replace(config=rig.loaded.config.model_copy(update={"trainer": trainer}))
    return rig


class Interrupting:
    """Interrupts a run after so many looks at what a builder or adapter is asked, once no rollout is in flight.

    One that was cut off would come again as another attempt, with another id, and so be another submission.
    """

    def __init__(self, left: int, rig: EpochwiseRig) -> None:
        self.left, self.rig = left, rig

    async def __call__(self) -> None:
        self.left -= 1
        if self.left == 0:
            while await self._num_open():
                await asyncio.sleep(0.005)
            raise InterruptedError

    async def _num_open(self) -> int:
        asked = {task.group_id for task in await self.rig.events("tasks", TaskRequested)}
        return len(asked - {group.group_id for group in await self.rig.events("groups", GroupClosed)})


def interrupted(method: Any, interrupt: Interrupting) -> Any:
    async def call(*arguments: Any, **named: Any) -> Any:
        await interrupt()
        found = await method(*arguments, **named)
        await interrupt()
        return found

    return call
