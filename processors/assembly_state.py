"""State of the assembly fold of one `steps` partition: open groups and their attempts. `assembly` changes it."""

from collections import deque
from dataclasses import dataclass, field

from rollstream.schemas.events_rollouts import GroupStarted, RewardRecorded, StepRecorded, TrajectoryAssembled
from rollstream.schemas.events_training import AttemptOutcome, GroupClosed, MemberRef

CLOSED_REMEMBERED = 4096
"""So many closed groups are remembered, so that a repeated GroupStarted does not open one of them again."""

NEVER_MS = 1 << 62


@dataclass(slots=True)
class Attempt:
    """One attempt at a member of an open group. `outcome` is set by its first terminal event."""

    rollout_id: str
    member: int
    number: int
    step_digests: dict[int, str] = field(default_factory=dict)
    reward_digests: dict[int, str] = field(default_factory=dict)
    calls: list[StepRecorded] = field(default_factory=list)
    agents: set[str] = field(default_factory=set)
    rewards: list[RewardRecorded] = field(default_factory=list)
    is_spliced: bool = False
    """Two producers wrote it: an index has two contents."""
    outcome: AttemptOutcome | None = None


@dataclass(slots=True)
class OpenGroup:
    """A group between its GroupStarted and its closing."""

    started: GroupStarted
    first_offset: int
    deadline_ms: int
    attempts: dict[str, Attempt] = field(default_factory=dict[str, Attempt])
    complete: dict[int, "Assembled"] = field(default_factory=dict[int, "Assembled"])
    """By member: what its first complete attempt yielded."""
    final: set[int] = field(default_factory=set[int])
    """Members that are not tried again."""
    settled: set[int] = field(default_factory=set[int])


@dataclass(frozen=True, slots=True)
class Assembled:
    """Trajectories of a complete attempt, by agent name, and the references to them at the same index."""

    trajectories: tuple[TrajectoryAssembled, ...]
    members: tuple[MemberRef, ...]


@dataclass(frozen=True, slots=True)
class Closing:
    """A closed group: what is to be sent, payload first."""

    first_offset: int
    """Of its GroupStarted: what the low-water mark must not pass before both are acknowledged."""
    trajectories: tuple[TrajectoryAssembled, ...]
    closed: GroupClosed
    """Without locators; one for each trajectory in its order is added when their places are known."""


@dataclass(slots=True)
class AssemblyState:
    """All that is open in one partition. Mutable on purpose: its fold is its only writer."""

    next_offset: int = 0
    next_deadline_ms: int = NEVER_MS
    """No open group has an earlier deadline."""
    groups: dict[str, OpenGroup] = field(default_factory=dict[str, OpenGroup])
    """In the order of their GroupStarted."""
    closed: set[str] = field(default_factory=set[str])
    closed_order: deque[str] = field(default_factory=deque[str])

    @property
    def low_water(self) -> int:
        """Offset from which the partition must be folded again to rebuild what is open."""
        oldest = next(iter(self.groups.values()), None)
        return self.next_offset if oldest is None else oldest.first_offset

    def remember(self, group_id: str) -> None:
        """Note a closed group, and forget the oldest one beyond the limit."""
        if group_id in self.closed:
            return
        self.closed.add(group_id)
        self.closed_order.append(group_id)
        if len(self.closed_order) > CLOSED_REMEMBERED:
            self.closed.discard(self.closed_order.popleft())
