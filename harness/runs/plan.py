"""The plan of a new or resumed run: its identity, examples and jobs, consistent with the log."""

import hashlib
import re
from datetime import UTC, datetime
from typing import Literal, NamedTuple

import orjson
from pydantic import JsonValue

from rollstream.eventlog import codec
from rollstream.eventlog.artifacts import ArtifactStore
from rollstream.eventlog.log import ReadableLog, record_size, wall_ms
from rollstream.harness.config import dataset
from rollstream.harness.config import file as config_file
from rollstream.harness.config.checks import check_attempts, warn
from rollstream.harness.config.file import Loaded
from rollstream.harness.config.jobs import WRITTEN, check_manifests, jobs_of, most_trajectories
from rollstream.harness.config.resolve import block_of, is_ours
from rollstream.harness.config.rewards import check_examples, permissions_of
from rollstream.harness.runs.follower import check_partitions, is_known, progress_of
from rollstream.harness.runs.preflight import check_inputs, environment_of, users_code
from rollstream.harness.runs.progress import Progress
from rollstream.harness.runs.sampling_checks import reads_base_models
from rollstream.harness.runs.stored_config import check_stored, check_variables, from_variables, name_changes
from rollstream.learner.library_versions import library_versions
from rollstream.producers.engines.base import base_model_of
from rollstream.producers.league.draw import frozen_player
from rollstream.producers.league.opponents import PublishedVersions
from rollstream.schemas import ids
from rollstream.schemas.config import RunConfig
from rollstream.schemas.errors import ConfigError, ModelError, NotAllowedError, TruncatedError
from rollstream.schemas.evaluators import DatasetSection
from rollstream.schemas.events import JobStarted, RunStarted, TaskRequested
from rollstream.schemas.events.recorded import RECORDED
from rollstream.schemas.events.training import ForkPoint
from rollstream.schemas.finetuning import builder_path, trainer_path
from rollstream.schemas.settings import EXTERNAL, MAX_TASKS, JobSpec
from rollstream.schemas.topics import TOPICS

MIN_EXAMPLES = 64
"""Examples that an environment is asked for when there is no dataset."""


class RunPlan(NamedTuple):
    """The run that the driver conducts."""

    started: RunStarted
    jobs: tuple[JobSpec, ...]
    is_new: bool
    is_over: bool = False
    """Whether RunEnded is written, so that only the steps after it are left: the final model, the metrics and the
    result.
    """

    @property
    def is_submitted(self) -> bool:
        """Whether components conduct the run epoch by epoch (planning `submitted`)."""
        return self.jobs[-1].plan.planning == "submitted"


async def new_run(
    log: ReadableLog,
    artifacts: ArtifactStore,
    loaded: Loaded,
    name: str,
    *,
    parent: ForkPoint | None = None,
    run_id: str | None = None,
    examples: list[dataset.Example] | None = None,
) -> RunPlan:
    """A run under a fresh id; its examples are put into the artifact store. Raises ConfigError.

    `parent`: the existing version to branch from (`fork.check_fork`). `run_id`: an unused id (`check_new`), for a run
    that must use the seeds of a run of another log. `examples`: those of its dataset, where they were read already.
    """
    config = loaded.config
    examples = examples_of(config) if examples is None else examples
    run_id = run_id or ids.new_run_id(name)
    jobs = checked_jobs(loaded, run_id, examples, is_fork=parent is not None)
    await check_frozen(log, config, run_id)
    started = RunStarted(
        run_id=run_id,
        time_ms=wall_ms(),
        name=name,
        config=loaded.written,
        seed=config.adapter.seed,
        dataset=artifacts.put_bytes(dataset.to_json_lines(examples), suffix=".jsonl"),
        num_examples=len(examples),
        num_partitions=await log.num_partitions("tasks"),
        cluster_id=await log.cluster_id(),
        library_versions=library_versions(),
        idle_timeout_s=config.trainer.run_idle_timeout_s,
        parent=parent,
        started_at=datetime.now(UTC).isoformat(timespec="seconds"),
        from_variables=from_variables(jobs, loaded.written),
    )
    return RunPlan(started, jobs, is_new=True)


def checked_examples(
    loaded: Loaded, run_id: str, examples: list[dataset.Example] | None, *, is_fork: bool
) -> list[dataset.Example]:
    """The examples of a new run: `examples`, where those of its dataset were read already. Raises as `checked_jobs`."""
    examples = examples_of(loaded.config) if examples is None else examples
    checked_jobs(loaded, run_id, examples, is_fork=is_fork)
    return examples


def checked_jobs(loaded: Loaded, run_id: str, examples: list[dataset.Example], *, is_fork: bool) -> tuple[JobSpec, ...]:
    """The jobs of a new run. Raises ConfigError for records that could become too large."""
    jobs = jobs_of(loaded.config, run_id, is_fork=is_fork)
    check_manifests(jobs)
    check_attempts(jobs)
    check_tasks(jobs, examples)
    _check_epoch(loaded, jobs[-1], len(examples))
    return jobs


def _check_epoch(loaded: Loaded, spec: JobSpec, num_examples: int) -> None:
    """Raises ConfigError if an epoch that is submitted whole has more trajectories than fit into its manifest.

    Only warns where the curriculum or components of others may leave some out. Rollouts have one trajectory at least.
    """
    is_known = is_ours(block_of(loaded.finetune, "trajectory_builder")) and not spec.job.algorithm.needs.pairs
    num, most = num_examples * spec.plan.num_generations, most_trajectories(spec, WRITTEN)
    if num <= most or spec.plan.planning != "submitted" or not is_known or loaded.config.environment == RECORDED:
        return
    epoch = f"job {spec.job_id}: an epoch of {num} trajectories (examples x num_generations)"
    what = f"{epoch} exceeds the {most} that fit into its manifest"
    others = not all(is_ours(block_of(loaded.finetune, name)) for name in ("trainer", "trainer_adapter"))
    if not spec.plan.curriculum.enabled and not others:
        raise ConfigError(f"{what}; give fewer examples, or lower num_generations")
    warn(f"{what}; the run fails if the curriculum and the components leave more than {most} of them")


def check_tasks(jobs: tuple[JobSpec, ...], examples: list[dataset.Example]) -> None:
    """Raises ConfigError for a job whose task with the largest example would be above the limit of its topic."""
    limit = TOPICS[TaskRequested.TOPIC].max_record_bytes
    if not examples:
        return
    largest = max(examples, key=lambda example: len(orjson.dumps(example.inputs)))
    for spec in (spec for spec in jobs if not spec.is_frozen):
        size = _task_bytes(spec, largest)
        if size > limit:
            raise ConfigError(
                f"job {spec.job_id}: the task of example {largest.example_id[:100]!r} would have {size} bytes, "
                f"more than the {limit} of a record: {len(orjson.dumps(largest.inputs))} are its inputs, the rest "
                "settings such as environment_config; shorten either"
            )


def _task_bytes(spec: JobSpec, example: dataset.Example) -> int:
    """Size of a task with high numbers."""
    number = max(MAX_TASKS, spec.plan.num_epochs)
    encoded = codec.encode(
        TaskRequested.of_run(
            2**62,  # the seed
            run_id=ids.run_of(spec.job_id),
            time_ms=2**41,
            group_id=ids.group_id(ids.run_of(spec.job_id), ids.name_of(spec.job_id), number, MAX_TASKS),
            example_id=example.example_id,
            job_id=spec.job_id,
            epoch=number,
            index=MAX_TASKS,
            inputs=example.inputs,
            num_rollouts=spec.plan.num_generations,
            oversampling=spec.plan.oversampling,
            minimum=spec.plan.num_generations,
            min_version=number,
            settings=spec.rollout,
            min_versions=dict.fromkeys(spec.rollout.agents.values(), number),
        )
    )
    return record_size(encoded.key, encoded.value, encoded.headers)


async def check_frozen(log: ReadableLog, config: RunConfig, run_id: str) -> None:
    """Raises ConfigError for a frozen opponent of another run that the log does not have, or whose weights are gone.

    Also for one whose base model the run's producers may not load, or have with another tokenizer.
    """
    league, versions = config.builder.league, PublishedVersions(log)
    wanted = [(written, name) for written in (league.frozen if league else ()) for name in config.by_group()]
    for written, name in wanted:
        player = frozen_player(written, ids.model_group(run_id, name))
        if ids.run_of(player) == run_id:
            continue  # a version that is to come
        try:
            published = await versions.find(player)
            if reads_base_models(config):
                base_model_of(published, permissions_of(config))
        except (ModelError, NotAllowedError) as error:
            location = builder_path(config.finetuning, "league.frozen")
            raise ConfigError(f"{location}: {written}: {error}") from error


def check_id(run_id: str) -> None:
    """Raises ConfigError if `run_id` is not a valid id."""
    if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", run_id) is None:
        raise ConfigError(f"--run_id {run_id} is not valid; use at most 100 letters, digits, '.', '_' and '-'")


async def check_new(log: ReadableLog, run_id: str) -> None:
    """Raises ConfigError if `run_id` is already in use."""
    if await is_known(log, run_id):
        raise ConfigError(f"--run_id {run_id}: this run already exists; continue it with --resume")


async def open_run(
    log: ReadableLog, artifacts: ArtifactStore, loaded: Loaded, run_id: str, *, trust: bool = False
) -> RunPlan:
    """A run of the log with the jobs of its own configuration. A run that has ended is not conducted again.

    Raises ConfigError for other settings than the run's, in particular NotAllowedError for names that only the stored
    configuration has, unless `trust`; TopicError for topics with other partitions than at the run's start;
    ArtifactError for a store without the run's dataset.
    """
    progress = await look_up(log, run_id)
    assert progress.run is not None
    if progress.ended is None:
        await check_partitions(log, progress.run)
    check_stored(progress.run.config, loaded.written, run_id=run_id, trust=trust)
    is_fork = progress.run.parent is not None
    stored = config_file.resolve(dict(progress.run.config), is_new=False)
    started = progress.job(ids.job_id(run_id, ids.TRAINING)).started
    planning = stored.config.trainer.planning if started is None else started.plan.planning
    jobs = jobs_of(planned_as(stored.config, planning), run_id, is_fork=is_fork)
    if progress.ended is None:
        check_variables(progress, jobs, stored.config.trainer.run_idle_timeout_s)
    trainer = block_of(loaded.finetune, "trainer")
    is_alike = "planning" not in trainer.model_fields_set or trainer.planning == planning
    given = planned_as(loaded.config, planning) if is_alike else loaded.config
    different = _difference(jobs, jobs_of(given, run_id, is_fork=is_fork))
    if different := different or _run_difference(progress.run, stored.config, loaded.config):

        def is_different(written: dict[str, JsonValue]) -> bool:
            one = config_file.resolve(written, is_new=False).config
            is_other = _difference(jobs, jobs_of(planned_as(one, planning), run_id, is_fork=is_fork))
            return is_other is not None or one.trainer.run_idle_timeout_s != stored.config.trainer.run_idle_timeout_s

        raise ConfigError(
            f"run {run_id} was started with another "
            f"{name_changes(progress.run.config, loaded.written, is_different) or different}: "
            "give it the same file and overrides, or start a new run"
        )
    if progress.ended is None:
        artifacts.fetch(progress.run.dataset)  # without it curation would wait, or end the run
        artifacts.drop_copy(progress.run.dataset)
    kept = tuple(weighted_as_recorded(spec, progress.job(spec.job_id).started) for spec in jobs)
    return RunPlan(progress.run, kept, is_new=False, is_over=progress.ended is not None)


def planned_as(config: RunConfig, planning: Literal["stream", "submitted"]) -> RunConfig:
    """The configuration with the planning of the recorded run: `nat finetune` runs epoch by epoch where `rollstream
    finetune` would stream."""
    return config.model_copy(update={"trainer": config.trainer.model_copy(update={"planning": planning})})


def weighted_as_recorded(spec: JobSpec, recorded: JobStarted | None) -> JobSpec:
    """A job with the reward weights, the group sizes and the agents without need of a reward recorded at its start.

    The same configuration gave others in earlier releases: `finetuning.reward_function` was added to the environment's
    rewards, and every recorded example was asked for as many rollouts as the largest one has.
    """
    if recorded is None:
        return spec
    sizes = recorded.plan.has_recorded_sizes
    names = ("reward_weights", "algorithm_weights", "frozen_agents")
    kept = {name: getattr(recorded.rollout, name) for name in names}
    return spec._replace(
        rollout=spec.rollout.model_copy(update=kept),
        plan=spec.plan.model_copy(update={"has_recorded_sizes": sizes}),
    )


async def look_up(log: ReadableLog, run_id: str) -> Progress:
    """The progress of a run of the log.

    Raises ConfigError if the run does not exist, TruncatedError if its beginning was removed.
    """
    progress = await progress_of(log, run_id)
    if any(job.started and not job.submitted for job in progress.jobs.values()):
        raise await _cut_off(log, run_id, "jobs")
    if any(progress.version_of(group) < 0 for group in _published_groups(progress)):
        raise await _cut_off(log, run_id, "weights")
    return progress


def _published_groups(progress: Progress) -> set[str]:
    """Model groups that have published a version: a run starts its jobs after the first one, a shared model group
    before it.
    """
    found, has_started = set[str](), any(job.started for job in progress.jobs.values())
    for job in progress.jobs.values():
        if job.submitted is None or job.submitted.settings.kind == EXTERNAL:
            continue
        if job.submitted.fine_tune is None and has_started:
            found.add(progress.model_group)
        elif job.submitted.fine_tune is not None and job.has_progressed:
            found.add(job.submitted.model_group)
    return found


async def _cut_off(log: ReadableLog, run_id: str, topic: str) -> TruncatedError:
    begin, end = (await log.begin_offsets(topic))[0], (await log.end_offsets(topic))[0]
    return TruncatedError(
        f"run {run_id} cannot be resumed: topic {topic} partition 0 holds only offsets {begin} to {end - 1}, and "
        f"earlier records of the run were removed; begin a new run"
    )


def examples_of(config: RunConfig) -> list[dataset.Example]:
    """The dataset's examples, else the environment's own; none if other components supply them.

    Raises ConfigError. If every example is rolled out in every epoch, the environment makes only the tasks of one
    epoch.
    """
    if config.dataset is not None:
        return dataset.read_dataset(config.dataset)
    is_submitted = config.trainer.planning == "submitted"
    if is_submitted and config.environment == RECORDED:
        return []
    environment = environment_of(config)
    num = config.adapter.tasks_per_epoch if is_submitted else max(MIN_EXAMPLES, config.adapter.tasks_per_epoch)
    location = f"environment {config.environment}: {type(environment).__name__}.examples()"
    with users_code(location, config):
        examples = dataset.examples_of(environment.examples(num, config.adapter.seed), location)
    check_inputs(config, examples, location)
    if config.environment != RECORDED:  # examples are part of the recorded rollouts
        check_examples(config, examples, f"environment {config.environment}")
    return examples


def _difference(before: tuple[JobSpec, ...], now: tuple[JobSpec, ...]) -> str | None:
    """The first setting that differs, by its path; none if nothing does."""
    if {spec.model_group for spec in before} != {spec.model_group for spec in now}:
        return "agents (their model groups)"
    if len(before) != len(now):
        return "warm_start"
    for one, other in zip(before, now, strict=True):
        if one.fork != other.fork:
            return "model_groups.version"
        for part in ("job", "plan", "rollout"):
            mine, theirs = getattr(one, part), getattr(other, part)
            for key in type(mine).model_fields:
                if getattr(mine, key) != getattr(theirs, key):
                    return f"setting {part}.{key} (recorded: {getattr(mine, key)}, given: {getattr(theirs, key)})"
    return None


def _run_difference(started: RunStarted, before: RunConfig, now: RunConfig) -> str | None:
    """The first setting of the run itself that differs, by its path; none if nothing does."""
    if before.trainer.run_idle_timeout_s != now.trainer.run_idle_timeout_s:
        return trainer_path(now.finetuning, "run_idle_timeout_s")
    return "dataset" if _is_other_dataset(started, before.dataset, now.dataset) else None


def _is_other_dataset(started: RunStarted, before: DatasetSection | None, now: DatasetSection | None) -> bool:
    """Whether another dataset than the recorded one is named. None need be named, nor the run's own still be there.

    One that was changed in place is reported only: the run goes on with the examples that it recorded.
    """
    if now is None:
        return False
    try:
        content = dataset.to_json_lines(dataset.read_dataset(now))
    except ConfigError:
        if now == before:
            return False
        raise
    if hashlib.sha256(content).hexdigest() == started.dataset.sha256:
        return False
    if before is None or _resolved(now) != _resolved(before):
        return True
    warn(
        f"dataset {now.file_path} has changed since run {started.run_id} began, or was read in another way then; the "
        "run keeps its recorded examples"
    )
    return False


def _resolved(section: DatasetSection) -> DatasetSection:
    return section.model_copy(update={"file_path": section.file_path.expanduser().resolve()})
