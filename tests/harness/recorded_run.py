"""A whole run on a log in memory: the real folds and the real learner; only the producers are played."""

import asyncio
import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import orjson

from rollstream.eventlog import codec
from rollstream.eventlog.artifacts import ArtifactStore
from rollstream.eventlog.log import Record, TopicPartition
from rollstream.eventlog.memory_log import MemoryLog
from rollstream.harness.config import config_file
from rollstream.harness.config.settings import jobs_of
from rollstream.harness.plan import library_versions
from rollstream.harness.replay.source import of_type
from rollstream.learner.worker import Worker
from rollstream.processors.assemble_shell import AssembleShell
from rollstream.processors.curate_shell import CurateShell
from rollstream.processors.faust_app import Batch
from rollstream.schemas import ids, tokens
from rollstream.schemas.base import Event
from rollstream.schemas.events import (
    BatchPlanned,
    EpochSealed,
    EpochStarted,
    GroupStarted,
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
    TaskRequested,
    WeightsPublished,
)
from rollstream.schemas.events_rollouts import LLMCall, VersionSpan

RUN = "replayed"
GROUP = f"{RUN}/policy"
JOB = f"{RUN}/rl"
EPOCHS = 3
E = TypeVar("E", bound=Event)


def configuration(folder: Path, model: Path) -> dict[str, Any]:
    """Three epochs with two groups of four each."""
    builder = {"_type": "rollstream", "num_generations": 4, "environment_config": {}}
    learner = {
        "_type": "rollstream",
        "model": {"path": str(model), "device": "cpu"},
        "tasks_per_epoch": 2,
        "threads": 1,
    }
    learner |= {"optimizer": {"learning_rate": 1e-2}, "tasks_per_epoch": 2, "max_staleness": 1}
    return {
        "workflow": "guess_number",
        "trajectory_builders": {"rollouts": builder},
        "trainer_adapters": {"learner": learner},
        "trainers": {"trainer": {"_type": "rollstream"}},
        "finetuning": {
            "trainer": "trainer",
            "trajectory_builder": "rollouts",
            "trainer_adapter": "learner",
            "num_epochs": EPOCHS,
            "output_dir": str(folder / "output"),
        },
    }


class RecordedRun:
    """A run of three epochs with two groups of four each."""

    num_epochs = EPOCHS

    def __init__(self, folder, model):
        self.folder, self.model = folder, model
        self.log = MemoryLog(num_partitions=2)
        self.artifacts = ArtifactStore(str(folder / "artifacts"))
        self.checkpoints = folder / "checkpoints"
        self._places = {}

    async def events(self, topic: str, kind: type[E]) -> list[E]:
        """Events of one type that came since this was last asked, in the order of the log."""
        return [event for record in await self._new((topic, kind.__name__), topic) for event in self._of(record, kind)]

    def _of(self, record: Record, kind: type[E]) -> list[E]:
        event = codec.decode(record).event
        return [event] if isinstance(event, kind) else []

    async def _new(self, reader, topic):
        found = []
        for partition, end in (await self.log.end_offsets(topic)).items():
            at = self._places.get((reader, partition), 0)
            records = await self.log.reader({TopicPartition(topic, partition): at})
            while records.position(TopicPartition(topic, partition)) < end:
                found += await records.poll()
            self._places[reader, partition] = end
        return found

    def configuration(self):
        """As written."""
        return configuration(self.folder, self.model)

    def examples(self):
        """Inputs of every example."""
        return [{"n": n} for n in range(4)]

    async def roll_out(self, task, version):
        """Play a task's rollouts."""
        for event in rollouts_of(task, version):
            await self.log.send(event)

    async def record(self):
        """Run to the end."""
        examples = self.examples()
        lines = b"\n".join(orjson.dumps({"example_id": f"x{n}", "inputs": inputs}) for n, inputs in enumerate(examples))
        common = {"run_id": RUN, "time_ms": 1}
        job = {"job_id": JOB, "model_group": GROUP, "base_version": 0}
        written = self.configuration()
        (spec,) = jobs_of(config_file.resolve(written).config, RUN)
        await self.log.send_all(
            [
                RunStarted(
                    **common,
                    name="run",
                    config=written,
                    seed=5,
                    dataset=self.artifacts.put_bytes(lines, ".jsonl"),
                    num_examples=len(examples),
                    num_partitions=2,
                    library_versions=library_versions(),
                ),
                JobSubmitted(**common, **job, settings=spec.job),
            ]
        )
        worker = Worker(self.log, self.artifacts, name="learner", checkpoints=self.checkpoints, threads=1)
        learner = asyncio.create_task(worker.run())
        shells = AssembleShell(self.log, None, service="p"), CurateShell(self.log, self.artifacts, service="p")
        try:
            async with asyncio.timeout(120):
                await self._until("weights", WeightsPublished, learner)
                await self.log.send(JobStarted(**common, **job, plan=spec.plan, rollout=spec.rollout))
                for epoch in range(self.num_epochs):
                    await self.log.send(EpochStarted(**common, job_id=JOB, epoch=epoch))
                    await self._epoch(*shells, version=epoch)
                    if epoch + 1 < self.num_epochs:
                        await self._until("weights", WeightsPublished, learner)
                await self._until("jobs", JobSucceeded, learner)
        finally:
            learner.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await learner
        await self.log.send(RunEnded(**common, cause="completed"))
        return self

    async def _until(self, topic, kind, learner):
        while not await self.events(topic, kind):
            assert not learner.done(), learner.exception()
            await asyncio.sleep(0.01)

    async def _epoch(self, assembling, curating, *, version):
        while not await self.events("batches", EpochSealed):
            await self._pump(curating, "groups")
            for task in await self.events("tasks", TaskRequested):
                await self.roll_out(task, version)
            await self._pump(assembling, "steps")
            await assembling.drain()
            await asyncio.sleep(0)

    async def _pump(self, shell, topic):
        records = await self._new(shell.topic, topic)
        for partition in sorted({record.partition for record in records}):
            await shell.take(Batch(partition, 1, [one for one in records if one.partition == partition]))

    # ---- tampering: what no writer of a log can do ----

    def find(self, topic: str, kind: str, nth: int = 0, holding: bytes = b"") -> tuple[list[Record], int]:
        """The nth record of a topic that is an event of a type and holds some bytes: its list, and where in it."""
        found = [
            (kept.records, index)
            for where, kept in self.log._store._partitions.items()
            if where.topic == topic
            for index, record in enumerate(kept.records)
            if orjson.loads(value_of(record))["kind"] == kind and holding in value_of(record)
        ]
        return found[nth]

    def remove(self, topic: str, kind: str, nth: int = 0) -> None:
        """Put a repeat of the partition's first record in the place of the nth of a kind."""
        records, index = self.find(topic, kind, nth)
        records[index] = replace(records[0], offset=records[index].offset)

    def change(self, topic: str, kind: str, old: bytes, new: bytes, nth: int = 0) -> str:
        """Change bytes of the nth record that holds them; returns its position as text."""
        records, index = self.find(topic, kind, nth, old)
        before = records[index]
        records[index] = replace(before, value=value_of(before).replace(old, new, 1))
        return f"{before.partition}@{before.offset}"


def value_of(record: Record) -> bytes:
    """Its bytes: no record of a run is a tombstone."""
    assert record.value is not None
    return record.value


def batches_of(events):
    return [batch for batch, _ in of_type(events.by_topic["batches"], BatchPlanned)]


def hashes_of(events):
    return [step.weights_sha256 for step, _ in of_type(events.by_topic["weights"], StepTrained)]


def rollouts_of(task, version):
    """All records of a group whose members differ in what they say and are rewarded with."""
    common = {"run_id": RUN, "time_ms": 1, "group_id": task.group_id}
    yield GroupStarted(
        **common,
        size=task.num_rollouts,
        minimum=task.minimum,
        timeout_ms=3_600_000,
        example_id=task.example_id,
        job_id=task.job_id,
        epoch=task.epoch,
        index=task.index,
        seed=task.seed,
        agents={"agent": GROUP},
    )
    for member in range(task.num_rollouts):
        rollout = {**common, "rollout_id": ids.rollout_id(task.group_id, member, 0)}
        yield RolloutStarted(**rollout, member=member, attempt=0, seed=member)
        call = LLMCall(
            prompt_ids=tokens.encode_ids([3, 4, 5 + task.index]),
            completion_ids=tokens.encode_ids([6 + member, 7, 8 + task.epoch]),
            logprobs=tokens.encode_floats([-4.5, -4.6, -4.4]),
            spans=(VersionSpan(model_group=GROUP, version=version, length=3),),
        )
        said = {"input": [{"role": "user", "content": "?"}], "output": "!" * member}
        step = StepRecorded(
            **rollout, step_index=0, agent="agent", event_type="LLM_END", uuid=f"u{member}", data=said, llm=call
        )
        reward = RewardRecorded(**rollout, reward_index=0, name="task", value=float(member))
        yield step
        yield reward
        digest = codec.chain(rollout["rollout_id"], map(codec.content_digest, (step, reward)))
        yield RolloutEnded(**rollout, num_steps=1, num_rewards=1, digest=digest)
