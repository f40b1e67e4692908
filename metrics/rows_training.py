"""Rows of the topics groups, batches, jobs and weights."""

from collections.abc import Callable, Iterator
from typing import Any

from rollstream.metrics.rows_rollouts import TEXT_CHARS, json_text, number64
from rollstream.schemas.events_training import (
    BatchPlanned,
    EpochSealed,
    EpochStarted,
    GroupClosed,
    JobStarted,
    RunEnded,
    RunStarted,
    SubmissionReceived,
    TrajectoryRejected,
)
from rollstream.schemas.events_weights import (
    JobCancelled,
    JobFailed,
    JobProgressed,
    JobSubmitted,
    JobSucceeded,
    LearnerClaimed,
    StepTrained,
    WeightsLoaded,
    WeightsPublished,
)

Row = dict[str, Any]
Rows = Iterator[tuple[str, Row]]


def run_started(event: RunStarted, _: str) -> Rows:
    """A run."""
    row = _fields(event, "name", "num_examples", "num_partitions")
    row |= {
        "config": json_text(event.config),
        "seed": number64(event.seed),
        "dataset_uri": event.dataset.uri,
        "dataset_sha256": event.dataset.sha256,
        "library_versions": json_text(event.library_versions),
        "parent_run_id": event.parent.run_id if event.parent else None,
        "parent_version": event.parent.version if event.parent else None,
    }
    yield "run_started", row


def run_ended(event: RunEnded, _: str) -> Rows:
    """A run's end."""
    yield "run_ended", {"cause": event.cause, "message": event.message[:TEXT_CHARS]}


def job_started(event: JobStarted, _: str) -> Rows:
    """A job's plan."""
    row = _fields(event, "job_id", "model_group", "base_version")
    row |= {
        "num_epochs": event.plan.num_epochs,
        "plan": event.plan.model_dump_json(),
        "rollout": event.rollout.model_dump_json(),
        "policy": event.rollout.policy,
    }
    yield "job_started", row


def epoch_started(event: EpochStarted, _: str) -> Rows:
    """An epoch."""
    yield "epoch_started", _fields(event, "job_id", "epoch")


def submission_received(event: SubmissionReceived, _: str) -> Rows:
    """A submission, counted."""
    row = _fields(event, "submission_id", "job_id", "epoch")
    row |= {
        "num_groups": len(event.groups),
        "num_trajectories": sum(len(group.trajectory_ids) for group in event.groups),
    }
    yield "submission_received", row


def group_closed(event: GroupClosed, _: str) -> Rows:
    """A group, its members and what became of each attempt."""
    rewards = [member.reward for member in event.members]
    row = _fields(event, "group_id", "job_id", "example_id", "epoch", "purpose", "policy", "reason", "void_cause")
    row |= _fields(event, "is_viable", "size")
    row |= {
        "task_index": event.index,
        "num_members": len(event.members),
        "mean_reward": sum(rewards) / len(rewards) if rewards else None,
        "last_step_offset": event.steps_at.last_offset if event.steps_at else None,
    }
    yield "group_closed", row
    for member in event.members:
        row = _fields(member, "trajectory_id", "rollout_id", "agent", "member", "digest", "reward", "num_tokens")
        row |= _fields(member, "num_completion_tokens", "min_version", "max_version")
        row |= _fields(member, "num_without_logprobs")
        yield "group_member", {"group_id": event.group_id, **row}
    for attempt in event.attempts:
        row = _fields(attempt, "rollout_id", "member", "attempt", "outcome", "cause", "num_tokens")
        yield "attempt_settled", {"group_id": event.group_id, **row}


def batch_planned(event: BatchPlanned, digest: str) -> Rows:
    """A batch and its members in their order."""
    row = _fields(event, "batch_id", "job_id", "model_group", "epoch", "trains_at_version")
    row |= _fields(event, "curriculum_sha256", "previous_sha256")
    row |= {
        "batch_index": event.index,
        "version": event.yields_version,
        "num_trajectories": len(event.members),
        "num_groups": len({member.group_id for member in event.members}),
        "seed": number64(event.seed),
        "digest": digest,
    }
    yield "batch_planned", row
    for position, member in enumerate(event.members):
        row = _fields(member, "group_id", "rollout_id", "trajectory_id", "digest", "reward", "staleness")
        yield "batch_member", {"batch_id": event.batch_id, "position": position, **row}


def trajectory_rejected(event: TrajectoryRejected, _: str) -> Rows:
    """A line of the ledger."""
    columns = ("trajectory_id", "job_id", "epoch", "group_id", "rollout_id", "cause", "num_tokens")
    yield "trajectory_rejected", _fields(event, *columns)


def epoch_sealed(event: EpochSealed, _: str) -> Rows:
    """An epoch's end."""
    row = _fields(event, "job_id", "epoch", "is_last", "num_groups", "num_trained_groups", "num_batches", "avg_reward")
    row |= _fields(event, "filtered_avg_reward", "zero_variance_groups", "curriculum_percentile", "curriculum_sha256")
    yield "epoch_sealed", row


def job_submitted(event: JobSubmitted, _: str) -> Rows:
    """A job as a learner sees it."""
    row = _fields(event, "job_id", "model_group", "base_version")
    row |= {
        "kind": event.settings.kind,
        "algorithm": event.settings.algorithm.name,
        "model": event.settings.model.path,
        "num_versions": event.settings.num_versions,
        "settings": event.settings.model_dump_json(),
    }
    yield "job_submitted", row


def job_progressed(event: JobProgressed, _: str) -> Rows:
    """How far a job is."""
    yield "job_progressed", _fields(event, "job_id", "version", "percent")


def job_succeeded(event: JobSucceeded, _: str) -> Rows:
    """A job's success."""
    yield "job_finished", _finished(event.job_id, "succeeded", event.final_version, None)


def job_failed(event: JobFailed, _: str) -> Rows:
    """A job's failure."""
    yield "job_finished", _finished(event.job_id, "failed", None, event.error[:TEXT_CHARS])


def job_cancelled(event: JobCancelled, _: str) -> Rows:
    """A job's cancellation."""
    yield "job_finished", _finished(event.job_id, "cancelled", None, event.cause[:TEXT_CHARS])


def learner_claimed(event: LearnerClaimed, _: str) -> Rows:
    """A learner's claim; it voids lower terms after it."""
    yield "learner_claimed", _fields(event, "model_group", "term", "learner")


def step_trained(event: StepTrained, _: str) -> Rows:
    """A training step and its metrics."""
    row = _fields(event, "model_group", "version", "term", "job_id", "batch_id", "epoch", "weights_sha256")
    row |= _fields(event, "num_optimizer_steps", "tokens_per_s")
    yield "step_trained", {**row, "metrics": json_text(event.metrics), "seconds": json_text(event.seconds)}


def weights_published(event: WeightsPublished, _: str) -> Rows:
    """A weight version."""
    row = _fields(event, "model_group", "version", "term", "job_id", "batch_id", "parent", "weights_sha256")
    row |= _fields(event, "weights_format", "base_model")
    yield "weights_published", {**row, "uri": event.artifact.uri, "size_bytes": event.artifact.size_bytes}


def weights_loaded(event: WeightsLoaded, _: str) -> Rows:
    """An engine's load of a version."""
    yield "weights_loaded", _fields(event, "model_group", "version", "engine", "num_skipped", "seconds")


def _finished(job_id: str, state: str, final_version: int | None, error: str | None) -> Row:
    return {"job_id": job_id, "state": state, "final_version": final_version, "error": error}


def _fields(source: Any, *names: str) -> Row:
    return {name: getattr(source, name) for name in names}


TRAINING_ROWS: dict[str, Callable[[Any, str], Rows]] = {
    "run_started": run_started,
    "run_ended": run_ended,
    "job_started": job_started,
    "epoch_started": epoch_started,
    "submission_received": submission_received,
    "group_closed": group_closed,
    "batch_planned": batch_planned,
    "trajectory_rejected": trajectory_rejected,
    "epoch_sealed": epoch_sealed,
    "job_submitted": job_submitted,
    "job_progressed": job_progressed,
    "job_succeeded": job_succeeded,
    "job_failed": job_failed,
    "job_cancelled": job_cancelled,
    "learner_claimed": learner_claimed,
    "step_trained": step_trained,
    "weights_published": weights_published,
    "weights_loaded": weights_loaded,
}
"""Row builder by event kind, given the event and its content digest."""
