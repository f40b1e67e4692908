"""`replay --what-if FILE`: trains a run's recorded rollouts again with another reward, curriculum, loss or optimizer.

The result is a new run with manifests, versions and metrics, but without rollouts of its own. The recorded run is read
from the same log or from an export, see `replay.what_if.imports`.
"""

import asyncio
import os
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from pydantic import JsonValue

from rollstream.eventlog.artifacts import ArtifactStore
from rollstream.eventlog.log import EventLog, ReadableLog, wall_ms
from rollstream.harness.config import file as config_file
from rollstream.harness.config.checks import check_model, silence, warn
from rollstream.harness.config.jobs import jobs_of
from rollstream.harness.config.rewards import permissions_of, weights_of
from rollstream.harness.replays.changed_config import changed, leaves, read_changes, without
from rollstream.harness.runs.driver import give_signs_of_life
from rollstream.harness.runs.plan import planned_as
from rollstream.harness.runs.preflight import check_rewards
from rollstream.harness.runs.sampling_checks import check_temperature
from rollstream.harness.runs.stored_config import check_stored
from rollstream.learner.library_versions import library_versions
from rollstream.replay import assembly
from rollstream.replay.fork import misfit
from rollstream.replay.source import RunEvents, of_type, read_run
from rollstream.replay.verify import dataset_of
from rollstream.replay.weights import log_state
from rollstream.replay.what_if import plan as what_if_plan
from rollstream.replay.what_if.imports import OpenedExport, bring_artifact, bring_trajectories, moved_scores
from rollstream.replay.what_if.rewards import Grading, grade
from rollstream.replay.what_if.training import train_planned
from rollstream.schemas import ids
from rollstream.schemas.algorithm_settings import AlgorithmSettings
from rollstream.schemas.config import RunConfig
from rollstream.schemas.errors import ConfigError, TruncatedError
from rollstream.schemas.events import (
    BatchPlanned,
    GroupClosed,
    JobStarted,
    JobSubmitted,
    RunStarted,
    StepTrained,
    TaskRequested,
    WeightsPublished,
)
from rollstream.schemas.events.training import ForkPoint
from rollstream.schemas.settings import JobSettings, JobSpec, PlanSettings, Settings
from rollstream.schemas.variables import expand

M = TypeVar("M", bound=Settings)
COMPARED = ("reward/mean", "loss/total", "policy/ess", "policy/kl", "policy/entropy")
OnProgress = Callable[[str], None]


class WhatIfOutcome(NamedTuple):
    """A finished what-if."""

    run_id: str
    num_batches: int
    rejected: dict[str, int]
    recorded: dict[str, float]
    """Means of step metrics over the recorded job, in the epochs that the what-if trained."""
    trained: dict[str, float]
    """The same over the what-if's."""


async def what_if(
    log: EventLog,
    events: RunEvents,
    artifacts: ArtifactStore,
    file: Path,
    *,
    checkpoints: Path,
    on_progress: OnProgress,
    exported: OpenedExport | None = None,
    trust: bool = False,
    warn: OnProgress = warn,
) -> WhatIfOutcome:
    """Plan and train a what-if of a run. `file`: YAML whose keys replace those of the run's configuration.

    `exported`: the export to read the run from instead of `log` and `artifacts`. `warn` receives a message for each
    key without an effect. Raises ConfigError if the change would need other rollouts, NotAllowedError for names that
    only the recorded configuration contains (unless `trust`), RunFailedError if the training fails.
    """
    started, source = events.started, exported or OpenedExport(log, artifacts)
    changes = read_changes(file)
    check_stored(started.config, changes, run_id=started.run_id, trust=trust)
    written = changed(started.config, changes)
    config = _of_first_group(config_file.resolve(written, is_new=False).config)
    run_id = ids.new_run_id(f"{started.name}-what-if")
    check_temperature(config, next(iter(config.trained())))
    recorded = _recorded_job(events)
    before = _of_first_group(config_file.resolve(dict(started.config), is_new=False).config)
    spec, same = (spec_of(one, before, recorded, _submitted(events, recorded), run_id) for one in (config, before))
    what_if_plan.check(recorded, spec)
    curriculum = config_file.block_at(changes, "finetuning", "curriculum_learning")
    spec = what_if_plan.filtering(recorded, spec, steers=curriculum.get("steer") is True)
    base = _beginning(events, recorded, config)
    for line in _ineffective(file, events, recorded, changes, is_same=_trains_alike(spec, same)):
        warn(line)
    dataset = dataset_of(events, source.artifacts)
    rewards = await _rewards(source.log, events, recorded, spec, config, on_progress)
    on_progress("planning")
    records = events.by_topic["groups"]
    made = what_if_plan.replan(records, recorded, spec, run_id, rewards, {started.run_id: dataset})
    begun = await _begun(log, started, run_id, written, recorded)
    planned = made.events
    base = base.model_copy(update={"artifact": bring_artifact(source, artifacts, base.artifact)})
    if exported is not None:
        on_progress("importing trajectories")
        begun = begun.model_copy(update={"dataset": bring_artifact(exported, artifacts, started.dataset)})
        planned = await bring_trajectories(exported, log, planned)
    scores = moved_scores(source.log, events, planned)
    signs = asyncio.create_task(give_signs_of_life(log, begun, is_new=True))
    try:
        await train_planned(
            log, artifacts, begun, spec, base, planned, checkpoints, on_progress, permissions_of(config), scores
        )
    finally:
        signs.cancel()
        await asyncio.wait({signs})
    epochs = {event.epoch for event in made.events if isinstance(event, BatchPlanned)}
    old = _metrics(events, recorded.job_id, epochs)
    new = _metrics(await read_run(log, run_id), spec.job_id, epochs)
    return WhatIfOutcome(run_id, made.num_batches, made.rejected, means(old), means(new))


async def _begun(
    log: EventLog, parent: RunStarted, run_id: str, written: dict[str, JsonValue], recorded: JobStarted
) -> RunStarted:
    return parent.model_copy(
        update={
            "run_id": run_id,
            "time_ms": wall_ms(),
            "name": f"{parent.name}-what-if",
            "config": written,
            "num_partitions": await log.num_partitions("trajectories"),
            "cluster_id": await log.cluster_id(),
            "parent": ForkPoint(run_id=parent.run_id, version=recorded.base_version),
            "is_what_if": True,
            "library_versions": library_versions(),
            "started_at": datetime.now(UTC).isoformat(timespec="seconds"),
        }
    )


def _of_first_group(config: RunConfig) -> RunConfig:
    """The configuration as it applies to the model group that a what-if trains: the one whose job planned the tasks."""
    return next(iter(config.trained().values()))


def spec_of(config: RunConfig, before: RunConfig, started: JobStarted, settings: JobSettings, run_id: str) -> JobSpec:
    """The job of a what-if: as recorded (`started`, and the submitted `settings`), with the changes of its file.

    `config`: the run's configuration `before` with the file's keys. Defaults may have changed since the run was
    recorded, so only fields apply in which both differ, or which `config` sets and `before` does not.
    """
    if config.trainer.planning == before.trainer.planning:
        config, before = (planned_as(one, started.plan.planning) for one in (config, before))
    now, was = jobs_of(config, run_id, is_fork=True)[-1], jobs_of(before, run_id, is_fork=True)[-1]
    given = (config.adapter.model_fields_set - before.adapter.model_fields_set) | (
        config.builder.model_fields_set - before.builder.model_fields_set
    )
    losses = config.adapter.algorithm.model_fields_set - before.adapter.algorithm.model_fields_set
    algorithm = _changed_algorithm(settings.algorithm, was.job.algorithm, now.job.algorithm, losses)
    rollout = _changed(started.rollout, was.rollout, now.rollout, given)
    changes: dict[str, Any] = {"agents": now.rollout.agents}
    if weights_of(config) != weights_of(before) or config.reward_functions != before.reward_functions:
        changes["reward_weights"] = now.rollout.reward_weights
    return now._replace(
        job=_changed(settings, was.job, now.job, given).model_copy(update={"algorithm": algorithm}),
        plan=_changed_plan(started.plan, was.plan, now.plan, given),
        rollout=rollout.model_copy(update=changes),
    )


def _changed_plan(recorded: PlanSettings, was: PlanSettings, now: PlanSettings, given: Set[str]) -> PlanSettings:
    """`knows_single_group` belongs to the curriculum: as recorded, unless the curriculum is turned on or given."""
    plan = _changed(recorded, was, now, given)
    before, after = was.curriculum, now.curriculum
    if (before.enabled, before.filter_single_group) == (after.enabled, after.filter_single_group):
        return plan
    return plan.model_copy(update={"knows_single_group": now.knows_single_group})


def _changed_algorithm(
    recorded: AlgorithmSettings, was: AlgorithmSettings, now: AlgorithmSettings, given: Set[str]
) -> AlgorithmSettings:
    """Another algorithm's settings keep of the recorded ones what all have in common; the same one's change in part."""
    if (type(recorded), recorded.name) == (type(now), now.name):
        return _changed(recorded, was, now, given)
    common = {name: getattr(now, name) for name in AlgorithmSettings.model_fields}
    shared = AlgorithmSettings(**{name: getattr(recorded, name) for name in common})
    before = AlgorithmSettings(**{name: getattr(was, name) for name in common})
    kept = _changed(shared, before, AlgorithmSettings(**common), given & common.keys())
    return now.model_copy(update={**vars(kept), "name": now.name})


def _changed(recorded: M, was: M, now: M, given: Set[str]) -> M:
    """The recorded settings with the fields that differ between `now` and `was`, and those `given` only in `now`."""
    changes: dict[str, Any] = {}
    names = {*given, *(now.model_fields_set - was.model_fields_set)}
    for name in type(now).model_fields:
        one, old, new = (getattr(settings, name) for settings in (recorded, was, now))
        if isinstance(one, Settings) and isinstance(new, type(one)) and isinstance(old, type(one)):
            changes[name] = _changed(one, old, new, frozenset())
        elif old != new or name in names:
            changes[name] = new
    return recorded.model_copy(update=changes)


def _trains_alike(one: JobSpec, other: JobSpec) -> bool:
    return what_if_plan.without_task_choice(one) == what_if_plan.without_task_choice(other)


def _ineffective(
    file: Path, events: RunEvents, job: JobStarted, changes: dict[str, JsonValue], *, is_same: bool
) -> Iterator[str]:
    """Warnings of keys without an effect. `is_same`: none of them has one."""
    for path in without_effect(events, job, changes):
        yield f"{'.'.join(path)}: accepted, but ignored here (a what-if trains recorded rollouts and has no use for it)"
    if is_same:
        yield f"{file}: changes no setting that a what-if uses, so it is the run trained again; write other values"


def without_effect(events: RunEvents, job: JobStarted, changes: dict[str, JsonValue]) -> Iterator[tuple[str, ...]]:
    """Paths of keys that change the configuration, but not the what-if."""
    recorded, submitted = dict(events.started.config), _submitted(events, job)

    def resolved(changes: dict[str, JsonValue]) -> config_file.Loaded:
        with silence():
            return config_file.resolve(changed(recorded, changes), is_new=False)

    before, whole = _of_first_group(resolved({}).config), resolved(changes)

    def effect(config: RunConfig) -> object:
        spec = what_if_plan.filtering(job, spec_of(_of_first_group(config), before, job, submitted, ""))
        return (*what_if_plan.without_task_choice(spec), permissions_of(config))

    for path in leaves(changes):
        try:
            rest = resolved(without(changes, path))
            is_changed = (rest.config, rest.finetune) != (whole.config, whole.finetune)
            is_unused = is_changed and effect(rest.config) == effect(whole.config)
        except ConfigError:
            continue  # another key needs it
        if is_unused:
            yield path


def _recorded_job(events: RunEvents) -> JobStarted:
    started = events.started
    if started.is_what_if and started.parent is not None:
        raise ConfigError(
            f"run {started.run_id} is a what-if and has no rollouts of its own; use run {started.parent.run_id}"
        )
    for job, _ in of_type(events.by_topic.get("groups", ()), JobStarted):
        if job.job_id == ids.job_id(events.run_id, ids.TRAINING):
            return job
    raise ConfigError(f"run {events.run_id} has no recorded rollouts of its policy; use a run with an RL job")


def _submitted(events: RunEvents, recorded: JobStarted) -> JobSettings:
    """The submitted job settings. Raises TruncatedError if the record was removed."""
    for job, _ in of_type(events.by_topic.get("jobs", ()), JobSubmitted):
        if job.job_id == recorded.job_id:
            return job.settings
    raise TruncatedError(f"topic jobs no longer has the settings of job {recorded.job_id}; use an export of the run")


def _beginning(events: RunEvents, recorded: JobStarted, config: RunConfig) -> WeightsPublished:
    """The base version of the recorded job.

    Raises ConfigError if the new job would start with another policy or other examples than recorded.
    """
    before = _of_first_group(config_file.resolve(dict(events.started.config), is_new=False).config)
    if before.adapter.warm_start != config.adapter.warm_start:
        raise ConfigError(
            f"warm_start cannot change in a what-if, which begins with the recorded version {recorded.base_version}; "
            "leave it out, or use `finetune --fork`"
        )
    for name, ours, theirs in (
        ("the dataset", before.dataset, config.dataset),
        ("seed", before.adapter.seed, config.adapter.seed),
    ):
        if ours != theirs:
            raise ConfigError(f"{name} cannot change in a what-if: the rollouts were made with {ours}; leave it out")
    base = log_state(events).group(recorded.model_group).published.get(recorded.base_version)
    if base is None:
        raise ConfigError(
            f"run {events.run_id} no longer has its base version {recorded.base_version}; use an export of the run"
        )
    path = config.adapter.model.path
    check_model(str(expand(path, os.environ)), config.group_path(ids.name_of(recorded.model_group), "model.path"))
    moved = base.model_copy(update={"base_model": path})
    # full weights define the policy, so the path may have changed
    wrong = misfit(moved if base.weights_format == "full" else base, config)
    if wrong:
        raise ConfigError(f"version {recorded.base_version} of run {events.run_id} does not fit: {wrong}")
    return moved


async def _rewards(
    log: ReadableLog, events: RunEvents, recorded: JobStarted, spec: JobSpec, config: RunConfig, on_progress: OnProgress
) -> dict[str, float | None]:
    """Recomputed rewards by trajectory id, None where there is no score; empty if neither functions nor weights change.

    Rollouts with other settings (validation, or recorded with rewards) keep theirs.
    """
    tasks = of_type(events.by_topic.get("tasks", ()), TaskRequested)
    inputs = {task.group_id: task.inputs for task, _ in tasks if task.settings == recorded.rollout}
    grading = Grading(recorded.rollout, spec.rollout, inputs, permissions_of(config))
    if not grading.changes_something:
        return {}
    check_rewards(config)
    grading.check()
    closed = of_type(events.by_topic["groups"], GroupClosed)
    groups = [group for group, _ in closed if group.job_id == recorded.job_id and group.group_id in inputs]
    parts = assembly.ranges(events.run_id, groups, events.dead)
    on_progress(f"rewards of {len(groups)} groups")
    return await grade(log, parts, grading)


def _metrics(events: RunEvents, job_id: str, epochs: Set[int]) -> list[dict[str, float]]:
    steps = of_type(events.by_topic.get("weights", ()), StepTrained)
    return [step.metrics for step, _ in steps if step.job_id == job_id and step.epoch in epochs]


def means(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Mean of each compared metric over the steps that have it: one that adopted an earlier version has none."""
    found = {name: [step[name] for step in steps if name in step] for name in COMPARED}
    return {name: sum(values) / len(values) for name, values in found.items() if values}
