"""The view that an environment has of an attempt at a rollout, and the record of what happens in it."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rollstream.producers.rollout import (
        environment,
        recorded_call,
        registry,
        rendering,
        reply,
        rewards,
        scored_answers,
        user_code,
    )

__all__ = ["environment", "recorded_call", "registry", "rendering", "reply", "rewards", "scored_answers", "user_code"]
