"""State of the assembly fold of one `steps` partition: open groups and their attempts. `fold` changes it."""

from collections import defaultdict, deque
from dataclasses import dataclass, field
from typing import NamedTuple, cast

from rollstream.eventlog.attempts import Recorded
from rollstream.eventlog.log import Encoded
from rollstream.schemas.events.rollouts import GroupStarted, LLMCall, RewardRecorded, TrajectoryAssembled
from rollstream.schemas.events.training import AttemptOutcome, GroupClosed

CLOSED_REMEMBERED = 4096
"""Maximum number of closed groups remembered, so that a repeated GroupStarted does not reopen one."""

NEVER_MS = 1 << 62


class Call(NamedTuple):
    """An LLM call of an attempt in progress: the retained fields of its step."""

    step_index: int
    agent: str
    llm: LLMCall


# Called for every attempt: `list[RewardRecorded]()` takes five times as long.
def _no_rewards() -> list[RewardRecorded]:
    return []


@dataclass(slots=True)
class Attempt(Recorded):
    """One attempt in progress of a member of an open group."""

    calls: defaultdict[str, list[Call]] = field(default_factory=lambda: defaultdict(list))
    """LLM steps by agent; of one that only made other steps none."""
    scores: list[RewardRecorded] = field(default_factory=_no_rewards)
    """Scores in the order of the log."""


@dataclass(slots=True)
class OpenGroup:
    """A group between its GroupStarted and its closing."""

    started: GroupStarted
    first_offset: int
    deadline_ms: int
    attempts: dict[str, Attempt | AttemptOutcome] = field(default_factory=dict[str, Attempt | AttemptOutcome])
    """Attempts by rollout id, in the order of their first records: open ones, and the outcomes of the others."""
    complete: dict[int, "Assembled"] = field(default_factory=dict[int, "Assembled"])
    """Result of each member's first complete attempt, by member."""
    final: set[int] = field(default_factory=set[int])
    """Members that are not tried again."""
    settled: set[int] = field(default_factory=set[int])

    def under_way(self) -> list[Attempt]:
        """Attempts without an outcome."""
        return [attempt for attempt in self.attempts.values() if type(attempt) is Attempt]


class Assembled(NamedTuple):
    """Result of a complete attempt, kept until its group closes."""

    trajectories: tuple[dict[str, object], ...]
    """Fields of TrajectoryAssembled, by agent name; validated and digested with the closing, before they are sent."""
    num_tokens: int
    match: dict[str, object] | None = None
    """Fields of MatchResult, if the group has matches."""


@dataclass(frozen=True, slots=True)
class Closing:
    """A closed group: the records to send, trajectories first."""

    first_offset: int
    """Offset of its GroupStarted, which the low-water mark must not pass before both are acknowledged."""
    encoded: tuple[Encoded, ...]
    """Records of the trajectories."""
    closed: GroupClosed
    """Lacks locators; one for each trajectory, in order, is added once the trajectories are stored."""

    @property
    def trajectories(self) -> tuple[TrajectoryAssembled, ...]:
        """The trajectories whose records these are."""
        return tuple([cast(TrajectoryAssembled, one.event) for one in self.encoded])


@dataclass(slots=True)
class AssemblyState:
    """Open groups of one partition. Mutable on purpose: only its fold writes it."""

    next_offset: int = 0
    next_deadline_ms: int = NEVER_MS
    """No open group has an earlier deadline."""
    groups: dict[str, OpenGroup] = field(default_factory=dict[str, OpenGroup])
    """Open groups in the order of their GroupStarted."""
    closed: set[str] = field(default_factory=set[str])
    closed_order: deque[str] = field(default_factory=deque[str])
    repeats: dict[int, int] = field(default_factory=dict[int, int])
    """Offset of the newest repeat of a group's GroupStarted, by the offset of the first; at most as many as closed
    groups are remembered."""

    @property
    def low_water(self) -> int:
        """Offset from which the partition must be folded again to rebuild this state."""
        oldest = next(iter(self.groups.values()), None)
        return self.next_offset if oldest is None else oldest.first_offset

    def before_repeats(self, offset: int) -> int:
        """The newest offset up to `offset` that is not between a group's GroupStarted and a repeat of it.

        From in between, the repeat alone would open the group again without its beginning, and it could close with
        other members.
        """
        for first in sorted(self.repeats, reverse=True):
            offset = first if first < offset <= self.repeats[first] else offset
        return offset

    def repeat(self, group: OpenGroup, offset: int) -> None:
        """Remember that the GroupStarted of an open group is repeated at `offset`."""
        self.repeats[group.first_offset] = offset
        if len(self.repeats) > CLOSED_REMEMBERED:
            del self.repeats[next(iter(self.repeats))]

    def remember(self, group_id: str) -> None:
        """Remember a closed group and forget the oldest one beyond the limit."""
        if group_id in self.closed:
            return
        self.closed.add(group_id)
        self.closed_order.append(group_id)
        if len(self.closed_order) > CLOSED_REMEMBERED:
            self.closed.discard(self.closed_order.popleft())
