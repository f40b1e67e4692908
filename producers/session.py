"""Old path of `rollstream.producers.rollout.session`, kept for one release."""

from rollstream.producers.rollout.session import *  # noqa: F403
