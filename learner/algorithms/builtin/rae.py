"""RAE: a rollout is compared with the moving average of the rewards that its agent got before."""

from rollstream.learner.algorithms.builtin.grpo import Clipped
from rollstream.schemas.policy_gradient import RaeSettings


class Rae(Clipped):
    """r - b by agent (SPIRAL, arXiv 2506.24119, section 3.3), see `advantages.role_conditioned`."""

    Settings = RaeSettings
