"""Closes a group in the assembly fold: the outcome of every attempt, the trajectories and the GroupClosed."""

from collections.abc import Iterable
from typing import Literal, cast

from rollstream.eventlog import codec
from rollstream.eventlog.attempts import Cause
from rollstream.eventlog.log import Received
from rollstream.processors.assemble.bounds import fitting
from rollstream.processors.assemble.state import Attempt, Closing, OpenGroup
from rollstream.processors.assemble.trajectories import num_tokens, reference
from rollstream.schemas.base import validator_of
from rollstream.schemas.events.rollouts import TrajectoryAssembled
from rollstream.schemas.events.training import AttemptOutcome, GroupClosed, MatchResult, StepsRange

Reason = Literal["complete", "partial", "timeout", "failed", "void"]
_outcome = validator_of(AttemptOutcome)
_match = validator_of(MatchResult)
_trajectory = validator_of(TrajectoryAssembled)


def close(group: OpenGroup, received: Received, *, is_timed_out: bool) -> Closing:
    """Close a group at the record `received`; attempts in progress get their outcome now."""
    started = group.started
    for attempt in group.under_way():
        if attempt.member in group.complete:
            decide(group, attempt, "superseded")
        elif is_timed_out:
            decide(group, attempt, "failed", Cause.TIMEOUT)
        else:
            decide(group, attempt, "superseded", Cause.OVERSAMPLED)
    assembled = [group.complete[member] for member in sorted(group.complete)]
    trajectories = tuple([codec.encode(_trajectory(fields)) for each in assembled for fields in each.trajectories])
    outcomes = cast("Iterable[AttemptOutcome]", group.attempts.values())  # none is in progress now
    where = received.position
    closed = GroupClosed(
        run_id=started.run_id,
        time_ms=received.event.time_ms,
        group_id=started.group_id,
        example_id=started.example_id,
        job_id=started.job_id,
        epoch=started.epoch,
        index=started.index,
        purpose=started.purpose,
        policy=started.policy,
        reason=_reason(group, is_timed_out=is_timed_out),
        void_cause=started.void_cause,
        is_viable=_is_viable(group),
        size=started.size,
        members=tuple(map(reference, trajectories)),
        attempts=tuple(sorted(outcomes, key=_by_member)),
        matches=tuple([_match(each.match) for each in assembled if each.match is not None]),
        steps_at=StepsRange(partition=where.partition, first_offset=group.first_offset, last_offset=where.offset),
    )
    closed = fitting(closed)
    return Closing(group.first_offset, trajectories if closed.members else (), closed)


def _reason(group: OpenGroup, *, is_timed_out: bool) -> Reason:
    if group.started.size == 0:
        return "void"
    if is_timed_out:
        return "timeout"
    if len(group.complete) >= (group.started.enough or group.started.size):
        return "complete"
    return "partial" if _is_viable(group) else "failed"


def _is_viable(group: OpenGroup) -> bool:
    return 0 < len(group.complete) >= group.started.minimum


def _by_member(outcome: AttemptOutcome) -> tuple[int, int]:
    return outcome.member, outcome.attempt


def decide(
    group: OpenGroup,
    attempt: Attempt,
    outcome: Literal["complete", "failed", "superseded", "rejected"],
    cause: str = "",
    tokens: int | None = None,
    stop_reason: str = "",
) -> None:
    """Replace an attempt by its outcome and release its steps."""
    group.attempts[attempt.rollout_id] = _outcome(
        {
            "rollout_id": attempt.rollout_id,
            "member": attempt.member,
            "attempt": attempt.number,
            "outcome": outcome,
            "cause": cause,
            "num_tokens": num_tokens(attempt) if tokens is None else tokens,
            "stop_reason": stop_reason,
        }
    )
