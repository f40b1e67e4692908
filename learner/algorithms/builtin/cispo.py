"""CISPO: the ratio is clipped from above and held constant, so that every token keeps a gradient."""

from collections.abc import Mapping

from torch import Tensor

from rollstream.learner.algorithms.advantages import PolicyGradient
from rollstream.learner.algorithms.base import Counts
from rollstream.learner.algorithms.tokens import (
    KL_REFERENCE,
    Losses,
    TokenBatch,
    log_ratio,
    with_entropy_bonus,
    with_kl_penalty,
)
from rollstream.schemas.algorithms import CispoSettings


class Cispo(PolicyGradient):
    """See `loss`."""

    Settings = CispoSettings

    def loss(self, tokens: TokenBatch, settings: CispoSettings) -> Losses:
        """-sg(min(r, 1 + high)) A log p - c H + b KL by token, r = exp(current - behaviour), sg without a gradient.

        MiniMax-M1 (arXiv 2506.13585, equations 4 and 5), which sets no lower bound.
        """
        ratio_N = log_ratio(tokens.logprobs_N, tokens.behaviour_N).exp().detach()
        weight_N = ratio_N.clamp(max=1 + settings.clip_high)
        losses_N = -weight_N * tokens.advantages_N * tokens.logprobs_N
        losses_N = with_entropy_bonus(losses_N, tokens.entropies_N, settings.entropy_coefficient)
        sums = dict[str, Tensor]()
        losses_N = with_kl_penalty(losses_N, tokens, settings, sums)
        sums |= {
            "loss": losses_N.detach().sum(),
            "entropy": tokens.entropies_N.detach().sum(),
            "ratio": ratio_N.sum(),
            "clip_high": (ratio_N > 1 + settings.clip_high).sum(),
        }
        return Losses(losses_N, sums)

    def metrics(self, sums: Mapping[str, float], counts: Counts) -> dict[str, float]:
        """Means over all completion tokens; clip/high: the share of tokens whose weight is bounded."""
        names = {"loss": "loss/total", "entropy": "policy/entropy", "ratio": "policy/ratio", "clip_high": "clip/high"}
        names[KL_REFERENCE] = "policy/kl_reference"
        return {name: sums[key] / counts.tokens for key, name in names.items() if key in sums}
