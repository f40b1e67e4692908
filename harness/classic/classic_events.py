"""What the harness writes itself in its classic way: an epoch, its tasks, and submissions. Pure."""

from collections.abc import Sequence
from typing import Any

from rollstream.eventlog import codec
from rollstream.harness.config.settings import JobSpec
from rollstream.harness.dataset import Example
from rollstream.schemas import ids
from rollstream.schemas.events import EpochStarted, RunStarted, SubmissionReceived, TaskRequested
from rollstream.schemas.events_training import SubmittedGroup


def epoch_started(spec: JobSpec, run_id: str, epoch: int, num_tasks: int, time_ms: int) -> EpochStarted:
    """An epoch whose tasks the harness asks for."""
    return EpochStarted(run_id=run_id, time_ms=time_ms, job_id=spec.job_id, epoch=epoch, num_tasks=num_tasks)


def epoch_tasks(
    started: RunStarted, spec: JobSpec, examples: Sequence[Example], epoch: int, *, min_version: int, time_ms: int
) -> list[TaskRequested]:
    """One task an example, in the order of the dataset: everything is rolled out, and filtered afterwards."""
    return [
        _task(
            started,
            spec,
            example,
            group_id=ids.group_id(started.run_id, _short(spec, started), epoch, index),
            epoch=epoch,
            index=index,
            num_rollouts=spec.plan.num_generations,
            minimum=min(spec.plan.min_generations, spec.plan.num_generations),
            min_version=min_version,
            time_ms=time_ms,
            settings=spec.rollout,
        )
        for index, example in enumerate(examples)
    ]


def min_version(spec: JobSpec, base_version: int, num_planned: int) -> int:
    """The version that tasks must wait for, so that they are fresh enough at the next batch. It is sure to come."""
    return base_version + max(0, num_planned - spec.plan.max_staleness)


def submission(
    spec: JobSpec,
    run_id: str,
    epoch: int,
    groups: Sequence[SubmittedGroup],
    *,
    time_ms: int,
    percentile: float | None = None,
    is_last: bool = False,
) -> SubmissionReceived:
    """What is to be trained on. Its id derives from epoch and content: submitting the same again is the same."""
    content: Any = [group.model_dump(mode="json") for group in groups]
    digest = codec.canonical_digest([spec.job_id, epoch, content, is_last])
    return SubmissionReceived(
        run_id=run_id,
        time_ms=time_ms,
        job_id=spec.job_id,
        submission_id=f"{spec.job_id}/e{epoch:05d}/{digest[:16]}",
        epoch=epoch,
        groups=tuple(groups),
        curriculum_percentile=percentile,
        is_last=is_last,
    )


def _short(spec: JobSpec, started: RunStarted) -> str:
    return spec.job_id.removeprefix(f"{started.run_id}/")


def _task(started: RunStarted, spec: JobSpec, example: Example, *, group_id: str, **fields: Any) -> TaskRequested:
    return TaskRequested(
        run_id=started.run_id,
        job_id=spec.job_id,
        group_id=group_id,
        example_id=example.example_id,
        inputs=example.inputs,
        seed=ids.derive_seed(started.seed, group_id),
        **fields,
    )
