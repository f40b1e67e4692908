"""Expected results of a workload, derived record by record from the rules of the design; uses none of the folds.

The rules of a steps partition:
- Only a group's first GroupStarted opens it; what lies before it does not count.
- Event time is what records say. The first record at or after the deadline closes an open group before it counts. A
  GroupExtended of an open group moves its deadline on, never back.
- Of an event id the first occurrence counts. An attempt is what is written up to its first terminal event.
- An attempt is complete if its end counts every step and reward that is there, its chained digest agrees and it
  says of no score that it is missing.
- A member is its first complete attempt. It is settled by that; or, if a failure says that it is final or an end is
  not borne out (unless two producers wrote the attempt), once none of its attempts is under way.
- A group closes with the record that settles its last member; or, if it names how many members are enough, with the
  record that completes as many, and what is under way then is superseded as oversampled.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from rollstream.eventlog import codec
from rollstream.schemas import ids
from rollstream.schemas.base import Event
from rollstream.schemas.events import (
    GroupClosed,
    GroupExtended,
    GroupStarted,
    RewardRecorded,
    RolloutEnded,
    RolloutFailed,
    StepRecorded,
    TrajectoryAssembled,
)
from rollstream.schemas.events.rollouts import Completion, RolloutEvent, TokenSequence
from rollstream.schemas.events.training import AttemptOutcome, MemberRef
from rollstream.schemas.tokens import decode_floats, decode_ids, encode_floats, encode_ids
from tests.chaos.chaos_workload import Line

NEVER = 1 << 62


@dataclass
class Expected:
    """Contents that the log must have, after repeats are dropped."""

    trajectories: dict[str, str] = field(default_factory=dict)
    """Content digest by trajectory id."""
    rewards: dict[str, float] = field(default_factory=dict)
    """Rewards by trajectory id."""
    groups: dict[str, str] = field(default_factory=dict)
    """Content digest of GroupClosed by group id."""
    verdicts: dict[str, str] = field(default_factory=dict)
    """Verdicts by trajectory id: `not_viable` or `zero_variance`; empty if it is to be trained (or left over)."""
    letters: dict[tuple[int, int], bytes | None] = field(default_factory=dict)
    """Raw values of dead letters by partition and offset in `steps`."""


def expect(partitions: Sequence[Sequence[Line]]) -> Expected:
    """The one right outcome. A line's offset is its place."""
    expected = Expected()
    for partition, lines in enumerate(partitions):
        by_group: dict[str, list[tuple[int, Event]]] = defaultdict(list)
        for offset, line in enumerate(lines):
            if line.event is None:
                expected.letters[partition, offset] = line.value
            elif group_id := getattr(line.event, "group_id", ""):
                by_group[group_id].append((offset, line.event))
        for records in by_group.values():
            _expect_group(expected, lines, records)
    return expected


def _expect_group(expected: Expected, lines: Sequence[Line], records: list[tuple[int, Event]]) -> None:
    opened = next(((at, event) for at, event in records if isinstance(event, GroupStarted)), None)
    if opened is None:
        return
    start, started = opened
    assert isinstance(started, GroupStarted)
    timeout = _timeout(lines, start, started)
    attempts = _attempts((at, event) for at, event in records if start < at < timeout)
    settled = _closed_at(started, attempts.values())
    end = min(settled, timeout)
    assert end < NEVER, f"{started.group_id} does not close: the workload's last tick is missing"
    until = _attempts((at, event) for at, event in records if start < at <= end and at < timeout)
    closed = _close(started, until.values(), is_timed_out=settled > timeout)
    expected.groups[started.group_id] = codec.content_digest(closed.event)
    for trajectory in closed.trajectories:
        expected.trajectories[trajectory.trajectory_id] = codec.content_digest(trajectory)
        expected.rewards[trajectory.trajectory_id] = trajectory.reward
        expected.verdicts[trajectory.trajectory_id] = closed.verdict


def _timeout(lines: Sequence[Line], start: int, started: GroupStarted) -> int:
    deadline_ms = started.time_ms + started.timeout_ms
    for offset in range(start + 1, len(lines)):
        event = lines[offset].event
        if event is not None and event.time_ms >= deadline_ms:
            return offset
        if isinstance(event, GroupExtended) and event.group_id == started.group_id:
            deadline_ms = max(deadline_ms, event.deadline_ms)
    return NEVER


class _Attempt:
    """One attempt, up to its first terminal event."""

    def __init__(self, rollout_id: str, begun: int) -> None:
        member, _, number = rollout_id.rsplit("/m", 1)[1].partition("/a")
        self.rollout_id, self.begun = rollout_id, begun
        self.member, self.number = int(member), int(number)
        self.steps: dict[int, StepRecorded] = {}
        self.rewards: dict[int, RewardRecorded] = {}
        self.is_spliced = False
        self.terminal: RolloutEnded | RolloutFailed | None = None
        self.decided = NEVER

    def take(self, at: int, event: Event) -> None:
        if self.terminal is not None:
            return
        if isinstance(event, RolloutEnded | RolloutFailed):
            self.terminal, self.decided = event, at
        elif isinstance(event, StepRecorded):
            self._first(self.steps, event.step_index, event)
        elif isinstance(event, RewardRecorded):
            self._first(self.rewards, event.reward_index, event)

    def _first(self, known: dict, index: int, event: Event) -> None:
        first = known.setdefault(index, event)
        self.is_spliced |= codec.content_digest(first) != codec.content_digest(event)

    @property
    def fault(self) -> str:
        """The reason why its end does not fit its records, by count, digest and scores; empty if it fits, or without an
        end.
        """
        ended = self.terminal
        if not isinstance(ended, RolloutEnded):
            return ""
        if sorted(self.steps) != list(range(ended.num_steps)) or sorted(self.rewards) != list(range(ended.num_rewards)):
            return "incomplete"
        content = [self.steps[index] for index in sorted(self.steps)]
        content += [self.rewards[index] for index in sorted(self.rewards)]
        if codec.chain(self.rollout_id, map(codec.content_digest, content)) != ended.digest:
            return "digest"
        return "no_score" if ended.missing_scores else ""

    @property
    def is_complete(self) -> bool:
        return isinstance(self.terminal, RolloutEnded) and not self.fault

    @property
    def is_final(self) -> bool:
        """After it its member is not tried again."""
        if isinstance(self.terminal, RolloutFailed):
            return self.terminal.is_final
        ended = self.terminal
        if ended is None or not self.fault:
            return False
        has_more = max(self.steps, default=-1) >= ended.num_steps or max(self.rewards, default=-1) >= ended.num_rewards
        return not (self.is_spliced or has_more)

    @property
    def num_tokens(self) -> int:
        calls = [step.llm for step in self.steps.values() if step.llm]
        return sum(len(decode_ids(call.prompt_ids)) + len(decode_ids(call.completion_ids)) for call in calls)


def _attempts(records: Iterable[tuple[int, Event]]) -> dict[str, _Attempt]:
    attempts: dict[str, _Attempt] = {}
    for at, event in records:
        if isinstance(event, RolloutEvent):
            attempts.setdefault(event.rollout_id, _Attempt(event.rollout_id, at)).take(at, event)
    return attempts


def _closed_at(started: GroupStarted, attempts: Collection[_Attempt]) -> int:
    """Offset of the record that settles the last member, or that completes the last of those that are enough."""
    settled = max(_settled(attempts, member) for member in range(started.size))
    complete: dict[int, int] = {}
    for attempt in attempts:
        if attempt.is_complete:
            complete[attempt.member] = min(attempt.decided, complete.get(attempt.member, NEVER))
    if not 0 < started.enough <= len(complete):
        return settled
    return min(settled, sorted(complete.values())[started.enough - 1])


def _settled(attempts: Iterable[_Attempt], member: int) -> int:
    """Offset of the record that settles a member."""
    own = sorted((attempt for attempt in attempts if attempt.member == member), key=lambda one: one.decided)
    for attempt in own:
        now = attempt.decided
        if now == NEVER:
            return NEVER
        if attempt.is_complete:
            return now
        is_final = any(other.is_final for other in own if other.decided <= now)
        if is_final and all(other.decided <= now for other in own if other.begun <= now):
            return now
    return NEVER


# ---- what a group closes with ----


@dataclass(frozen=True)
class _Closed:
    event: GroupClosed
    trajectories: list[TrajectoryAssembled]
    verdict: str


def _close(started: GroupStarted, begun: Iterable[_Attempt], *, is_timed_out: bool) -> _Closed:
    attempts = sorted(begun, key=lambda one: one.decided)
    winners: dict[int, _Attempt] = {}
    for attempt in attempts:
        if attempt.is_complete:
            winners.setdefault(attempt.member, attempt)
    outcomes = [_outcome(attempt, winners, is_timed_out=is_timed_out) for attempt in attempts]
    trajectories = [one for member in sorted(winners) for one in _trajectories(started, winners[member])]
    is_viable = 0 < len(winners) >= started.minimum
    reason = "complete" if len(winners) >= (started.enough or started.size) else "partial" if is_viable else "failed"
    event = GroupClosed(
        run_id=started.run_id,
        time_ms=0,
        group_id=started.group_id,
        example_id=started.example_id,
        job_id=started.job_id,
        epoch=started.epoch,
        index=started.index,
        purpose=started.purpose,
        policy=started.policy,
        reason="timeout" if is_timed_out else reason,
        is_viable=is_viable,
        size=started.size,
        members=tuple(map(_reference, trajectories)),
        attempts=tuple(sorted(outcomes, key=lambda one: (one.member, one.attempt))),
    )
    rewards: dict[str, set[float]] = defaultdict(set)
    for trajectory in trajectories:
        rewards[trajectory.agent].add(trajectory.reward)
    is_flat = all(len(found) == 1 for found in rewards.values())
    return _Closed(event, trajectories, "not_viable" if not is_viable else "zero_variance" if is_flat else "")


def _outcome(attempt: _Attempt, winners: dict[int, _Attempt], *, is_timed_out: bool) -> AttemptOutcome:
    winner = winners.get(attempt.member)
    cause = ""
    if winner is attempt:
        outcome = "complete"
    elif isinstance(attempt.terminal, RolloutFailed):
        outcome, cause = "failed", attempt.terminal.cause
    elif attempt.fault:
        outcome, cause = "rejected", attempt.fault
    elif winner is not None:
        outcome = "superseded"
    elif is_timed_out:
        outcome, cause = "failed", "timeout"
    else:
        outcome, cause = "superseded", "oversampled"
    return AttemptOutcome(
        rollout_id=attempt.rollout_id,
        member=attempt.member,
        attempt=attempt.number,
        outcome=outcome,
        cause=cause,
        num_tokens=attempt.num_tokens,
    )


def _trajectories(started: GroupStarted, attempt: _Attempt) -> list[TrajectoryAssembled]:
    assert isinstance(attempt.terminal, RolloutEnded)
    return [
        TrajectoryAssembled(
            run_id=started.run_id,
            time_ms=0,
            group_id=started.group_id,
            rollout_id=attempt.rollout_id,
            trajectory_id=ids.trajectory_id(attempt.rollout_id, agent),
            agent=agent,
            model_group=started.agents[agent],
            member=attempt.member,
            attempt=attempt.number,
            example_id=started.example_id,
            job_id=started.job_id,
            epoch=started.epoch,
            purpose=started.purpose,
            policy=started.policy,
            **_rewards(started, attempt, agent),
            sequences=_sequences(attempt, agent),
            num_steps=attempt.terminal.num_steps,
            steps_digest=attempt.terminal.digest,
        )
        for agent in sorted({step.agent for step in attempt.steps.values()})
    ]


def _rewards(started: GroupStarted, attempt: _Attempt, agent: str) -> dict:
    """Weighted sum, sums by name, weighted sums and scores by step; in fractions, so exact."""
    total, by_name, by_step, scores = Fraction(), defaultdict(Fraction), defaultdict(Fraction), defaultdict(Fraction)
    for reward in attempt.rewards.values():
        if reward.agent in (None, agent):
            weighted = Fraction(started.reward_weights.get(reward.name, 1.0)) * Fraction(reward.value)
            if not reward.is_score:
                total += weighted
                by_name[reward.name] += Fraction(reward.value)
            if reward.step_index is not None:
                (scores if reward.is_score else by_step)[str(reward.step_index)] += weighted
    sums = {"rewards": by_name, "step_rewards": by_step, "step_scores": scores}
    return {"reward": float(total)} | {
        name: {key: float(value) for key, value in found.items()} for name, found in sums.items()
    }


def _sequences(attempt: _Attempt, agent: str) -> tuple[TokenSequence, ...]:
    """An agent's calls in order; one with a prefix goes on where the last sequence ends."""
    sequences: list[tuple[list[int], list[float], list[Completion]]] = []
    for index in sorted(attempt.steps):
        call = attempt.steps[index].llm
        if call is None or attempt.steps[index].agent != agent:
            continue
        if call.prefix is None:
            sequences.append(([], [], []))
        token_ids, logprobs, completions = sequences[-1]
        token_ids += decode_ids(call.prompt_ids)
        sampled = decode_ids(call.completion_ids)
        completions.append(Completion(start=len(token_ids), length=len(sampled), step_index=index, spans=call.spans))
        token_ids += sampled
        logprobs += decode_floats(call.logprobs or "")
    return tuple(
        TokenSequence(token_ids=encode_ids(token_ids), logprobs=encode_floats(logprobs), completions=tuple(completions))
        for token_ids, logprobs, completions in sequences
    )


def _reference(trajectory: TrajectoryAssembled) -> MemberRef:
    parts = [part for sequence in trajectory.sequences for part in sequence.completions]
    return MemberRef(
        trajectory_id=trajectory.trajectory_id,
        rollout_id=trajectory.rollout_id,
        agent=trajectory.agent,
        member=trajectory.member,
        digest=codec.content_digest(trajectory),
        reward=trajectory.reward,
        num_tokens=sum(len(decode_ids(sequence.token_ids)) for sequence in trajectory.sequences),
        num_completion_tokens=sum(part.length for part in parts),
        min_version=0,
        max_version=0,
    )
