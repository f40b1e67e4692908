"""Who may publish for a model group: a pure fold over its LearnerClaimed events in the order of the log."""

from collections.abc import Mapping
from typing import NamedTuple

from rollstream.schemas.events import LearnerClaimed


class Owner(NamedTuple):
    """The learner that holds a model group."""

    term: int
    learner: str
    offset: int
    """Of its claim: tells apart two claims of one term by one name."""


def claim(owners: Mapping[str, Owner], event: LearnerClaimed, offset: int) -> dict[str, Owner]:
    """Owners after a claim: a higher term takes the group; an equal or lower one is void."""
    if event.term <= term_of(owners, event.model_group):
        return dict(owners)
    return {**owners, event.model_group: Owner(event.term, event.learner, offset)}


def term_of(owners: Mapping[str, Owner], model_group: str) -> int:
    """The highest term claimed; 0 if there is none."""
    owner = owners.get(model_group)
    return owner.term if owner else 0


def is_void(owners: Mapping[str, Owner], model_group: str, term: int) -> bool:
    """Whether an event of `term` that stands here in the log comes from a learner that was replaced."""
    return term < term_of(owners, model_group)
