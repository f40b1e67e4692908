"""A whole run on a log in memory: the real folds and the real learner; only the producers are played."""

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import orjson

from rollstream.eventlog import codec
from rollstream.eventlog.artifacts import ArtifactStore
from rollstream.eventlog.log import Record, TopicPartition, format_position
from rollstream.eventlog.memory.log import MemoryLog
from rollstream.harness.config import file as config_file
from rollstream.harness.config.jobs import jobs_of
from rollstream.learner.library_versions import library_versions
from rollstream.learner.model.ranks import Ranks
from rollstream.learner.worker import Worker
from rollstream.processors.assemble.shell import AssembleShell
from rollstream.processors.curate.shell import CurateShell
from rollstream.processors.host.app import Batch
from rollstream.replay.source import of_type
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
from rollstream.schemas.events.rollouts import LLMCall, VersionSpan
from rollstream.schemas.permissions import Permissions

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
        self.ranks = Ranks()
        self._read_up_to = {}

    async def events(self, topic: str, kind: type[E]) -> list[E]:
        """Events of one type that came since this was last asked, in the order of the log."""
        return [event for record in await self._new((topic, kind.__name__), topic) for event in self._of(record, kind)]

    def _of(self, record: Record, kind: type[E]) -> list[E]:
        event = codec.decode(record).event
        return [event] if isinstance(event, kind) else []

    async def _new(self, reader, topic):
        found = []
        for partition, end in (await self.log.end_offsets(topic)).items():
            at = self._read_up_to.get((reader, partition), 0)
            records = await self.log.reader({TopicPartition(topic, partition): at})
            while records.position(TopicPartition(topic, partition)) < end:
                found += await records.poll()
            self._read_up_to[reader, partition] = end
        return found

    def configuration(self):
        """The configuration as written."""
        return configuration(self.folder, self.model)

    def spec(self, written):
        """The job that is submitted."""
        (spec,) = jobs_of(config_file.resolve(written).config, RUN)
        return spec

    def examples(self):
        """Inputs of every example."""
        return [{"n": n} for n in range(4)]

    async def roll_out(self, task, version):
        """Play a task's rollouts."""
        for event in rollouts_of(task, version):
            await self.log.send(event)

    async def before(self, epoch, assembling, curating):
        """Hook that writes events before an epoch begins."""

    async def record(self):
        """Run to the end."""
        examples = self.examples()
        lines = b"\n".join(orjson.dumps({"example_id": f"x{n}", "inputs": inputs}) for n, inputs in enumerate(examples))
        common = {"run_id": RUN, "time_ms": 1}
        job = {"job_id": JOB, "model_group": GROUP, "base_version": 0}
        written = self.configuration()
        spec = self.spec(written)
        run = RunStarted(
            **common,
            name="run",
            config=written,
            seed=5,
            dataset=self.artifacts.put_bytes(lines, ".jsonl"),
            num_examples=len(examples),
            num_partitions=2,
            library_versions=library_versions(),
        )
        submitted = JobSubmitted(**common, **job, settings=spec.job, run_sha256=codec.content_digest(run))
        started = JobStarted(
            **common, **job, plan=spec.plan, rollout=spec.rollout, job_sha256=codec.content_digest(submitted)
        )
        await self.log.send_all([run, submitted])
        worker = Worker(
            self.log,
            self.artifacts,
            name="learner",
            checkpoints=self.checkpoints,
            threads=1,
            permissions=Permissions.of([f"model:{self.model}"], {}),
            ranks=self.ranks,
        )
        learner = asyncio.create_task(worker.run())
        shells = AssembleShell(self.log, None, service="p"), CurateShell(self.log, self.artifacts, service="p")
        try:
            async with asyncio.timeout(120):
                await self._wait_until("weights", WeightsPublished, learner)
                await self.log.send(started)
                for epoch in range(self.num_epochs):
                    await self.before(epoch, *shells)
                    await self.log.send(EpochStarted(**common, job_id=JOB, epoch=epoch))
                    await self._epoch(*shells, version=epoch)
                    if epoch + 1 < self.num_epochs:
                        await self._wait_until("weights", WeightsPublished, learner)
                await self._wait_until("jobs", JobSucceeded, learner)
        finally:
            learner.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await learner
        await self.log.send(RunEnded(**common, cause="completed"))
        return self

    async def _wait_until(self, topic, kind, learner):
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
        """Put a repeat of the partition's first record, or of its second, in the place of the nth of a kind."""
        records, index = self.find(topic, kind, nth)
        records[index] = replace(records[0 if index else 1], offset=records[index].offset)

    def change(self, topic: str, kind: str, old: bytes, new: bytes, nth: int = 0) -> str:
        """Change bytes of the nth record that holds them; returns its position as text."""
        records, index = self.find(topic, kind, nth, old)
        before = records[index]
        records[index] = replace(before, value=value_of(before).replace(old, new, 1))
        return format_position(before.position)


def value_of(record: Record) -> bytes:
    """Its bytes: no record of a run is a tombstone."""
    assert record.value is not None
    return record.value


def batches_of(events):
    return [batch for batch, _ in of_type(events.by_topic["batches"], BatchPlanned)]


def hashes_of(events):
    return [step.weights_sha256 for step, _ in of_type(events.by_topic["weights"], StepTrained)]


def rollouts_of(task, version, reward: Callable[[int], float] = float):
    """All records of a group whose members give different answers; `reward`: of a member."""
    yield group_start(task)
    for member in range(task.num_rollouts):
        yield from attempt_at(task, member, version, reward=reward(member))


def group_start(task):
    return GroupStarted(
        run_id=RUN,
        time_ms=1,
        group_id=task.group_id,
        size=task.num_rollouts,
        minimum=task.minimum,
        enough=task.enough,
        timeout_ms=max(1, int(task.settings.group_timeout_s * 1000)),
        example_id=task.example_id,
        job_id=task.job_id,
        epoch=task.epoch,
        purpose=task.purpose,
        index=task.index,
        seed=task.seed,
        agents={"agent": GROUP},
        revision=2,
    )


def attempt_at(task, member, version, *, reward, attempt=0, time_ms=1):
    """All records of a complete attempt."""
    began = attempt_start(task, member, attempt=attempt, time_ms=time_ms)
    yield began
    rollout = {"run_id": RUN, "time_ms": time_ms, "group_id": task.group_id, "rollout_id": began.rollout_id}
    call = LLMCall(
        prompt_ids=tokens.encode_ids([3, 4, 5 + task.index]),
        completion_ids=tokens.encode_ids([6 + member, 7, 8 + task.epoch]),
        logprobs=tokens.encode_floats([-4.5, -4.6, -4.4]),
        spans=(VersionSpan(model_group=GROUP, version=version, length=3),),
    )
    data = {"input": [{"role": "user", "content": "?"}], "output": "!" * member}
    step = StepRecorded(
        **rollout, step_index=0, agent="agent", event_type="LLM_END", uuid=f"u{member}", data=data, llm=call
    )
    rewarded = RewardRecorded(**rollout, reward_index=0, name="task", value=reward)
    yield step
    yield rewarded
    digest = codec.chain(began.rollout_id, map(codec.content_digest, (step, rewarded)))
    yield RolloutEnded(**rollout, num_steps=1, num_rewards=1, digest=digest)


def attempt_start(task, member, *, attempt=0, time_ms=1):
    return RolloutStarted(
        run_id=RUN,
        time_ms=time_ms,
        group_id=task.group_id,
        rollout_id=ids.rollout_id(task.group_id, member, attempt),
        member=member,
        attempt=attempt,
        seed=ids.derive_seed(task.seed, member),
    )
