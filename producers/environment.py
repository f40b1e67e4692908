"""Old path of `rollstream.producers.rollout.environment`, kept for one release."""

from rollstream.producers.rollout.environment import *  # noqa: F403
