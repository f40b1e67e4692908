"""Recorded rollouts trained again under other settings."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rollstream.replay.what_if import imports, plan, rewards, training

__all__ = ["imports", "plan", "rewards", "training"]
