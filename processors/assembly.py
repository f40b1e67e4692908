"""The assembly fold over one partition of `steps`: steps in, closed groups with their trajectories out.

Given every record of the partition in order from any low-water mark on, it answers with the same closings. A group
opens only at its GroupStarted; records of groups that are not open belong to closed ones and change nothing. No Kafka,
clock, randomness or disk: time is what the records say.
"""

from collections.abc import Callable
from typing import Any, cast

from rollstream.eventlog import codec
from rollstream.eventlog.log import Received
from rollstream.processors.assembly_state import NEVER_MS, AssemblyState, Attempt, Call, Closing, OpenGroup
from rollstream.processors.closing import close, decide
from rollstream.processors.trajectories import assemble
from rollstream.schemas.base import Event
from rollstream.schemas.errors import DecodeError
from rollstream.schemas.events_rollouts import (
    GroupStarted,
    RewardRecorded,
    RolloutEnded,
    RolloutFailed,
    RolloutStarted,
    StepRecorded,
)

__all__ = ["AssemblyState", "Closing", "evolve", "initial"]


def initial(next_offset: int = 0) -> AssemblyState:
    """The state before the record at `next_offset`: nothing is open."""
    return AssemblyState(next_offset)


def evolve(state: AssemblyState, received: Received) -> list[Closing]:
    """Fold one record into `state`, which is changed in place; returns the groups that it closes, oldest first.

    First the record's time passes (groups whose deadline it reaches close), then what it says counts.
    """
    said = received.event
    event: Any = said  # the table of handlers knows its type
    state.next_offset = received.position.offset + 1
    closings = _time_out(state, received) if event.time_ms >= state.next_deadline_ms else []
    handler = _HANDLERS.get(type(said))
    if handler is None:
        return closings + _open_group(state, received) if type(said) is GroupStarted else closings
    group = state.groups.get(event.group_id)
    if group is None:
        return closings
    attempt = group.attempts.get(event.rollout_id) or _open_attempt(group, event.rollout_id)
    if type(attempt) is not Attempt:
        return closings
    if handler(group, attempt, event, received.digest) and len(group.settled) == group.started.size:
        closings.append(_close(state, group, received, is_timed_out=False))
    return closings


def _open_group(state: AssemblyState, received: Received) -> list[Closing]:
    started = cast(GroupStarted, received.event)
    if started.group_id in state.groups or started.group_id in state.closed:
        return []
    group = OpenGroup(started, received.position.offset, started.time_ms + started.timeout_ms)
    state.groups[started.group_id] = group
    state.next_deadline_ms = min(state.next_deadline_ms, group.deadline_ms)
    return [_close(state, group, received, is_timed_out=False)] if started.size == 0 else []


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
    """An attempt by its first record; None if its id is no attempt at a member of the group."""
    member, _, number = rollout_id.removeprefix(f"{group.started.group_id}/m").partition("/a")
    if not (member.isdecimal() and number.isdecimal()) or int(member) >= group.started.size:
        return None
    attempt = group.attempts[rollout_id] = Attempt(rollout_id, int(member), int(number))
    return attempt


# ---- what a record says of an attempt under way: each returns whether its member may have been settled by it ----


def _take_step(group: OpenGroup, attempt: Attempt, step: StepRecorded, digest: str) -> bool:
    index, agent, call = step.step_index, step.agent, step.llm
    first = attempt.step_digests.get(index)
    if first is not None:
        attempt.is_spliced = attempt.is_spliced or first != digest
        return False
    attempt.step_digests[index] = digest
    calls = attempt.calls[agent]
    if call is not None:
        calls.append(Call(index, agent, call))
    return False


def _take_reward(group: OpenGroup, attempt: Attempt, reward: RewardRecorded, digest: str) -> bool:
    first = attempt.reward_digests.get(reward.reward_index)
    if first is not None:
        attempt.is_spliced = attempt.is_spliced or first != digest
        return False
    attempt.reward_digests[reward.reward_index] = digest
    attempt.rewards.append(reward)
    return False


def _start_attempt(group: OpenGroup, attempt: Attempt, started: RolloutStarted, digest: str) -> bool:
    return False


def _end_attempt(group: OpenGroup, attempt: Attempt, ended: RolloutEnded, digest: str) -> bool:
    cause = _incompleteness(attempt, ended)
    if cause:
        decide(group, attempt, "rejected", cause)
        if not _is_spliced(attempt, ended):
            group.final.add(attempt.member)
    elif attempt.member in group.complete:
        decide(group, attempt, "superseded")
    else:
        _complete(group, attempt, ended)
    return _settle(group, attempt)


def _fail_attempt(group: OpenGroup, attempt: Attempt, failed: RolloutFailed, digest: str) -> bool:
    decide(group, attempt, "failed", failed.cause)
    if failed.is_final:
        group.final.add(attempt.member)
    return _settle(group, attempt)


def _incompleteness(attempt: Attempt, ended: RolloutEnded) -> str:
    """Why an ended attempt is not complete, by count, digest and scores; empty if it is."""
    steps, rewards = attempt.step_digests, attempt.reward_digests
    if len(steps) != ended.num_steps or len(rewards) != ended.num_rewards:
        return "incomplete"
    try:
        digests = [*map(steps.__getitem__, range(len(steps))), *map(rewards.__getitem__, range(len(rewards)))]
    except KeyError:
        return "incomplete"
    if codec.chain(ended.rollout_id, digests) != ended.digest:
        return "digest"
    return "no_score" if ended.missing_scores else ""


def _is_spliced(attempt: Attempt, ended: RolloutEnded) -> bool:
    """Whether two producers wrote the attempt, which its member's owner sees too and makes good by the next one."""
    has_more = max(attempt.step_digests, default=-1) >= ended.num_steps
    return attempt.is_spliced or has_more or max(attempt.reward_digests, default=-1) >= ended.num_rewards


def _complete(group: OpenGroup, attempt: Attempt, ended: RolloutEnded) -> None:
    try:
        assembled = assemble(group.started, attempt, ended)
    except DecodeError as error:
        decide(group, attempt, "rejected", f"broken_tokens: {error}")
        group.final.add(attempt.member)
        return
    group.complete[attempt.member] = assembled
    decide(group, attempt, "complete", tokens=assembled.num_tokens)


def _settle(group: OpenGroup, decided: Attempt) -> bool:
    """A member is settled once it is complete, or is not tried again and has no attempt under way."""
    member = decided.member
    if member not in group.complete:
        if member not in group.final:
            return False
        if any(other.member == member for other in group.under_way()):
            return False
    group.settled.add(member)
    return True


_HANDLERS: dict[type[Event], Callable[[OpenGroup, Attempt, Any, str], bool]] = {
    RolloutStarted: _start_attempt,
    StepRecorded: _take_step,
    RewardRecorded: _take_reward,
    RolloutEnded: _end_attempt,
    RolloutFailed: _fail_attempt,
}
