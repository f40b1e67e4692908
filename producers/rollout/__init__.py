"""What an environment sees of an attempt at a rollout, and what of it is written down."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rollstream.producers.rollout import candidates, environment, recorded_call, registry, rewards, user_code

__all__ = ["candidates", "environment", "recorded_call", "registry", "rewards", "user_code"]
