"""The assembly fold over one partition of `steps`: steps in, closed groups with their trajectories out.

Given every record of the partition in order from any low-water mark, it returns the same closings. A group opens only
at its GroupStarted; records of groups that are not open belong to closed ones and are ignored. No Kafka, clock,
randomness or disk: time comes from the records.
"""

from collections.abc import Callable
from typing import Any, cast

from rollstream.eventlog.attempts import attempt_in, is_group_settled, is_settled
from rollstream.eventlog.log import Received
from rollstream.processors.assemble.bounds import check_opening
from rollstream.processors.assemble.closing import close, decide
from rollstream.processors.assemble.state import NEVER_MS, AssemblyState, Attempt, Call, Closing, OpenGroup
from rollstream.processors.assemble.trajectories import assemble
from rollstream.schemas.base import Event
from rollstream.schemas.errors import DecodeError
from rollstream.schemas.events.rollouts import (
    GroupExtended,
    GroupStarted,
    RewardRecorded,
    RolloutEnded,
    RolloutFailed,
    RolloutStarted,
    StepRecorded,
)
from rollstream.schemas.revisions import STOP_REASONS_SINCE

__all__ = ["AssemblyState", "Closing", "evolve", "initial"]


def initial(next_offset: int = 0) -> AssemblyState:
    """The state before the record at `next_offset`: nothing is open."""
    return AssemblyState(next_offset)


def evolve(state: AssemblyState, received: Received) -> list[Closing]:
    """Fold one record into `state`, which is changed in place; returns the groups that it closes, oldest first.

    First the record's time is applied (groups past their deadline close), then its content.
    """
    published = received.event
    event: Any = published  # the handler table checks its type
    state.next_offset = received.position.offset + 1
    closings = _time_out(state, received) if event.time_ms >= state.next_deadline_ms else []
    handler = _HANDLERS.get(type(published))
    if handler is None:
        return closings + _pass_group(state, received)
    group = state.groups.get(event.group_id)
    if group is None:
        return closings
    attempt = group.attempts.get(event.rollout_id) or _open_attempt(group, event.rollout_id)
    if type(attempt) is not Attempt:
        return closings
    if handler(group, attempt, event, received) and _is_settled(group):
        closings.append(_close(state, group, received, is_timed_out=False))
    return closings


def _pass_group(state: AssemblyState, received: Received) -> list[Closing]:
    """A record without an attempt: a group starts, or its deadline is extended."""
    event = received.event
    if isinstance(event, GroupStarted):
        return _open_group(state, received)
    if isinstance(event, GroupExtended) and (group := state.groups.get(event.group_id)) is not None:
        group.deadline_ms = max(group.deadline_ms, event.deadline_ms)
    return []


def _open_group(state: AssemblyState, received: Received) -> list[Closing]:
    started = cast(GroupStarted, received.event)
    if (opened := state.groups.get(started.group_id)) is not None:
        state.repeat(opened, received.position.offset)
        return []
    if started.group_id in state.closed:
        return []
    check_opening(started)
    group = OpenGroup(started, received.position.offset, started.time_ms + started.timeout_ms)
    state.groups[started.group_id] = group
    state.next_deadline_ms = min(state.next_deadline_ms, group.deadline_ms)
    return [_close(state, group, received, is_timed_out=False)] if started.size == 0 else []


def _is_settled(group: OpenGroup) -> bool:
    started = group.started
    return is_group_settled(
        size=started.size, num_settled=len(group.settled), num_complete=len(group.complete), enough=started.enough
    )


def _close(state: AssemblyState, group: OpenGroup, received: Received, *, is_timed_out: bool) -> Closing:
    del state.groups[group.started.group_id]
    state.remember(group.started.group_id)
    return close(group, received, is_timed_out=is_timed_out)


def _time_out(state: AssemblyState, received: Received) -> list[Closing]:
    now_ms = received.event.time_ms
    due = [group for group in state.groups.values() if group.deadline_ms <= now_ms]
    closings = [_close(state, group, received, is_timed_out=True) for group in due]
    state.next_deadline_ms = min((group.deadline_ms for group in state.groups.values()), default=NEVER_MS)
    return closings


def _open_attempt(group: OpenGroup, rollout_id: str) -> Attempt | None:
    """Open an attempt at its first record; None if its id is not an attempt of a member of the group."""
    found = attempt_in(group.started.group_id, group.started.size, rollout_id)
    if found is None:
        return None
    attempt = group.attempts[rollout_id] = Attempt(rollout_id, *found)
    return attempt


# ---- handlers of an attempt's records: each returns whether the record may have settled the member ----


def _take_step(group: OpenGroup, attempt: Attempt, step: StepRecorded, received: Received) -> bool:
    if attempt.take_step(step.step_index, received.digest):
        calls = attempt.calls[step.agent]
        if step.llm is not None:
            calls.append(Call(step.step_index, step.agent, step.llm))
    return False


def _take_reward(group: OpenGroup, attempt: Attempt, reward: RewardRecorded, received: Received) -> bool:
    if attempt.take_reward(reward.reward_index, received.digest):
        attempt.scores.append(reward)
    return False


def _start_attempt(group: OpenGroup, attempt: Attempt, started: RolloutStarted, received: Received) -> bool:
    return False


def _end_attempt(group: OpenGroup, attempt: Attempt, ended: RolloutEnded, received: Received) -> bool:
    cause = attempt.incompleteness(ended)
    stop_reason = ended.stop_reason if group.started.revision >= STOP_REASONS_SINCE else ""
    if cause:
        decide(group, attempt, "rejected", cause, stop_reason=stop_reason)
        if not attempt.is_spliced_at(ended):
            group.final.add(attempt.member)
    elif attempt.member in group.complete:
        decide(group, attempt, "superseded", stop_reason=stop_reason)
    else:
        _complete(group, attempt, ended, stop_reason)
    return _close_member(group, attempt)


def _fail_attempt(group: OpenGroup, attempt: Attempt, failed: RolloutFailed, received: Received) -> bool:
    decide(group, attempt, "failed", failed.cause)
    if failed.is_final:
        group.final.add(attempt.member)
    return _close_member(group, attempt)


def _complete(group: OpenGroup, attempt: Attempt, ended: RolloutEnded, stop_reason: str) -> None:
    try:
        assembled = assemble(group.started, attempt, ended)
    except DecodeError as error:  # its message is part of the closing's digest: messages of `assemble` stay as they are
        decide(group, attempt, "rejected", f"broken_tokens: {error}", stop_reason=stop_reason)
        group.final.add(attempt.member)
        return
    group.complete[attempt.member] = assembled
    decide(group, attempt, "complete", tokens=assembled.num_tokens, stop_reason=stop_reason)


def _close_member(group: OpenGroup, decided: Attempt) -> bool:
    """Record the member as settled, if it is."""
    member = decided.member
    is_final = member in group.final
    # a member that may be retried is not decided by it
    has_open_attempts = is_final and any(other.member == member for other in group.under_way())
    if not is_settled(is_complete=member in group.complete, is_final=is_final, has_open_attempts=has_open_attempts):
        return False
    group.settled.add(member)
    return True


_HANDLERS: dict[type[Event], Callable[[OpenGroup, Attempt, Any, Received], bool]] = {
    RolloutStarted: _start_attempt,
    StepRecorded: _take_step,
    RewardRecorded: _take_reward,
    RolloutEnded: _end_attempt,
    RolloutFailed: _fail_attempt,
}
