"""A run about to begin or to go on: its identity, its examples and its jobs, agreed with what the log says."""

import platform
import re
import time
from datetime import UTC, datetime
from importlib import metadata
from typing import NamedTuple

from rollstream.eventlog.artifacts import ArtifactStore
from rollstream.eventlog.log import EventLog
from rollstream.harness import dataset
from rollstream.harness.config import config_file
from rollstream.harness.config.config_file import Loaded
from rollstream.harness.config.finetune_config import RECORDED
from rollstream.harness.config.settings import JobSpec, jobs_of
from rollstream.harness.follower import follow
from rollstream.harness.manifest_size import check_manifests
from rollstream.harness.preflight import environment_of, users_code
from rollstream.harness.progress import Progress
from rollstream.harness.reward_choice import check_examples
from rollstream.schemas import ids
from rollstream.schemas.config import RunConfig
from rollstream.schemas.errors import ConfigError, TruncatedError
from rollstream.schemas.events import RunStarted
from rollstream.schemas.events_training import ForkPoint

MIN_EXAMPLES = 64
"""Examples that an environment is asked for when there is no dataset."""
LIBRARIES = ("rollstream", "torch", "transformers", "peft", "safetensors", "numpy", "faust-streaming", "aiokafka")


class RunPlan(NamedTuple):
    """What the driver conducts."""

    started: RunStarted
    jobs: tuple[JobSpec, ...]
    is_new: bool


async def new_run(
    log: EventLog,
    artifacts: ArtifactStore,
    loaded: Loaded,
    name: str,
    *,
    parent: ForkPoint | None = None,
    run_id: str | None = None,
) -> RunPlan:
    """A run under a fresh id; its examples are put into the artifact store. Raises ConfigError.

    `parent`: the version that it branches from, which is there (`fork.check_fork`). `run_id`: one that is not taken
    (`check_new`), for a run that is to draw the seeds of another log's run.
    """
    config = loaded.config
    examples = examples_of(config)
    run_id = run_id or ids.new_run_id(name)
    jobs = jobs_of(config, run_id, is_fork=parent is not None)
    check_manifests(jobs)
    started = RunStarted(
        run_id=run_id,
        time_ms=time.time_ns() // 1_000_000,
        name=name,
        config=loaded.written,
        seed=config.adapter.seed,
        dataset=artifacts.put_bytes(dataset.to_json_lines(examples), suffix=".jsonl"),
        num_examples=len(examples),
        num_partitions=config.builder.num_partitions,
        cluster_id=await log.cluster_id(),
        library_versions=library_versions(),
        idle_timeout_s=config.trainer.run_idle_timeout_s,
        parent=parent,
        started_at=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    return RunPlan(started, jobs, is_new=True)


async def check_new(log: EventLog, run_id: str) -> None:
    """Raises ConfigError if a run cannot be called so, or one is already."""
    if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", run_id) is None:
        raise ConfigError(f"--run_id {run_id}: letters, digits, '.', '_' and '-', at most 100 of them")
    follower = await follow(log, run_id)
    try:
        progress = await follower.catch_up()
    finally:
        await follower.close()
    if progress.run is not None:
        raise ConfigError(f"--run_id {run_id}: there is a run of this id already; --resume goes on with it")


async def open_run(log: EventLog, loaded: Loaded, run_id: str) -> RunPlan:
    """A run of the log that has not ended, with the jobs of its own configuration. Raises ConfigError."""
    progress = await look_up(log, run_id)
    assert progress.run is not None
    if progress.ended is not None:
        raise ConfigError(f"run {run_id} is over ({progress.ended.cause}); start a new one without --resume")
    is_fork = progress.run.parent is not None
    jobs = jobs_of(config_file.resolve(dict(progress.run.config)).config, run_id, is_fork=is_fork)
    different = _difference(jobs, jobs_of(loaded.config, run_id, is_fork=is_fork))
    if different:
        raise ConfigError(
            f"run {run_id} was started with another {different}: "
            "give it the same file and overrides, or start a new run"
        )
    return RunPlan(progress.run, jobs, is_new=False)


async def look_up(log: EventLog, run_id: str) -> Progress:
    """Where a run of the log is. Raises ConfigError if there is none of this id, TruncatedError if it is cut off."""
    follower = await follow(log, run_id)
    try:
        progress = await follower.catch_up()
    finally:
        await follower.close()
    if progress.run is None:
        begin = (await log.begin_offsets("groups"))[0]
        removed = f", and topic groups partition 0 holds nothing before offset {begin} any more" if begin else ""
        raise ConfigError(f"no run is called {run_id}{removed}; `rollstream runs` lists them")
    if any(job.started and not job.submitted for job in progress.jobs.values()):
        raise await _cut_off(log, run_id, "jobs")
    if any(job.started for job in progress.jobs.values()) and progress.weights is None:
        raise await _cut_off(log, run_id, "weights")
    return progress


async def _cut_off(log: EventLog, run_id: str, topic: str) -> TruncatedError:
    begin, end = (await log.begin_offsets(topic))[0], (await log.end_offsets(topic))[0]
    return TruncatedError(
        f"run {run_id} cannot go on: topic {topic} partition 0 holds offsets {begin} to {end - 1} only, and what the "
        "run wrote before them was removed"
    )


def examples_of(config: RunConfig) -> list[dataset.Example]:
    """The dataset's examples, else the environment's own; none if other components bring them. Raises ConfigError.

    Where every example is rolled out in every epoch, an environment is asked for just the tasks of one.
    """
    if config.dataset is not None:
        return dataset.read_dataset(config.dataset)
    is_submitted = config.trainer.planning == "submitted"
    if is_submitted and config.environment == RECORDED:
        return []
    environment = environment_of(config)
    num = config.adapter.tasks_per_epoch if is_submitted else max(MIN_EXAMPLES, config.adapter.tasks_per_epoch)
    with users_code(f"examples of environment {config.environment}", config):
        made = list(environment.examples(num, config.adapter.seed))
    examples = dataset.examples_of(made, f"environment {config.environment}")
    if config.environment != RECORDED:  # whose examples come with the rollouts
        check_examples(config, examples, f"environment {config.environment}")
    return examples


def library_versions() -> dict[str, str]:
    """Versions of what can change a result."""
    found = {"python": platform.python_version()}
    for name in LIBRARIES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _difference(before: tuple[JobSpec, ...], now: tuple[JobSpec, ...]) -> str | None:
    """The first setting that differs, by its path; none if nothing does."""
    if len(before) != len(now):
        return "warm_start"
    for one, other in zip(before, now, strict=True):
        for part in ("job", "plan", "rollout"):
            mine, theirs = getattr(one, part), getattr(other, part)
            for key in type(mine).model_fields:
                if getattr(mine, key) != getattr(theirs, key):
                    return f"{part}.{key}"
    return None
