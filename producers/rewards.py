"""Old path of `rollstream.producers.rollout.rewards`, kept for one release."""

from rollstream.producers.rollout.rewards import *  # noqa: F403
