"""CISPO: the ratio is clipped from above and held constant, so that every token keeps a gradient."""

from collections.abc import Mapping

from rollstream.learner.algorithms.advantages import PolicyGradient
from rollstream.learner.algorithms.base import Counts
from rollstream.learner.algorithms.tokens import Losses, TokenBatch, log_ratio, means, regularised
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
        losses_N, sums = regularised(losses_N, ratio_N, tokens, settings)
        sums["clip_high"] = (ratio_N > 1 + settings.clip_high).sum()
        return Losses(losses_N, sums)

    def metrics(self, sums: Mapping[str, float], counts: Counts) -> dict[str, float]:
        """Means over all completion tokens; clip/high: the share of tokens whose weight is bounded."""
        return means(sums, counts.tokens, {"clip_high": "clip/high"})
