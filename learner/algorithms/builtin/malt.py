"""MALT: DPO between answers to one prompt, each worth the expected reward of the rollouts through it."""

from rollstream.learner.algorithms.builtin.dpo import Dpo, losses_of
from rollstream.learner.algorithms.tokens import Losses, TokenBatch
from rollstream.schemas.algorithms import MaltSettings


class Malt(Dpo):
    """Pairs of a tree of rollouts (MALT, arXiv 2412.01928, section 4) with the loss of DPO."""

    Settings = MaltSettings

    def loss(self, tokens: TokenBatch, settings: MaltSettings) -> Losses:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The loss of DPO, by default with the policy before the batch's first step as the reference."""
        if settings.reference == "iteration":
            tokens = tokens._replace(reference_N=tokens.proximal_N)
        return losses_of(tokens, settings)
