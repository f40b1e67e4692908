"""`replay --what-if FILE`: a run's recorded rollouts trained again with another reward, curriculum, loss or optimizer.

What comes of it is a run of its own: manifests, versions and metrics, but not one rollout. The recorded run is read
from the log that this one is written to, or from an export, see `what_if_import`.
"""

import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from pydantic import JsonValue

from rollstream.eventlog.artifacts import ArtifactStore
from rollstream.eventlog.log import EventLog
from rollstream.harness.config import config_file
from rollstream.harness.config.config_values import check_values
from rollstream.harness.config.settings import TRAINING, JobSpec, jobs_of
from rollstream.harness.config.yaml_reading import merged, read_yaml
from rollstream.harness.fork import misfit
from rollstream.harness.plan import library_versions
from rollstream.harness.preflight import check_model, check_rewards
from rollstream.harness.replay import assembly, what_if_plan
from rollstream.harness.replay.source import RunEvents, of_type, read_run
from rollstream.harness.replay.verify import dataset_of
from rollstream.harness.replay.weights import log_state
from rollstream.harness.replay.what_if_import import Exported, bring_artifact, bring_trajectories
from rollstream.harness.replay.what_if_rewards import Grading, grade
from rollstream.harness.replay.what_if_training import train_planned
from rollstream.schemas import ids
from rollstream.schemas.config import RunConfig
from rollstream.schemas.errors import ConfigError
from rollstream.schemas.events import (
    GroupClosed,
    JobStarted,
    StepTrained,
    TaskRequested,
    WeightsPublished,
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
    log: EventLog,
    events: RunEvents,
    artifacts: ArtifactStore,
    file: Path,
    *,
    checkpoints: Path,
    tell: Tell,
    exported: Exported | None = None,
) -> Outcome:
    """Plan and train a what-if of a run. `file`: YAML whose keys replace those of the run's configuration.

    `exported`: where the run is read if not from `log` and `artifacts`, which then need not know it.
    Raises ConfigError if the change would need other rollouts, RunFailedError if the training fails.
    """
    started, source = events.started, exported or Exported(log, artifacts)
    written = merged(dict(started.config), _changes(file))
    loaded = config_file.resolve(written)
    run_id = ids.new_run_id(f"{started.name}-what-if")
    spec = jobs_of(loaded.config, run_id, is_fork=True)[-1]
    recorded = _recorded_job(events)
    what_if_plan.check(recorded, spec)
    base = _beginning(events, recorded, loaded.config)
    dataset = dataset_of(events, source.artifacts)
    rewards = await _rewards(source.log, events, recorded, spec, loaded.config, tell)
    tell("planning")
    records = events.by_topic["groups"]
    made = what_if_plan.replan(records, recorded, spec, run_id, rewards, {started.run_id: dataset})
    begun = started.model_copy(
        update={
            "run_id": run_id,
            "time_ms": time.time_ns() // 1_000_000,
            "name": f"{started.name}-what-if",
            "config": written,
            "num_partitions": await log.num_partitions("trajectories"),
            "cluster_id": await log.cluster_id(),
            "parent": ForkPoint(run_id=started.run_id, version=recorded.base_version),
            "is_what_if": True,
            "library_versions": library_versions(),
            "started_at": datetime.now(UTC).isoformat(timespec="seconds"),
        }
    )
    planned = made.events
    base = base.model_copy(update={"artifact": bring_artifact(source, artifacts, base.artifact)})
    if exported is not None:
        tell("taking over trajectories")
        begun = begun.model_copy(update={"dataset": bring_artifact(exported, artifacts, started.dataset)})
        planned = await bring_trajectories(exported, log, planned)
    await train_planned(log, artifacts, begun, spec, base, planned, checkpoints, tell)
    trained = _metrics(await read_run(log, run_id), spec.job_id)
    before = _metrics(events, recorded.job_id)
    return Outcome(run_id, made.num_batches, made.rejected, _means(before), _means(trained))


def _changes(file: Path) -> dict[str, JsonValue]:
    """What the file says. Raises ConfigError for what no run may store, as of every other configuration."""
    changes = read_yaml(file)
    try:
        check_values(changes)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from error
    return changes


def _recorded_job(events: RunEvents) -> JobStarted:
    started = events.started
    if started.is_what_if and started.parent is not None:
        raise ConfigError(
            f"run {started.run_id} is a what-if itself and has no rollouts of its own; give run {started.parent.run_id}"
        )
    for job, _ in of_type(events.by_topic.get("groups", ()), JobStarted):
        if job.job_id == ids.job_id(events.run_id, TRAINING):
            return job
    raise ConfigError(f"run {events.run_id} has recorded no rollouts of its policy to train on again")


def _beginning(events: RunEvents, recorded: JobStarted, config: RunConfig) -> WeightsPublished:
    """The version that the recorded job began with.

    Raises ConfigError if the new one would begin with another policy, or on other examples, than were recorded.
    """
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
    path = config.adapter.model.path
    check_model(path, f"trainer_adapters.{config.finetuning.trainer_adapter}.model.path")
    if base.weights_format == "full":
        base = base.model_copy(update={"base_model": path})  # all of the policy is in the weights, so it may have moved
    wrong = misfit(base, config)
    if wrong:
        raise ConfigError(f"version {recorded.base_version} of run {events.run_id} does not fit: {wrong}")
    return base


async def _rewards(
    log: EventLog, events: RunEvents, recorded: JobStarted, spec: JobSpec, config: RunConfig, tell: Tell
) -> dict[str, float]:
    """Rewards by trajectory id where they may differ; empty if neither functions nor weights change.

    What was asked for with other settings (validation, rollouts that came with their rewards) stays as recorded.
    """
    tasks = of_type(events.by_topic.get("tasks", ()), TaskRequested)
    inputs = {task.group_id: task.inputs for task, _ in tasks if task.settings == recorded.rollout}
    grading = Grading(recorded.rollout, spec.rollout, inputs)
    if not grading.changes_something:
        return {}
    check_rewards(config)
    grading.check()
    closed = of_type(events.by_topic["groups"], GroupClosed)
    groups = [group for group, _ in closed if group.job_id == recorded.job_id and group.group_id in inputs]
    parts = assembly.ranges(events.run_id, groups, events.dead)
    tell(f"rewards of {len(groups)} groups")
    return await grade(log, parts, grading)


def _metrics(events: RunEvents, job_id: str) -> list[dict[str, float]]:
    steps = of_type(events.by_topic.get("weights", ()), StepTrained)
    return [step.metrics for step, _ in steps if step.job_id == job_id]


def _means(steps: list[dict[str, float]]) -> dict[str, float]:
    return {
        name: sum(step[name] for step in steps if name in step) / len(steps)
        for name in COMPARED
        if any(name in step for step in steps)
    }
