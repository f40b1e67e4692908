"""DPPO: tokens that moved far from the policy that sampled them, by a divergence, not by a ratio, get no gradient."""

from collections.abc import Mapping

import torch
from torch import Tensor

from rollstream.learner.algorithms.advantages import PolicyGradient
from rollstream.learner.algorithms.base import Counts
from rollstream.learner.algorithms.tokens import Losses, TokenBatch, log_ratio, means, regularised
from rollstream.schemas.algorithms import DppoSettings
from rollstream.schemas.revisions import MASKS_ADVANTAGES_SINCE

_EPSILON = 1e-6
"""Distance that a probability keeps from 0 and 1 in the divergence."""


class Dppo(PolicyGradient):
    """See `loss`."""

    Settings = DppoSettings

    def loss(self, tokens: TokenBatch, settings: DppoSettings) -> Losses:
        """-M sg(min(r, max)) A log p - c H + b KL by token, r = exp(current - behaviour), sg without a gradient.

        "Rethinking the Trust Region in LLM Reinforcement Learning" (arXiv 2602.04879, equation 12): M is 0 where the
        advantage moves p further from the sampling policy's q and their divergence is above delta, else 1. binary_tv:
        |p - q|; binary_kl: q log(q / p) + (1 - q) log((1 - q) / (1 - p)).
        """
        ratio_N = log_ratio(tokens.logprobs_N, tokens.behaviour_N).exp().detach()
        keep_N = _keeps(tokens, settings)
        is_masked_N = keep_N == 0
        if tokens.revision >= MASKS_ADVANTAGES_SINCE:  # without an advantage there is no gradient to mask
            is_masked_N &= tokens.advantages_N != 0
        weight_N = ratio_N.clamp(max=settings.ratio_max) * keep_N
        losses_N = -weight_N * tokens.advantages_N * tokens.logprobs_N
        losses_N, sums = regularised(losses_N, ratio_N, tokens, settings)
        sums["masked"] = is_masked_N.sum()
        return Losses(losses_N, sums)

    def metrics(self, sums: Mapping[str, float], counts: Counts) -> dict[str, float]:
        """Means over all completion tokens; clip/divergence: the share of those that have an advantage and whose
        gradient is masked.
        """
        return means(sums, counts.tokens, {"masked": "clip/divergence"})


@torch.no_grad()
def _keeps(tokens: TokenBatch, settings: DppoSettings) -> Tensor:
    """M (N,), 0 or 1."""
    p_N, q_N = (one.exp().clamp(_EPSILON, 1 - _EPSILON) for one in (tokens.logprobs_N, tokens.behaviour_N))
    if settings.divergence == "binary_tv":
        divergence_N = (p_N - q_N).abs()
    else:
        divergence_N = q_N * (q_N / p_N).log() + (1 - q_N) * ((1 - q_N) / (1 - p_N)).log()
    moves_away_N = torch.where(tokens.advantages_N > 0, p_N > q_N, p_N < q_N)
    return (~(moves_away_N & (divergence_N > settings.delta))).to(tokens.logprobs_N.dtype)
