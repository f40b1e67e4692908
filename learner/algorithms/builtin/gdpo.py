"""GDPO: each of several rewards is normalised within its group, then their weighted sum within the batch."""

from rollstream.learner.algorithms.builtin.grpo import Clipped
from rollstream.schemas.policy_gradient import GdpoSettings


class Gdpo(Clipped):
    """Group reward-decoupled normalisation (arXiv 2601.05242), see `advantages.decoupled`."""

    Settings = GdpoSettings
