"""The rule of terms, which decides what learner may publish for a model group: a pure fold over its LearnerClaimed in
log order.

The first claim of a higher term takes the model group. Later events of a lower term, in the order of `weights`, are
void: their learner was replaced. The SQL views of the metrics implement the same rule.
"""

from typing import NamedTuple

from rollstream.schemas.events.weights import LearnerClaimed, ReferenceScored, StepTrained, WeightsPublished

BEFORE_LEARNERS = 0
"""Term of a version that was published before any learner claimed its model group, as the base of a what-if is."""

OfLearner = ReferenceScored | StepTrained | WeightsPublished
"""Events that a learner writes under its term."""


class Owner(NamedTuple):
    """The learner that holds a model group."""

    term: int
    learner: str
    offset: int
    """Offset of the owner's claim: distinguishes two claims of one term by the same learner."""


def claimed(owner: Owner | None, event: LearnerClaimed, offset: int = -1) -> Owner:
    """Owner after a claim: a higher term takes the model group; an equal or lower one is void."""
    if owner is not None and event.term <= owner.term:
        return owner
    return Owner(event.term, event.learner, offset)


def term_of(owner: Owner | None) -> int:
    """The highest term claimed; `BEFORE_LEARNERS` if there is none."""
    return BEFORE_LEARNERS if owner is None else owner.term


def needs_claim(event: OfLearner) -> bool:
    """Whether a LearnerClaimed of the event's term must be on the log."""
    return event.term > BEFORE_LEARNERS


def is_void(owner: Owner | None, event: OfLearner) -> bool:
    """Whether an event comes from a learner that was replaced. `owner`: at the event's position in the log."""
    return event.term < term_of(owner)
