"""MaxRL: rewards less the mean of their task, divided by that mean, so that hard tasks count more."""

from rollstream.learner.algorithms.builtin.grpo import Clipped
from rollstream.schemas.policy_gradient import MaxRlSettings


class MaxRl(Clipped):
    """(r - mean) / mean by group (arXiv 2602.02710), see `advantages.max_rl`."""

    Settings = MaxRlSettings
