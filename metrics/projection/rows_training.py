"""Rows of the topics groups, batches, jobs and weights."""

import math
from collections.abc import Callable, Iterator
from typing import Any

from rollstream.eventlog.log import Received
from rollstream.metrics.projection.columns import Row, copied
from rollstream.metrics.projection.rows_rollouts import TEXT_CHARS, json_text, number64
from rollstream.schemas.errors import DecodeError
from rollstream.schemas.events.training import (
    BatchPlanned,
    GroupClosed,
    JobStarted,
    RunEnded,
    RunStarted,
    SubmissionReceived,
)
from rollstream.schemas.events.weights import (
    JobCancelled,
    JobFailed,
    JobSubmitted,
    JobSucceeded,
    ReferenceScored,
    StepTrained,
    WeightsCollected,
    WeightsPublished,
)
from rollstream.schemas.tokens import count, decode_floats

Rows = Iterator[tuple[str, Row]]


def run_started(event: RunStarted, _: Received) -> Rows:
    """A run."""
    row = copied("run_started", event)
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


def run_ended(event: RunEnded, _: Received) -> Rows:
    """A run's end."""
    yield "run_ended", {"cause": event.cause, "message": event.message[:TEXT_CHARS]}


def job_started(event: JobStarted, _: Received) -> Rows:
    """A job's plan."""
    row = copied("job_started", event)
    row |= {
        "num_epochs": event.plan.num_epochs,
        "plan": event.plan.model_dump_json(),
        "rollout": event.rollout.model_dump_json(),
        "policy": event.rollout.policy,
    }
    yield "job_started", row


def submission_received(event: SubmissionReceived, _: Received) -> Rows:
    """A submission and its counts; its other parts only name what `trajectory_rejected` holds."""
    if event.is_part:
        return
    row = copied("submission_received", event)
    row |= {
        "num_groups": len(event.groups),
        "num_trajectories": sum(len(group.trajectory_ids) for group in event.groups),
    }
    yield "submission_received", row


def group_closed(event: GroupClosed, _: Received) -> Rows:
    """Rows of a group, its members, the outcome of each attempt, and the players of its matches."""
    rewards = [member.reward for member in event.members]
    row = copied("group_closed", event)
    row |= {
        "task_index": event.index,
        "num_members": len(event.members),
        "mean_reward": sum(rewards) / len(rewards) if rewards else None,
        "last_step_offset": event.steps_at.last_offset if event.steps_at else None,
    }
    yield "group_closed", row
    for member in event.members:
        yield "group_member", {"group_id": event.group_id, **copied("group_member", member)}
    for attempt in event.attempts:
        yield "attempt_settled", {"group_id": event.group_id, **copied("attempt_settled", attempt)}
    for match in event.matches:
        for seat, player in match.players.items():
            common = {"group_id": event.group_id, "member": match.member, "seat": seat}
            yield "match_seat", {**common, "player": player, "score": match.scores.get(seat)}


def batch_planned(event: BatchPlanned, received: Received) -> Rows:
    """A batch and its members in their order."""
    row = copied("batch_planned", event)
    row |= {
        "batch_index": event.index,
        "version": event.yields_version,
        "num_trajectories": len(event.members),
        "num_groups": len({member.group_id for member in event.members}),
        "seed": number64(event.seed),
        "digest": received.digest,
    }
    yield "batch_planned", row
    for position, member in enumerate(event.members):
        yield "batch_member", {"batch_id": event.batch_id, "position": position, **copied("batch_member", member)}


def job_submitted(event: JobSubmitted, _: Received) -> Rows:
    """A job as a learner sees it."""
    row = copied("job_submitted", event)
    row |= {
        "kind": event.settings.kind,
        "algorithm": event.settings.algorithm.name,
        "model": event.settings.model.path,
        "num_versions": event.settings.num_versions,
        "settings": event.settings.model_dump_json(),
    }
    yield "job_submitted", row


def job_succeeded(event: JobSucceeded, _: Received) -> Rows:
    """A job's success."""
    row = copied("job_finished", event)
    yield "job_finished", {**row, "state": "succeeded", "error": None, "finish_s": event.finish_s or None}


def job_failed(event: JobFailed, _: Received) -> Rows:
    """A job's failure."""
    yield "job_finished", _unfinished(event.job_id, "failed", event.error)


def job_cancelled(event: JobCancelled, _: Received) -> Rows:
    """A job's cancellation."""
    yield "job_finished", _unfinished(event.job_id, "cancelled", event.cause)


def _unfinished(job_id: str, state: str, error: str) -> Row:
    return {"job_id": job_id, "state": state, "final_version": None, "error": error[:TEXT_CHARS], "finish_s": None}


def step_trained(event: StepTrained, _: Received) -> Rows:
    """A training step and its metrics."""
    row = copied("step_trained", event)
    yield "step_trained", {**row, "metrics": json_text(event.metrics), "seconds": json_text(event.seconds)}


def reference_scored(event: ReferenceScored, _: Received) -> Rows:
    """A trajectory's scores under a reference or a teacher, or a part of them; of the log-probabilities the mean."""
    row = copied("reference_scored", event)
    row |= {
        "scorer_sha256": event.scorer.sha256,
        "role": event.scorer.role,
        "model": event.scorer.model,
        "temperature": event.scorer.temperature,
        "context": event.scorer.context[:TEXT_CHARS],
        "num_tokens": count(event.logprobs),
        "mean_logprob": _mean(event.logprobs),
    }
    yield "reference_scored", row


def _mean(logprobs: str) -> float | None:
    """None where there is none: no token, or no finite numbers."""
    try:
        values = decode_floats(logprobs)
    except DecodeError:
        return None
    return math.fsum(values) / len(values) if values and all(map(math.isfinite, values)) else None


def weights_published(event: WeightsPublished, _: Received) -> Rows:
    """A weight version."""
    row = copied("weights_published", event)
    yield "weights_published", {**row, "uri": event.artifact.uri, "size_bytes": event.artifact.size_bytes}


def weights_collected(event: WeightsCollected, _: Received) -> Rows:
    """Versions whose artifacts went."""
    for version, sha256 in zip(event.versions, event.weights_sha256, strict=True):
        row = copied("weights_collected", event)
        yield "weights_collected", {**row, "version": version, "weights_sha256": sha256}


TRAINING_ROWS: dict[str, Callable[[Any, Received], Rows]] = {
    "run_started": run_started,
    "run_ended": run_ended,
    "job_started": job_started,
    "submission_received": submission_received,
    "group_closed": group_closed,
    "batch_planned": batch_planned,
    "job_submitted": job_submitted,
    "job_succeeded": job_succeeded,
    "job_failed": job_failed,
    "job_cancelled": job_cancelled,
    "step_trained": step_trained,
    "reference_scored": reference_scored,
    "weights_published": weights_published,
    "weights_collected": weights_collected,
}
"""Row builder by event kind, given the event and its record; others are copied by column name alone."""
