"""How a group of the assembly fold closes: the outcome of every attempt, the reason, and the GroupClosed of it all."""

from typing import Literal

from rollstream.eventlog.log import Received
from rollstream.processors.assembly_state import Attempt, Closing, OpenGroup
from rollstream.processors.trajectories import num_tokens
from rollstream.schemas.base import validator_of
from rollstream.schemas.events_training import AttemptOutcome, GroupClosed, StepsRange

Reason = Literal["complete", "partial", "timeout", "failed", "void"]
_outcome = validator_of(AttemptOutcome)


def close(group: OpenGroup, received: Received, *, is_timed_out: bool) -> Closing:
    """What a group closes with at the record `received`; attempts under way get their outcome now."""
    started = group.started
    for attempt in group.attempts.values():
        if attempt.outcome is None:
            is_superseded = attempt.member in group.complete
            decide(attempt, "superseded" if is_superseded else "failed", "" if is_superseded else "timeout")
    assembled = [group.complete[member] for member in sorted(group.complete)]
    outcomes = [attempt.outcome for attempt in group.attempts.values() if attempt.outcome is not None]
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
        members=tuple(member for each in assembled for member in each.members),
        attempts=tuple(sorted(outcomes, key=_by_member)),
        steps_at=StepsRange(partition=where.partition, first_offset=group.first_offset, last_offset=where.offset),
    )
    trajectories = tuple(trajectory for each in assembled for trajectory in each.trajectories)
    return Closing(group.first_offset, trajectories, closed)


def _reason(group: OpenGroup, *, is_timed_out: bool) -> Reason:
    if group.started.size == 0:
        return "void"
    if is_timed_out:
        return "timeout"
    if len(group.complete) == group.started.size:
        return "complete"
    return "partial" if _is_viable(group) else "failed"


def _is_viable(group: OpenGroup) -> bool:
    return 0 < len(group.complete) >= group.started.minimum


def _by_member(outcome: AttemptOutcome) -> tuple[int, int]:
    return outcome.member, outcome.attempt


def decide(
    attempt: Attempt,
    outcome: Literal["complete", "failed", "superseded", "rejected"],
    cause: str = "",
    tokens: int | None = None,
) -> None:
    """Give an attempt its outcome and let go of its steps."""
    attempt.outcome = _outcome(
        {
            "rollout_id": attempt.rollout_id,
            "member": attempt.member,
            "attempt": attempt.number,
            "outcome": outcome,
            "cause": cause,
            "num_tokens": num_tokens(attempt) if tokens is None else tokens,
        }
    )
    attempt.calls, attempt.rewards = [], []
