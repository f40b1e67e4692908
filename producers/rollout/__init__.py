"""What an environment sees of an attempt at a rollout, and what of it is written down."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rollstream.producers.rollout import environment, recorded_call, registry, rewards, scored_answers, user_code

__all__ = ["environment", "recorded_call", "registry", "rewards", "scored_answers", "user_code"]
