"""PPO without a critic: the clipped objective on GAE over the rewards of steps, which are taken as they are."""

from rollstream.learner.algorithms.base import BatchView, Prepared
from rollstream.learner.algorithms.builtin.grpo import Clipped
from rollstream.schemas.policy_gradient import PpoSettings


class Ppo(Clipped):
    """A_t = sum over later steps l of (gamma lambda)^(l - t) r_l: GAE (arXiv 1506.02438, equation 16) where every value
    is 0, in the clipped objective (arXiv 1707.06347, equation 7). All tokens of a step have its advantage; a reward
    that no step has is one of the last step.
    """

    Settings = PpoSettings

    def prepare(self, batch: BatchView, settings: PpoSettings) -> Prepared:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Without values, gamma and lambda are one discount by step."""
        discount = settings.gamma * settings.gae_lambda
        return super().prepare(batch, settings.model_copy(update={"step_discount": discount}))
