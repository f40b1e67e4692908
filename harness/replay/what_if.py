"""`replay --what-if FILE`: a run's recorded rollouts trained again with another reward, curriculum, loss or optimizer.

What comes of it is a run of its own in the same log: manifests, versions and metrics, but not one rollout.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from rollstream.eventlog import codec
from rollstream.eventlog.artifacts import ArtifactStore
from rollstream.eventlog.log import EventLog, TopicPartition
from rollstream.harness import config_file
from rollstream.harness.fork import misfit
from rollstream.harness.plan import library_versions
from rollstream.harness.preflight import check_names
from rollstream.harness.replay import assembly, what_if_plan
from rollstream.harness.replay.source import RunEvents, of_type, read_run
from rollstream.harness.replay.verify import dataset_of
from rollstream.harness.replay.weights import log_state
from rollstream.harness.replay.what_if_rewards import Grading, grade
from rollstream.harness.settings import TRAINING, JobSpec, jobs_of
from rollstream.harness.yaml_reading import merged, read_yaml
from rollstream.schemas import ids
from rollstream.schemas.base import Event
from rollstream.schemas.config import RunConfig
from rollstream.schemas.errors import ConfigError, FencedError, RunFailedError
from rollstream.schemas.events import (
    BatchPlanned,
    GroupClosed,
    JobCancelled,
    JobFailed,
    JobStarted,
    JobSubmitted,
    JobSucceeded,
    RunEnded,
    RunStarted,
    StepTrained,
    TaskRequested,
)
from rollstream.schemas.events_training import ForkPoint

COMPARED = ("reward/mean", "loss/total", "policy/ess", "policy/kl", "policy/entropy")
Tell = Callable[[str], None]


class Outcome(NamedTuple):
    """A finished what-if."""

    run_id: str
    num_batches: int
    rejected: dict[str, int]
    recorded: dict[str, float]
    """Means of step metrics over the recorded job."""
    trained: dict[str, float]
    """The same over the what-if's."""


async def what_if(
    log: EventLog, events: RunEvents, artifacts: ArtifactStore, file: Path, *, checkpoints: Path, tell: Tell
) -> Outcome:
    """Plan and train a what-if of a run. `file`: YAML whose keys replace those of the run's configuration.

    Raises ConfigError if the change would need other rollouts, RunFailedError if the training fails.
    """
    started = events.started
    written = merged(dict(started.config), read_yaml(file))
    loaded = config_file.resolve(written)
    run_id = ids.new_run_id(f"{started.name}-what-if")
    spec = jobs_of(loaded.config, run_id, is_fork=True)[-1]
    recorded = _recorded_job(events)
    what_if_plan.check(recorded, spec)
    _check_beginning(events, recorded, loaded.config)
    check_names(loaded.config)
    dataset = dataset_of(events, artifacts)
    rewards = await _rewards(log, events, recorded, spec, tell)
    tell("planning")
    records = events.by_topic["groups"]
    made = what_if_plan.replan(records, recorded, spec, run_id, rewards, {started.run_id: dataset})
    parent = ForkPoint(run_id=started.run_id, version=recorded.base_version)
    begun = started.model_copy(
        update={
            "run_id": run_id,
            "time_ms": time.time_ns() // 1_000_000,
            "name": f"{started.name}-what-if",
            "config": written,
            "parent": parent,
            "is_what_if": True,
            "library_versions": library_versions(),
            "started_at": datetime.now(UTC).isoformat(timespec="seconds"),
        }
    )
    await _train(log, artifacts, begun, spec, recorded.base_version, made.events, checkpoints, tell)
    trained = _metrics(await read_run(log, run_id), spec.job_id)
    before = _metrics(events, recorded.job_id)
    return Outcome(run_id, made.num_batches, made.rejected, _means(before), _means(trained))


def _recorded_job(events: RunEvents) -> JobStarted:
    for job, _ in of_type(events.by_topic.get("groups", ()), JobStarted):
        if job.job_id == ids.job_id(events.run_id, TRAINING):
            return job
    raise ConfigError(f"run {events.run_id} has recorded no rollouts of its policy to train on again")


def _check_beginning(events: RunEvents, recorded: JobStarted, config: RunConfig) -> None:
    """Raises ConfigError if the job would begin with another policy, or on other examples, than were recorded."""
    before = config_file.resolve(dict(events.started.config)).config
    for name, ours, theirs in (
        ("the dataset", before.dataset, config.dataset),
        ("seed", before.adapter.seed, config.adapter.seed),
    ):
        if ours != theirs:
            raise ConfigError(f"{name} cannot change in a what-if: the rollouts were made with {ours}")
    base = log_state(events).group(recorded.model_group).published.get(recorded.base_version)
    if base is None:
        raise ConfigError(f"run {events.run_id} has no version {recorded.base_version} to begin from")
    wrong = misfit(base, config)
    if wrong:
        raise ConfigError(f"version {recorded.base_version} of run {events.run_id} does not fit: {wrong}")


async def _rewards(
    log: EventLog, events: RunEvents, recorded: JobStarted, spec: JobSpec, tell: Tell
) -> dict[str, float]:
    """Rewards by trajectory id where they may differ; empty if neither functions nor weights change.

    What was asked for with other settings (validation, rollouts that came with their rewards) stays as recorded.
    """
    tasks = of_type(events.by_topic.get("tasks", ()), TaskRequested)
    inputs = {task.group_id: task.inputs for task, _ in tasks if task.settings == recorded.rollout}
    grading = Grading(recorded.rollout, spec.rollout, inputs)
    if not grading.changes_something:
        return {}
    grading.check()
    closed = of_type(events.by_topic["groups"], GroupClosed)
    groups = [group for group, _ in closed if group.job_id == recorded.job_id and group.group_id in inputs]
    parts = assembly.ranges(events.run_id, groups, events.dead)
    tell(f"rewards of {len(groups)} groups")
    return await grade(log, parts, grading)


async def _train(
    log: EventLog,
    artifacts: ArtifactStore,
    begun: RunStarted,
    spec: JobSpec,
    base_version: int,
    planned: list[Event],
    checkpoints: Path,
    tell: Tell,
) -> None:
    """Write the new run and have a learner of this process train it. The run is ended whatever happens."""
    from rollstream.learner.worker import Worker

    job = JobSubmitted(
        run_id=begun.run_id,
        time_ms=begun.time_ms,
        job_id=spec.job_id,
        model_group=spec.model_group,
        base_version=base_version,
        settings=spec.job,
        fork=begun.parent,
    )
    ended = RunEnded(run_id=begun.run_id, time_ms=begun.time_ms, cause="failed", message="the what-if was interrupted")
    ends = await log.end_offsets("jobs")
    await log.send(begun)
    worker = Worker(log, artifacts, name="what-if", checkpoints=checkpoints, model_groups=(spec.model_group,))
    training: asyncio.Task[None] | None = None
    try:
        await log.send_all([*planned, job])
        tell(f"training {sum(isinstance(event, BatchPlanned) for event in planned)} batches")
        training = asyncio.create_task(worker.run())
        closed = await _closed(log, spec.job_id, ends, training)
        if not isinstance(closed, JobSucceeded):
            cause = closed.error if isinstance(closed, JobFailed) else "it was cancelled"
            ended = ended.model_copy(update={"message": cause})
            raise RunFailedError(f"what-if {begun.run_id}: {cause}")
        ended = ended.model_copy(update={"cause": "completed", "message": ""})
    finally:
        if training is not None:
            training.cancel()
            with contextlib.suppress(asyncio.CancelledError, FencedError):
                await training
        await log.send(ended)


async def _closed(
    log: EventLog, job_id: str, ends: Mapping[int, int], training: "asyncio.Task[None]"
) -> JobSucceeded | JobFailed | JobCancelled:
    """The end of a job. Raises what the learner raises; another one that takes the job over may end it too."""
    reader = await log.reader({TopicPartition("jobs", partition): at for partition, at in ends.items()})
    try:
        while True:
            for record in await reader.poll(timeout_s=0.2):
                event = codec.decode(record).event
                if isinstance(event, (JobSucceeded, JobFailed, JobCancelled)) and event.job_id == job_id:
                    return event
            if training.done() and not isinstance(training.exception(), FencedError):
                await training
    finally:
        await reader.close()


def _metrics(events: RunEvents, job_id: str) -> list[dict[str, float]]:
    steps = of_type(events.by_topic.get("weights", ()), StepTrained)
    return [step.metrics for step, _ in steps if step.job_id == job_id]


def _means(steps: list[dict[str, float]]) -> dict[str, float]:
    return {
        name: sum(step[name] for step in steps if name in step) / len(steps)
        for name in COMPARED
        if any(name in step for step in steps)
    }
