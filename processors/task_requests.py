"""From an epoch's start to its task requests: which examples, which seeds, how far ahead of training."""

from collections.abc import Mapping

from pydantic import JsonValue

from rollstream.processors import curriculum
from rollstream.processors.curate_state import Job, Run
from rollstream.schemas import ids
from rollstream.schemas.events import EpochStarted, TaskRequested

Dataset = Mapping[str, Mapping[str, JsonValue]]
"""Inputs by example id."""


def request_tasks(run: Run, job: Job, event: EpochStarted, dataset: Dataset) -> list[TaskRequested]:
    """The tasks of an epoch, by index. Notes in the job what was asked for; none if the dataset is empty."""
    plan = job.started.plan
    requests: list[TaskRequested] = []
    for index, example_id in enumerate(_examples(run, job, event.epoch, dataset)):
        group_id = ids.group_id(event.run_id, job.short_name, event.epoch, index)
        job.last_asked[example_id] = event.epoch
        request = TaskRequested(
            run_id=event.run_id,
            time_ms=event.time_ms,
            group_id=group_id,
            example_id=example_id,
            job_id=event.job_id,
            epoch=event.epoch,
            index=index,
            inputs=dict(dataset[example_id]),
            num_rollouts=plan.num_generations,
            minimum=min(plan.min_generations, plan.num_generations),
            seed=ids.derive_seed(run.started.seed, group_id),
            min_version=min_version(job, index),
            settings=job.started.rollout,
        )
        requests.append(request)
    return requests


def min_version(job: Job, index: int) -> int:
    """The version that a task's engine must have reached, so that its group is fresh at the manifest it should fill.

    Never above the version of the next manifest: a later one exists only if the groups before this one fill manifests,
    which filters may prevent, and then the task would wait for ever. Demonstrations need the base version only.
    """
    base = job.started.base_version
    if job.started.rollout.policy == "demonstration":
        return base
    ahead = 0 if job.is_single_batch else (len(job.ready) + index) // job.groups_per_batch
    return max(base, job.next_version + min(0, ahead - job.started.plan.max_staleness))


def _examples(run: Run, job: Job, epoch: int, dataset: Dataset) -> list[str]:
    plan = job.started.plan
    seed = ids.derive_seed(run.started.seed, job.started.job_id, "curriculum")
    if not (plan.curriculum.enabled and plan.curriculum.steer):
        return curriculum.walk(dataset.keys(), epoch * plan.tasks_per_epoch, plan.tasks_per_epoch, seed)
    job.progress = curriculum.expand(job.progress, epoch, plan.curriculum)
    return curriculum.choose(
        dataset.keys(),
        job.window.known(job.window_start),
        job.last_asked,
        plan.curriculum,
        job.progress,
        epoch=epoch,
        count=plan.tasks_per_epoch,
        seed=seed,
    )
